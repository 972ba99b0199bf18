"""What a request may hold, what an answer holds, and how a refusal is told."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from pd_rerank.errors import near_names


class Refusal(Exception):
    """A request that is not answered: the status, a short code for programs and a sentence for people.

    `field` names what in the request is meant, `retry_after` (seconds) when it is worth asking again.
    """

    def __init__(
        self, status: int, code: str, message: str, *, field: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.field = field
        self.retry_after = retry_after


class Problem(BaseModel):
    """A refusal's body. The sentence stands under two names: clients of one API read one, of the other the other."""

    message: str = Field(description="What is wrong, where, and what to do.")
    detail: str = Field(description="The same sentence.")
    code: str = Field(description="A word for programs: invalid_request, queue_full, deadline, …")
    field: str | None = Field(description="What in the request is meant, as in documents[3].")
    id: str = Field(description="The request's id, which is in the server's log too.")


Document = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "object", "properties": {"text": {"type": "string"}}}]},
    ),
]

_MOST_RANK_FIELDS = 100

_IDLE = "Taken for other servers' clients; has no effect here, and the answer's `meta.warnings` says so."


class RerankRequest(BaseModel):
    """A query and the documents to rank for it."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())

    query: str = Field(description="The query.")
    documents: list[Document] = Field(description="Strings, or objects whose `text` is read.")
    model: str | None = Field(
        None, description="Name of a served model, see above; any other name is answered by the first."
    )
    top_n: int | None = Field(None, ge=1, description="Only the best so many. Left out: all.")
    return_documents: bool | None = Field(None, description="Put each result's document into the answer.")
    rank_fields: list[str] | None = Field(
        None,
        min_length=1,
        max_length=_MOST_RANK_FIELDS,
        description="Fields of document objects that are read, a line each, instead of `text`.",
    )

    threshold: float | None = Field(
        None, allow_inf_nan=False, description="Score from which a document is retained; marks each result."
    )
    retained_only: bool | None = Field(None, description="Leave out results below the threshold.")
    presentations: int | None = Field(
        None, ge=1, description="Shuffles whose scores are averaged; 1: shown once, as `order` says."
    )
    order: Literal["given", "reverse", "canonical"] | None = Field(
        None, description="Arrangement before that. canonical: by content, so that arrival order cannot matter."
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="Seed of the first shuffle.")
    adapter: str | None = Field(None, description="Name of a served adapter.")
    details: bool | None = Field(
        None, description="Add rank, spread, grade probabilities and cut to results, and how they were scored."
    )

    max_tokens_per_doc: Any = Field(None, description=_IDLE)
    max_chunks_per_doc: Any = Field(None, description=_IDLE)
    truncation: Any = Field(None, description=_IDLE)
    truncate: Any = Field(None, description=_IDLE)
    priority: Any = Field(None, description=_IDLE)
    user: Any = Field(None, description=_IDLE)

    def warnings(self) -> list[str]:
        """What was asked and has no effect."""
        idle = [name for name in _IDLE_FIELDS if getattr(self, name) is not None]
        return [f"'{name}' has no effect on this server" for name in idle]

    def texts(self) -> list[str]:
        """The text of each document; one without is a `Refusal`."""
        return [_text(document, i, self.rank_fields) for i, document in enumerate(self.documents)]


_IDLE_FIELDS = tuple(name for name, field in RerankRequest.model_fields.items() if field.description == _IDLE)


class RerankResult(BaseModel):
    """One document's place. Fields beyond the first three are there where the request asked for them."""

    index: int = Field(description="The document's place in the request, from 0.")
    relevance_score: float | None = Field(
        description="In [0, 1]; null where the model gave the document no grade. Such documents come last."
    )
    document: dict[str, Any] | None = Field(None, description="With `return_documents`: the document, or its text.")
    retained: bool | None = Field(None, description="With a threshold: whether the score reaches it.")
    rank: int | None = Field(None, description="With `details`: from 1.")
    spread: float | None = Field(None, description="With `details`: standard deviation of the score over shuffles.")
    grade_probabilities: list[float] | None = Field(None, description="With `details`: of grades 0, 1, 2, 3.")
    cut: int | None = Field(None, description="With `details`: characters taken off the document's end to fit.")


class Usage(BaseModel):
    """Tokens of all prompts of the request."""

    total_tokens: int
    prompt_tokens: int


class Decision(BaseModel):
    """What the threshold came to."""

    threshold: float
    retained: int = Field(description="How many of all documents reach the threshold.")


class RerankResponse(BaseModel):
    """Results, best first."""

    id: str
    model: str = Field(description="The served model that answered.")
    results: list[RerankResult]
    usage: Usage | None
    meta: dict[str, Any] = Field(description="`api_version`, `tokens`, and `warnings` if there are any.")
    decision: Decision | None = Field(None, description="With a threshold.")
    scoring: dict[str, Any] | None = Field(None, description="With `details`: how the scores were made.")


