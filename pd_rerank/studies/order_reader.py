"""Who reads the best passages: a plain rule, a chat model in this process, or one behind an endpoint; answers are kept.

A question gets a short answer, a claim one of three verdicts. The same passages in the same order are read once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from pd_rerank._extras import need
from pd_rerank.engines.fake import word_overlap
from pd_rerank.engines.http import Client, Failure, Response
from pd_rerank.errors import EngineFailure, InvalidData
from pd_rerank.files import read_json, sha256_json, write_json
from pd_rerank.studies.folder import slug
from pd_rerank.studies.order_settings import ReaderSettings

VERDICTS = ("SUPPORTED", "REFUTED", "NEI")

_ANSWER = (
    "Read the passages and answer the question with the few words that settle it, nothing else. "
    "Give a name, a date, a number, or yes or no.\n\n{passages}\n\nQuestion: {asked}\nAnswer:"
)
_VERDICT = (
    "Read the passages and judge the claim by them alone. Say SUPPORTED if they bear it out, REFUTED if they "
    "contradict it, NEI if they leave it open. Say one of the three words.\n\n{passages}\n\nClaim: {asked}\nVerdict:"
)
WORDING = hashlib.sha256(f"{_ANSWER}\0{_VERDICT}".encode()).hexdigest()[:12]
"""Changes with the words of the prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a reader is given: a question or a claim, and the passages in the order of a ranking."""

    kind: Literal["qa", "claims"]
    text: str
    passages: tuple[str, ...]

    @property
    def prompt(self) -> str:
        """The words put to a chat model."""
        shown = "\n".join(f"Passage {i}: {' '.join(text.split())}" for i, text in enumerate(self.passages, 1))
        return (_ANSWER if self.kind == "qa" else _VERDICT).format(passages=shown, asked=self.text)


class Reader(Protocol):
    """What answers; None where there is no answer."""

    def read(self, asked: Sequence[Asked]) -> list[str | None]:
        """Answer each, in order."""
        ...


def open_reader(settings: ReaderSettings) -> Reader:
    """Load what the settings name."""
    if settings.type == "extractive":
        return Extractive()
    return Endpoint(settings) if settings.type == "server" else ChatModel.load(settings)


class Kept:
    """A reader's answers on disk, one file per query: asked once, whoever ranked the passages so.

    The reader is opened when the first missing answer is come to. A kill loses one query's answers of one scorer.
    """

    def __init__(self, folder: Path, settings: ReaderSettings, task: str) -> None:
        said = {**settings.model_dump(mode="json", exclude={"server"}), "wording": WORDING}
        self.settings = settings
        self.folder = folder / f"answers-{slug(task)}-{sha256_json(said)[:12]}"
        self._reader: Reader | None = None
        self._said = said

    def read(self, query_id: str, asked: Sequence[Asked]) -> list[str | None]:
        """The answers to what is asked about one query, in order."""
        place = self.folder / f"{slug(query_id)[:40]}-{hashlib.sha256(query_id.encode()).hexdigest()[:12]}.json"
        known: dict[str, str | None] = read_json(place)["answers"] if place.exists() else {}
        keys = [hashlib.sha256(one.prompt.encode("utf-8", "surrogatepass")).hexdigest() for one in asked]
        missing = {key: one for key, one in zip(keys, asked, strict=True) if key not in known}
        if missing:
            if self._reader is None:
                self._reader = open_reader(self.settings)
            said = self._reader.read(list(missing.values()))
            known |= dict(zip(missing, said, strict=True))
            write_json(place, {"query_id": query_id, "reader": self._said, "answers": known})
        return [known[key] for key in keys]


class Extractive:
    """No model: of the sentences that share most words with what is asked, the first shown decides.

    A question gets the sentence's last capitalised words that the question does not hold; a claim is REFUTED by a
    sentence that denies, SUPPORTED by one that shares at least six tenths of its words, and NEI otherwise.
    """

    def read(self, asked: Sequence[Asked]) -> list[str | None]:
        """Answer each, in order."""
        return [self._answer(one) if one.kind == "qa" else self._verdict(one) for one in asked]

    @staticmethod
    def _best(one: Asked) -> tuple[str, float]:
        sentences = [s for text in one.passages for s in re.split(r"(?<=[.!?])\s+|\n", text) if s.strip()]
        shares = [word_overlap(one.text, sentence) for sentence in sentences]
        if not sentences:
            return "", 0.0
        at = max(range(len(sentences)), key=lambda i: (shares[i], -i))
        return sentences[at], shares[at]

    def _answer(self, one: Asked) -> str:
        names = re.findall(r"\b[A-Z]\w*(?: [A-Z]\w*)*", self._best(one)[0])
        fresh = [name for name in names if name.lower() not in one.text.lower()]
        return fresh[-1] if fresh else "unknown"

    def _verdict(self, one: Asked) -> str:
        sentence, share = self._best(one)
        if share < 0.6:
            return "NEI"
        return "REFUTED" if re.search(r"\b(not|never|no|nobody)\b|n't\b", sentence.lower()) else "SUPPORTED"


class ChatModel:
    """A causal language model in this process: greedy answers, one at a time; for a claim the likeliest of three words.

    A label's likelihood is that of all its tokens after the prompt.
    """

    def __init__(self, model: Any, tokenizer: Any, *, max_tokens: int) -> None:
        self._torch = need("torch", extra="hf", purpose="a reader of type transformers runs on torch")
        self._model, self._tokenizer, self._most = model.eval(), tokenizer, max_tokens

    @classmethod
    def load(cls, settings: ReaderSettings) -> ChatModel:
        """Load the model by short name, folder or hub id."""
        torch = need("torch", extra="hf", purpose="a reader of type transformers runs on torch")
        need("transformers", extra="hf", purpose="a reader of type transformers is loaded through transformers")
        from pd_rerank.engines.loading import load_named, named_dtype

        loaded = load_named(
            settings.model,
            adapter=None,
            tokenizer=None,
            dtype=named_dtype(torch, settings.dtype),
            device=None,
            device_map=None,
            revision=None,
            adapter_revision=None,
            attn_implementation=None,
            trust_remote_code=False,
            model_kwargs={},
            tokenizer_kwargs={},
            quiet=True,
        )
        return cls(loaded.model, loaded.tokenizer, max_tokens=settings.max_tokens)

    def read(self, asked: Sequence[Asked]) -> list[str | None]:
        """Answer each, in order."""
        with self._torch.inference_mode():
            return [self._answer(one) if one.kind == "qa" else self._verdict(one) for one in asked]

    def _ids(self, one: Asked) -> list[int]:
        if getattr(self._tokenizer, "chat_template", None):
            said = [{"role": "user", "content": one.prompt}]
            text = self._tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        else:
            text = f"{one.prompt} "
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _answer(self, one: Asked) -> str:
        ids = self._torch.tensor([self._ids(one)], device=self._model.device)
        # every knob that would draw is named, for a model's own defaults may set them
        out = self._model.generate(
            ids,
            attention_mask=self._torch.ones_like(ids),
            max_new_tokens=self._most,
            do_sample=False,
            num_beams=1,
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=self._tokenizer.pad_token_id or self._tokenizer.eos_token_id,
        )
        return str(self._tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))

    def _verdict(self, one: Asked) -> str:
        start = self._ids(one)
        scores = []
        for label in VERDICTS:
            tail = list(self._tokenizer.encode(label, add_special_tokens=False))
            ids = self._torch.tensor([[*start, *tail]], device=self._model.device)
            logits = self._model(ids).logits[0, len(start) - 1 : -1].float()
            said = self._torch.log_softmax(logits, dim=-1)
            scores.append(float(said[range(len(tail)), tail].sum()))
        return VERDICTS[scores.index(max(scores))]


class Endpoint:
    """A chat endpoint: greedy answers, and verdicts held to the three labels by a JSON schema.

    A request the server refuses has no answer; a server that does not answer is `EngineFailure`.
    """

    def __init__(self, settings: ReaderSettings) -> None:
        assert settings.server is not None
        self._settings = settings
        self._client = Client(settings.server, concurrency=8)
        path = "chat/completions"
        self._path = path if self._client.base_url.count("/") > 2 else f"v1/{path}"

    def read(self, asked: Sequence[Asked]) -> list[str | None]:
        """Answer each, in order."""
        found: dict[int, str | None] = {}

        def done(i: int, outcome: Response | Failure) -> None:
            if isinstance(outcome, Response):
                found[i] = _content(outcome, verdict=asked[i].kind == "claims")
            elif outcome.of_request:
                found[i] = None
            else:
                raise EngineFailure(f"the reader at {self._client.base_url} does not answer: {outcome.reason}")

        self._client.post_many(self._path, [self._body(one) for one in asked], on_done=done, check=_message)
        return [found[i] for i in range(len(asked))]

    def _body(self, one: Asked) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._settings.model,
            "messages": [{"role": "user", "content": one.prompt}],
            "temperature": 0.0,
            "max_tokens": self._settings.max_tokens,
        }
        if one.kind == "claims":
            verdict = {"type": "string", "enum": list(VERDICTS)}
            schema = {
                "type": "object",
                "properties": {"verdict": verdict},
                "required": ["verdict"],
                "additionalProperties": False,
            }
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema}}
        return body | self._settings.request


def _message(response: Response) -> str:
    try:
        text = response.json()["choices"][0]["message"].get("content")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise InvalidData("the answer has no choices[0].message; it is no chat completion") from None
    return text if isinstance(text, str) else ""


def _content(response: Response, *, verdict: bool) -> str:
    text = _message(response)
    if verdict:
        try:
            return str(json.loads(text)["verdict"])
        except (ValueError, KeyError, TypeError):
            return text  # a server that does not enforce the schema: whatever it said is judged as it is
    return text
