"""The server engine: grade logits from a model that vLLM or SGLang serves somewhere, by URL.

Prompts are made here, with the model's own tokenizer, and sent as token ids. Which readout a server offers is found by
asking it for one (`slot_readout="auto"`), in the order below; the adapter is chosen by the name the server gives it.

    pooling       vLLM /pooling, task token_classify: the raw rows of a head of one row per grade, in binary form
    generate      SGLang /generate with the grades' log-probabilities at prompt positions
    one_token     /v1/completions, one token per slot with the grades' log-probabilities, the longest prefix first
    score         SGLang /v1/score at every occurrence of the token that stands at the slots
"""

from __future__ import annotations

import logging
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from pd_rerank.engines.adapters import Adapter, open_adapter
from pd_rerank.engines.answers import (
    after_head,
    blanked,
    check_no_bias,
    check_read,
    completion_entries,
    corrected,
    generate_entries,
    one_anchor,
    picked,
    rows_at_slots,
    rows_of_bytes,
    rows_of_json,
    score_rows,
)
from pd_rerank.engines.base import FloatArray, Progress, WindowPrompt
from pd_rerank.engines.canary import Canary, find_canary
from pd_rerank.engines.http import KEY_VARIABLE, Client, Failure, Response
from pd_rerank.engines.loading import load_tokenizer
from pd_rerank.errors import (
    BadArgument,
    EngineFailure,
    InvalidData,
    MissingResource,
    ModelMismatch,
    PdRerankError,
    whole,
)
from pd_rerank.files import CARD, read_json

logger = logging.getLogger("pd_rerank")

SlotReadout = Literal["auto", "pooling", "generate", "one_token", "score"]

_PATHS = {"pooling": "pooling", "generate": "generate", "one_token": "v1/completions", "score": "v1/score"}
_KEPT = 4096
"""Windows kept of calls that failed in part, so that what is asked again is only what is missing."""
_TOP = 20
"""Log-probabilities asked of a server that cannot be told which tokens; the most that servers allow by default."""


