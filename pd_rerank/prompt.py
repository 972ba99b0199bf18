"""The one place that renders text: rubrics, windows as token ids, the slots to read, and what had to be cut.

A prompt is laid out so that everything a query's windows have in common stands first::

    system text | instruction, grades, answer form | query | documents, one per line | skeleton of the answer

The skeleton is written for the model: one line per document, ending in a placeholder where its grade
would stand. The token *before* a placeholder is that document's slot; its next-token distribution is read.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from pd_rerank.engines.base import ChatWindow, WindowPrompt
from pd_rerank.errors import BadArgument, InvalidData, ModelMismatch, whole
from pd_rerank.rubrics import Rubric, load_rubric

LAYOUT_VERSION = 1
"""Raised whenever the same settings would render other text."""

MIN_DOC_TOKENS = 24
"""Documents are not shortened below this to keep a window wide; the window shrinks instead."""

Markers = Literal["numeric", "alpha", "doc_n", "roman", "rand3"]
MARKERS: tuple[str, ...] = get_args(Markers)


def marker(scheme: str, position: int) -> str:
    """The marker of the candidate shown at `position` (from 0): `[1]`, `[A]`, `[Doc-1]`, `[i]` or three letters."""
    if scheme == "numeric":
        return f"[{position + 1}]"
    if scheme == "doc_n":
        return f"[Doc-{position + 1}]"
    if scheme == "alpha":
        letters, n = "", position + 1
        while n:
            n, digit = divmod(n - 1, 26)
            letters = chr(65 + digit) + letters
        return f"[{letters}]"
    if scheme == "roman":
        out, n = "", position + 1
        for value, sign in _ROMAN:
            out += sign * (n // value)
            n %= value
        return f"[{out}]"
    if scheme == "rand3":
        # 7919 is prime to the 23**3 codes, so positions never share one.
        code, out = (position * 7919 + 4401) % 23**3, ""
        for _ in range(3):
            code, digit = divmod(code, 23)
            out += "ABCDEFGHJKLMNPQRSTUVXYZ"[digit]
        return f"[{out}]"
    raise BadArgument(f"unknown markers '{scheme}'; choose one of {', '.join(MARKERS)}")


_ROMAN = (
    (1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc"), (50, "l"), (40, "xl"),
    (10, "x"), (9, "ix"), (5, "v"), (4, "iv"), (1, "i"),
)  # fmt: skip


def normalise(text: str) -> str:
    """Collapse every run of whitespace to one space and replace lone surrogates, which no tokenizer takes."""
    return " ".join(text.split()).encode("utf-8", "replace").decode("utf-8")


def is_blank(text: str) -> bool:
    """Whether a text shows nothing: whitespace, control and invisible format characters only."""
    return all(c.isspace() or unicodedata.category(c) in {"Cf", "Cc"} for c in text)


@dataclass(frozen=True, slots=True)
class _Frame:
    """The rendered text around what varies: before the query, between it and the documents, after them."""

    before: str
    between: str
    after: str


@dataclass(frozen=True, slots=True)
class _Ending:
    """What follows the documents of a window of n, as token ids, and where its slots are, counted from the end."""

    ids: npt.NDArray[np.int64]
    slots_from_end: npt.NDArray[np.int64]
    checked: npt.NDArray[np.int64]


class GradePrompt:
    """Renders windows for one tokenizer and proves, when built, that their slots can be read.

    The proof: every grade is one token at a slot, the grades' tokens differ, the token after each slot is the
    placeholder, and the chat template keeps query and documents as given. What fails raises `ModelMismatch`.

    `rubric` is a shipped name, a YAML file or a `Rubric`; `instruction` replaces the rubric's. `markers` names
    the documents (`numeric`, `alpha`, `doc_n`, `roman`, `rand3`). `placeholder` stands where a grade would.
    `max_doc_chars` cuts a document's normalised text (None: the rubric's cap; 0: no cap). `chat` is "auto"
    (a chat template where the tokenizer has one), True or False (plain text, for base models).
    `template_kwargs` go to the chat template; thinking is off and dates are fixed unless they say otherwise.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        rubric: str | Path | Rubric = "passage_relevance",
        instruction: str | None = None,
        markers: str = "numeric",
        placeholder: str = "0",
        max_doc_chars: int | None = None,
        chat: bool | Literal["auto"] = "auto",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        chosen, max_doc_chars = _wording(rubric, instruction, markers, max_doc_chars)
        if not isinstance(placeholder, str) or not placeholder.strip() or "\n" in placeholder:
            raise BadArgument(f"placeholder {placeholder!r} must be a string, one visible token such as '0' or '?'")
        if not (isinstance(chat, bool) or chat == "auto"):
            raise BadArgument(f"chat is True, False or 'auto', got {chat!r}")
        if template_kwargs is not None and not isinstance(template_kwargs, Mapping):
            raise BadArgument(f"template_kwargs are a mapping, got {template_kwargs!r}")
        self.tokenizer = tokenizer
        self.rubric = chosen
        self.markers = markers
        self.placeholder = placeholder
        self.max_doc_chars = max_doc_chars
        self._template_kwargs = dict(template_kwargs or {})
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if chat is True and not has_template:
            raise ModelMismatch("chat=True, but this tokenizer has no chat template; use chat=False or chat='auto'")
        self.chat = has_template if chat == "auto" else bool(chat)
        self._special = _special_pattern(tokenizer)
        self._template_error: Exception | None = None
        self._bos = _leading_bos(tokenizer) if not self.chat else ()
        self.layout, self._frame = self._render_frame()
        self._endings: dict[int, _Ending] = {}
        self._marker_ids: dict[int, list[int]] = {}
        self._marker_arrays: dict[int, npt.NDArray[np.int64]] = {}
        self._gap, self.grade_ids, self._placeholder_id = self._find_grades()
        self.joined = self._joins()
        """Whether ids of parts, put together, equal the ids of the whole: then a document is tokenised once."""
        self.hash = self._hash()

    # -- text ---------------------------------------------------------------------------------------------

    def _user_text(self, query: str, documents: str) -> str:
        rubric = self.rubric
        form = (
            f'Answer with one line for each {rubric.item}, in the order shown: its marker, then "Grade:" and '
            f"one digit from 0 to {len(rubric.grades) - 1}."
        )
        return _question(rubric, form, query, documents)

    def _render_frame(self) -> tuple[str, _Frame]:
        """Render once around stand-ins and split there; then prove on a second text that the split holds."""
        query, documents = "q7Zx9QueryStandIn", "d7Zx9DocumentsStandIn"
        for layout in ("system", "folded") if self.chat else ("plain",):
            text = self._render(layout, query, f"{documents}\n")
            if text is None or text.count(query) != 1 or text.count(documents) != 1:
                continue
            before, rest = text.split(query)
            between, after = rest.split(f"{documents}\n")
            if not self._rubric_is_kept(before):
                continue
            frame = _Frame(before, between, after)
            other = ("was ist <b>das</b> & 'jenes'?", '[1] Ein "Satz" {{ mit }} Zeichen.\n[2] Noch einer.\n')
            if self._render(layout, *other) == frame.before + other[0] + frame.between + other[1] + frame.after:
                return layout, frame
        said = f" (it ended in {self._template_error!r})" if self._template_error else ""
        raise ModelMismatch(
            f"this tokenizer's chat template does not keep the query and documents as given{said}; "
            "use chat=False for a plain prompt, or a tokenizer with another template"
        ) from self._template_error

    def _rubric_is_kept(self, text: str) -> bool:
        """Whether a rendered beginning still holds the rubric's system text and instruction."""
        return self.rubric.system.strip() in text and self.rubric.instruction.strip() in text

    def _render(self, layout: str, query: str, documents: str) -> str | None:
        user = self._user_text(query, documents)
        if layout == "plain":
            return f"{self.rubric.system}\n\n{user}\n\nGrades:\n"
        messages = (
            [{"role": "system", "content": self.rubric.system}, {"role": "user", "content": user}]
            if layout == "system"
            else [{"role": "user", "content": f"{self.rubric.system}\n\n{user}"}]
        )
        fixed_day = datetime.date(2026, 1, 1)
        settings: dict[str, Any] = {
            "enable_thinking": False,
            "thinking": False,
            "date_string": fixed_day.strftime("%d %b %Y"),
            "strftime_now": fixed_day.strftime,
            **self._template_kwargs,
        }
        try:
            text = str(
                self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **settings)
            )
        except ImportError:
            raise
        except Exception as error:  # a template may raise anything: the next layout is tried, then it is reported
            self._template_error = error
            return None
        opened, closed = text.rfind("<think>"), text.rfind("</think>")
        if opened > closed:
            text = text.rstrip() + "\n\n</think>\n\n"
        return f"{text}Grades:\n"

    def _skeleton(self, marks: Sequence[int]) -> list[str]:
        """The answer's lines up to, not including, each placeholder; a line also holds what closes the one before."""
        closing = f"{self._gap[1]}{self.placeholder}\n"
        return [f"{closing if i else ''}{marker(self.markers, m)} Grade:{self._gap[0]}" for i, m in enumerate(marks)]

    def _clean(self, text: str) -> str:
        """Break up the tokenizer's control tokens inside a text, so that no text can end a turn or open one."""
        return text if self._special is None else self._special.sub(lambda m: f"{m[0][0]} {m[0][1:]}", text)

    # -- tokens -------------------------------------------------------------------------------------------

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        # Without offsets, which nobody reads, a fifth less time. What the tokenizer was last called with stays set in
        # its backend: a cut or padding somebody else asked for must not reach these texts.
        backend: Any = getattr(self.tokenizer, "backend_tokenizer", None)
        encode = getattr(backend, "encode_batch_fast", None)
        if encode is not None and backend.truncation is None and backend.padding is None:
            return [found.ids for found in encode(list(texts), add_special_tokens=False)]
        return [list(ids) for ids in self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]]

    def _find_grades(self) -> tuple[tuple[str, str], tuple[int, ...], int]:
        """Find a spelling of "Grade: 0" in which grade and placeholder are one token each, read in context."""
        top = len(self.rubric.grades) - 1
        why = ""
        # (text before the slot, text that belongs to the graded token): the space apart, or part of the token.
        for gap in ((" ", ""), ("", " "), ("", "")):
            stem = f"{self._frame.before}x{self._frame.between}{marker(self.markers, 0)} x\n{self._frame.after}"
            stem += f"{marker(self.markers, 0)} Grade:{gap[0]}"
            before = self._encode(stem)
            encoded = {
                sign: self._encode(f"{stem}{gap[1]}{sign}\n")
                for sign in [*(str(g) for g in range(top + 1)), self.placeholder]
            }
            bad = [s for s, ids in encoded.items() if ids[: len(before)] != before or len(ids) <= len(before) + 1]
            ends = {tuple(ids[len(before) + 1 :]) for ids in encoded.values()}
            tokens = [encoded[str(g)][len(before)] for g in range(top + 1)] if not bad else []
            if not bad and len(ends) == 1 and len(set(tokens)) == len(tokens):
                return gap, tuple(tokens), encoded[self.placeholder][len(before)]
            bad = bad or [s for s, ids in encoded.items() if len(ids) != min(map(len, encoded.values())) or s == "0"]
            count = {s: len(encoded[s]) - len(before) - 1 for s in bad}
            why = why or "; ".join(f"'{s}' is {max(c, 0)} tokens" for s, c in count.items())
        raise ModelMismatch(
            f"this tokenizer does not keep the grades 0 to {top} and the placeholder '{self.placeholder}' as one "
            f"token each after 'Grade:' ({why}); choose a placeholder or a model whose tokenizer keeps them whole"
        )

    def _ending(self, n: int, marks: Sequence[int] | None = None) -> _Ending:
        """The ids after the documents of a window of n, found in context and verified slot by slot.

        `marks`: the markers in the order shown; None: 0 … n-1, whose ending is kept.
        """
        if marks is None and n in self._endings:
            return self._endings[n]
        shown = range(n) if marks is None else marks
        start = f"{self._frame.before}x{self._frame.between}"
        start += "".join(f"{marker(self.markers, m)} x\n" for m in shown)
        placeholder = f"{self._gap[1]}{self.placeholder}"
        lines = self._skeleton(shown)
        text = f"{start}{self._frame.after}{''.join(lines)}{placeholder}"
        ids = self._encode(text)
        # A line's ids are looked for where the line before ended: encoding every prefix whole would take n² tokens.
        tails = [f"{line[len(placeholder) if i else 0 :]}{placeholder}" for i, line in enumerate(lines)]
        done, slots = len(start) + len(self._frame.after), list[int]()
        for tail, found in zip(tails, self._encode_many(tails), strict=True):
            done += len(tail)
            end = slots[-1] + 2 + len(found) if slots else 0
            if not slots or ids[slots[-1] + 2 : end] != found:
                upto = self._encode(text[:done])
                end = len(upto) if ids[: len(upto)] == upto else 0
            if not end or ids[end - 1] != self._placeholder_id:
                raise ModelMismatch(
                    f"in a window of {n} the tokenizer does not keep the placeholder '{self.placeholder}' apart after "
                    f"'…{text[:done][-24 : -len(self.placeholder)]}'; choose other markers or another placeholder"
                )
            slots.append(end - 2)
        opening = self._encode(start)
        cut = len(opening) if ids[: len(opening)] == opening else slots[0]
        whole = np.array(ids, dtype=np.int64)
        ending = _Ending(whole[cut:], np.array(slots, dtype=np.int64) - len(ids), whole[slots[0] :])
        if marks is None:
            self._endings[n] = ending
        return ending

    def _marker(self, position: int) -> list[int]:
        if position not in self._marker_ids:
            self._marker_ids[position] = self._encode(marker(self.markers, position))
        return self._marker_ids[position]

    def _marker_array(self, position: int) -> npt.NDArray[np.int64]:
        if position not in self._marker_arrays:
            self._marker_arrays[position] = np.array(self._marker(position), dtype=np.int64)
        return self._marker_arrays[position]

    def _joins(self) -> bool:
        """Whether head, markers, texts and ending, tokenised apart, equal the whole, on texts chosen to break it."""
        texts = [normalise(text) for text in _AWKWARD]
        pieces = self._document_ids(texts)
        if any(piece is None for piece in pieces):
            return False
        for query in ("", "what is 3.5?", "-"):
            for n in (1, 2, len(texts)):
                chosen = texts[-n:]
                head = self._encode(self._frame.before + query + self._frame.between)
                parts = [*head, *self._body(pieces[-n:]), *self._ending(n).ids]
                if parts != self._encode(self._whole_text(query, chosen)):
                    return False
        return True

    def _document_ids(self, texts: Sequence[str]) -> list[list[int] | None]:
        """Ids of " text\\n" as they stand between two markers; None where a marker's ids do not stay whole there."""
        left, right = self._marker(0), self._marker(1)
        lines = [f"{marker(self.markers, 0)} {text}\n{marker(self.markers, 1)}" for text in texts]
        found: list[list[int] | None] = []
        for ids in self._encode_many(lines):
            whole = ids[: len(left)] == left and ids[len(ids) - len(right) :] == right
            found.append(ids[len(left) : len(ids) - len(right)] if whole else None)
        return found

    def _body(self, pieces: Sequence[list[int] | None]) -> list[int]:
        body: list[int] = []
        for i, piece in enumerate(pieces):
            assert piece is not None
            body += self._marker(i)
            body += piece
        return body

    def _whole_text(self, query: str, texts: Sequence[str], marks: Sequence[int] | None = None) -> str:
        shown = range(len(texts)) if marks is None else marks
        documents = "".join(f"{marker(self.markers, m)} {text}\n" for m, text in zip(shown, texts, strict=True))
        last = f"{self._gap[1]}{self.placeholder}"
        return f"{self._frame.before}{query}{self._frame.between}{documents}{self._frame.after}" + (
            "".join(self._skeleton(shown)) + last if texts else ""
        )

    # -- use ----------------------------------------------------------------------------------------------

    def sheet(self, query: str, texts: Sequence[str], *, width: int, max_tokens: int) -> PromptSheet:
        """Prepare one query's documents for every window they will stand in.

        Texts are normalised, cut to `max_doc_chars` characters, then shortened evenly so that *any* `width` of
        them fit `max_tokens`; where that would leave less than `MIN_DOC_TOKENS` each, the width shrinks instead.
        The plan sees the whole pool, never one window, so what is cut cannot depend on the order of the
        candidates. Raises `InvalidData` where not even one document fits.
        """
        if width < 1:
            raise BadArgument(f"window width must be at least 1, got {width}")
        return PromptSheet(self, query, texts, width=width, max_tokens=max_tokens)

    def describe(self) -> dict[str, Any]:
        """Return what a manifest must record of the prompt."""
        return {
            "template_hash": self.hash,
            "rubric": asdict(self.rubric) | {"grades": list(self.rubric.grades)},
            "markers": self.markers,
            "placeholder": self.placeholder,
            "max_doc_chars": self.max_doc_chars,
            "layout": self.layout,
            "grade_ids": list(self.grade_ids),
        }

    def check_card(self, card: Mapping[str, Any], *, where: str = "the adapter") -> None:
        """Refuse an adapter or score file made with another template, naming what differs."""
        _check_card(self.describe(), card, where=where)

    def _hash(self) -> str:
        frame = asdict(self._frame) | {
            "version": LAYOUT_VERSION,
            "markers": [marker(self.markers, i) for i in range(3)],
            "gap": self._gap,
            "placeholder": self.placeholder,
            "grades": len(self.rubric.grades),
        }
        return hashlib.sha256(json.dumps(frame, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


class ChatPrompt:
    """Renders windows as one message each, for a model that writes its grades as JSON instead of being read at slots.

    `rubric`, `instruction`, `markers` and `max_doc_chars` are those of `GradePrompt`, and so is the order of the text.
    `reasons` asks for a short reason beside every grade. `grade_ids` are the grades themselves.
    """

    layout = "chat"

    def __init__(
        self,
        *,
        rubric: str | Path | Rubric = "passage_relevance",
        instruction: str | None = None,
        markers: str = "numeric",
        max_doc_chars: int | None = None,
        reasons: bool = False,
    ) -> None:
        self.rubric, self.max_doc_chars = _wording(rubric, instruction, markers, max_doc_chars)
        self.markers = markers
        self.reasons = reasons
        self.grade_ids = tuple(range(len(self.rubric.grades)))
        shown = {"text": self._text("query", "documents"), "markers": [marker(markers, i) for i in range(3)]}
        said = json.dumps(shown | {"version": LAYOUT_VERSION}, sort_keys=True)
        self.hash = hashlib.sha256(said.encode()).hexdigest()

    def _text(self, query: str, documents: str) -> str:
        rubric, name = self.rubric, marker(self.markers, 0)[1:-1]
        reason = '"reason": "at most 25 words on what decides the grade", ' if self.reasons else ""
        form = (
            f"Answer with one JSON object alone, with one item for each {rubric.item}:\n"
            f'{{"items": [{{"id": "{name}", {reason}"grade": 0}}]}}\n'
            f'"id" is the marker without its brackets, "grade" a whole number from 0 to {len(rubric.grades) - 1}.'
        )
        return f"{rubric.system}\n\n{_question(rubric, form, query, documents)}"

    def sheet(self, query: str, texts: Sequence[str], *, width: int, max_tokens: int) -> ChatSheet:
        """Prepare one query's documents: normalised, cut to `max_doc_chars`; `max_tokens` is the server's to know."""
        if width < 1:
            raise BadArgument(f"window width must be at least 1, got {width}")
        return ChatSheet(self, query, texts, width=width)

    def describe(self) -> dict[str, Any]:
        """Return what a manifest must record of the prompt."""
        return {
            "template_hash": self.hash,
            "rubric": asdict(self.rubric) | {"grades": list(self.rubric.grades)},
            "markers": self.markers,
            "max_doc_chars": self.max_doc_chars,
            "layout": self.layout,
            "reasons": self.reasons,
        }

    def check_card(self, card: Mapping[str, Any], *, where: str) -> None:
        """Refuse a score file made with another template, naming what differs."""
        _check_card(self.describe(), card, where=where)


class ChatSheet:
    """One query's candidates, ready to be put into messages; `width`, `cut` and `blank` are those of `PromptSheet`."""

    def __init__(self, prompt: ChatPrompt, query: str, texts: Sequence[str], *, width: int) -> None:
        full = [normalise(text) for text in texts]
        kept = [text[: prompt.max_doc_chars or None].rstrip() for text in full]
        self._prompt = prompt
        self._query = _broken(normalise(query))
        self._texts = [_broken(text) for text in kept]
        self.blank: npt.NDArray[np.bool_] = np.array([is_blank(text) for text in full], dtype=bool)
        self.cut: npt.NDArray[np.int32] = np.array(
            [len(a) - len(b) for a, b in zip(full, kept, strict=True)], dtype=np.int32
        )
        shown = int((~self.blank).sum())
        self.width = min(width, shown) if shown else width

    def window(self, positions: Sequence[int] | range | npt.NDArray[np.int64]) -> ChatWindow:
        """Render one window: `positions` (m,) are pool positions in the order shown, none of them blank."""
        if len(positions) == 0:
            raise BadArgument("a window holds at least one candidate")
        marks = [marker(self._prompt.markers, i) for i in range(len(positions))]
        lines = (f"{mark} {self._texts[p]}\n" for mark, p in zip(marks, positions, strict=True))
        text = self._prompt._text(self._query, "".join(lines))
        return ChatWindow(
            token_ids=np.frombuffer(text.encode("utf-32-le"), dtype="<u4").astype(np.int64),
            slots=np.arange(len(marks), dtype=np.int64),
            text=text,
            ids=tuple(mark[1:-1] for mark in marks),
            reasons=self._prompt.reasons,
        )

    def empty(self, n: int) -> ChatWindow:
        """There is no window of empty documents: written grades have no probabilities to correct."""
        raise BadArgument("calibration by empty documents needs grade probabilities; written grades have none")


Prompt = GradePrompt | ChatPrompt
"""What renders windows for an engine."""


def _wording(
    rubric: str | Path | Rubric, instruction: str | None, markers: str, max_doc_chars: int | None
) -> tuple[Rubric, int]:
    """The rubric in the words asked for, and the cap on a document's text; bad ones are refused."""
    chosen = load_rubric(rubric)
    if instruction is not None:
        if not isinstance(instruction, str) or not instruction.strip():
            raise BadArgument(f"instruction must be a text, got {instruction!r}")
        chosen = replace(chosen, instruction=normalise(instruction))
    marker(markers, 0)
    if max_doc_chars is not None and (not whole(max_doc_chars) or max_doc_chars < 0):
        raise BadArgument(f"max_doc_chars must be a whole number, 0 (no cap) or more, got {max_doc_chars!r}")
    return chosen, chosen.max_doc_chars if max_doc_chars is None else int(max_doc_chars)


def _question(rubric: Rubric, form: str, query: str, documents: str) -> str:
    """What every prompt asks, in this order: instruction, scale, answer form, query, documents."""
    items, top = f"{rubric.item}s", len(rubric.grades) - 1
    scale = "\n".join(f"{g}: {rubric.grades[g]}" for g in range(top, -1, -1))
    return (
        f"{rubric.instruction}\n\nThe grades:\n{scale}\n\n{form}\n\n"
        f"{rubric.query_label}: {query}\n\n{items.capitalize()}:\n{documents}[end of {items}]"
    )


def _check_card(mine: Mapping[str, Any], card: Mapping[str, Any], *, where: str) -> None:
    theirs, ours = card.get("template_hash"), mine["template_hash"]
    if theirs is None or theirs == ours:
        return
    named = ("rubric", "markers", "placeholder", "layout", "reasons")
    differing = [k for k in named if k in card and card[k] != mine.get(k)]
    raise ModelMismatch(
        f"{where} was made with prompt template {str(theirs)[:12]}, this prompt is {ours[:12]}"
        + (f" (they differ in {', '.join(differing)})" if differing else "")
        + "; use the settings it was made with (an adapter's folder is taken as rubric), or pass check_template=False "
        "to override"
    )


_CONTROL = re.compile(r"<\|[^|<>]{1,40}\|>|</?(?:think|s|bos|eos|start_of_turn|end_of_turn)>|\[/?INST\]")
"""Control tokens of the usual chat models, for servers whose tokenizer is not known."""


def _broken(text: str) -> str:
    """Break up control tokens inside a text, so that no text can end a turn or open one."""
    return _CONTROL.sub(lambda m: f"{m[0][0]} {m[0][1:]}", text)


class PromptSheet:
    """One query's candidates, tokenised once: rendering a window is putting ids together.

    `width` is the widest window that fits, at most the one asked for; `cut` (n,) int32 counts the characters
    taken off each normalised text; `blank` (n,) bool marks texts that show nothing and are never rendered.
    """

    def __init__(self, prompt: GradePrompt, query: str, texts: Sequence[str], *, width: int, max_tokens: int) -> None:
        self._prompt = prompt
        self._query = prompt._clean(normalise(query))
        self._max_tokens = max_tokens
        full = [normalise(text) for text in texts]
        self.blank: npt.NDArray[np.bool_] = np.array([is_blank(text) for text in full], dtype=bool)
        cap = prompt.max_doc_chars or None
        kept = [text[:cap].rstrip() for text in full]
        self._texts = [prompt._clean(text) for text in kept]
        self._pieces = prompt._document_ids(self._texts)
        head_text = prompt._frame.before + self._query + prompt._frame.between
        self._head = prompt._encode(head_text)
        first = prompt._marker(0)
        self._head_joins = prompt.joined and prompt._encode(head_text + marker(prompt.markers, 0)) == [
            *self._head,
            *first,
        ]
        self.width = self._plan(width, max_tokens)
        self.cut: npt.NDArray[np.int32] = np.array(
            [max(len(a) - len(b), 0) for a, b in zip(map(prompt._clean, full), self._texts, strict=True)],
            dtype=np.int32,
        )
        self._arrays = [None if ids is None else np.array(ids, dtype=np.int64) for ids in self._pieces]
        self._head_array = np.array([*prompt._bos, *self._head], dtype=np.int64)

    def _plan(self, width: int, max_tokens: int) -> int:
        """Shorten texts in place where needed; return the width that fits."""
        shown = [i for i in range(len(self._texts)) if not self.blank[i]]
        if not shown:
            return width
        lengths = {i: self._length(i) for i in shown}
        longest = sorted(lengths.values(), reverse=True)
        width = min(width, len(shown))

        def cap_at(w: int) -> int | None:
            """Tokens a document may keep in windows of w; None where that is too little."""
            room = max_tokens - self._overhead(w)
            if sum(longest[:w]) <= room:
                return longest[0]
            cap = _even_cap(longest[:w], room)
            return cap if cap >= (MIN_DOC_TOKENS if w > 1 else 1) else None

        cap = cap_at(width)
        if cap is None:  # room grows as the window narrows: the widest that leaves enough is found by halving
            widest = width
            width -= bisect_left(range(widest), True, key=lambda less: cap_at(widest - less) is not None)
            cap = cap_at(width) if width else None
        if cap is None:
            raise InvalidData(
                f"query '{self._query[:60]}…' leaves no room for a document: the prompt around one document takes "
                f"{self._overhead(1)} tokens of {max_tokens}; shorten the query or raise max_length"
            )
        for i in shown:
            if lengths[i] > cap:
                self._shorten(i, cap)
        return width

    def _overhead(self, width: int) -> int:
        prompt = self._prompt
        markers = sum(len(prompt._marker(i)) for i in range(width))
        # Where parts do not join, whole and parts may differ by a token at each joint.
        slack = 0 if self._head_joins else 2 * width + 4
        return len(prompt._bos) + len(self._head) + markers + len(prompt._ending(width).ids) + slack

    def _length(self, i: int) -> int:
        piece = self._pieces[i]
        return len(piece) if piece is not None else len(self._prompt._encode(f" {self._texts[i]}\n")) + 2

    def _shorten(self, i: int, cap: int) -> None:
        """Cut text i to at most `cap` tokens, from its end."""
        while (length := self._length(i)) > cap:
            text = self._texts[i]
            if not text:
                raise InvalidData(f"a document cannot be shortened to {cap} tokens; raise max_length")
            self._texts[i] = text[: min(len(text) - 1, len(text) * cap // length)].rstrip()
            self._pieces[i] = self._prompt._document_ids([self._texts[i]])[0]

    def empty(self, n: int) -> WindowPrompt:
        """Render a window of n empty documents under the same query, which is what CapCal measures slots with."""
        return PromptSheet(self._prompt, self._query, [""] * n, width=n, max_tokens=self._max_tokens).window(range(n))

    def window(
        self, positions: Sequence[int] | range | npt.NDArray[np.int64], *, marks: Sequence[int] | None = None
    ) -> WindowPrompt:
        """Render one window: `positions` (m,) are pool positions in the order shown, none of them blank.

        `marks` (m,), for training on them, gives each the marker of another place: 0 … m-1 in some order.
        """
        prompt, n = self._prompt, len(positions)
        if n == 0:
            raise BadArgument("a window holds at least one candidate")
        if marks is not None and sorted(marks) != list(range(n)):
            raise BadArgument(f"marks of a window of {n} are 0 to {n - 1} in some order, got {list(marks)}")
        ending = prompt._ending(n, marks)
        pieces = [self._arrays[p] for p in positions]
        if self._head_joins and all(piece is not None for piece in pieces):
            parts: list[Any] = [self._head_array]
            for i, piece in zip(range(n) if marks is None else marks, pieces, strict=True):
                parts += (prompt._marker_array(i), piece)
            ids = np.concatenate([*parts, ending.ids], dtype=np.int64)
            shared = len(self._head_array)
        else:
            whole = prompt._encode(prompt._whole_text(self._query, [self._texts[p] for p in positions], marks))
            ids = np.array([*prompt._bos, *whole], dtype=np.int64)
            head = self._head_array
            same = np.cumprod(ids[: len(head)] == head[: len(ids)])
            # The last token of the head may have merged with what follows it; the engine verifies the rest.
            shared = int(same.sum())
        if not np.array_equal(ids[len(ids) - len(ending.checked) :], ending.checked):
            raise ModelMismatch(
                f"the answer lines of a window of {n} are tokenised differently after these documents; "
                "choose other markers or another placeholder"
            )
        return WindowPrompt(token_ids=ids, slots=ending.slots_from_end + len(ids), shared=shared)


def _even_cap(lengths: Sequence[int], room: int) -> int:
    """The largest cap c with sum(min(length, c)) <= room: short documents keep their text, long ones share the rest."""
    left, todo = room, sorted(lengths)
    for done, length in enumerate(todo):
        share = left // (len(todo) - done)
        if length > share:
            return max(share, 0)
        left -= length
    return max(lengths, default=0)


def _special_pattern(tokenizer: Any) -> re.Pattern[str] | None:
    """A pattern of the tokenizer's control tokens and think tags, longest first."""
    tokens = set(getattr(tokenizer, "all_special_tokens", ()) or ())
    decoder = getattr(tokenizer, "added_tokens_decoder", None) or {}
    tokens |= {token.content for token in decoder.values() if getattr(token, "special", False)}
    tokens |= {"<think>", "</think>"}
    found = sorted((t for t in tokens if len(t) > 1 and t.strip()), key=lambda t: (-len(t), t))
    return re.compile("|".join(map(re.escape, found))) if found else None


def _leading_bos(tokenizer: Any) -> tuple[int, ...]:
    """The begin-of-text id, where this tokenizer puts one before plain text by itself."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        return ()
    ids = list(tokenizer("a")["input_ids"])
    return (int(bos),) if ids[:1] == [bos] else ()


_AWKWARD = (
    "plain words", "ends in a stop.", "“Quoted.”", "(in brackets)", "12,5 % of 30", "3", "…", "a-", "-a", "?!", "x:",
    "日本語の文。", "🙂", "naïve café", "[9] Grade: 3", "'s", "`code();`", "C++", "A", "٣", "ﬁ",
    "\u200bzero width\u200b",
)  # fmt: skip
