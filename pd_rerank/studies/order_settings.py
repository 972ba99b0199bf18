"""What the order study can be told: tasks, scorers and what is derived from them, consumers, controls."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from pd_rerank.config import Settings
from pd_rerank.engines.http import checked_url
from pd_rerank.studies.folder import check_names

Kind = Literal["passages", "qa", "responses", "claims"]

RUBRIC = {
    "passages": "passage_relevance",
    "qa": "answer_support",
    "responses": "response_quality",
    "claims": "answer_support",
}
"""What is graded where the task does not say."""

CONSUMERS = {"passages": ("threshold",), "qa": ("threshold", "reader"), "responses": ("pair",), "claims": ("reader",)}
"""Who uses the ranking where the task does not say: the study's own."""

OWNED = ("presentations", "seed", "settle", "threshold", "readout", "verbose", "shuffle", "slot_residual")
"""Options of the reranker that the study sets itself."""

CONTROLS: dict[str, tuple[Any, ...]] = {
    "partition": ("contiguous", "round_robin", "hashed"),
    "reverse": (),
    "placeholder": ("0", "1", "2", "3"),
    "markers": ("numeric", "alpha", "doc_n"),
    "width": (1, 2, 5, 10, 20, 50),
    "batching": (1, 8),
    "pool": ("replace", "drop"),
    "first_stage": (),
    "readout": ("expected", "p_relevant", "argmax"),
    "k_sweep": (),
    "sources": (),
    "adaptive": (0.01, 0.05, 0.2),
}
"""Every control, with the values it goes through where the config names none."""

STORED = ("readout", "k_sweep", "sources", "adaptive")
"""Controls that are made of what the scorers have said already."""


class ReaderSettings(Settings):
    """Who reads the best passages.

    `extractive` needs no model: it says the words of the best passages that a plain rule picks. `transformers` asks a
    chat model in this process, greedily, and takes the likeliest label for a verdict; `server` asks a chat endpoint of
    `model` at `server`, with `request` as further fields. `top` passages are shown, each cut at `max_doc_chars`.
    """

    type: Literal["extractive", "transformers", "server"]
    model: str = ""
    server: str | None = None
    request: dict[str, JsonValue] = Field({})
    dtype: str = "auto"
    top: int = Field(5, ge=1)
    max_tokens: int = Field(64, ge=1)
    max_doc_chars: int = Field(1200, ge=1)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.type != "extractive" and not self.model:
            raise ValueError(f"a reader of type {self.type} needs a 'model'")
        if (self.server is not None) != (self.type == "server"):
            raise ValueError("a reader of type server has an address under 'server', and no other has")
        if self.server is not None:
            checked_url(self.server)
        return self


class TaskSettings(Settings):
    """A list of queries with candidates and what is known of these.

    `passages`: `pools`, or `run` with `topics` and `corpus`, and `qrels`; `others` are runs of other first stages.
    `qa`, `responses` and `claims`: one JSONL `file`. Or so many queries of this project's own `templates`.
    `candidates` stand in a pool, `window` of them in one prompt. `queries` are drawn by the study's seed.
    """

    type: Kind
    file: Path | None = None
    pools: Path | None = None
    run: Path | None = None
    topics: Path | None = None
    corpus: Path | None = None
    qrels: Path | None = None
    others: dict[str, Path] = Field({})
    templates: int | None = Field(None, ge=4, le=96)
    queries: int | None = Field(None, ge=4)
    candidates: int = Field(ge=2)
    window: int = Field(ge=1)
    k: int = Field(10, ge=1)
    min_grade: int = Field(1, ge=1)
    rubric: str | None = None
    max_doc_chars: int | None = Field(None, ge=1)
    scale: tuple[float, float] = (1.0, 5.0)
    levels: int = Field(12, ge=1)
    consumers: list[Literal["threshold", "reader", "pair"]] | None = None
    reader: ReaderSettings | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.templates is not None and self.candidates > 96:
            raise ValueError("the templates have words for 96 candidates at most")
        if self.templates is None:
            if self.type != "passages" and self.file is None:
                raise ValueError(f"a task of type {self.type} is one 'file', or so many queries of 'templates'")
            run = self.run is not None and self.topics is not None and self.corpus is not None
            if self.type == "passages" and ((self.pools is None) == (not run) or self.qrels is None):
                raise ValueError("passages are 'pools', or a 'run' with 'topics' and 'corpus'; and 'qrels'")
        if self.others and self.pools is not None:
            raise ValueError("other first stages are runs beside a 'run', not beside 'pools'")
        if not self.scale[0] < self.scale[1]:
            raise ValueError("a scale is its lowest and its highest score")
        if (self.reader is not None or "reader" in self.uses) and self.type not in ("qa", "claims"):
            raise ValueError(f"a reader answers questions and judges claims; a task of type {self.type} has neither")
        return self

    @property
    def uses(self) -> tuple[str, ...]:
        """Who uses the ranking."""
        return CONSUMERS[self.type] if self.consumers is None else tuple(self.consumers)

    @property
    def asked(self) -> str:
        """The rubric's name or file."""
        return self.rubric or RUBRIC[self.type]


