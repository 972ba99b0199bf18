"""Model servers on loopback that answer in the shapes of vLLM and SGLang, from a tiny transformers model.

The shapes were recorded from vllm 0.32 and read from sglang 0.5.23; what an answer holds is computed, so that a client
that reads another row, another column or another adapter gets other numbers.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

Fault = Callable[[str, dict[str, Any], int], str | None]
"""Given path, body and how many posts came before: None, or what goes wrong (see `ModelServer`)."""


class ModelServer:
    """One model, and adapters by name, served as `kind`: "vllm_pooling", "vllm" or "sglang".

    `fault` names what goes wrong with a request: "500", "429", "slow" (no answer for `stall` seconds), "truncated",
    "rows" (one row too few), "missing" (a grade left out), "dead" (the server stops for good).
    """

    def __init__(
        self,
        kind: str,
        model: Any,
        tokenizer: Any,
        *,
        adapters: Mapping[str, Any] | None = None,
        fault: Fault | None = None,
        grade_ids: tuple[int, ...] = (),
        knows_ids: bool = True,
        applies_adapters: bool = True,
        stall: float = 3.0,
        max_model_len: int = 2048,
        key: str | None = None,
    ) -> None:
        self.kind, self.tokenizer, self.fault, self.grade_ids = kind, tokenizer, fault, grade_ids
        self.models = {"base": model, **(adapters or {})}
        self.knows_ids, self.applies, self.stall, self.limit, self.key = (
            knows_ids,
            applies_adapters,
            stall,
            max_model_len,
            key,
        )
        self.posts: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.busy = self.most = 0
        self._one = threading.Lock()
        self._count = threading.Lock()
        self._server: ThreadingHTTPServer | None = None
        self.url = ""

    @property
    def paths(self) -> list[str]:
        common = ["/v1/models", "/version"]
        return (
            common
            + {
                "vllm_pooling": ["/pooling"],
                "vllm": ["/v1/completions"],
                "sglang": ["/generate", "/v1/score"],
            }[self.kind]
        )

    # -- the model ----------------------------------------------------------------------------------------------

    def logits(self, name: str, ids: list[int]) -> Any:
        """Logits of every position, (t, vocabulary), from the named adapter or the base."""
        import torch

        model = self.models[name if self.applies else "base"]
        with self._one, torch.no_grad():
            return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()

    def head_rows(self, name: str, ids: list[int]) -> Any:
        """What a head of grade rows gives at every position: no soft cap, scale or bias."""
        import torch

        model = self.models[name if self.applies else "base"]
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        with self._one, torch.no_grad():
            hidden = base.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
            head = base.get_output_embeddings()
            weight = getattr(head, "base_layer", head).weight
            return hidden @ weight[list(self.grade_ids)].T

    # -- answers ------------------------------------------------------------------------------------------------

    def answer(self, path: str, body: dict[str, Any], fault: str | None) -> tuple[bytes, dict[str, str]]:
        made = {
            "/pooling": self._pooling,
            "/v1/completions": self._completions,
            "/generate": self._generate,
            "/v1/score": self._score,
        }[path](body, fault)
        if isinstance(made, tuple):
            return made
        return json.dumps(made).encode(), {"content-type": "application/json"}

    def _pooling(self, body: dict[str, Any], fault: str | None) -> Any:
        assert body["task"] == "token_classify"
        assert body["use_activation"] is False
        parts, items, at = [], [], 0
        for i, ids in enumerate(body["input"]):
            rows = self.head_rows(body["model"], ids).float().numpy()
            if fault == "rows":
                rows = rows[:-1]
            if fault == "missing":
                rows = np.where(np.arange(rows.shape[1]) == 1, np.nan, rows)
            raw = rows.astype("<f4").tobytes()
            item = {"index": i, "embed_dtype": "float32", "endianness": "native", "shape": list(rows.shape)}
            items.append({**item, "start": at, "end": at + len(raw)})
            parts.append(raw)
            at += len(raw)
        if body["encoding_format"] == "float":
            data = [{"index": i, "object": "pooling", "data": p} for i, p in enumerate(parts)]
            return {"object": "list", "data": data}
        said = {"id": "pooling-1", "created": 1, "model": body["model"], "data": items, "usage": {}}
        return b"".join(parts), {"content-type": "application/octet-stream", "metadata": json.dumps(said)}

    def _completions(self, body: dict[str, Any], fault: str | None) -> Any:
        assert body["max_tokens"] == 1
        choices = []
        for i, ids in enumerate(body["prompt"]):
            logs = self.logits(body["model"], ids)[-1].log_softmax(-1)
            best = int(logs.argmax())
            shown = [best, *logs.topk(int(body["logprobs"])).indices.tolist()]
            if self.knows_ids:
                shown = [best, *body.get("logprob_token_ids", shown)]
            if fault == "missing":
                shown = shown[:-1]
            top = {f"token_id:{t}": float(logs[t]) for t in shown}
            choices.append({"index": i, "text": "x", "logprobs": {"top_logprobs": [top]}, "finish_reason": "length"})
        if fault == "rows":
            choices.pop()
        return {"id": "cmpl-1", "object": "text_completion", "model": body["model"], "choices": choices}

    def _generate(self, body: dict[str, Any], fault: str | None) -> Any:
        ids, start, wanted = body["input_ids"], body["logprob_start_len"], body["token_ids_logprob"]
        logs = self.logits(body.get("lora_path") or "base", ids).log_softmax(-1)
        rows: list[Any] = [None]
        for at in range(start, len(ids) - 1):  # entry j predicts the token at start + j
            rows.append([[float(logs[at, t]), t, None] for t in wanted[: -1 if fault == "missing" else None]])
        if fault == "rows":
            rows.pop()
        return {"text": "", "meta_info": {"prompt_tokens": len(ids), "input_token_ids_logprobs": rows}}

    def _score(self, body: dict[str, Any], fault: str | None) -> Any:
        anchor = self.tokenizer.convert_tokens_to_ids(body["score_extraction_token"])
        scores = []
        for ids in body["items"]:
            ids = [*body["query"], *ids]
            p = self.logits("base", ids).softmax(-1)
            rows = [[float(p[at, t]) for t in body["label_token_ids"]] for at, t in enumerate(ids) if t == anchor]
            scores.append(rows[:-1] if fault == "rows" else rows)
        return {"scores": scores, "model": body["model"], "object": "scoring"}

    # -- the socket ---------------------------------------------------------------------------------------------

    def get(self, path: str) -> Any:
        if path == "/v1/models":
            base = {"id": "base", "object": "model", "root": "x", "parent": None, "max_model_len": self.limit}
            more = [{"id": n, "object": "model", "parent": "base"} for n in self.models if n != "base"]
            return {"object": "list", "data": [base, *more]}
        if path == "/openapi.json":
            return {"openapi": "3.1.0", "paths": {path: {} for path in self.paths}}
        return {"version": "0.0.test"} if path == "/version" else None

    def stop(self) -> None:
        """Stop listening, as a killed server does."""
        if self._server is not None:
            server, self._server = self._server, None
            server.shutdown()
            server.server_close()

    @contextmanager
    def running(self) -> Iterator[ModelServer]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                outer.headers.append(dict(self.headers.items()))
                if outer.key and self.headers.get("authorization") != f"Bearer {outer.key}":
                    return self._send(401, {"error": "Unauthorized"})
                found = outer.get(self.path)
                return self._send(200, found) if found is not None else self._send(404, {"detail": "Not Found"})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with outer._count:
                    before = len(outer.posts)
                    outer.posts.append((self.path, body))
                    outer.busy += 1
                    outer.most = max(outer.most, outer.busy)
                try:
                    self._post(body, before)
                finally:
                    with outer._count:
                        outer.busy -= 1

            def _post(self, body: dict[str, Any], before: int) -> None:
                fault = outer.fault(self.path, body, before) if outer.fault else None
                if self.path not in outer.paths:
                    return self._send(404, {"detail": "Not Found"})
                if fault == "dead":
                    threading.Thread(target=outer.stop, daemon=True).start()
                if fault in ("dead", "cut"):
                    self.close_connection = True
                    return None
                if fault == "slow":
                    time.sleep(outer.stall)
                if fault in ("500", "429"):
                    more = {"retry-after": "0.05"} if fault == "429" else {}
                    return self._send(int(fault), {"error": {"message": f"told to say {fault}"}}, **more)
                raw, headers = outer.answer(self.path, body, fault)
                if fault == "truncated":
                    raw = raw[: len(raw) // 2]
                return self._raw(200, raw, headers)

            def _send(self, status: int, answer: Any, **headers: str) -> None:
                self._raw(status, json.dumps(answer).encode(), {"content-type": "application/json", **headers})

            def _raw(self, status: int, raw: bytes, headers: Mapping[str, str]) -> None:
                try:
                    self.send_response(status)
                    for name, value in {**headers, "content-length": str(len(raw))}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(raw)
                except OSError:
                    self.close_connection = True

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.stop()
            thread.join()
