"""Encoders: texts to dense vectors or to weighted terms, with every choice that changes them written down.

Rankings drift in silence where prefix, pooling, normalisation or length differ between documents and queries, so
an encoder takes them from the model's own files, from a table of known families or from the caller, and
`describe()` says what it took. Where none of these says how tokens are pooled, it is an error.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import numpy as np
import numpy.typing as npt

from pd_rerank._extras import need
from pd_rerank.errors import BadArgument, MissingResource, ModelMismatch
from pd_rerank.files import sha256_file

logger = logging.getLogger("pd_rerank")

Side = Literal["query", "document"]
Pooling = Literal["cls", "mean", "last"]
Progress = Callable[[int], None]
Vectors = npt.NDArray[np.float32]

CPU_TOKENS, ACCELERATOR_TOKENS = 2048, 65536
"""Tokens of a batch, padding included, where the caller does not say."""


class Encoder(Protocol):
    """What indexing and searching ask of an encoder.

    `encode` returns float32 vectors (n, dimension) for kind "dense" and one dict of positive weights by term per
    text for kind "sparse"; `describe` gives plain values that name everything the result depends on.
    """

    name: str
    kind: Literal["dense", "sparse"]

    def encode(self, texts: Sequence[str], *, side: Side = "document", progress: Progress | None = None) -> Any:
        """Encode texts, in their order; `progress` hears how many more are done."""
        ...

    def describe(self) -> dict[str, Any]:
        """Everything the result depends on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What is known of a family of dense encoders that its files do not say."""

    pooling: Pooling
    l2_norm: bool
    query_prefix: str = ""
    doc_prefix: str = ""


_SEARCH = "Represent this sentence for searching relevant passages: "
FAMILIES: dict[str, Family] = {
    r"bge-(small|base|large)-en(-v1\.5)?": Family(pooling="cls", l2_norm=True, query_prefix=_SEARCH),
    r"bge-(small|base|large)-zh(-v1\.5)?": Family(
        pooling="cls", l2_norm=True, query_prefix="为这个句子生成表示以用于检索相关文章："
    ),
    r"bge-m3": Family(pooling="cls", l2_norm=True),
    r"(multilingual-)?e5-(small|base|large)(-v2|-unsupervised)?": Family(
        pooling="mean", l2_norm=True, query_prefix="query: ", doc_prefix="passage: "
    ),
    r"snowflake-arctic-embed-(xs|s|m|l)": Family(pooling="cls", l2_norm=True, query_prefix=_SEARCH),
    r"(m)?contriever(-msmarco)?": Family(pooling="mean", l2_norm=False),
}
"""Known families, by a pattern for the last part of the model's name, whatever its case."""


def load_encoder(name: str | Path, *, kind: Literal["dense", "sparse"] | None = None, **settings: Any) -> Encoder:
    """Load an encoder by short name (`pd_rerank.embedded`), folder or hub id.

    With `kind` left out, a model whose files list SPLADE pooling, or whose name says splade and which is a masked
    language model, is sparse; all others are dense. `settings` are those of `DenseEncoder` or `SpladeEncoder`;
    None means not given.
    """
    given = {key: value for key, value in settings.items() if value is not None}
    if (kind or _Source(str(name), given.get("revision")).kind()) == "sparse":
        return SpladeEncoder(name, **given)
    return DenseEncoder(name, **given)


