"""Settings from a YAML file and the command line, as frozen models that refuse what they do not know."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from pd_rerank.errors import BadArgument, MissingResource, near_names


class Settings(BaseModel):
    """Base of every settings model: frozen, unknown keys refused, defaults checked like given values.

    A field's description is its help text; `panel` in its `json_schema_extra` groups it there.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )


S = TypeVar("S", bound=Settings)


def load(model: type[S], *, file: str | Path | None = None, given: Mapping[str, Any] | None = None) -> S:
    """Make a `model` from a YAML file and what was given by hand; what was given by hand wins, None is not given.

    Keys are the options' names, with hyphens or underscores. Paths are relative to the working folder, as on the
    command line. A missing file is `MissingResource`; an unknown key (near names are offered) or a value out of
    range is `BadArgument`.
    """
    values = {} if file is None else read(model, Path(file))
    values |= {name: value for name, value in (given or {}).items() if value is not None}
    try:
        return model(**values)
    except ValidationError as error:
        raise BadArgument("; ".join(_sentence(e) for e in error.errors())) from error


def read(model: type[Settings], path: Path) -> dict[str, Any]:
    """The values a YAML file gives for fields of `model`, unchecked; an unknown key is refused."""
    values: dict[str, Any] = {}
    for key, value in read_mapping(path).items():
        name = key.replace("-", "_")
        if name not in model.model_fields:
            raise BadArgument(f"{path}: unknown key '{key}'; {near_names(name, model.model_fields)}")
        if isinstance(value, bool) and bool not in (kind := model.model_fields[name].annotation, *get_args(kind)):
            raise BadArgument(f"{path}: '{key}' is {str(value).lower()}, which means yes or no; give its value")
        values[name] = value
    return values


def read_mapping(path: Path) -> dict[str, Any]:
    """A YAML file's keys and values; a key that is there twice, however its hyphens are spelled, is refused."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8-sig")
        data, root = yaml.safe_load(text), yaml.compose(text)
    except FileNotFoundError as error:
        raise MissingResource(f"no config file {path}") from error
    except IsADirectoryError as error:
        raise BadArgument(f"{path} is a folder; name a config file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadArgument(f"{path} is not YAML: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise BadArgument(f"{path}: a config file is a list of 'key: value' lines, this is a {type(data).__name__}")
    names = [str(key.value).replace("-", "_") for key, _ in (root.value if root else ())]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise BadArgument(f"{path}: '{twice[0]}' is there twice; keep one")
    return {str(key): value for key, value in data.items()}


def _sentence(error: Any) -> str:
    """One of pydantic's errors in words: the option, what it should be, what it is."""
    message = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:
        return str(message)
    name = ".".join(map(str, error["loc"])).replace("_", "-")
    if error["type"] == "extra_forbidden":
        return f"unknown setting '{name}'"
    if isinstance(error["input"], dict):  # what is wrong is in the sentence; the whole mapping would bury it
        return f"{name}: {message}"
    option = "--" if len(error["loc"]) == 1 else ""
    return f"{option}{name}: {message[:1].lower()}{message[1:]}, got {error['input']!r}"


def _spelling(value: Any) -> Any:
    """round-robin and round_robin are one word."""
    return value.replace("-", "_") if isinstance(value, str) else value


def _as_typed(value: Any) -> Any:
    """A file's number as it would be typed."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _listed(value: Any) -> Any:
    """One stands for a list of one."""
    return [value] if isinstance(value, str) else value


def _as_json(value: Any) -> Any:
    """A mapping, from a file or typed as JSON, as sorted JSON."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
        if found is None or isinstance(found, dict):
            return None if found is None else json.dumps(found, sort_keys=True, allow_nan=False)
    except (ValueError, TypeError):
        pass
    raise ValueError('should be a JSON object such as {"reasoning_effort": "low"}')


def _option(default: Any, help: str, panel: str, **limits: Any) -> Any:
    return Field(default, description=help, json_schema_extra={"panel": panel}, **limits)


_IN, _MODEL, _PROMPT = "What is scored", "Model", "What is asked"
_WRITTEN = "Written grades (--engine generated)"
_SHOW, _READ, _OUT = "How candidates are shown", "What is read and decided", "What is written"


class InputSettings(Settings):
    """The pools to score, or the run, corpus and topics they are made from."""

    run: Path | None = _option(None, "TREC run: query id, Q0, document id, rank, score, tag.", _IN)
    corpus: Path | None = _option(None, "Texts of the run's documents: .jsonl, or .tsv (id, tab, text).", _IN)
    topics: Path | None = _option(None, "Queries of the run: .tsv (id, tab, text) or .jsonl.", _IN)
    pools: Path | None = _option(
        None, "Pool folder or JSONL in rank_llm's shape, instead of run, corpus and topics.", _IN
    )
    hits: int | None = _option(None, "Best hits of the run taken per query. Default: 100.", _IN, ge=1)
    missing: Literal["error", "skip"] = _option(
        "error", "Hits without a text in the corpus: stop, or leave them out.", _IN
    )
    max_queries: int | None = _option(None, "Only the first queries.", _IN, ge=1)

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        parts = {"--run": self.run, "--corpus": self.corpus, "--topics": self.topics}
        given = [name for name, value in parts.items() if value is not None]
        if self.pools is not None and given:
            raise ValueError(f"--pools holds texts and queries already; leave out {', '.join(given)}")
        if self.pools is not None and self.hits is not None:
            raise ValueError("--hits is for a run; pools are taken as they are")
        if self.pools is None and len(given) < 3:
            lacking = ", ".join(name for name in parts if name not in given)
            raise ValueError(f"nothing to score: give --pools, or --run, --corpus and --topics ({lacking} missing)")
        return self


