"""Grades that a model writes down: whole numbers from any OpenAI-compatible chat endpoint, thinking models included.

A window goes out as one message (`prompt.ChatPrompt`) and comes back as JSON. A written grade becomes grade
log-probabilities of 0 for that grade and -inf for the others, so that score tables, evaluation and labels take it as
any other. An answer that is not exactly what was asked for gives no grade to any document of its window: NaN.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import uuid
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from pd_rerank.engines.base import ChatWindow, FloatArray, Progress, WindowPrompt
from pd_rerank.engines.http import KEY_VARIABLE, Client, Failure, Response
from pd_rerank.errors import BadArgument, EngineFailure, InvalidData, whole
from pd_rerank.files import read_json, write_json

logger = logging.getLogger("pd_rerank")

AnswerForm = Literal["json_schema", "json_object", "text"]

FORMAT = "pd_rerank answers 1"
"""Of cached answers; raised whenever equal settings would give other requests."""

_OWN = ("messages", "model", "n", "stream", "response_format")
"""Fields of a request that are not for `request` to set."""

_SECRET = ("api_key", "apikey", "key", "authorization", "access_token")

_ENOUGH = 8
"""Malformed answers, and no other so far, after which a model is taken to be unable."""

_API = "chat/completions"
_IN_MEMORY = 4096
"""Answers that stay in memory between calls, so that what is asked again after a failure is only what is missing."""


class GeneratedEngine:
    """Asks a chat endpoint to write the grades of each window.

    `model` is the server's name for it, `server` the URL; `/v1` is added where it has no path. `answer_form` is how
    JSON is enforced: `json_schema` by the window's own schema, `json_object` by JSON mode, `text` not at all.
    `temperature`, `max_tokens` and `request_seed` are sent unless None; `request` adds fields of the server's own
    (`{"reasoning_effort": "low"}`), and takes a field out where it gives None.

    Answers are kept in the folder `cache`, each under a hash of the whole request, and never asked for twice; a folder
    of answers made with other settings is refused. Malformed answers are kept too: they are what the model said.

    A request takes at most `server_timeout` seconds between signs of life and is tried `attempts` times; `deadline`
    ends each call of `grade_logits`, in seconds. At most `concurrency` are under way. An API key is read from the
    environment variable `key_variable` only.
    """

    tokenizer: Any = None
    max_length = 1 << 30
    """What a prompt may hold is the server's to know; one it refuses has no grades."""

    def __init__(
        self,
        model: str,
        *,
        server: str | None = None,
        answer_form: AnswerForm = "json_schema",
        temperature: float | None = 0.0,
        max_tokens: int | None = 4096,
        request_seed: int | None = None,
        request: Mapping[str, Any] | None = None,
        cache: str | Path | None = None,
        server_timeout: float = 300.0,
        attempts: int = 5,
        concurrency: int = 16,
        deadline: float | None = None,
        key_variable: str | None = KEY_VARIABLE,
    ) -> None:
        if server is None:
            raise BadArgument("generated grades need a server's address: server='http://host:port/v1'")
        if answer_form not in get_args(AnswerForm):
            raise BadArgument(f"unknown answer_form '{answer_form}'; choose one of {', '.join(get_args(AnswerForm))}")
        if max_tokens is not None and (not whole(max_tokens) or max_tokens < 1):
            raise BadArgument(f"max_tokens must be a whole number of at least 1, got {max_tokens!r}")
        own = dict(request or {})
        if wrong := sorted(set(own) & set(_OWN)):
            raise BadArgument(f"request may not set '{wrong[0]}', which is made from the prompt and the other settings")
        if secret := sorted(name for name in own if name.lower().replace("-", "_") in _SECRET):
            raise BadArgument(
                f"request holds '{secret[0]}', which would be recorded; a key is read from {key_variable}"
            )
        fields = {"temperature": temperature, "max_tokens": max_tokens, "seed": request_seed} | own
        self.name = model
        self.settings: dict[str, Any] = {
            "format": FORMAT,
            "api": _API,
            "model": model,
            "answer_form": answer_form,
            "request": {name: value for name, value in sorted(fields.items()) if value is not None},
        }
        try:
            json.dumps(self.settings, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise BadArgument(f"request holds what JSON cannot carry: {error}") from error
        self._form = answer_form
        self._client = Client(
            server,
            timeout_s=server_timeout,
            attempts=attempts,
            concurrency=concurrency,
            deadline_s=deadline,
            key_variable=key_variable,
        )
        self._path = _API if self._client.base_url.count("/") > 2 else f"v1/{_API}"
        self._answers = _Answers(None if cache is None else Path(cache), self.settings)
        self._spent = Spent()
        self._graded = 0

    def describe(self) -> dict[str, Any]:
        """Return what decides about the grades; where the server stands does not."""
        return {"engine": "generated", **self.settings}

    def cost(self) -> dict[str, Any]:
        """What was asked and used: by this engine, and by all that kept their answers in the same folder."""
        spent = self._spent.describe()
        return spent if self._answers.folder is None else spent | {"all_runs": self._answers.spent()}

    def grade_logits(
        self, prompts: Sequence[WindowPrompt], grade_ids: Sequence[int], *, progress: Progress | None = None
    ) -> list[FloatArray]:
        """Grade each window, (n, G): 0 at the grade written and -inf elsewhere, NaN where the answer holds none.

        Where the server could not be asked for all windows, and where it has refused everything or many answers and
        not one held grades, this is an `EngineFailure`; what it did answer is kept, so that asking again asks for the
        rest.
        """
        asked: list[ChatWindow] = []
        for prompt in prompts:
            if not isinstance(prompt, ChatWindow):
                raise BadArgument("generated grades are asked for in messages; make the prompt with ChatPrompt")
            asked.append(prompt)
        bodies = [self._body(window, len(grade_ids)) for window in asked]
        keys = [_key_of(body) for body in bodies]
        failures = self._ask(dict(zip(keys, bodies, strict=True)), Counter(keys), progress)
        lost = [failure for failure in failures.values() if not failure.of_request]
        if lost:
            raise EngineFailure(
                f"'{self.name}' at {self._client.base_url} left {len(lost)} of {len(set(keys))} windows without an "
                f"answer: {lost[0].reason}"
            )
        found: list[FloatArray] = []
        without: Counter[str] = Counter()
        for window, key in zip(asked, keys, strict=True):
            failure = failures.get(key)
            try:
                if failure is not None:
                    raise InvalidData(f"the server refuses the request, HTTP {failure.status}")
                grades = self._answers[key].grades(window, top=len(grade_ids) - 1)
            except InvalidData as error:
                without[str(error)] += 1
                found.append(np.full((len(window.ids), len(grade_ids)), np.nan, dtype=np.float32))
            else:
                found.append(_one_hot(grades, len(grade_ids)))
        if without:
            most, count = without.most_common(1)[0]
            said = f"{without.total()} of {len(asked)} answers of '{self.name}' hold no grades; {count}: {most}"
            if refused := next(iter(failures.values()), None):
                said += f"; first refusal: {refused.reason}"
            hopeless = failures or len(asked) >= _ENOUGH
            if not self._graded and without.total() == len(asked) and hopeless:
                cure = "" if self._form == "text" else "; where it cannot enforce JSON, try answer_form 'text'"
                raise EngineFailure(f"{said}{cure}")
            logger.warning("%s", said)
        self._graded += len(asked) - without.total()
        self._spent.unavailable.update(without)
        return found

    def _body(self, window: ChatWindow, grades: int) -> dict[str, Any]:
        body = {
            "model": self.name,
            "messages": [{"role": "user", "content": window.text}],
            **self.settings["request"],
        }
        if self._form == "json_object":
            body["response_format"] = {"type": "json_object"}
        elif self._form == "json_schema":
            schema = answer_schema(window.ids, grades=grades, reasons=window.reasons)
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "grades", "strict": True, "schema": schema},
            }
        return body

    def _ask(
        self, bodies: Mapping[str, Mapping[str, Any]], windows: Mapping[str, int], progress: Progress | None
    ) -> dict[str, Failure]:
        """Ask for what is not kept, keep it, and return what could not be had."""
        self._answers.forget()
        missing = [key for key in bodies if not self._answers.has(key)]
        self._spent.kept = self._answers.from_disk
        if progress is not None and len(missing) < len(bodies):
            progress(sum(windows.values()) - sum(windows[key] for key in missing))
        failures: dict[str, Failure] = {}

        def on_done(i: int, outcome: Response | Failure) -> None:
            self._spent.requests += outcome.connected
            self._spent.retries += max(0, outcome.attempts - 1)
            if isinstance(outcome, Failure):
                failures[missing[i]] = outcome
            else:
                answer = _Answer.of(outcome)
                self._spent.add(answer)
                self._answers.keep(missing[i], answer)
            if progress is not None:
                progress(windows[missing[i]])

        try:
            self._client.post_many(self._path, [bodies[key] for key in missing], on_done=on_done, check=_Answer.of)
        finally:
            if missing:
                self._answers.keep_spent(self._spent)
        return failures


