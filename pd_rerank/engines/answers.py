"""What model servers and vLLM answer, turned into grade logits at slots: pure parsing, one function per shape.

A slot is the position whose next token the grade would be. An answer that holds fewer rows, more rows or other columns
than were asked for is `InvalidData`, never a guess; a grade an answer does not hold is NaN.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pd_rerank.engines.base import FloatArray, IntArray, WindowPrompt
from pd_rerank.errors import InvalidData, ModelMismatch

_DTYPES = {"float32": "f4", "float16": "f2", "float64": "f8"}
_BIASED_HEADS = ("phi", "gptj", "codegen")
"""Model types whose output head has a bias, which a head copied from the weight matrix alone leaves out."""


# -- what a copied head leaves out ---------------------------------------------------------------------------------


def after_head(config: Any) -> dict[str, Any]:
    """What a model does to its head's product before it is the logits: `scale` and `softcap`, each where there is one.

    `config` is the transformers config of the text model. Logits = cap · tanh(product · scale / cap).
    """
    said: dict[str, Any] = {}
    if getattr(config, "logits_scaling", None) not in (None, 1.0):
        said["scale"] = 1.0 / float(config.logits_scaling)
    elif getattr(config, "logit_scale", None) not in (None, 1.0):
        said["scale"] = float(config.logit_scale)
    if getattr(config, "final_logit_softcapping", None):
        said["softcap"] = float(config.final_logit_softcapping)
    return said


def check_no_bias(config: Any, name: str) -> None:
    """Refuse a model whose output head is known to have a bias; its rows alone are not its logits."""
    if getattr(config, "model_type", None) in _BIASED_HEADS:
        raise ModelMismatch(
            f"the output head of '{name}' has a bias, which a head of grade rows leaves out; serve its classifier "
            "export (pd-rerank export --form classifier), whose card holds the bias, or read one token per slot"
        )


def corrected(rows: FloatArray, said: Mapping[str, Any]) -> FloatArray:
    """Grade logits from the rows (…, G) of a copied head: the bias, scale and soft cap it leaves out."""
    logits = np.asarray(rows, dtype=np.float32)
    if (bias := said.get("bias")) is not None:
        logits = logits + np.asarray(bias, dtype=np.float32)
    if (scale := said.get("scale")) is not None:
        logits = logits * np.float32(scale)
    if (cap := said.get("softcap")) is not None:
        logits = np.float32(cap) * np.tanh(logits / np.float32(cap))
    return logits


# -- rows of a token-wise classifier -------------------------------------------------------------------------------


def rows_at_slots(rows: FloatArray, prompt: WindowPrompt, *, cached: int = 0) -> FloatArray | None:
    """The rows at a prompt's slots, of rows (n - cached, G) for the tokens after the first `cached`.

    None where the cached part reaches a slot, so that its row was not computed. Another number of rows is
    `InvalidData`.
    """
    n = len(prompt.token_ids)
    if rows.ndim != 2 or len(rows) != n - cached:
        shape = "×".join(map(str, rows.shape))
        held = f" of which {cached} were cached" if cached else ""
        raise InvalidData(f"rows of shape {shape} came back for a prompt of {n} tokens{held}; wanted {n - cached}")
    if len(prompt.slots) and int(prompt.slots[0]) < cached:
        return None
    picked: FloatArray = rows[prompt.slots - cached].astype(np.float32)
    return picked


def rows_of_bytes(body: bytes, metadata: str | None) -> list[FloatArray]:
    """The arrays of a binary pooling answer, described by its `metadata` header (JSON with shape and place of each)."""
    try:
        items = sorted(json.loads(metadata or "")["data"], key=lambda item: item["index"])
        found = []
        for item in items:
            order = {"native": "=", "little": "<", "big": ">"}[item["endianness"]]
            kind = np.dtype(order + _DTYPES[item["embed_dtype"]])
            shape = tuple(int(side) for side in item["shape"])
            part = body[item["start"] : item["end"]]
            if len(part) != math.prod(shape) * kind.itemsize:
                raise InvalidData(
                    f"the binary answer was cut off: {len(part)} bytes of {item['embed_dtype']} of shape {shape}"
                )
            found.append(np.frombuffer(part, dtype=kind).reshape(shape).astype(np.float32))
    except InvalidData:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidData(f"the binary answer's metadata header is not what vLLM sends ({error!r})") from error
    return found


def rows_of_json(answer: Any) -> list[FloatArray]:
    """The arrays of a pooling answer in JSON (`encoding_format` float)."""
    try:
        items = sorted(answer["data"], key=lambda item: item["index"])
        return [np.asarray(item["data"], dtype=np.float32) for item in items]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidData(f"the pooling answer is not of the shape vLLM sends ({error!r})") from error


# -- log-probabilities by token ------------------------------------------------------------------------------------


def picked(entry: Mapping[int, float], grade_ids: Sequence[int]) -> FloatArray:
    """The grades' log-probabilities (G,) from those an answer holds by token id; NaN for what it does not hold."""
    return np.array([entry.get(int(g), np.nan) for g in grade_ids], dtype=np.float32)