def parse(body: bytes, *, max_documents: int) -> RerankRequest:
    """Read a request's JSON; what is wrong with it is a `Refusal` that never repeats what was sent.

    What may come in any number (documents, fields) is looked at before pydantic sees it, which makes an error for each.
    """
    try:
        data = _loaded(body)
    except RecursionError:
        raise Refusal(400, "invalid_json", "the body is nested too deeply to be a request") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise Refusal(400, "invalid_json", f"the body is not JSON: {error.msg} at {place}") from None
    except UnicodeDecodeError as error:
        raise Refusal(400, "invalid_json", f"the body is not UTF-8: byte {error.start} cannot be read") from None
    except ValueError as error:
        raise Refusal(400, "invalid_json", f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise Refusal(422, "invalid_request", f"a request is an object with query and documents, this is {_kind(data)}")
    _check_many(data, max_documents=max_documents)
    try:
        request = RerankRequest.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)
        field = _path(first[0]["loc"])
        raise Refusal(422, "invalid_request", _sentence(first), field=field) from None
    if request.rank_fields is not None and len(set(request.rank_fields)) < len(request.rank_fields):
        raise Refusal(422, "invalid_request", "rank_fields: a name stands there twice", field="rank_fields")
    if not request.query.strip():
        raise Refusal(422, "invalid_request", "query: there is no text in it", field="query")
    return request


def _loaded(body: bytes) -> Any:
    """JSON as Python values. They hold no cycles, and looking for some over and over is most of a large body's time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        return json.loads(body, parse_constant=_no_constant, parse_float=_finite)
    finally:
        if collecting:
            gc.enable()


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError("a number in it is too large for a double")
    return value


def _check_many(data: Mapping[str, Any], *, max_documents: int) -> None:
    """Refuse unknown fields, with near names, too many documents or rank_fields, and the first that is no document."""
    fields = RerankRequest.model_fields
    if unknown := [name for name in data if name not in fields]:
        name, more = unknown[0], f" ({len(unknown) - 1} more)" if len(unknown) > 1 else ""
        shown = name if name.isprintable() and len(name) <= 40 else "that name"
        known = [name for name in fields if name not in _IDLE_FIELDS]
        told = f"unknown field '{shown}'; {near_names(name[:40], known)}{more}"
        raise Refusal(422, "invalid_request", told, field=_path([name]))
    documents, rank_fields = data.get("documents"), data.get("rank_fields")
    if isinstance(documents, list):
        if len(documents) > max_documents:
            told = f"documents: {len(documents)}, this server takes {max_documents} a request"
            raise Refusal(422, "too_many_documents", told, field="documents")
        for i, document in enumerate(documents):
            if not isinstance(document, str | dict):
                told = f"documents[{i}]: a document is a string or an object with 'text', this is {_kind(document)}"
                raise Refusal(422, "invalid_request", told, field=f"documents[{i}]")
    if isinstance(rank_fields, list) and len(rank_fields) > _MOST_RANK_FIELDS:
        told = f"rank_fields: {len(rank_fields)}, there may be {_MOST_RANK_FIELDS}"
        raise Refusal(422, "invalid_request", told, field="rank_fields")


def _sentence(errors: Sequence[Any]) -> str:
    """What is wrong first, and how many things there are."""
    error = errors[0]
    more = f" ({len(errors) - 1} more)" if len(errors) > 1 else ""
    field = _path(error["loc"])
    if error["type"] == "missing":
        return f"{field} is missing; a request has query and documents{more}"
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{field}: {message[:1].lower()}{message[1:]}{more}"


def _path(loc: Sequence[str | int]) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
    return path if len(path) <= 60 and path.isprintable() else f"{path[:40]!a}…"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _text(document: str | dict[str, Any], i: int, fields: Sequence[str] | None) -> str:
    if isinstance(document, str):
        return document
    where = f"documents[{i}]"
    if fields is not None:
        there = [document[name] for name in fields if document.get(name) is not None]
        if not there or not all(isinstance(value, str | int | float) for value in there):
            raise Refusal(422, "invalid_request", f"{where}: no text in its rank_fields", field=where)
        return "\n".join(map(str, there))
    text = document.get("text")
    if not isinstance(text, str):
        what = "has no 'text'" if text is None else f"has {_kind(text)} as 'text'"
        cure = "only text is ranked" if "image" in document else "give it one, or name others in rank_fields"
        raise Refusal(422, "invalid_request", f"{where} {what}; {cure}", field=where)
    return text


def number(value: float) -> float | None:
    """A number for JSON, which has no NaN."""
    return None if math.isnan(value) else float(value)