class _Answer:
    """What the server said: the message's text, why it ended, and what it used, each None where it did not say."""

    __slots__ = ("finish", "model", "text", "usage")

    def __init__(
        self, *, text: str | None, finish: str | None, usage: Mapping[str, int | None], model: str | None
    ) -> None:
        self.text, self.finish, self.usage, self.model = text, finish, usage, model

    @classmethod
    def of(cls, response: Response) -> _Answer:
        """Read an endpoint's answer; one without a choice's message is `InvalidData`."""
        found = response.json()
        try:
            choice = found["choices"][0]
            text, finish, used = choice["message"].get("content"), choice.get("finish_reason"), found.get("usage")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise InvalidData("the answer has no choices[0].message; it is no chat completion") from None
        if isinstance(text, list):  # some servers give parts
            text = "".join(str(part.get("text", "")) for part in text if isinstance(part, dict))
        if not (text is None or isinstance(text, str)):
            raise InvalidData("the answer's content is no text")
        used = used if isinstance(used, dict) else {}
        return cls(
            text=text,
            finish=finish if isinstance(finish, str) else None,
            usage={name: used[name] if whole(used.get(name)) else None for name in _TOKENS},
            model=found["model"] if isinstance(found.get("model"), str) else None,
        )

    def grades(self, window: ChatWindow, *, top: int) -> list[int]:
        """The grades of the window's candidates, in its order; `InvalidData` says why there are none."""
        if self.finish == "length":  # what is there may parse, and is not all that was to be said
            raise InvalidData("the answer was cut off at max_tokens")
        return read_grades(self.text or "", ids=window.ids, top=top)

    def as_json(self) -> dict[str, Any]:
        """As `from_json` reads it."""
        return {"text": self.text, "finish_reason": self.finish, "usage": dict(self.usage), "model": self.model}

    @classmethod
    def from_json(cls, found: Any) -> _Answer:
        """What `as_json` gave; anything else raises."""
        text, finish, model = found["text"], found["finish_reason"], found["model"]
        if not all(value is None or isinstance(value, str) for value in (text, finish, model)):
            raise TypeError("text, finish_reason or model is no string")
        return cls(text=text, finish=finish, usage={name: found["usage"][name] for name in _TOKENS}, model=model)