def completion_entries(answer: Any, *, prompts: int) -> list[dict[int, float]]:
    """Log-probabilities by token id at the one token of each completion, in the order the prompts were sent.

    Keys must be token ids (`return_tokens_as_token_ids`): several tokens share one text, so texts are refused.
    """
    try:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if [choice["index"] for choice in choices] != list(range(prompts)):
            raise InvalidData(f"{prompts} prompts were sent and {len(choices)} completions came back")
        return [_by_id(choice["logprobs"]["top_logprobs"][0]) for choice in choices]
    except InvalidData:
        raise
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise InvalidData(f"the completion holds no log-probabilities of its first token ({error!r})") from error


def _by_id(entry: Mapping[str, float]) -> dict[int, float]:
    found = {}
    for key, value in entry.items():
        kind, _, number = key.partition(":")
        if kind != "token_id" or not number.isdecimal():
            raise InvalidData(
                f"log-probabilities came back by text ({key!r}), which several tokens may share; the server must know "
                "return_tokens_as_token_ids"
            )
        found[int(number)] = _number(value)
    return found


def generate_entries(answer: Any, prompt: WindowPrompt, *, start: int) -> list[dict[int, float]]:
    """Log-probabilities by token id at each slot, from SGLang's /generate asked from position `start` on.

    Entry j of `input_token_ids_logprobs` holds [log-prob, id, text] as predictions of the token at `start` + j; the
    first entry is null.
    """
    try:
        entries = answer["meta_info"]["input_token_ids_logprobs"]
        wanted = len(prompt.token_ids) - start
        if len(entries) != wanted:
            raise InvalidData(
                f"{len(entries)} rows of log-probabilities came back for {wanted} tokens from position {start} on"
            )
        return [
            {int(found[1]): _number(found[0]) for found in entries[slot + 1 - start]} for slot in prompt.slots.tolist()
        ]
    except InvalidData:
        raise
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise InvalidData(
            f"the answer holds no input_token_ids_logprobs of the shape SGLang sends ({error!r})"
        ) from error


def score_rows(answer: Any, prompt: WindowPrompt, *, grades: int) -> FloatArray:
    """Log-probabilities (slots, G) from SGLang's /v1/score, asked for every occurrence of the token at the slots.

    The answer has a row of probabilities per occurrence in the prompt, so slots are found by counting. A row of
    nothing but zeros is missing.
    """
    anchor = int(prompt.token_ids[prompt.slots[0]])
    at: IntArray = np.flatnonzero(prompt.token_ids == anchor)
    try:
        rows = np.asarray(answer["scores"][0], dtype=np.float64)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise InvalidData(f"the answer holds no scores of the shape SGLang sends ({error!r})") from error
    if rows.shape != (len(at), grades):
        raise InvalidData(
            f"scores of shape {rows.shape} came back for {len(at)} occurrences of token {anchor} and {grades} grades"
        )
    chosen = rows[np.searchsorted(at, prompt.slots)]
    with np.errstate(divide="ignore"):
        logs: FloatArray = np.log(chosen).astype(np.float32)
    logs[~(chosen > 0).any(axis=-1)] = np.nan
    return logs


def one_anchor(prompt: WindowPrompt) -> bool:
    """Whether the same token stands at every slot of a prompt, as /v1/score needs it."""
    return len({int(t) for t in prompt.token_ids[prompt.slots]}) == 1


def _number(value: Any) -> float:
    """A log-probability; null (which JSON has for -inf and NaN) is NaN."""
    return float("nan") if value is None else float(value)


# -- what came back, judged ----------------------------------------------------------------------------------------


def blanked(logits: FloatArray) -> tuple[FloatArray, int]:
    """`logits` (n, G) with every row that lacks a grade made NaN as a whole, and how many such rows there are.

    -inf is a probability of zero and stays; a row of nothing else, +inf and NaN are no grades.
    """
    values = np.asarray(logits, dtype=np.float32)
    broken = np.isnan(values).any(axis=-1) | np.isposinf(values).any(axis=-1) | np.isneginf(values).all(axis=-1)
    if broken.any():
        values = values.copy()
        values[broken] = np.nan
    return values, int(broken.sum())


def expected(logits: FloatArray) -> FloatArray:
    """Expected grade over the top grade, in [0, 1], from logits or log-probabilities (…, G); NaN stays."""
    values = np.asarray(logits, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        p = np.exp(values - values.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    result: FloatArray = ((p * np.arange(values.shape[-1])).sum(axis=-1) / max(1, values.shape[-1] - 1)).astype(
        np.float32
    )
    return result


def apart(one: FloatArray, other: FloatArray) -> float:
    """How far two readings of the same slots, expected grades (n,), are apart at most; NaN where that cannot be told.

    It cannot where a slot has a grade in one of them alone, or where no slot has any. NaN is within no tolerance: ask
    `apart(…) <= tolerance`, never whether it is above.
    """
    there = ~np.isnan(one)
    if not there.any() or not np.array_equal(there, ~np.isnan(other)):
        return math.nan
    return float(np.abs(one - other)[there].max())


def check_read(probe: Sequence[FloatArray], what: str) -> None:
    """Refuse to judge by a probe of which nothing was read: no grade at any slot of it."""
    if all(np.isnan(logits).all() for logits in probe):
        raise ModelMismatch(
            f"with {what} no slot of a probe comes back with a grade, so whether it is applied cannot be told; it, or "
            "this precision, gives no numbers, or the readout leaves grades out: try slot_readout='one_token'"
        )
