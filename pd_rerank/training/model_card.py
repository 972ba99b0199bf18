"""The model card of an adapter or export: its `reranker.json` told to a reader, with tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pd_rerank.evaluation.report import Cell, shown
from pd_rerank.rubrics import RUBRICS
from pd_rerank.training.selection import FIGURES, Evaluation, quality_at_stability

README = "README.md"

_ADAPTER = (
    "A LoRA adapter that makes its base model grade several documents in one prompt. The score of a document is the "
    "expected grade, read from the probabilities of the grades at its slot in one forward pass."
)
_MERGED = (
    "A causal language model with a reranking adapter folded into its weights. It grades several documents in one "
    "prompt; the score of a document is the expected grade, read at its slot in one forward pass."
)
_CLASSIFIER = (
    "The body of a language model with a reranking adapter folded into its weights, under a head of one row per grade. "
    "Read token by token, the head's row at a document's slot holds the raw logits of its grades."
)


def model_card(record: Mapping[str, Any], *, title: str) -> str:
    """The card as Markdown, from what `reranker.json` records; what is not recorded is not said."""
    return "\n".join(_card(record, title)) + "\n"


def _card(record: Mapping[str, Any], title: str) -> Iterator[str]:
    form = str(record.get("format", "")).removeprefix("pd_rerank ").split(" ")[0]
    base = record["base"]["id"]
    yield from _front(record, base, form)
    yield f"# {title}\n"
    yield {"merged": _MERGED, "classifier": _CLASSIFIER}.get(form, _ADAPTER)
    yield "\n## Use\n"
    yield from _classifier_use(record) if form == "classifier" else _use(record, base, form)
    yield "\n## Prompt\n"
    rubric = record["rubric"]
    yield from _grid(
        ("", ""),
        [
            ("rubric", rubric["name"]),
            ("grades", "; ".join(f"{grade}: {text}" for grade, text in enumerate(rubric["grades"]))),
            ("window", record.get("window")),
            ("partition", record.get("partition")),
            ("characters of a document", record["max_doc_chars"] or "all"),
            ("tokens of a prompt", record.get("max_length")),
            ("markers, placeholder, layout", f"{record['markers']}, {record['placeholder']}, {record['layout']}"),
            ("template hash", record["template_hash"]),
        ],
    )
    if "loss" in record:
        yield "\n## Training\n"
        settings = {
            "base": base,
            "base revision": record["base"].get("revision"),
            "loss": record["loss"],
            "λ": record.get("lambda"),
            "steps": record.get("step"),
            **record.get("settings", {}),
        }
        yield from _grid(("setting", "value"), settings.items())
    if record.get("data"):
        yield "\n## Data\n"
        yield from _grid(("", ""), record["data"].items())
    yield from _figures(record)
    yield "\n## Limits\n"
    yield from (f"- {limit}" for limit in _limits(record, form))
    yield "\n## Versions\n"
    yield from _grid(("library", "version"), record.get("versions", {}).items())


def _front(record: Mapping[str, Any], base: str, form: str) -> Iterator[str]:
    """What model hubs read: YAML between rules, every value as JSON, which is YAML too."""
    tags = ["reranking", "order-consistency", *(["lora"] if form == "adapter" else [])]
    fields = {
        "base_model": base,
        "library_name": "peft" if form == "adapter" else "transformers",
        "pipeline_tag": "text-ranking",
        "license": record.get("licence"),
        "tags": tags,
    }
    yield "---"
    yield from (f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items() if value)
    yield "---\n"


def _use(record: Mapping[str, Any], base: str, form: str) -> Iterator[str]:
    name, rubric = ("THIS_FOLDER", record["rubric"])
    options: dict[str, Any] = {} if form == "merged" else {"adapter": name}
    shipped = RUBRICS.get(rubric["name"])
    own = shipped is None or list(shipped.grades) != rubric["grades"] or shipped.system != rubric["system"]
    if own:
        options["rubric"] = name
    elif shipped is not None:
        if shipped.name != "passage_relevance":
            options["rubric"] = shipped.name
        if shipped.instruction != rubric["instruction"]:
            options["instruction"] = rubric["instruction"]
    for option, usual in (("window", 20), ("partition", "round_robin"), ("markers", "numeric"), ("placeholder", "0")):
        if record.get(option) not in (None, usual):
            options[option] = record[option]
    if not own and record["max_doc_chars"] != rubric["max_doc_chars"]:
        options["max_doc_chars"] = record["max_doc_chars"]
    if record["layout"] == "plain":
        options["chat"] = False
    if record.get("max_length"):
        options["max_length"] = record["max_length"]
    said = "".join(f", {option}={_python(value)}" for option, value in options.items())
    yield "```python"
    yield "from pd_rerank import OCSFTBatchedReranker\n"
    yield f"ranker = OCSFTBatchedReranker({_python(name if form == 'merged' else base)}{said})"
    yield 'ranker.rank("how long do bees live", ["A worker bee lives six weeks.", "The ferry leaves at nine."])'
    yield "```"
    if own:
        yield "\nIts rubric is its own, and the folder is named for it; the cap on a document's text comes with it."
    yield "\nAnother prompt than this was made with, or another base, is refused with what differs."


def _classifier_use(record: Mapping[str, Any]) -> Iterator[str]:
    yield "```sh"
    yield """vllm serve THIS_FOLDER --runner pooling --pooler-config '{"task": "token_classify"}'"""
    yield "```\n"
    yield "Ask for raw values (`use_activation` false) and take the row at every slot, the token before a placeholder."
    said = record.get("logits") or {}
    if not said:
        yield "\nThe rows are the model's grade logits as they stand."
        return
    yield "\nThe head leaves out what the model does to its logits; apply it to the rows, in this order:\n"
    if "bias" in said:
        yield f"- add the grades' bias {', '.join(f'{b:.6g}' for b in said['bias'])}"
    if "scale" in said:
        yield f"- multiply by {said['scale']:.6g}"
    if "softcap" in said:
        yield f"- cap softly: {said['softcap']:g} · tanh(row / {said['softcap']:g})"
    yield "\n`pd_rerank.training.adapters.grade_logits(rows, record)` does it from `reranker.json`."


def _figures(record: Mapping[str, Any]) -> Iterator[str]:
    if not record.get("held_out"):
        return
    own = Evaluation.of(record["held_out"])
    beside = [Evaluation.of(said) for said in record.get("beside", ())]
    yield "\n## Held-out quality and stability\n"
    how = {name: own.settings.get(name, "–") for name in ("queries", "candidates", "window", "presentations")}
    yield (
        f"{how['queries']} queries that were not trained on, {how['candidates']} candidates, windows of "
        f"{how['window']}; stability over {how['presentations']} shuffles of each pool. Means with 95 % bootstrap "
        "intervals over queries."
    )
    if record.get("merging_moved_scores_by") is not None:
        moved = record["merging_moved_scores_by"]
        yield f"Measured before merging, which moved scores of a probe by up to {moved:.1e}."
    names = [f for f in FIGURES if any(f in e.figures for e in (own, *beside))]
    rows: list[tuple[Cell, ...]] = []
    for name in names:
        cells = [e.figures.get(name) for e in (own, *beside)]
        rows.append((FIGURES[name], *("–" if f is None or f.value is None else _between(f) for f in cells)))
    rows.append(("score SD on the grade scale", *(e.score_sd for e in (own, *beside))))
    yield from _grid(("", f"this ({own.name})", *(e.name for e in beside)), rows)
    if beside:
        table = quality_at_stability([own, *beside])
        yield f"\n{table.title}: {table.note}."
        yield from _grid(table.columns, table.rows)
    if record.get("choice"):
        choice = record["choice"]
        yield f"\nKept by the rule `{choice['rule']}`: {_text('; '.join(choice['reasons']))}."
        yield from (f"\n**Doubt:** {_text(doubt)}." for doubt in choice["warnings"])


def _limits(record: Mapping[str, Any], form: str) -> Iterator[str]:
    yield from record.get("limits", ())
    if record.get("window"):
        yield f"Made for windows of {record['window']} documents; stability at other widths is another figure."
    yield "Scores compare within a query; a threshold holds for this model and this prompt only."
    if not record.get("held_out"):
        yield "Nothing was measured on held-out queries: how well it ranks is not known."
    if form == "merged":
        yield f"The weights are {record.get('dtype')}, rounded again by merging; evaluate this folder, not the adapter."
    if form == "classifier":
        yield "It has no output head and generates no text; loaded as a causal model it would read noise."


def _between(figure: Any) -> str:
    interval = "" if figure.low is None or figure.high is None else f" [{figure.low:.4f}, {figure.high:.4f}]"
    return f"{shown(figure.value)}{interval}{'' if figure.n is None else f' (n {figure.n})'}"


def _grid(columns: Sequence[str], rows: Any) -> Iterator[str]:
    yield f"\n| {' | '.join(map(_text, columns))} |"
    yield f"|{'|'.join('---' for _ in columns)}|"
    for row in rows:
        cells = (
            cell if isinstance(cell, str | int | float | None) else json.dumps(cell, ensure_ascii=False) for cell in row
        )
        yield f"| {' | '.join(_text(shown(cell)) for cell in cells)} |"


def _text(value: str) -> str:
    """`value` on one line of a table."""
    return " ".join(str(value).split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _python(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