_TOKENS = ("prompt_tokens", "completion_tokens")


class Spent:
    """What was asked and used; a request whose use is not known makes the sum unknown, with what is known beside it."""

    def __init__(self) -> None:
        self.requests = 0
        self.retries = 0
        self.answers = 0
        self.kept = 0
        self.known: Counter[str] = Counter()
        self.with_usage: Counter[str] = Counter()
        self.models: Counter[str] = Counter()
        self.unavailable: Counter[str] = Counter()

    def add(self, answer: _Answer) -> None:
        """Count one answer and what it used."""
        self.answers += 1
        self.models[answer.model or "unknown"] += 1
        for name, value in answer.usage.items():
            if value is not None:
                self.known[name] += value
                self.with_usage[name] += 1

    def describe(self) -> dict[str, Any]:
        """As plain values: requests that reached the server, answers, and tokens, None where not all are known."""
        return {
            "requests": self.requests,
            "retries": self.retries,
            "answers": self.answers,
            "answers_from_cache": self.kept,
            "answered_by": dict(self.models),
            "windows_without_grades": dict(self.unavailable),
            **_tokens(self.requests, self.known, self.with_usage),
        }


def _tokens(requests: int, known: Mapping[str, int], counted: Mapping[str, int]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in _TOKENS:
        out[name] = known.get(name, 0) if counted.get(name, 0) >= requests else None
        out[f"{name}_known"] = known.get(name, 0)
        out[f"requests_without_{name}"] = max(0, requests - counted.get(name, 0))
    return out


class _Answers:
    """Answers by the hash of their request: in memory, and with a folder on disk, one whole file each."""

    def __init__(self, folder: Path | None, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        self._memory: OrderedDict[str, _Answer] = OrderedDict()
        self.from_disk = 0
        self._run = f"{uuid.uuid4().hex}.json"
        if folder is None:
            return
        if folder.exists() and not folder.is_dir():
            raise BadArgument(f"{folder} is a file; name a folder for the answers")
        record = folder / "settings.json"
        if record.exists():
            there = read_json(record)
            if there != settings:
                before = there if isinstance(there, dict) else {}
                names = sorted(name for name in {*before, *settings} if before.get(name) != settings.get(name))
                raise BadArgument(
                    f"{folder} holds answers made with other settings ({', '.join(names)} differ); "
                    "name another cache, or none"
                )
        elif folder.exists() and any(folder.iterdir()):
            raise BadArgument(f"{folder} holds other files than answers; name another cache")
        else:
            write_json(record, settings)

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / "answers" / key[:2] / f"{key}.json"

    def _read(self, key: str) -> _Answer | None:
        path = self._path(key)
        if not path.is_file():
            return None
        try:
            found = read_json(path)
            if found["request_sha256"] != key:
                raise ValueError("it is of another request")
            return _Answer.from_json(found)
        except (InvalidData, KeyError, TypeError, ValueError) as error:
            logger.warning("%s is damaged (%s); it is asked for again", path, error)
            return None

    def has(self, key: str) -> bool:
        """Whether there is an answer; it is then in memory until `forget`."""
        if key not in self._memory and self.folder is not None and (answer := self._read(key)) is not None:
            self._memory[key] = answer
            self.from_disk += 1
        return key in self._memory

    def __getitem__(self, key: str) -> _Answer:
        return self._memory[key]

    def keep(self, key: str, answer: _Answer) -> None:
        """Keep an answer; with a folder it is on disk, whole, when this returns."""
        self._memory[key] = answer
        if self.folder is not None:
            write_json(self._path(key), {"request_sha256": key, **answer.as_json()})

    def forget(self) -> None:
        """Drop the oldest answers in memory; what one call needs must stay until it has been read."""
        while len(self._memory) > _IN_MEMORY:
            self._memory.popitem(last=False)

    def keep_spent(self, spent: Spent) -> None:
        """Put what this run has spent so far beside what others have."""
        if self.folder is not None:
            counted = {"requests": spent.requests, "retries": spent.retries, "answers": spent.answers}
            used = {"known": dict(spent.known), "counted": dict(spent.with_usage)}
            write_json(self.folder / "spent" / self._run, counted | used)

    def spent(self) -> dict[str, Any]:
        """The sum over all runs, this one included."""
        assert self.folder is not None
        total, known, counted = Counter[str](), Counter[str](), Counter[str]()
        for path in sorted((self.folder / "spent").glob("*.json")):
            found = read_json(path)
            total.update({name: found[name] for name in ("requests", "retries", "answers")})
            known.update(found["known"])
            counted.update(found["counted"])
        return {
            **{name: total[name] for name in ("requests", "retries", "answers")},
            **_tokens(total["requests"], known, counted),
        }


def _key_of(body: Mapping[str, Any]) -> str:
    """The hash of everything that changes an answer: the whole request and the API it goes to."""
    said = json.dumps({"format": FORMAT, "api": _API, "body": body}, sort_keys=True, allow_nan=False)
    return hashlib.sha256(said.encode()).hexdigest()


def _one_hot(grades: Sequence[int], count: int) -> FloatArray:
    out = np.full((len(grades), count), -np.inf, dtype=np.float32)
    out[np.arange(len(grades)), list(grades)] = 0.0
    return out


# -- what an answer must be ------------------------------------------------------------------------------------------


def answer_schema(ids: Sequence[str], *, grades: int, reasons: bool = False) -> dict[str, Any]:
    """The JSON schema of an answer to a window: one item per id, its grade from 0 to `grades` - 1."""
    fields: dict[str, Any] = {"id": {"type": "string", "enum": list(ids)}}
    if reasons:  # before the grade, so that it is written first
        fields["reason"] = {"type": "string"}
    fields["grade"] = {"type": "integer", "enum": list(range(grades))}
    item = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {
        "type": "object",
        "properties": {"items": {"type": "array", "items": item}},
        "required": ["items"],
        "additionalProperties": False,
    }


_THINKING = re.compile(r"<(think|thinking|reasoning)>")
_THOUGHT = re.compile(r"</(?:think|thinking|reasoning)>")
_FENCE = re.compile(r"```(?:json)?\s*\n(.*)\n\s*```", re.DOTALL | re.IGNORECASE)


def read_grades(text: str, *, ids: Sequence[str], top: int) -> list[int]:
    """The grades of `ids`, in their order, from an answer's text; anything but exactly one grade each is `InvalidData`.

    Thinking and one code fence around everything are taken off. What is left must be `{"items": [...]}`, each item
    an id, a whole number from 0 to `top` and perhaps a reason: no other keys, no numbers as text, no key twice.
    """
    found = _whole_json(text)
    if not isinstance(found, dict) or list(found) != ["items"] or not isinstance(found["items"], list):
        raise InvalidData("the answer is not an object with one list, 'items'")
    grades: dict[str, int] = {}
    for item in found["items"]:
        if not isinstance(item, dict) or not {"id", "grade"} <= set(item) <= {"id", "grade", "reason"}:
            raise InvalidData("an item is not an object with an id and a grade")
        name, grade = item["id"], item["grade"]
        if whole(name):
            name = str(name)
        if name not in ids:
            raise InvalidData("the answer grades what was not shown")
        if name in grades:
            raise InvalidData("the answer grades a document twice")
        if not whole(grade):
            raise InvalidData("a grade is not a whole number")
        if not 0 <= grade <= top:
            raise InvalidData(f"a grade is not on the scale from 0 to {top}")
        grades[name] = grade
    if len(grades) != len(ids):
        raise InvalidData("the answer leaves documents out")
    return [grades[name] for name in ids]


def _whole_json(text: str) -> Any:
    """The JSON that an answer is, or that follows its thinking to the end; a reason in it may quote an end of thinking.

    Thinking may hold drafts, so nothing in front of its end is taken.
    """
    why = ""
    for start in (0, *(match.end() for match in _THOUGHT.finditer(text))):
        body = text[start:].strip()
        fenced = _FENCE.fullmatch(body)
        try:
            return json.loads(fenced[1] if fenced else body, object_pairs_hook=_object, parse_constant=_refuse)
        except InvalidData as error:
            why = str(error)
        except (ValueError, RecursionError):  # what was said may quote a document, so it is not repeated
            unended = "the answer ends inside its thinking" if _THINKING.match(body) else "the answer is not JSON"
            why = unended if body else "the answer holds no text"
    raise InvalidData(why)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise InvalidData("the answer gives a key twice")
    return dict(pairs)


def _refuse(name: str) -> Any:
    raise ValueError(name)