class ServerEngine:
    """Reads grade logits from a running model server.

    `model` names the tokenizer and the configuration here: a short name, a hub id or a folder; weights are not loaded.
    `server` is its URL. `adapter` is a name the server gives an adapter, or the adapter's folder here, then served
    under the folder's name; `served_as` is what the server calls model or adapter where that is neither.
    `slot_readout` chooses the readout, see the module. A request takes at most `server_timeout` seconds between signs
    of life; `concurrency` are under way at most. An API key is read from the environment variable `key_variable` only.

    `canary`: a file, folder or `Canary` the server must read as transformers did; by default one is looked for beside
    the adapter and the model; False: none. `max_length` lowers the server's and the tokenizer's own limit, in tokens.

    Raises `MissingResource` where no server answers, `ModelMismatch` where it serves another model, lacks the adapter
    or fails the canary, all before anything is scored.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        server: str | None = None,
        adapter: str | os.PathLike[str] | None = None,
        served_as: str | None = None,
        tokenizer: Any = None,
        slot_readout: SlotReadout = "auto",
        server_timeout: float = 120.0,
        concurrency: int = 16,
        key_variable: str | None = KEY_VARIABLE,
        canary: Canary | str | os.PathLike[str] | bool | None = None,
        max_length: int | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        quiet: bool = False,
    ) -> None:
        if server is None:
            raise BadArgument("the server engine needs the server's address: server='http://host:port'")
        if slot_readout not in get_args(SlotReadout):
            raise BadArgument(
                f"unknown slot_readout '{slot_readout}'; choose one of {', '.join(get_args(SlotReadout))}"
            )
        if max_length is not None and (not whole(max_length) or max_length < 1):
            raise BadArgument(f"max_length must be a whole number of at least 1, got {max_length!r}")

        self._client = Client(server, timeout_s=server_timeout, concurrency=concurrency, key_variable=key_variable)
        self._key_variable = key_variable
        self.close = weakref.finalize(self, self._client.close)
        """Close the connections; happens by itself when the engine is dropped."""
        listed = self._listed()
        self._opened: Adapter | None = None
        if adapter is not None and Path(adapter).expanduser().is_dir():
            self._opened = open_adapter(Path(adapter))
        self.tokenizer, config, place = load_tokenizer(
            os.fspath(model),
            tokenizer=tokenizer,
            adapter=self._opened,
            revision=revision,
            trust_remote_code=trust_remote_code,
            quiet=quiet,
        )
        self._text_config = None if config is None else config.get_text_config()
        wanted = None if adapter is None else Path(adapter).name if self._opened else os.fspath(adapter)
        self._lora = None if adapter is None else served_as or wanted
        self.served, self._base, limit = _chosen(listed, str(model), wanted, served_as, self._client.base_url)
        self.name = f"{os.fspath(model)}+{adapter}" if adapter is not None else os.fspath(model)
        self._model = os.fspath(model)
        self._limit = limit
        said = getattr(self.tokenizer, "model_max_length", None)
        own = said if isinstance(said, int) and 0 < said < 10_000_000 else None
        self.max_length = min(n for n in (own, limit, max_length, 1 << 30) if n is not None)

        card = Path(place, CARD)
        self.adapter_card: dict[str, Any] | None = None
        if self._opened is not None:
            self.adapter_card = self._opened.card
        elif adapter is None and card.is_file():
            self.adapter_card = read_json(card)
        self._head = self._head_says(config)
        self._versions = self._asked("version")
        self._kept: OrderedDict[tuple[bytes, bytes, tuple[int, ...]], FloatArray] = OrderedDict()
        self._top: int | None = None
        folder = None if self._opened is None else self._opened.folder
        bird = find_canary(canary, folder, place if adapter is None else None)
        self.readout = self._choose(slot_readout, bird)
        self._canary = None
        if bird is not None:
            (read,) = self._read([bird.prompt], bird.grade_ids)
            self._canary = bird.check(read, dtype="unknown", what=f"'{self.served}' at {self._client.base_url}")
        elif self._lora is not None:
            self._prove_adapter(listed)

    # -- reading ------------------------------------------------------------------------------------------------

    def grade_logits(
        self, prompts: Sequence[WindowPrompt], grade_ids: Sequence[int], *, progress: Progress | None = None
    ) -> list[FloatArray]:
        """Return each prompt's grade logits or log-probabilities at its slots, float32 (slots, len(grade_ids)).

        A prompt that comes twice is asked once. A grade the server does not give makes its row NaN, counted in a
        warning. Where requests fail for good the others are still read and kept for the next call, and an
        `EngineFailure` says how many failed and why. A prompt longer than `max_length` is a `BadArgument`.
        """
        for i, prompt in enumerate(prompts):
            if len(prompt.token_ids) > self.max_length:
                raise BadArgument(
                    f"prompt {i} has {len(prompt.token_ids)} tokens, '{self.served}' takes {self.max_length}; score "
                    "fewer candidates per window or lower max_doc_chars"
                )
        ids = tuple(int(g) for g in grade_ids)
        twins: dict[tuple[bytes, bytes, tuple[int, ...]], list[int]] = {}
        for i, prompt in enumerate(prompts):
            twins.setdefault((prompt.token_ids.tobytes(), prompt.slots.tobytes(), ids), []).append(i)
        answers: dict[int, FloatArray] = {}
        todo: list[tuple[bytes, bytes, tuple[int, ...]]] = []
        found: dict[tuple[bytes, bytes, tuple[int, ...]], FloatArray] = {}
        for key, members in twins.items():
            kept = self._kept.pop(key, None)
            if kept is None and len(prompts[members[0]].slots) == 0:
                kept = np.zeros((0, len(ids)), dtype=np.float32)
            if kept is None:
                todo.append(key)
            else:
                found[key] = kept
                if progress is not None:
                    progress(len(members))
        failed: dict[int, str] = {}

        def done(j: int, outcome: FloatArray | str) -> None:
            if isinstance(outcome, str):
                failed[j] = outcome
            else:
                found[todo[j]] = outcome
                if progress is not None:
                    progress(len(twins[todo[j]]))

        self._ask([prompts[twins[key][0]] for key in todo], ids, done)
        if failed:
            self._keep(found)
            first = failed[min(failed)]
            raise EngineFailure(
                f"{len(failed)} of {len(todo)} windows got no grades from {self._client.base_url}: {first}"
            )
        lost = 0
        for key, members in twins.items():
            values, broken = blanked(found[key])
            lost += broken * len(members)
            for i in members:
                answers[i] = values.copy()
        if lost:
            logger.warning(
                "%s: %d of %d slots came back without all their grades and are left without one",
                self.name,
                lost,
                sum(len(p.slots) for p in prompts),
            )
        return [answers[i] for i in range(len(prompts))]

    def describe(self) -> dict[str, Any]:
        """Return what a manifest must record: model, the server's name for it, readout, adapter, versions, canary."""
        adapter = None
        if self._lora is not None:
            adapter = {"source": self._lora, **({} if self._opened is None else self._opened.describe())}
        return {
            "engine": "server",
            "model": self._model,
            "served_as": self.served,
            "slot_readout": self.readout,
            "top_logprobs": self._top,
            "head": self._head if self.readout == "pooling" else None,
            "adapter": adapter,
            "dtype": "unknown",
            "max_length": self.max_length,
            "canary": None if self._canary is None else "held",
            "versions": self._versions,
        }

    def _keep(self, found: Mapping[tuple[bytes, bytes, tuple[int, ...]], FloatArray]) -> None:
        self._kept.update(found)
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)

    def _read(
        self, prompts: Sequence[WindowPrompt], ids: Sequence[int], *, served: str | None = None
    ) -> list[FloatArray]:
        """The grades of a few prompts for the checks at the start; any failure is raised."""
        found: dict[int, FloatArray | str] = {}
        self._ask(prompts, ids, found.__setitem__, served=served)
        for outcome in found.values():
            if isinstance(outcome, str):
                raise EngineFailure(f"{self._client.base_url} failed a probe: {outcome}")
        return [np.asarray(found[i]) for i in range(len(prompts))]

    def _ask(
        self,
        prompts: Sequence[WindowPrompt],
        ids: Sequence[int],
        done: Callable[[int, FloatArray | str], None],
        *,
        served: str | None = None,
        client: Client | None = None,
        readout: str | None = None,
    ) -> None:
        """Read every prompt; `done` gets its place and its grades, or why there are none."""
        name, via = served or self.served, client or self._client
        readout = readout or self.readout
        if readout == "one_token":
            step = 2 * via.concurrency  # a window's slots are asked while its prefix is still in the server's cache
            for start in range(0, len(prompts), step):
                some = prompts[start : start + step]
                self._completions(some, ids, lambda j, o, at=start: done(at + j, o), name, via)  # type: ignore[misc]
            return
        body, parse = {
            "pooling": (self._pooling_body, self._pooling_rows),
            "generate": (self._generate_body, _generate_rows),
            "score": (self._score_body, _scored_rows),
        }[readout]

        def finished(j: int, outcome: Response | Failure) -> None:
            done(j, _parsed(outcome, lambda response: parse(response, prompts[j], ids)))

        check = _well_formed if readout == "pooling" else Response.json
        via.post_many(_PATHS[readout], [body(p, ids, name) for p in prompts], on_done=finished, check=check)

    def _pooling_body(self, prompt: WindowPrompt, ids: Sequence[int], name: str) -> dict[str, Any]:
        return {
            "model": name,
            "input": [prompt.token_ids.tolist()],
            "task": "token_classify",
            "use_activation": False,
            "encoding_format": "bytes",
        }

    def _pooling_rows(self, response: Response, prompt: WindowPrompt, ids: Sequence[int]) -> FloatArray:
        arrays = _pooled(response)
        if len(arrays) != 1:
            raise InvalidData(f"{len(arrays)} results came back for one prompt")
        rows = rows_at_slots(arrays[0], prompt)
        assert rows is not None
        if rows.shape[1] != len(ids):
            raise InvalidData(
                f"the served head has {rows.shape[1]} rows where the prompt has {len(ids)} grades; serve a head of one "
                "row per grade (classifier_from_token, or a classifier export)"
            )
        return corrected(rows, self._head)

    def _generate_body(self, prompt: WindowPrompt, ids: Sequence[int], name: str) -> dict[str, Any]:
        lora = {} if self._lora is None or name == self._base else {"lora_path": self._lora}
        return {
            "input_ids": prompt.token_ids.tolist(),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": int(prompt.slots[0]),
            "token_ids_logprob": list(ids),
            **lora,
        }

    def _score_body(self, prompt: WindowPrompt, ids: Sequence[int], name: str) -> dict[str, Any]:
        if not one_anchor(prompt):
            raise ModelMismatch(
                "the 'score' readout needs one and the same token at every slot, and this tokenizer has several; "
                "use slot_readout='generate'"
            )
        anchor = self.tokenizer.convert_ids_to_tokens(int(prompt.token_ids[prompt.slots[0]]))
        return {
            "model": name,
            "query": [],
            "items": [prompt.token_ids.tolist()],
            "label_token_ids": list(ids),
            "apply_softmax": False,
            "score_extraction_token": anchor,
        }

    def _completions(
        self,
        prompts: Sequence[WindowPrompt],
        ids: Sequence[int],
        done: Callable[[int, FloatArray | str], None],
        name: str,
        via: Client,
    ) -> None:
        """One token per slot: first each window's longest prefix, which fills the cache, then its other slots."""

        def body(prompt: WindowPrompt, slots: Sequence[int]) -> dict[str, Any]:
            ids_of = prompt.token_ids.tolist()
            how = {"logprobs": self._top} if self._top else {"logprobs": 1, "logprob_token_ids": list(ids)}
            return {
                "model": name,
                "prompt": [ids_of[: slot + 1] for slot in slots],
                "max_tokens": 1,
                "temperature": 0,
                "return_tokens_as_token_ids": True,
                **how,
            }

        def rows(outcome: Response | Failure, count: int) -> FloatArray | str:
            def read(response: Response) -> FloatArray:
                return np.stack([picked(e, ids) for e in completion_entries(response.json(), prompts=count)])

            return _parsed(outcome, read)

        last: dict[int, FloatArray | str] = {}
        slots = [p.slots.tolist() for p in prompts]
        path = _PATHS["one_token"]
        via.post_many(
            path,
            [body(p, s[-1:]) for p, s in zip(prompts, slots, strict=True)],
            on_done=lambda j, o: last.__setitem__(j, rows(o, 1)),
            check=Response.json,
        )
        more = [j for j in range(len(prompts)) if not isinstance(last[j], str) and len(slots[j]) > 1]
        for j in sorted({*range(len(prompts))} - {*more}):
            done(j, last[j])

        def finished(k: int, outcome: Response | Failure) -> None:
            j = more[k]
            others = rows(outcome, len(slots[j]) - 1)
            done(j, others if isinstance(others, str) else np.concatenate([others, np.asarray(last[j])]))

        bodies = [body(prompts[j], slots[j][:-1]) for j in more]
        via.post_many(path, bodies, on_done=finished, check=Response.json)

    # -- setting up ---------------------------------------------------------------------------------------------

    def _probing(self) -> Client:
        """A client for one probe alone: what a server lacks closes a client's gate for a while."""
        client = self._client
        return Client(
            client.base_url, timeout_s=client.timeout_s, attempts=2, concurrency=1, key_variable=self._key_variable
        )

    def _listed(self) -> list[dict[str, Any]]:
        """The models and adapters the server lists; `MissingResource` where nothing answers."""
        url = self._client.base_url
        with self._probing() as client:
            outcome = client.get("v1/models", check=Response.json)
        if isinstance(outcome, Failure):
            if outcome.status in (401, 403):
                raise BadArgument(f"{url}: {outcome.reason}; put the key into {self._key_variable}")
            raise MissingResource(f"no model server at {url}: {outcome.reason}; start it, or check the address")
        try:
            return [dict(entry) for entry in outcome.json()["data"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ModelMismatch(f"{url} answers, but not as vLLM and SGLang do: /v1/models lists no models") from error

    def _asked(self, path: str) -> dict[str, Any]:
        """What the server says of itself at `path`, if anything."""
        with self._probing() as client:
            outcome = client.get(path, check=Response.json)
        found = outcome.json() if isinstance(outcome, Response) else {}
        return found if isinstance(found, dict) else {}

    def _head_says(self, config: Any) -> dict[str, Any]:
        """What the served head of grade rows leaves out: by the classifier export's card, else by the configuration."""
        logits = (self.adapter_card or {}).get("logits")
        if isinstance(logits, dict):
            return dict(logits)
        return {} if config is None else after_head(self._text_config)

    def _choose(self, asked: SlotReadout, bird: Canary | None) -> str:
        """The first readout the server gives an answer by; what each said otherwise."""
        probe = bird.prompt if bird is not None else _probe(self.tokenizer)
        ids = bird.grade_ids if bird is not None else _digits(self.tokenizer)
        said: dict[str, str] = {}
        known = self._asked("openapi.json").get("paths")
        for readout in [asked] if asked != "auto" else list(_PATHS):
            if asked == "auto" and isinstance(known, dict) and f"/{_PATHS[readout]}" not in known:
                said[readout] = f"no /{_PATHS[readout]}"
                continue
            if refusal := self._refused(readout):
                said[readout] = refusal
                continue
            why = self._tried(readout, probe, ids)
            if why is None:
                return readout
            said[readout] = why
        reasons = "; ".join(f"{readout}: {why}" for readout, why in said.items())
        raise ModelMismatch(f"{self._client.base_url} cannot be read at slots ({reasons})")

    def _refused(self, readout: str) -> str | None:
        """Why a readout would be wrong although the server answers."""
        if readout == "pooling":
            if self._opened is not None and self._opened.changes_head:
                return "a served head of grade rows ignores what this adapter does to the output head; export it merged"
            if (self.adapter_card or {}).get("logits") is None and self._text_config is not None:
                try:
                    check_no_bias(self._text_config, self._model)
                except ModelMismatch as error:
                    return str(error)
        if readout == "score" and self._lora is not None:
            return "/v1/score takes no adapter and would read the base; serve the merged model, or use 'generate'"
        return None

    def _tried(self, readout: str, probe: WindowPrompt, ids: Sequence[int]) -> str | None:
        """Why a readout does not work on a probe; None where it does."""
        for top in (None, _TOP) if readout == "one_token" else (None,):
            self._top = top
            found: dict[int, FloatArray | str] = {}
            try:
                with self._probing() as client:
                    self._ask([probe], ids, found.__setitem__, client=client, readout=readout)
            except PdRerankError as error:
                return str(error)
            outcome = found[0]
            if isinstance(outcome, str):
                why: str | None = outcome
            elif top is None and np.isnan(outcome).any():
                why = "the server leaves out grades it was asked for"
            else:
                if top is not None:
                    logger.warning(
                        "%s cannot be told which tokens to report; the %d likeliest are asked for, and a grade that is "
                        "not among them is missing",
                        self._client.base_url,
                        top,
                    )
                return None
        return why

    def _prove_adapter(self, listed: Sequence[Mapping[str, Any]]) -> None:
        """Refuse an adapter the server takes by name but does not apply: it must change the probe's grades."""
        url = self._client.base_url
        if self._base is None:
            others = [str(e.get("id")) for e in listed if not e.get("parent") and e.get("id") != self.served]
            if others:
                raise ModelMismatch(
                    f"which of the models at {url} ({', '.join(others)}) is the base of '{self.served}' cannot be "
                    f"told, so neither can whether the adapter is applied; serve the base as '{self._model}', or put a "
                    "canary beside the adapter"
                )
            logger.warning(
                "'%s' is the only model at %s, so whether the adapter is in it is not checked; write_canary makes a "
                "canary that tells",
                self.served,
                url,
            )
            return
        probe, ids = [_probe(self.tokenizer)], _digits(self.tokenizer)
        with_it, without = self._read(probe, ids)[0], self._read(probe, ids, served=self._base)[0]
        check_read([with_it], f"the adapter '{self.served}' at {self._client.base_url}")
        if np.array_equal(with_it, without, equal_nan=True):
            raise ModelMismatch(
                f"the adapter '{self.served}' changes nothing at {self._client.base_url}: a probe is read as by "
                f"'{self._base}'; the server lists it without applying it"
            )


def _parsed(outcome: Response | Failure, read: Callable[[Response], FloatArray]) -> FloatArray | str:
    """What `read` makes of an answer, or why there is nothing to read."""
    if isinstance(outcome, Failure):
        return outcome.reason + (f" (tried {outcome.attempts} times)" if outcome.attempts > 1 else "")
    try:
        return read(outcome)
    except InvalidData as error:
        return str(error)


def _pooled(response: Response) -> list[FloatArray]:
    if response.headers.get("content-type", "").startswith("application/json"):
        return rows_of_json(response.json())
    return rows_of_bytes(response.body, response.headers.get("metadata"))


def _well_formed(response: Response) -> None:
    """An answer that is cut off or garbled is asked for again; whether its rows fit a prompt is seen later."""
    _pooled(response)


def _generate_rows(response: Response, prompt: WindowPrompt, ids: Sequence[int]) -> FloatArray:
    answer = response.json()
    entries = generate_entries(answer[0] if isinstance(answer, list) else answer, prompt, start=int(prompt.slots[0]))
    return np.stack([picked(entry, ids) for entry in entries])


def _scored_rows(response: Response, prompt: WindowPrompt, ids: Sequence[int]) -> FloatArray:
    return score_rows(response.json(), prompt, grades=len(ids))


def _chosen(
    listed: Sequence[Mapping[str, Any]], model: str, adapter: str | None, served_as: str | None, url: str
) -> tuple[str, str | None, int | None]:
    """The server's name for what is asked, its name for the base, and the longest prompt it takes, in tokens."""
    names = [str(entry.get("id")) for entry in listed]
    wanted = served_as or adapter
    parent = next((entry.get("parent") for entry in listed if entry.get("id") == wanted), None)
    # A server that names no parents lists an adapter as if it were a base.
    bases = [str(e["id"]) for e in listed if not e.get("parent") and (adapter is None or e["id"] != wanted)]
    base = parent if parent in names else model if model in bases else bases[0] if len(bases) == 1 else None
    if wanted is None:
        # A server may give its only model any name.
        wanted = base or Path(model).name
    if wanted not in names:
        what = "adapter" if adapter is not None else "model"
        raise ModelMismatch(
            f"{url} serves no {what} '{wanted}', only {', '.join(names) or 'nothing'}; "
            "say what the server calls it with served_as"
        )
    limits = [entry.get("max_model_len") for entry in listed if entry.get("id") in (wanted, base)]
    known = [int(n) for n in limits if isinstance(n, int) and n > 0]
    return wanted, None if wanted == base else base, min(known, default=None)


def _digits(tokenizer: Any) -> tuple[int, ...]:
    """Ids of the grades 0 to 3 as this tokenizer spells them somewhere, for probes."""
    return tuple(int(tokenizer.encode(f"{g}", add_special_tokens=False)[-1]) for g in range(4))


def _probe(tokenizer: Any) -> WindowPrompt:
    """A prompt of two slots for finding out what a server can; the same token stands at both."""
    ids = [int(i) for i in tokenizer.encode("Bees visit flowers. The ferry leaves at nine.", add_special_tokens=False)]
    colon = int(tokenizer.encode("Grade:", add_special_tokens=False)[-1])
    zero = _digits(tokenizer)[0]
    whole = [*ids, colon, zero, *ids[:3], colon, zero]
    slots = np.array([len(ids), len(whole) - 2], dtype=np.int64)
    return WindowPrompt(token_ids=np.array(whole, dtype=np.int64), slots=slots)