class ModelSettings(Settings):
    """Which model is asked, in which words, and how many candidates it is shown at once."""

    model: str = _option("smollm2-135m", "Short name, folder or hub id of a causal LM.", _MODEL)
    adapter: str | None = _option(None, "LoRA adapter: folder or hub id.", _MODEL)
    merge_adapter: bool | None = _option(None, "Fold the adapter into the weights.", _MODEL)
    check_template: bool = _option(True, "Refuse an adapter or threshold made with another prompt.", _MODEL)
    engine: Literal["hf", "vllm", "server", "generated", "fake"] = _option(
        "hf",
        "hf: transformers. vllm: vLLM in this process. server: a running vLLM or SGLang, see --server. generated: "
        "grades a chat model behind --server writes down. fake: no model, grades by word overlap, to try out files.",
        _MODEL,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "fp32", "bf16", "fp16"] | None = _option(
        None, "Precision of the weights; left out: auto.", _MODEL
    )
    device: str | None = _option(None, "cpu, cuda, cuda:1, mps; left out: the best there is.", _MODEL)
    device_map: str | None = _option(None, "Spread the model over devices, as accelerate does: auto.", _MODEL)
    revision: str | None = _option(None, "Branch, tag or commit of a model on the hub.", _MODEL)
    trust_remote_code: bool | None = _option(None, "Run code that comes with the model.", _MODEL)
    batch_tokens: int | None = _option(None, "Tokens per batch on an accelerator.", _MODEL, ge=1)
    share_prefix: bool | None = _option(None, "Compute what prompts of a query share once.", _MODEL)
    max_length: int | None = _option(None, "Longest prompt in tokens; left out: the model's.", _MODEL, ge=1)
    server: str | None = _option(
        None, "Address of the model server, http://host:port; its key is read from PD_RERANK_API_KEY.", _MODEL
    )
    served_as: str | None = _option(None, "The server's name for the model or adapter, where it differs.", _MODEL)
    concurrency: int | None = _option(None, "Requests under way at the server at most; left out: 16.", _MODEL, ge=1)
    server_timeout: float | None = _option(
        None,
        "Seconds without a sign of life before a request is tried again; left out: 120, generated 300.",
        _MODEL,
        gt=0,
    )
    slot_readout: Literal["auto", "pooling", "prompt_ids", "one_token", "top_k", "generate", "score"] | None = _option(
        None, "How vLLM or a server reads the slots; left out: the best it can.", _MODEL
    )
    canary: Path | None = _option(
        None,
        "Scores of transformers that vLLM or a server must repeat; left out: canary.json beside the model.",
        _MODEL,
    )
    tensor_parallel: int | None = _option(None, "GPUs vLLM spreads the model over; left out: 1.", _MODEL, ge=1)
    gpu_memory: float | None = _option(None, "Part of a GPU's memory vLLM may take; left out: 0.9.", _MODEL, gt=0, le=1)

    rubric: str = _option(
        "passage_relevance", "passage_relevance, answer_support, response_quality, evidence, or .yaml.", _PROMPT
    )
    instruction: str | None = _option(None, "Replaces the rubric's instruction.", _PROMPT)
    markers: str = _option("numeric", "How documents are marked: numeric, alpha, doc_n, roman, rand3.", _PROMPT)
    placeholder: Annotated[str, BeforeValidator(_as_typed)] = _option("0", "What stands where a grade would.", _PROMPT)
    chat: bool | None = _option(None, "Chat template, or a plain prompt; left out: where there is one.", _PROMPT)
    max_doc_chars: int | None = _option(
        None, "Characters kept per document; 0: all; left out: the rubric's.", _PROMPT, ge=0
    )

    window_size: int = _option(20, "Candidates per prompt; 1 is exact pointwise scoring.", _SHOW, ge=1)
    partition: Annotated[Literal["round_robin", "contiguous", "hashed"], BeforeValidator(_spelling)] = _option(
        "round_robin", "How a pool is cut into windows.", _SHOW
    )

    def engine_options(self, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
        """What was said of the engine, by the names of its constructor; what means nothing to it is refused."""
        given = {
            name: getattr(self, name)
            for name in dict.fromkeys(name for names in _OF_ENGINE.values() for name in names)
            if name not in without and getattr(self, name, None) is not None
        }
        if idle := sorted(set(given) - {*_OF_ENGINE[self.engine]}):
            raise BadArgument(f"--{idle[0].replace('_', '-')} means nothing to --engine {self.engine}; leave it out")
        if self.engine in ("server", "generated") and self.server is None:
            raise BadArgument(f"--engine {self.engine} needs the server's address: --server http://host:port")
        return given


_OF_MODEL = ("adapter", "revision", "trust_remote_code", "max_length")
_OF_READOUT = ("slot_readout", "canary")
_OF_ENGINE: Mapping[str, tuple[str, ...]] = {
    "hf": (*_OF_MODEL, "merge_adapter", "dtype", "device", "device_map", "batch_tokens", "share_prefix"),
    "vllm": (*_OF_MODEL, *_OF_READOUT, "dtype", "share_prefix", "tensor_parallel", "gpu_memory"),
    "server": (*_OF_MODEL, *_OF_READOUT, "server", "served_as", "concurrency", "server_timeout"),
    "generated": (
        *("server", "concurrency", "server_timeout", "attempts", "deadline", "cache"),
        *("answer_form", "temperature", "max_tokens", "request_seed", "request"),
    ),
    "fake": ("max_length",),
}
"""The options each engine's constructor takes from the settings."""

WHERE_NOT_WHAT = ("server", "concurrency", "server_timeout", "gpu_memory", "attempts", "deadline", "cache")
"""Of these, what says where and how fast, not what is scored: a job may go on with others."""


class GeneratedSettings(Settings):
    """How a chat model is asked to write grades down, for `engine: generated` alone."""

    reasons: bool | None = _option(None, "Ask for a short reason beside every grade.", _WRITTEN)
    answer_form: Literal["json_schema", "json_object", "text"] | None = _option(
        None, "How the server enforces JSON; text: not at all. Left out: json_schema.", _WRITTEN
    )
    temperature: float | None = _option(None, "Left out: 0.", _WRITTEN, ge=0)
    max_tokens: int | None = _option(
        None, "Most tokens of an answer, thinking included; left out: 4096.", _WRITTEN, ge=1
    )
    request_seed: int | None = _option(None, "Seed sent with every request; left out: none.", _WRITTEN)
    request: Annotated[str | None, BeforeValidator(_as_json)] = _option(
        None, 'More fields of the request as JSON, {"reasoning_effort": "low"}; null takes one out.', _WRITTEN
    )
    cache: Path | None = _option(None, "Folder of answers, kept for other jobs; left out: one in --output.", _WRITTEN)
    attempts: int | None = _option(None, "Times a request is tried; left out: 5.", _WRITTEN, ge=1)
    deadline: float | None = _option(None, "Seconds for the requests of one shard; left out: no end.", _WRITTEN, gt=0)


class ScoringSettings(GeneratedSettings, ModelSettings, InputSettings):
    """What is scored, by which model, in which words: what every command that scores pools can be told."""

    @model_validator(mode="after")
    def _no_slots_to_read(self) -> Self:
        if self.engine != "generated":
            if self.reasons is not None:
                raise ValueError(f"--reasons means nothing to --engine {self.engine}; leave it out")
            return self
        if "model" not in self.model_fields_set:
            raise ValueError("--engine generated needs --model, the server's name for it")
        if self.placeholder != "0" or self.chat is not None:
            raise ValueError("--placeholder and --chat are for reading slots; --engine generated has none")
        return self


class DecisionSettings(ModelSettings):
    """How candidates are presented, and what is read and decided from the grades."""

    order: Literal["given", "reverse", "canonical"] = _option(
        "given", "Arrangement before that; canonical: by content, whatever order candidates came in.", _SHOW
    )
    presentations: int = _option(1, "Shuffles whose scores are averaged; 1: no shuffle.", _SHOW, ge=1)
    seed: int = _option(0, "Seed of the first shuffle; the next take seed+1 and so on.", _SHOW)
    shuffle: Literal["pool", "window"] = _option("pool", "Shuffle the whole pool, or inside each window.", _SHOW)

    readout: Literal["expected", "p_relevant", "argmax"] = _option(
        "expected", "Expected grade, mass of the upper grades, or likeliest grade.", _READ
    )
    calibration: Literal["none", "capcal"] = _option("none", "Correct by a prompt of empty documents.", _READ)
    residual: Path | None = _option(None, "Slot residuals (JSON) taken off the scores.", _READ)
    threshold: Annotated[str | None, BeforeValidator(_as_typed)] = _option(
        None, "A number, or a threshold's file (JSON); marks each candidate retained or not.", _READ
    )

    @model_validator(mode="after")
    def _one_correction(self) -> Self:
        if self.residual is not None and self.calibration != "none":
            raise ValueError("--residual and --calibration correct the same thing; choose one")
        return self


class RerankSettings(DecisionSettings, ScoringSettings):
    """Everything `pd-rerank rerank` can be told, on the command line or in a file."""

    settle: bool = _option(
        False, "Stop presenting a query once its retained set (or, without threshold, top-k set) is settled.", _SHOW
    )

    output: Path | None = _option(None, "Folder for run.trec, results.jsonl, scores/, manifest.json.", _OUT)
    top_k: int | None = _option(None, "Only the best candidates are written.", _OUT, ge=1)
    run_tag: str = _option("pd_rerank", "Last column of run.trec, one word.", _OUT)
    shard_size: int = _option(16, "Queries per shard; an interruption loses at most one shard.", _OUT, ge=1)

    @model_validator(mode="after")
    def _one_decision(self) -> RerankSettings:
        if self.settle and self.presentations < 3:
            raise ValueError("--settle needs --presentations 3 or more, the most a query may take")
        if self.settle and self.threshold is None and self.top_k is None:
            raise ValueError("--settle needs a decision: give --threshold or --top-k")
        if self.engine == "generated" and self.calibration != "none":
            raise ValueError("--calibration corrects grade probabilities; --engine generated has none")
        return self


# -- the server -------------------------------------------------------------------------------------------------

_SERVER, _LIMITS = "Server", "Limits"


class LimitSettings(Settings):
    """What a server takes on: per request, and of all requests together."""

    max_documents: int = _option(1000, "Documents of a request.", _LIMITS, ge=1)
    max_presentations: int = _option(20, "Presentations a request may ask for.", _LIMITS, ge=1)
    max_body: int = _option(8 * 2**20, "Bytes of a request.", _LIMITS, ge=1)
    max_requests: int = _option(
        512, "Requests under way at once, read or waiting or scored; more get 429.", _LIMITS, ge=1
    )
    max_queue: int = _option(4096, "Windows that may wait; a request that would add more gets 429.", _LIMITS, ge=1)
    timeout: float = _option(60.0, "Seconds from a request's arrival to its answer; later it gets 504.", _LIMITS, gt=0)
    batch_windows: int = _option(32, "Windows of several requests scored in one engine call.", _LIMITS, ge=1)
    batch_wait: float = _option(0.005, "Seconds a request waits for others to be scored with it.", _LIMITS, ge=0, le=1)


class ServeSettings(DecisionSettings, LimitSettings):
    """Everything `pd-rerank serve` can be told; the token comes from the environment only."""

    adapter: Annotated[list[str] | None, BeforeValidator(_listed)] = _option(  # type: ignore[assignment]
        None, "LoRA adapter, PATH or NAME=PATH. May be given several times; requests choose by name.", _MODEL
    )
    engine: Literal["hf", "vllm", "server", "fake"] = _option(
        "hf",
        "hf: transformers. vllm: vLLM in this process. server: a running vLLM or SGLang, see --server. fake: no model, "
        "grades by word overlap, for trying out clients.",
        _MODEL,
    )
    served_name: str | None = _option(None, "Name of the model in answers; left out: the model's.", _SERVER)
    host: str = _option("127.0.0.1", "Address to listen on; 0.0.0.0: all.", _SERVER)
    port: int = _option(8000, "Port to listen on; 0: any free one.", _SERVER, ge=0, le=65535)
    drain: float = _option(
        0.0, "Seconds between SIGTERM, from which /ready says no, and the last new request taken.", _SERVER, ge=0
    )
    log_texts: bool = _option(False, "Put queries and documents into the log.", _SERVER)

    @model_validator(mode="after")
    def _presentations_allowed(self) -> Self:
        if self.presentations > self.max_presentations:
            raise ValueError(
                f"--presentations {self.presentations} is above --max-presentations {self.max_presentations}"
            )
        return self


# -- pools ------------------------------------------------------------------------------------------------------

_FROM, _FUSE, _TEXTS = "What is searched", "How routes are fused", "Texts"

_OF_TYPE = {
    "run": ("path",),
    "bm25": ("index", "k1", "b", "rm3", "language"),
    "dense": ("index", "encoder", "query_prefix", "pooling", "l2_norm", "max_length", "batch_size", "ef_search"),
    "sparse": ("index", "encoder", "query_prefix", "max_length", "batch_size", "quantise"),
}
_OF_EVERY_TYPE = ("type", "depth", "weight", "threshold", "transform")


def _route_type(value: Any) -> Any:
    """Pyserini's words for the kinds of index are taken too."""
    return {"lucene": "bm25", "faiss": "dense", "impact": "sparse"}.get(value, value)


class RouteSettings(Settings):
    """One route of a pool: an index to search, or a TREC run. What a type does not know is refused."""

    type: Annotated[Literal["bm25", "dense", "sparse", "run"], BeforeValidator(_route_type)]
    path: Path | None = None
    index: str | None = None
    depth: int | None = Field(None, ge=1)
    weight: float | None = Field(None, ge=0)
    threshold: float | None = None
    transform: Literal["raw", "log1p"] | None = None
    k1: float | None = None
    b: float | None = None
    rm3: bool | None = None
    language: str | None = None
    encoder: str | None = None
    query_prefix: str | None = None
    pooling: str | None = None
    l2_norm: bool | None = None
    max_length: int | None = None
    batch_size: int | None = None
    ef_search: int | None = None
    quantise: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _hyphens(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            raise ValueError("a route is a list of 'key: value' lines")
        spelt = {str(key).replace("-", "_"): value for key, value in values.items()}
        if unknown := [key for key in spelt if key not in cls.model_fields]:
            raise ValueError(f"unknown key '{unknown[0]}'; {near_names(unknown[0], cls.model_fields)}")
        return spelt

    @model_validator(mode="after")
    def _fits_its_type(self) -> RouteSettings:
        known = _OF_EVERY_TYPE + _OF_TYPE[self.type]
        if idle := [name for name in self.model_fields_set if name not in known and getattr(self, name) is not None]:
            raise ValueError(
                f"'{sorted(idle)[0]}' means nothing to type {self.type}, which knows {', '.join(known[1:])}"
            )
        place = "path" if self.type == "run" else "index"
        if getattr(self, place) is None:
            raise ValueError(f"a route of type {self.type} needs '{place}'")
        return self

    def searcher_options(self) -> dict[str, Any]:
        """What the searcher is to be told: every option of the type that was given."""
        names = [name for name in _OF_TYPE[self.type] if name not in ("index", "path")]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


class PoolSettings(Settings):
    """Everything `pd-rerank pool` can be told; routes and a method's parameters in a file only."""

    topics: Path | None = _option(None, "Queries: .tsv (id, tab, text) or .jsonl.", _FROM)
    routes: dict[str, RouteSettings] = Field({}, description="Routes by name.")
    preset: Literal["nevir-paper"] | None = _option(
        None, "Depths, weights, thresholds and transforms of the NevIR paper, by type of route.", _FROM
    )
    max_queries: int | None = _option(None, "Only the first queries.", _FROM, ge=1)
    threads: int = _option(1, "Threads of a search.", _FROM, ge=1)

    method: str = _option("weighted", "weighted, rrf, or any fusion method of ranx (ranx:rrf for its own).", _FUSE)
    norm: str | None = _option("min-max", "How ranx normalises scores before it fuses.", _FUSE)
    params: dict[str, Any] = Field({}, description="Parameters of the method: k of rrf, gamma, phi, …")
    precision: Literal["float64", "float32"] = _option(
        "float64", "Of weighted scores; float32 ties what the NevIR paper's scores tie.", _FUSE
    )
    weights: Path | None = _option(None, "Weights found by 'pd-rerank pool weights' (JSON).", _FUSE)

    corpus: Path | None = _option(None, "JSONL or TSV with the documents' texts.", _TEXTS)
    text_index: str | None = _option(None, "Lucene index that stores the texts, instead of a corpus.", _TEXTS)
    missing_limit: float = _option(0.0, "Share of documents without text above which to stop.", _TEXTS, ge=0, le=1)
    fold_texts: bool = _option(
        False, "Make one candidate of documents that differ in case, white space or Unicode form only.", _TEXTS
    )

    output: Path | None = _option(None, "Folder for pools.jsonl and manifest.json.", _OUT)
    qrels: Path | None = _option(None, "Judgements, for the health report in the manifest.", _OUT)
    shard_size: int = _option(256, "Queries per shard; an interruption loses at most one shard.", _OUT, ge=1)

    @model_validator(mode="after")
    def _one_text_source(self) -> PoolSettings:
        if self.corpus is not None and self.text_index is not None:
            raise ValueError("texts come from --corpus or --text-index; leave one out")
        if not self.routes:
            raise ValueError("no routes: list them under 'routes' in a config file, or give --run NAME=PATH")
        return self


# -- evaluation -------------------------------------------------------------------------------------------------

_WHAT, _HOW, _GATES = "What is evaluated", "How it is measured", "Limits: beyond them the exit code is 7"

_REPORT = "Folder for report.html, report.md, report.json, queries.csv; left out: JSON on stdout."
_METRICS = "nDCG@10,RR@10,R@100"


def _files(help: str) -> Any:
    return _option(None, help, _WHAT)


class EvaluateSettings(Settings):
    """Everything `pd-rerank evaluate` can be told."""

    run: list[str] | None = _files("TREC run, PATH or NAME=PATH. May be given several times.")
    scores: list[str] | None = _files("Scores folder, or what 'rerank' wrote; PATH or NAME=PATH.")
    qrels: Path | None = _files("Judgements: query id, 0, document id, grade.")
    first_stage: Path | None = _files("What was reranked: a TREC run, or pools.")

    metrics: str = _option(_METRICS, "Metrics between commas, in ranx's, ir_measures' or trec_eval's words.", _HOW)
    relevance_level: int | None = _option(None, "Lowest relevant grade of metrics other than nDCG.", _HOW, ge=1)
    readout: Literal["expected", "p_relevant", "argmax"] | None = _option(
        None, "Of scores; left out: the one they were served with.", _HOW
    )
    output: Path | None = _option(None, _REPORT, _OUT)

    @model_validator(mode="after")
    def _something_judged(self) -> EvaluateSettings:
        if not self.run and not self.scores:
            raise ValueError("nothing to evaluate: give --run or --scores")
        if self.qrels is None:
            raise ValueError("--qrels is missing: judgements are what rankings are evaluated against")
        return self


class StabilitySettings(Settings):
    """Everything `pd-rerank stability` can be told."""

    scores: Path | None = _files("Scores folder with several presentations, or what 'rerank' wrote.")
    runs: list[str] | None = _files("TREC runs of one system, one per presentation: --runs r1.trec r2.trec …")
    pools: Path | None = _files("Pools that were ranked: checked, and their texts shown.")
    qrels: Path | None = _files("Judgements, for quality under reordering and thresholds fitted by F1.")

    threshold: str | None = _option(
        None, "Number, threshold file, f1 or retention=0.3; the last two are fitted on half the queries.", _HOW
    )
    top_k: int = _option(10, "Cut of heads, churn and nDCG.", _HOW, ge=1)
    relevance_level: int = _option(1, "Lowest relevant grade.", _HOW, ge=1)
    average: int = _option(1, "Measure the mean of so many presentations instead of single ones.", _HOW, ge=1)
    readout: Literal["expected", "p_relevant", "argmax"] | None = _option(
        None, "Of scores; left out: the one they were served with.", _HOW
    )

    max_psi: float | None = _option(None, "Most τ-PSI.", _GATES)
    min_overlap: float | None = _option(None, "Least overlap of retained sets; needs --threshold.", _GATES)
    max_set_flip: float | None = _option(None, "Most set flip rate; needs --threshold.", _GATES)
    max_churn: float | None = _option(None, "Most top-k churn.", _GATES)
    max_selection_flip: float | None = _option(None, "Most flips of the first ranked.", _GATES)
    max_pair_flip: float | None = _option(None, "Most flips of the first and last ranked.", _GATES)
    max_order_spread: float | None = _option(None, "Most mean less worst nDCG; needs --qrels.", _GATES)
    max_residual: float | None = _option(None, "Most movement against spread (normalised residual).", _GATES)

    output: Path | None = _option(None, _REPORT, _OUT)
    save_threshold: Path | None = _option(None, "File for the fitted threshold, as 'rerank' takes it.", _OUT)

    @model_validator(mode="after")
    def _one_system(self) -> StabilitySettings:
        if (self.scores is None) == (not self.runs):
            raise ValueError("give --scores, or --runs with one run per presentation")
        if self.runs and self.readout is not None:
            raise ValueError("--readout is for scores; runs hold theirs")
        if self.threshold is None:
            for name in ("min_overlap", "max_set_flip", "save_threshold"):
                if getattr(self, name) is not None:
                    raise ValueError(f"--{name.replace('_', '-')} needs --threshold")
        if self.max_order_spread is not None and self.qrels is None:
            raise ValueError("--max-order-spread needs --qrels")
        return self


class PreferenceSettings(Settings):
    """Everything `pd-rerank preference` can be told."""

    pairs: Path | None = _files("Labelled pairs, JSONL: id, q1, q2, doc1, doc2, or query, preferred, rejected.")
    pools: Path | None = _files("Pools that were ranked, in which the passages are found.")
    scores: Path | None = _files("Scores folder, or what 'rerank' wrote.")
    run: Path | None = _files("TREC run, instead of scores.")
    reference: list[str] | None = _files("Scores or run to compare with besides the first stage; PATH or NAME=PATH.")

    source: Literal["prefix", "pair"] = _option(
        "prefix", "Source group of a pair id: what stands before its last hyphen, or all of it.", _HOW
    )
    window: int | None = _option(None, "Rerank the first stage's best so many only, the rest behind them.", _HOW, ge=1)
    fallback: Literal["query", "passage", "pair"] = _option(
        "query", "What returns to the first stage where a window lacks a grade.", _HOW
    )
    population: Literal["primary", "planned", "with_conflicts"] = _option(
        "primary", "Directions counted: covered ones without conflict; all planned; or conflicts too.", _HOW
    )
    ties: Literal["doc_id", "best", "worst", "expected"] = _option("doc_id", "Rank of tied passages.", _HOW)
    readout: Literal["expected", "p_relevant", "argmax"] | None = _option(
        None, "Of scores; left out: the one they were served with.", _HOW
    )

    min_strict: float | None = _option(None, "Least strict preference.", _GATES)
    min_both: float | None = _option(None, "Least share of pairs right in both directions.", _GATES)
    min_mrr: float | None = _option(None, "Least MRR of the preferred passage.", _GATES)
    min_coverage: float | None = _option(None, "Least share of directions with both passages in the pool.", _GATES)

    output: Path | None = _option(None, _REPORT, _OUT)

    @model_validator(mode="after")
    def _one_ranker(self) -> PreferenceSettings:
        for name in ("pairs", "pools"):
            if getattr(self, name) is None:
                raise ValueError(f"--{name} is missing: preference needs labelled pairs and the pools that were ranked")
        if (self.scores is None) == (self.run is None):
            raise ValueError("give --scores or --run")
        return self


class CompareSettings(Settings):
    """Everything `pd-rerank compare` can be told beside the systems."""

    systems: list[str] = Field([], description="Systems: scores folders or TREC runs, PATH or NAME=PATH.")
    baseline: str | None = _files("Name of the system the others are compared with; left out: the first.")
    qrels: Path | None = _files("Judgements, for quality.")
    pools: Path | None = _files("Pools that were ranked; checked.")
    pairs: Path | None = _files("Labelled pairs, for preference and position; needs --pools.")

    metrics: str = _option("nDCG@10", "Metrics between commas; the first is drawn against stability.", _HOW)
    relevance_level: int | None = _option(None, "Lowest relevant grade of metrics other than nDCG.", _HOW, ge=1)
    threshold: str | None = _option(
        None,
        "Number, threshold file, f1, retention=0.3, or matched: all retain what the baseline does at its F1 threshold.",
        _HOW,
    )
    top_k: int = _option(10, "Cut of heads, churn and nDCG under reordering.", _HOW, ge=1)
    source: Literal["prefix", "pair"] = _option(
        "prefix", "Source group of a pair id: what stands before its last hyphen, or all of it.", _HOW
    )
    readout: Literal["expected", "p_relevant", "argmax"] | None = _option(
        None, "Of scores; left out: the one they were served with.", _HOW
    )
    output: Path | None = _option(None, _REPORT, _OUT)

    @model_validator(mode="after")
    def _something_compared(self) -> CompareSettings:
        if len(self.systems) < 2:
            raise ValueError(f"a comparison needs two systems, PATH or NAME=PATH, or more; got {len(self.systems)}")
        if self.pairs is not None and self.pools is None:
            raise ValueError("--pairs needs --pools, in which its passages are found")
        return self


# -- training labels --------------------------------------------------------------------------------------------

_LABELS = "Labels that are there already"


class LabelSettings(ScoringSettings):
    """Everything `pd-rerank label` can be told.

    Labels come from a teacher (`model`), from scores a teacher gave before (`scores`), or from judgements (`qrels`
    alone). Beside a teacher or scores, `qrels` is what the labels are compared with.
    """

    scores: Path | None = _option(
        None, "Scores of these pools as 'rerank' wrote them, with --presentations; takes no model.", _LABELS
    )
    qrels: Path | None = _option(
        None, "Judgements the labels are compared with; they are the labels where there is no --model.", _LABELS
    )
    map_grades: str | None = _option(
        None, "Label grades that judged grades stand for: 0=0,1=3. Left out: the same.", _LABELS
    )
    unjudged: int | None = _option(
        None, "Label grade of documents nobody judged. Left out: an error that lists them.", _LABELS, ge=0
    )

    model: str | None = _option(None, "Teacher: short name, folder or hub id of a causal LM.", _MODEL)  # type: ignore[assignment]
    partition: Annotated[Literal["round_robin", "contiguous"], BeforeValidator(_spelling)] = _option(
        "round_robin", "How a shuffled pool is cut into windows.", _SHOW
    )
    presentations: int = _option(10, "Shuffles of the whole pool, seeds 0, 1, …; 1: the pool as it is.", _SHOW, ge=1)

    output: Path | None = _option(None, "Folder for labels/, report/ and, with a model, teacher/.", _OUT)
    experiment_id: str | None = _option(None, "Name in the manifest; left out: the folder's.", _OUT)
    metrics: str = _option("nDCG@10", "Metrics of the comparison with --qrels, between commas.", _OUT)
    shard_size: int = _option(16, "Queries per shard; an interruption loses at most one shard.", _OUT, ge=1)

    @property
    def teacher(self) -> str | None:
        """The model to ask; None where labels come from scores or judgements."""
        return self.model or ("fake" if self.engine == "fake" else None)

    @model_validator(mode="after")
    def _one_source(self) -> LabelSettings:
        if self.scores is not None and self.teacher is not None:
            raise ValueError("--scores holds a teacher's scores already; leave out --model")
        if self.scores is None and self.qrels is None and self.teacher is None:
            raise ValueError("no labels: give a teacher (--model), its scores (--scores) or judgements (--qrels)")
        judged = self.scores is None and self.teacher is None
        for name, idle in (("map_grades", not judged), ("unjudged", not judged), ("adapter", self.teacher is None)):
            if idle and getattr(self, name) is not None:
                cure = (
                    "is for judgements alone; leave out --model and --scores" if name != "adapter" else "needs --model"
                )
                raise ValueError(f"--{name.replace('_', '-')} {cure}")
        if self.map_grades is not None and not re.fullmatch(r"-?\d{1,9}=\d+(,-?\d{1,9}=\d+)*", self.map_grades):
            raise ValueError(f"--map-grades is a list such as 0=0,1=3, got '{self.map_grades}'")
        return self


# -- training ---------------------------------------------------------------------------------------------------

_DATA, _VIEWS, _LOSS, _OPTIMISER = "What is trained on", "Windows and views", "What is minimised", "Optimizer"
_LORA, _KEPT = "Adapter", "What is measured and kept"

RECIPES: Mapping[str, Mapping[str, Any]] = {
    "single_order": {"views": "none", "loss": "supervised"},
    "order_averaged": {"views": "none", "loss": "supervised", "targets": "averaged"},
    "oc_sft": {"views": "within_window", "loss": "order_consistency"},
    "permutation_augmentation": {"views": "whole_pool", "loss": "supervised"},
    "debias_first": {"views": "whole_pool", "loss": "supervised", "debias": True},
    "mean_teacher": {"views": "within_window", "loss": "mean_teacher", "consistency": 0.5, "ramp_steps": 0},
    "kl_to_base": {"views": "none", "loss": "kl_to_base", "consistency": 0.05, "ramp_steps": 0},
    "lora_dropout": {"views": "none", "loss": "supervised", "lora_dropout": 0.2},
    "combined": {"views": "none", "loss": "supervised", "targets": "averaged", "distribution": 1.0},
    "dropout_consistency": {"views": "dropout", "loss": "order_consistency"},
    "marker_consistency": {"views": "markers", "loss": "order_consistency"},
    "repartition": {"views": "repartition", "loss": "order_consistency"},
    "replacement": {"views": "replacement", "loss": "order_consistency"},
    "canonical_order": {"views": "none", "loss": "supervised", "order": "canonical"},
}
"""What each recipe sets, unless it is set by hand; the last three are not in the paper."""


class TrainSettings(Settings):
    """Everything `train/ocsft.py` can be told. `recipe` names an arm; what else is given wins over what it sets."""

    recipe: Literal[
        "single_order", "order_averaged", "oc_sft", "permutation_augmentation", "debias_first", "mean_teacher",
        "kl_to_base", "lora_dropout", "combined", "dropout_consistency", "marker_consistency", "repartition",
        "replacement", "canonical_order",
    ] = _option("oc_sft", "Arm: sets views, loss and labels; any of them given wins.", _LOSS)  # fmt: skip

    pools: Path | None = _option(None, "Pools to train on: folder, or JSONL in rank_llm's shape.", _DATA)
    labels: Path | None = _option(None, "Labels of these pools, as 'pd-rerank label' writes them.", _DATA)
    qrels: Path | None = _option(None, "Judgements of these pools, for --debias.", _DATA)
    max_queries: int | None = _option(None, "Only the first queries.", _DATA, ge=1)
    heldout_pools: Path | None = _option(None, "Pools of other queries, to choose a checkpoint by.", _DATA)
    heldout_qrels: Path | None = _option(None, "Their judgements.", _DATA)
    heldout_queries: int = _option(100, "At most so many of them, the first.", _DATA, ge=2)

    model: str = _option("smollm2-135m", "Base model: short name, folder or hub id of a causal LM.", _MODEL)
    revision: str | None = _option(None, "Branch, tag or commit of a model on the hub.", _MODEL)
    dtype: Literal["auto", "float32", "bfloat16", "fp32", "bf16"] = _option(
        "auto", "Precision of the base; the adapter is float32.", _MODEL
    )
    attn_implementation: str | None = _option(None, "sdpa, eager, flash_attention_2; left out: the model's.", _MODEL)
    trust_remote_code: bool = _option(False, "Run code that comes with the model.", _MODEL)
    max_length: int | None = _option(None, "Longest prompt in tokens; left out: the model's.", _MODEL, ge=1)
    gradient_checkpointing: bool = _option(
        False, "Compute activations again instead of keeping them: less memory, a third more time.", _MODEL
    )
    shard_base: bool = _option(
        False, "Share the frozen base out among processes (FSDP), for a base too large for each to hold.", _MODEL
    )
    cpu: bool = _option(False, "Train on the CPU even where there is an accelerator.", _MODEL)
    threads: int | None = _option(None, "Threads of the CPU per process; left out: torch's choice.", _MODEL, ge=1)

    rubric: str = _option(
        "passage_relevance", "passage_relevance, answer_support, response_quality, evidence, or .yaml.", _PROMPT
    )
    instruction: str | None = _option(None, "Replaces the rubric's instruction.", _PROMPT)
    markers: str = _option("numeric", "How documents are marked: numeric, alpha, doc_n, roman, rand3.", _PROMPT)
    placeholder: str = _option("0", "What stands where a grade would.", _PROMPT)
    chat: bool | None = _option(None, "Chat template, or a plain prompt; left out: where there is one.", _PROMPT)
    max_doc_chars: int | None = _option(
        None, "Characters kept per document; 0: all; left out: the rubric's.", _PROMPT, ge=0
    )
    check_template: bool = _option(True, "Refuse labels a teacher gave under another prompt.", _PROMPT)

    window_size: int = _option(20, "Candidates per prompt.", _VIEWS, ge=1)
    partition: Annotated[Literal["round_robin", "contiguous", "hashed"], BeforeValidator(_spelling)] = _option(
        "contiguous", "How a pool is cut into windows.", _VIEWS
    )
    order: Literal["given", "reverse", "canonical"] = _option("given", "Arrangement of a pool before that.", _VIEWS)
    views: Annotated[
        Literal["none", "within_window", "whole_pool", "dropout", "markers", "repartition", "replacement"],
        BeforeValidator(_spelling),
    ] = _option("within_window", "What differs between two views of a window.", _VIEWS)
    views_per_window: int = _option(2, "Views compared, or whole-pool shuffles.", _VIEWS, ge=1)
    marker_schemes: str = _option("numeric,alpha,doc_n", "Schemes that views 'markers' draw from.", _VIEWS)
    replaced: int = _option(1, "Candidates that views 'replacement' exchange.", _VIEWS, ge=1)

    loss: Annotated[
        Literal["supervised", "order_consistency", "mean_teacher", "kl_to_base"], BeforeValidator(_spelling)
    ] = _option("order_consistency", "Fit to the labels alone, or with a second term.", _LOSS)
    targets: Literal["single", "averaged"] = _option(
        "single", "Labels of the teacher's first order, or the mean over its orders.", _LOSS
    )
    consistency: float = _option(5.0, "λ: weight of the second term.", _LOSS, ge=0)
    convention: Literal["difference", "variance_sum", "variance_mean"] = _option(
        "difference", "What λ multiplies: squared differences of views, or their variance about the mean.", _LOSS
    )
    ramp_steps: int = _option(500, "Optimizer steps over which λ rises from 0; 0: none.", _LOSS, ge=0)
    ramp_fraction: float | None = _option(None, "The same as a share of all steps; wins.", _LOSS, ge=0, le=1)
    squared: float = _option(1.0, "Weight of the squared error of the expected grade.", _LOSS, ge=0)
    distribution: float = _option(0.0, "Weight of the divergence from the teacher's grade probabilities.", _LOSS, ge=0)
    cross_entropy: float = _option(0.0, "Weight of the cross-entropy on the grades around the label.", _LOSS, ge=0)
    temperature: float = _option(1.0, "Of both models in kl_to_base.", _LOSS, gt=0)
    ema_decay: float = _option(0.999, "Of the averaged weights in mean_teacher.", _LOSS, ge=0, lt=1)
    debias: bool = _option(False, "Weigh documents by the inverse propensity of their slot; needs --qrels.", _LOSS)
    debias_clip: float | None = _option(None, "Largest such weight.", _LOSS, gt=0)

    lora_rank: int = _option(16, "Rank of the adapter.", _LORA, ge=1)
    lora_alpha: float = _option(32.0, "Its scale is alpha/rank.", _LORA, gt=0)
    lora_dropout: float = _option(0.05, "Dropout in front of the adapter.", _LORA, ge=0, lt=1)
    lora_targets: str = _option(
        "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj",
        "Modules between commas, all-linear, or a regular expression.",
        _LORA,
    )
    start: str | None = _option(None, "Adapter whose weights training starts from; left out: a fresh one.", _LORA)

    epochs: int = _option(1, "Times all windows are seen.", _OPTIMISER, ge=1)
    max_steps: int | None = _option(None, "Optimizer steps, instead of whole epochs.", _OPTIMISER, ge=1)
    windows_per_step: int = _option(64, "Windows of one optimizer step, over all processes.", _OPTIMISER, ge=1)
    batch_size: int = _option(1, "Windows of one backward pass of a process.", _OPTIMISER, ge=1)
    learning_rate: float = _option(2e-4, "Its peak.", _OPTIMISER, gt=0)
    warmup: float = _option(
        0.1, "Share of the steps in which it rises; then half a cosine to 0.", _OPTIMISER, ge=0, lt=1
    )
    beta1: float = _option(0.9, "AdamW.", _OPTIMISER, ge=0, lt=1)
    beta2: float = _option(0.95, "AdamW.", _OPTIMISER, ge=0, lt=1)
    epsilon: float = _option(1e-8, "AdamW.", _OPTIMISER, gt=0)
    weight_decay: float = _option(0.01, "AdamW, of all weights in training.", _OPTIMISER, ge=0)
    max_grad_norm: float = _option(1.0, "Longer gradients are shortened to this.", _OPTIMISER, gt=0)
    seed: int = _option(42, "Of the adapter, the views, the order of windows and dropout.", _OPTIMISER, ge=0, lt=2**63)

    evaluate_every: int | None = _option(None, "Steps between evaluations; left out: as --save-every.", _KEPT, ge=1)
    evaluate_first: bool = _option(False, "Evaluate before the first step too, as step 0.", _KEPT)
    evaluate_presentations: int = _option(10, "Shuffles of the held-out pools, for stability.", _KEPT, ge=2)
    evaluate_k: int = _option(10, "Cut of nDCG.", _KEPT, ge=1)
    select: Literal["best_ndcg", "largest_weight", "equal_quality", "equal_stability", "last"] = _option(
        "best_ndcg", "Rule by which one checkpoint's adapter is kept; last where nothing is held out.", _KEPT
    )
    max_psi: float | None = _option(None, "Most τ-PSI, for --select equal_stability.", _KEPT, ge=0, le=1)
    min_step: int | None = _option(
        None, "Earliest step --select largest_weight keeps; left out: 1000 of 2305 steps, or that share.", _KEPT, ge=0
    )
    save_every: int = _option(200, "Steps between checkpoints.", _KEPT, ge=1)
    adapter_dtype: Literal["float32", "bfloat16"] = _option("float32", "Precision of the adapter that is kept.", _KEPT)
    min_spread: float = _option(
        0.02,
        "Stop where documents of a window differ by less than this (SD of the expected grade); 0: never.",
        _KEPT,
        ge=0,
    )
    patience: int = _option(50, "Steps in a row below that before it stops.", _KEPT, ge=1)
    trackers: str | None = _option(None, "tensorboard, wandb, … between commas, as accelerate knows them.", _KEPT)
    output: Path | None = _option(None, "Folder of the run: checkpoints, steps, evaluations, adapter.", _KEPT)

    @model_validator(mode="before")
    @classmethod
    def _recipe(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = {name: value for name, value in values.items() if value is not None}
        chosen = RECIPES.get(str(_spelling(values.get("recipe", "oc_sft"))), {})
        return {**chosen, **values}

    @model_validator(mode="after")
    def _whole(self) -> TrainSettings:
        for name in ("pools", "labels", "output"):
            if getattr(self, name) is None:
                raise ValueError(f"--{name} is missing: training needs pools, their labels, and a folder to work in")
        if (self.heldout_pools is None) != (self.heldout_qrels is None):
            raise ValueError("--heldout-pools and --heldout-qrels go together")
        if self.debias and self.qrels is None:
            raise ValueError("--debias needs --qrels, the judgements of the training pools")
        idle = {
            "--debias-clip": (self.debias_clip is not None and not self.debias, "--debias"),
            "--replaced": (self.replaced != 1 and self.views != "replacement", "--views replacement"),
            "--evaluate-first": (self.evaluate_first and self.heldout_pools is None, "--heldout-pools"),
            "--max-psi": (self.max_psi is not None and self.select != "equal_stability", "--select equal_stability"),
            "--min-step": (self.min_step is not None and self.select != "largest_weight", "--select largest_weight"),
            "--convention": (
                self.convention != "difference" and self.loss != "order_consistency",
                "--loss order_consistency",
            ),
        }
        for name, (useless, without) in idle.items():
            if useless:
                raise ValueError(f"{name} means nothing without {without}; leave it out")
        if self.views == "markers" and self.markers != "numeric":
            raise ValueError("--views markers take theirs from --marker-schemes, the first being served, not --markers")
        paired = self.views not in ("none", "whole_pool")
        if self.loss in ("order_consistency", "mean_teacher") and (not paired or self.views_per_window < 2):
            raise ValueError(f"--loss {self.loss} compares views of a window; --views {self.views} gives one")
        if paired and self.views_per_window < 2:
            raise ValueError(f"--views {self.views} needs --views-per-window 2 or more")
        if paired and self.loss in ("supervised", "kl_to_base"):
            raise ValueError(f"--loss {self.loss} reads one view of a window; --views {self.views} makes several")
        if self.loss == "mean_teacher" and self.views_per_window != 2:
            raise ValueError("--loss mean_teacher is between two views")
        if self.views == "dropout" and self.lora_dropout == 0:
            raise ValueError("--views dropout differ by --lora-dropout, which is 0")
        if not (self.squared or self.distribution or self.cross_entropy):
            raise ValueError("--squared, --distribution and --cross-entropy are all 0: nothing is fitted")
        if self.windows_per_step % self.batch_size:
            raise ValueError(f"--windows-per-step {self.windows_per_step} is no multiple of --batch-size")
        if self.select == "equal_stability" and self.max_psi is None:
            raise ValueError("--select equal_stability needs --max-psi")
        return self

    @property
    def view_seeds(self) -> tuple[int, ...]:
        """One base seed per view: 0 and 1 for run seed 42, 2 and 3 for 43; whole-pool shuffles always from 0."""
        count = 1 if self.views == "none" else self.views_per_window
        first = 0 if self.views == "whole_pool" else count * (self.seed - 42)
        return tuple(range(first, first + count))