class ScorerSettings(Settings):
    """One scorer, or what is derived from one.

    `ocsft`: this package's reranker of `model` with `options`, and `by_task` others over them (an adapter for each kind
    of task). `fake`: the engine without a model, `options` being its
    biases. `scores`: any peer, by task the TREC runs of its presentations, or its scores folder, in `runs`, and in
    `first` the run of the first-stage order. Derived, with `of` another scorer: `bsc` presentations averaged, from
    `ensembles` disjoint groups of its presentations; `adaptive` the most presentations of an ensemble, which ends once
    its decision is settled to `tolerance`.

    `presentations` differ from the study's where that suffices: two for what does not depend on order. `tasks` limit it
    to some; `skip` says why it is not run.
    """

    type: Literal["ocsft", "fake", "scores", "derived"] = "derived"
    model: str = ""
    options: dict[str, JsonValue] = Field({})
    by_task: dict[str, dict[str, JsonValue]] = Field({})
    runs: dict[str, list[Path]] = Field({})
    first: dict[str, Path] = Field({})
    of: str | None = None
    bsc: int | None = Field(None, ge=2)
    adaptive: int | None = Field(None, ge=3)
    ensembles: int | None = Field(None, ge=2)
    tolerance: float = Field(0.05, ge=0)
    presentations: int | None = Field(None, ge=2)
    tasks: list[str] | None = None
    skip: str | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.type == "derived":
            if self.of is None or (self.bsc is None) == (self.adaptive is None):
                raise ValueError("give a 'type', or derive it: 'of' another scorer with 'bsc' or 'adaptive'")
            if self.model or self.options or self.by_task or self.runs or self.first or self.presentations:
                raise ValueError("a derived scorer has nothing of its own: no model, options, runs or presentations")
        elif self.of is not None or self.bsc is not None or self.adaptive is not None or self.ensembles is not None:
            raise ValueError(f"'of', 'bsc', 'adaptive', 'ensembles' derive a scorer; this one is of type {self.type}")
        if self.type == "ocsft" and not self.model:
            raise ValueError("a scorer of type ocsft needs a 'model'")
        if (self.type == "scores") != bool(self.runs):
            raise ValueError("a scorer of type scores has 'runs' by task, and no other has")
        if self.type == "scores" and (self.model or self.options or self.by_task):
            raise ValueError("scores at hand take no model and no options; leave them out")
        for task, paths in self.runs.items():
            if not paths or len(set(paths)) < len(paths):
                raise ValueError(f"runs of task '{task}' are one or more files, each of another presentation")
        for options in (self.options, *self.by_task.values()):
            if owned := [name for name in OWNED if name in options]:
                raise ValueError(f"option '{owned[0]}' is the study's to set")
        return self

    def on(self, task: str) -> ScorerSettings:
        """The scorer with the options it has on a task."""
        return self.model_copy(update={"options": {**self.options, **self.by_task.get(task, {})}, "by_task": {}})

    @property
    def size(self) -> int:
        """Presentations of one ensemble."""
        return self.bsc or self.adaptive or 1