class _TransformerEncoder:
    """Tokenising and batching: texts sorted by length, so that a batch of near-equal lengths pads little."""

    kind: Literal["dense", "sparse"]

    def __init__(
        self,
        name: str | Path,
        *,
        max_length: int | None,
        query_prefix: str | None,
        doc_prefix: str | None,
        batch_size: int,
        batch_tokens: int | None,
        device: str | None,
        dtype: str,
        revision: str | None,
    ) -> None:
        if batch_size < 1 or (batch_tokens is not None and batch_tokens < 1):
            raise BadArgument(f"batches hold at least one text and one token, got {batch_size} and {batch_tokens}")
        if max_length is not None and max_length < 3:
            raise BadArgument(f"max_length must be at least 3 tokens, got {max_length}")
        torch = need("torch", extra="hf", purpose="encoders run on PyTorch")
        need("transformers", extra="hf", purpose="encoders are loaded with transformers")
        self.name = str(name)
        self._source = _Source(self.name, revision)
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = _dtype(dtype)
        self._batch_size = batch_size
        self._batch_tokens = batch_tokens or (CPU_TOKENS if self.device == "cpu" else ACCELERATOR_TOKENS)
        self._tokenizer = self._source.tokenizer()
        prompts = self._source.prompts()
        self.query_prefix = prompts["query"] if query_prefix is None else query_prefix
        self.doc_prefix = prompts["document"] if doc_prefix is None else doc_prefix
        self.max_length = max_length or self._source.max_length(self._tokenizer)

    def _token_ids(self, texts: Sequence[str], side: Side) -> list[list[int]]:
        if side not in ("query", "document"):
            raise BadArgument(f"side is query or document, got {side!r}")
        prefix = self.query_prefix if side == "query" else self.doc_prefix
        clean = [(prefix + text).encode("utf-8", "replace").decode() for text in texts]
        if self._source.lower_case:
            clean = [text.lower() for text in clean]
        if not clean:
            return []
        ids = self._tokenizer(clean, truncation=True, max_length=self.max_length, padding=False)["input_ids"]
        return cast(list[list[int]], ids)

    def _batches(self, ids: list[list[int]]) -> Iterator[tuple[npt.NDArray[np.int64], Any, Any]]:
        """Yield (positions, token ids (b, t), mask (b, t)), longest texts first."""
        import torch

        lengths = np.array([len(row) for row in ids], dtype=np.int64)
        order = np.argsort(-lengths, kind="stable")
        start = 0
        while start < len(order):
            longest = max(1, int(lengths[order[start]]))
            size = max(1, min(self._batch_size, self._batch_tokens // longest))
            rows = order[start : start + size]
            tokens = np.full((len(rows), longest), self._tokenizer.pad_token_id or 0, dtype=np.int64)
            mask = np.arange(longest) < lengths[rows, None]
            for row, position in zip(tokens, rows, strict=True):
                row[: lengths[position]] = ids[position]
            yield (
                rows,
                torch.from_numpy(tokens).to(self.device),
                torch.from_numpy(mask.astype(np.int64)).to(self.device),
            )
            start += size

    def describe(self) -> dict[str, Any]:
        """Name, content and settings of this encoder, as plain values."""
        return {
            "name": self.name,
            "kind": self.kind,
            **self._identity,
            "max_length": self.max_length,
            "query_prefix": self.query_prefix,
            "doc_prefix": self.doc_prefix,
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return self._source.identity()


class DenseEncoder(_TransformerEncoder):
    """A transformer whose token states, pooled, are the vector of a text.

    `pooling` is "cls" (first token), "mean" (over all tokens) or "last"; `l2_norm` scales vectors to length 1;
    prefixes go in front of queries or documents. Left at None, each comes from the model's own files
    (modules.json, 1_Pooling, config_sentence_transformers.json), else from `FAMILIES`. Texts are cut at `max_length`
    tokens (left out: as the files say). A batch holds at most `batch_size` texts and `batch_tokens` tokens;
    neither changes a vector by more than rounding. A folder that holds model.onnx and no config.json runs on
    onnxruntime; one in 8-bit numbers scales them by batch, so its vectors differ in the third digit between batches.
    Raises `BadArgument` where nothing says how to pool, `ModelMismatch` for modules it does not know.
    """

    kind: Literal["dense", "sparse"] = "dense"

    def __init__(
        self,
        name: str | Path,
        *,
        pooling: Pooling | None = None,
        l2_norm: bool | None = None,
        query_prefix: str | None = None,
        doc_prefix: str | None = None,
        max_length: int | None = None,
        batch_size: int = 64,
        batch_tokens: int | None = None,
        device: str | None = None,
        dtype: str = "fp32",
        revision: str | None = None,
    ) -> None:
        super().__init__(
            name,
            max_length=max_length,
            query_prefix=query_prefix,
            doc_prefix=doc_prefix,
            batch_size=batch_size,
            batch_tokens=batch_tokens,
            device=device,
            dtype=dtype,
            revision=revision,
        )
        self.pooling, self.l2_norm = self._source.pooling(pooling, l2_norm)
        if self._source.is_onnx:
            self._forward: Callable[[Any, Any], Any] = _onnx(self._source.folder)
            self.device = "cpu"
        else:
            model = self._source.model("AutoModel", self.dtype).to(self.device)
            self._forward = lambda tokens, mask: (
                model(input_ids=tokens, attention_mask=_where_padded(mask)).last_hidden_state
            )

    @cached_property
    def dimension(self) -> int:
        """The length of a vector."""
        return int(self.encode(["a"]).shape[1])

    def encode(self, texts: Sequence[str], *, side: Side = "document", progress: Progress | None = None) -> Vectors:
        """The texts' vectors, float32 (n, dimension), in their order; `progress` hears how many more are done."""
        import torch

        ids = self._token_ids(texts, side)
        if not ids:
            return np.zeros((0, self.dimension), dtype=np.float32)
        out: Vectors | None = None
        with torch.inference_mode():
            for rows, tokens, mask in self._batches(ids):
                states = self._forward(tokens, mask).float()
                if self.pooling == "cls":
                    pooled = states[:, 0]
                elif self.pooling == "last":
                    pooled = states[torch.arange(len(rows), device=states.device), mask.sum(1).clamp(min=1) - 1]
                else:
                    weight = mask.unsqueeze(-1).to(states.dtype)
                    pooled = (states * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
                if self.l2_norm:
                    pooled = torch.nn.functional.normalize(pooled, dim=1)
                if out is None:
                    out = np.empty((len(ids), pooled.shape[1]), dtype=np.float32)
                out[rows] = pooled.cpu().numpy()
                if progress is not None:
                    progress(len(rows))
        assert out is not None
        return out

    def describe(self) -> dict[str, Any]:
        """Name, content and settings of this encoder, as plain values."""
        return {**super().describe(), "pooling": self.pooling, "l2_norm": self.l2_norm, "dimension": self.dimension}


class SpladeEncoder(_TransformerEncoder):
    """A masked language model whose vocabulary scores, log(1 + max(0, x)) at their highest token, weigh a text's terms.

    Terms are the vocabulary's own strings. `max_terms` keeps the heaviest terms of a text only (ties by
    vocabulary order). Queries and documents are encoded alike but for their prefixes. Source: SPLADE v2,
    arXiv 2109.10086, equation 5.
    """

    kind: Literal["dense", "sparse"] = "sparse"

    def __init__(
        self,
        name: str | Path,
        *,
        max_terms: int | None = None,
        query_prefix: str | None = None,
        doc_prefix: str | None = None,
        max_length: int | None = None,
        batch_size: int = 32,
        batch_tokens: int | None = None,
        device: str | None = None,
        dtype: str = "fp32",
        revision: str | None = None,
    ) -> None:
        if max_terms is not None and max_terms < 1:
            raise BadArgument(f"max_terms must be at least 1, got {max_terms}")
        super().__init__(
            name,
            max_length=max_length,
            query_prefix=query_prefix,
            doc_prefix=doc_prefix,
            batch_size=batch_size,
            batch_tokens=batch_tokens or (CPU_TOKENS // 2 if device in (None, "cpu") else None),
            device=device,
            dtype=dtype,
            revision=revision,
        )
        self._source.check_splade()
        self.max_terms = max_terms
        self._model = self._source.model("AutoModelForMaskedLM", self.dtype).to(self.device)
        self._terms: list[str] = self._tokenizer.convert_ids_to_tokens(list(range(len(self._tokenizer))))

    def encode(
        self, texts: Sequence[str], *, side: Side = "document", progress: Progress | None = None
    ) -> list[dict[str, float]]:
        """The texts' term weights, in their order, each above 0, heaviest first; a text may have none."""
        import torch

        ids = self._token_ids(texts, side)
        out: list[dict[str, float]] = [{} for _ in ids]
        with torch.inference_mode():
            for rows, tokens, mask in self._batches(ids):
                padded = _where_padded(mask)
                logits = self._model(input_ids=tokens, attention_mask=padded).logits
                if padded is not None:
                    logits = logits.masked_fill(mask.unsqueeze(-1) == 0, -torch.inf)
                highest = logits.amax(1).float()  # the transform only rises, so it may follow the maximum
                weights = torch.log1p(torch.relu(highest)).cpu().numpy()[:, : len(self._terms)]
                for position, row in zip(rows, weights, strict=True):
                    kept = np.flatnonzero(row)
                    kept = kept[np.argsort(-row[kept], kind="stable")][: self.max_terms]
                    out[position] = {self._terms[i]: w for i, w in zip(kept.tolist(), row[kept].tolist(), strict=True)}
                if progress is not None:
                    progress(len(rows))
        return out

    def describe(self) -> dict[str, Any]:
        """Name, content and settings of this encoder, as plain values."""
        return {**super().describe(), "max_terms": self.max_terms}


class PyseriniQuery:
    """An encoder in the shape Pyserini's own searchers call: `encode(str)`.

    A float32 vector for a `FaissSearcher`; for a `LuceneImpactSearcher` weights times `quantise` as whole numbers,
    since that one cuts fractions off without a word.
    """

    def __init__(self, encoder: Encoder, *, quantise: int = 100) -> None:
        self.encoder = encoder
        self.quantise = quantise

    def encode(self, text: str, **_: Any) -> Any:
        """Encode one query."""
        encoded = self.encoder.encode([text], side="query")[0]
        return encoded if self.encoder.kind == "dense" else quantised(encoded, self.quantise)


def quantised(weights: dict[str, float], factor: int) -> dict[str, int]:
    """Term weights times `factor`, rounded to whole numbers; terms that round to 0 are gone."""
    whole = {term: round(weight * factor) for term, weight in weights.items()}
    return {term: weight for term, weight in whole.items() if weight > 0}


# -- what a model's files say -------------------------------------------------------------------------------


class _Source:
    """A model by short name, folder or hub id, and what the files beside its weights say."""

    def __init__(self, name: str, revision: str | None) -> None:
        from pd_rerank.embedded import EMBEDDED, resolve_model

        self.name = name
        self.path = resolve_model(name)
        self.revision = revision
        self.folder = Path(self.path).expanduser()
        self.is_folder = self.folder.is_dir()
        self.is_onnx = self.is_folder and (self.folder / "model.onnx").is_file() and not self._has("config.json")
        self._tokens_of = resolve_model("all-minilm-l6-v2") if self.is_onnx and name in EMBEDDED else self.path
        if not self.is_folder and (self.folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1):
            raise MissingResource(f"no model folder {name}")
        self._out_of_reach = False
        self.modules = self._modules()
        if self.is_folder and not self.is_onnx and not self._has(f"{self._inner}config.json"):
            raise MissingResource(f"{self.path} is no model folder: it has no {self._inner}config.json")
        sentence = self._json(f"{self._inner}sentence_bert_config.json") or {}
        self.lower_case = bool(sentence.get("do_lower_case"))
        self._sentence = sentence

    def _has(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def _json(self, name: str) -> Any:
        path = self._file(name)
        if path is None:
            return None
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelMismatch(f"{path} is not JSON: {error}") from error

    def _file(self, name: str) -> Path | None:
        """A file of the model, fetched from the hub if it is there; None if the model has no such file."""
        folder = Path(self._tokens_of)
        if folder.is_dir():
            return folder / name if (folder / name).is_file() else None
        hub = need("huggingface_hub", extra="hf", purpose=f"'{self.name}' is no folder and would come from the hub")
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        cached = hub.try_to_load_from_cache(self.path, name, revision=self.revision)
        if isinstance(cached, str):
            return Path(cached)
        if self._out_of_reach:
            return None
        try:
            return Path(hub.hf_hub_download(self.path, name, revision=self.revision))
        except LocalEntryNotFoundError as error:
            self._out_of_reach = True
            if isinstance(hub.try_to_load_from_cache(self.path, "config.json", revision=self.revision), str):
                return None  # the model was cached without this file
            raise MissingResource(
                f"'{self.name}' is no folder, no short name{self._near()} and not in the hub's cache, and the hub does "
                "not answer"
            ) from error
        except EntryNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise MissingResource(
                f"'{self.name}' is no folder, no short name{self._near()}, and the hub has no such model: {error}"
            ) from error

    def _near(self) -> str:
        from pd_rerank.embedded import EMBEDDED

        near = difflib.get_close_matches(self.name, EMBEDDED, n=2)
        return f" (near ones: {', '.join(near)})" if near else ""

    def _modules(self) -> list[tuple[str, str]]:
        """(kind, folder) of each module a sentence-transformers model lists; empty for a plain one."""
        listed = self._json("modules.json") or []
        self._inner = ""
        modules = [(str(module["type"]).rpartition(".")[2], str(module.get("path") or "")) for module in listed]
        if modules and modules[0][0] in ("Transformer", "MLMTransformer") and modules[0][1]:
            self._inner = modules[0][1] + "/"
        return modules

    def kind(self) -> Literal["dense", "sparse"]:
        kinds = {kind for kind, _ in self.modules}
        if kinds:
            return "sparse" if "SpladePooling" in kinds else "dense"
        config = {} if self.is_onnx else self._json("config.json") or {}
        masked = any(str(a).endswith("ForMaskedLM") for a in config.get("architectures") or ())
        return "sparse" if masked and "splade" in self.name.lower() else "dense"

    def family(self) -> Family | None:
        """The known family, by the last part of the name that one of the patterns fits."""
        for part in reversed(re.split(r"[/\\]|--", self.name.lower())):
            for pattern, family in FAMILIES.items():
                if re.fullmatch(pattern, part):
                    return family
        return None

    def prompts(self) -> dict[str, str]:
        """The prefixes of queries and documents that the files, else the family, ask for."""
        listed = (self._json("config_sentence_transformers.json") or {}).get("prompts") or {}
        family = self.family()
        document = listed.get("document", listed.get("passage"))
        return {
            "query": listed.get("query") or (family.query_prefix if family else ""),
            "document": document or (family.doc_prefix if family else ""),
        }

    def pooling(self, pooling: Pooling | None, l2_norm: bool | None) -> tuple[Pooling, bool]:
        """How tokens are pooled and whether vectors are normalised: as given, as the files say, as the family does."""
        said, normalised = self._modules_say() if self.modules else (None, None)
        family = self.family()
        if family is not None:
            said = said or family.pooling
            normalised = family.l2_norm if normalised is None else normalised
        chosen = pooling or said
        if chosen is None:
            raise BadArgument(
                f"neither the files of '{self.name}' nor its name say how tokens are pooled; give pooling cls or mean, "
                "and l2_norm, as its model card has them"
            )
        if chosen not in ("cls", "mean", "last"):
            raise BadArgument(f"unknown pooling '{chosen}'; choose cls, mean or last")
        return chosen, bool(normalised) if l2_norm is None else l2_norm

    def _modules_say(self) -> tuple[Pooling | None, bool]:
        pooling: Pooling | None = None
        normalised = False
        for kind, folder in self.modules:
            if kind == "Pooling":
                pooling = self._pooling_config(folder)
            elif kind == "Normalize":
                normalised = True
            elif kind != "Transformer":
                raise ModelMismatch(
                    f"'{self.name}' has a module '{kind}', which is not supported here: Transformer, Pooling and "
                    "Normalize are"
                )
        return pooling, normalised

    def _pooling_config(self, folder: str) -> Pooling:
        config = self._json(f"{folder}/config.json") or {}
        mode = config.get("pooling_mode")
        modes = [mode] if isinstance(mode, str) else list(mode or ())
        start = "pooling_mode_"
        modes += [key.removeprefix(start) for key, on in config.items() if key.startswith(start) and on]
        known: dict[str, Pooling] = {
            "cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean", "lasttoken": "last",
        }  # fmt: skip
        if len(modes) != 1 or modes[0] not in known:
            raise ModelMismatch(f"'{self.name}' pools by {' and '.join(modes) or 'nothing'}; cls, mean, last are known")
        if config.get("include_prompt") is False and any(self.prompts().values()):
            raise ModelMismatch(f"'{self.name}' leaves its prompts out of the pooling, which is not supported here")
        return known[modes[0]]

    def check_splade(self) -> None:
        """Refuse a model whose files ask for another reading than maximum over tokens of log(1 + relu)."""
        if self.is_onnx:
            raise ModelMismatch(f"'{self.name}' is an ONNX model of token states; a sparse encoder needs term scores")
        for kind, folder in self.modules:
            if kind not in ("Transformer", "MLMTransformer", "SpladePooling"):
                raise ModelMismatch(f"'{self.name}' has a module '{kind}'; MLMTransformer, SpladePooling are known")
            if kind == "SpladePooling":
                config = self._json(f"{folder}/config.json") or {}
                asked = config.get("pooling_strategy", "max"), config.get("activation_function", "relu")
                if asked != ("max", "relu"):
                    raise ModelMismatch(f"'{self.name}' pools by {asked[0]} of {asked[1]}; max of relu is supported")

    def tokenizer(self) -> Any:
        import transformers

        place, options = (self._tokens_of, {}) if self.is_onnx else self._place()
        with _quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(place, **options)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def model(self, kind: str, dtype: Any) -> Any:
        import transformers

        place, options = self._place()
        with _quiet():
            return getattr(transformers, kind).from_pretrained(place, dtype=dtype, **options).eval()

    def _place(self) -> tuple[str, dict[str, Any]]:
        if self.is_folder:
            return str(self.folder / self._inner), {}
        options = {"revision": self.revision} if self.revision else {}
        return self.path, options | ({"subfolder": self._inner.rstrip("/")} if self._inner else {})

    def max_length(self, tokenizer: Any) -> int:
        """Longest text in tokens: as sentence-transformers' file says, else what tokeniser and positions allow."""
        said = self._sentence.get("max_seq_length")
        config = self._json(f"{self._inner}config.json") or {}
        limits = [said] if said else [tokenizer.model_max_length, config.get("max_position_embeddings") or 512]
        return int(min(limits))

    def identity(self) -> dict[str, Any]:
        """The commit of a hub model, or the SHA-256 of a folder's weights."""
        if not self.is_folder:
            found = self._file("config.json")
            return {"revision": found.parent.name if found else self.revision}
        folder = self.folder / self._inner
        weights = sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".onnx"))
        wanted = [p for p in weights if p.suffix == ".safetensors"] or weights
        return {"weights_sha256": {path.name: sha256_file(path) for path in wanted}}


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' load bars and reports (a head left out, say) off stderr; errors still come through."""
    from transformers.utils import logging as report

    level, bars = report.get_verbosity(), report.is_progress_bar_enabled()
    report.set_verbosity_error()
    report.disable_progress_bar()
    try:
        yield
    finally:
        report.set_verbosity(level)
        if bars:
            report.enable_progress_bar()


def _where_padded(mask: Any) -> Any:
    """The mask, or None for a batch without padding: attention is faster without one."""
    return None if bool(mask.all()) else mask


def _dtype(name: str) -> Any:
    import torch

    known = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if name not in known:
        raise BadArgument(f"unknown dtype '{name}'; choose fp32, bf16 or fp16")
    return known[name]


def _onnx(folder: Path) -> Callable[[Any, Any], Any]:
    """The token states of an ONNX model, as a function of token ids and mask."""
    onnxruntime = need("onnxruntime", extra="pools", purpose=f"{folder}/model.onnx runs on onnxruntime")
    import torch

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(
        str(folder / "model.onnx"), sess_options=options, providers=["CPUExecutionProvider"]
    )
    names = {entry.name for entry in session.get_inputs()}

    def forward(tokens: Any, mask: Any) -> Any:
        feed = {
            "input_ids": tokens.cpu().numpy(),
            "attention_mask": mask.cpu().numpy(),
            "token_type_ids": np.zeros(tuple(tokens.shape), dtype=np.int64),
        }
        return torch.from_numpy(session.run(None, {name: feed[name] for name in names})[0])

    return forward