class ControlSettings(Settings):
    """One control: of which scorers (the first by default), on which tasks, over how many queries, with what values."""

    scorers: list[str] | None = None
    tasks: list[str] | None = None
    queries: int | None = Field(None, ge=2)
    presentations: int | None = Field(None, ge=2)
    values: list[JsonValue] | None = None


class OrderSettings(Settings):
    """The whole study."""

    output: Path
    title: str = "Decisions under the order of candidates"
    note: str = ""
    seed: int = 0
    presentations: int = Field(10, ge=2)
    resamples: int = Field(20_000, ge=100)
    shard_size: int = Field(4, ge=1)
    tasks: dict[str, TaskSettings]
    scorers: dict[str, ScorerSettings]
    reader: ReaderSettings | None = None
    main: str | None = None
    matched: str | None = None
    controls: dict[str, ControlSettings] = Field({})

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for what, names in (("task", self.tasks), ("scorer", self.scorers)):
            if not names:
                raise ValueError(f"the study names no {what}")
            check_names(what, names)
        for name, scorer in self.scorers.items():
            self._known(scorer.tasks or (), self.tasks, f"scorer '{name}' is for task")
            self._known((*scorer.runs, *scorer.first), self.tasks, f"scorer '{name}' has runs for task")
            self._known(scorer.by_task, self.tasks, f"scorer '{name}' has options for task")
            if scorer.type == "derived":
                self._derives(name, scorer)
        for what, named in (("main", self.main), ("matched", self.matched)):
            if named is not None:
                self._known((named,), self.scorers, f"{what} is scorer")
        for name, control in self.controls.items():
            if name not in CONTROLS:
                raise ValueError(f"unknown control '{name}'; there are {', '.join(CONTROLS)}")
            self._known(control.scorers or (), self.scorers, f"control '{name}' is of scorer")
            self._known(control.tasks or (), self.tasks, f"control '{name}' is of task")
            known = CONTROLS[name] if name in ("partition", "pool", "readout") else ()
            if wrong := [value for value in control.values or () if known and value not in known]:
                raise ValueError(f"control '{name}' knows {', '.join(map(str, known))}, not {wrong[0]!r}")
            if control.values is not None and not (control.values and CONTROLS[name]):
                raise ValueError(f"control '{name}' takes {'some' if CONTROLS[name] else 'no'} values")
            kinds = {"width": (int,), "batching": (int, dict), "adaptive": (int, float)}.get(name)
            for value in (control.values or ()) if kinds else ():
                if type(value) not in (kinds or ()) or (isinstance(value, int | float) and value <= 0):
                    raise ValueError(f"control '{name}' takes numbers above 0, got {value!r}")
        return self

    def _derives(self, name: str, scorer: ScorerSettings) -> None:
        source = self.scorers.get(scorer.of or "")
        if source is None:
            raise ValueError(f"scorer '{name}' is derived of '{scorer.of}', which is not among the scorers")
        if source.type == "derived":
            raise ValueError(f"scorer '{name}' is derived of '{scorer.of}', which is itself derived; name its source")
        there = source.presentations or self.presentations
        if scorer.ensembles is None and there < 2 * scorer.size and scorer.skip is None:
            raise ValueError(
                f"scorer '{name}': {there} presentations of '{scorer.of}' hold {there // scorer.size} ensemble(s) of "
                f"{scorer.size}, and it takes two to see what changes; give 'ensembles', and so many are scored"
            )

    @staticmethod
    def _known(names: Any, known: Any, told: str) -> None:
        for name in names:
            if name not in known:
                raise ValueError(f"{told} '{name}', which is not listed")

    def count(self, name: str) -> int:
        """Presentations that a scorer's own figures are of."""
        scorer = self.scorers[name]
        if scorer.type != "derived":
            return scorer.presentations or self.presentations
        source = self.scorers[scorer.of or ""]
        return scorer.ensembles or (source.presentations or self.presentations) // scorer.size

    def needed(self, name: str) -> int:
        """Presentations a scorer is asked for: its own, or more where others are derived of it."""
        derived = [s.size * self.count(n) for n, s in self.scorers.items() if s.of == name and s.skip is None]
        return max([self.count(name), *derived])
