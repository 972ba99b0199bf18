"""Models and tokenizers from folders and the hub, and the choice of precision, device and attention for them."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pd_rerank._extras import need
from pd_rerank.embedded import hub_answers, resolve_model
from pd_rerank.engines.adapters import Adapter, is_adapter_folder, open_adapter
from pd_rerank.errors import BadArgument, EngineFailure, InvalidData, MissingResource, ModelMismatch, PdRerankError

_DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A base model, its tokenizer, the adapter yet to be put on it, and where it came from (None: an object)."""

    model: Any
    tokenizer: Any
    adapter: Adapter | None
    folder: str | None


def load_named(
    name: str,
    *,
    adapter: str | None,
    tokenizer: Any,
    dtype: Any,
    device: Any,
    device_map: Any,
    revision: str | None,
    adapter_revision: str | None,
    attn_implementation: str | None,
    trust_remote_code: bool,
    model_kwargs: Mapping[str, Any],
    tokenizer_kwargs: Mapping[str, Any],
    quiet: bool,
) -> Loaded:
    """Load a model by short name, folder or hub id; the name of an adapter alone brings the base it was trained on.

    Without `tokenizer` (an object, folder or hub id) the adapter's own is taken, if it has one, else the base's.
    """
    import torch

    loader = _Loader(revision=revision, trust_remote_code=trust_remote_code)
    place = os.path.expanduser(resolve_model(name, quiet=quiet))
    if loader.is_adapter(place):
        if adapter is not None:
            raise BadArgument(f"'{place}' is itself an adapter; give its base as the model, or leave adapter away")
        adapter, adapter_revision = place, revision
        place = loader.base_of(place)
    opened = None
    if adapter is not None:
        opened = open_adapter(adapter, revision=adapter_revision, local_only=loader.local_only(adapter))
    target = None if device_map is not None else chosen_device(torch, device)
    model = loader.model(
        place,
        dtype=dtype,
        device=target,
        device_map=device_map,
        attn_implementation=attn_implementation,
        more=model_kwargs,
    )
    if tokenizer is None:
        own = opened is not None and (opened.folder / "tokenizer_config.json").is_file()
        tokenizer = str(opened.folder) if opened is not None and own else place
    if isinstance(tokenizer, str | os.PathLike):
        tokenizer = loader.tokenizer(os.fspath(tokenizer), more=tokenizer_kwargs)
    elif tokenizer_kwargs:
        raise BadArgument("a tokenizer object is already loaded: tokenizer_kwargs do not apply")
    return Loaded(model=model, tokenizer=tokenizer, adapter=opened, folder=place)


def load_tokenizer(
    name: str,
    *,
    tokenizer: Any = None,
    adapter: Adapter | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    quiet: bool = False,
) -> tuple[Any, Any, str]:
    """A model's tokenizer, its transformers config (None where there is none) and its place, without its weights.

    `name` is a short name, folder or hub id; `tokenizer` another one, or an object. The adapter's own goes first.
    """
    need("transformers", extra="hf", purpose="prompts are made with the model's tokenizer, which transformers loads")
    loader = _Loader(revision=revision, trust_remote_code=trust_remote_code)
    place = os.path.expanduser(resolve_model(name, quiet=quiet))
    if tokenizer is None:
        own = adapter is not None and (adapter.folder / "tokenizer_config.json").is_file()
        tokenizer = str(adapter.folder) if adapter is not None and own else place
    if isinstance(tokenizer, str | os.PathLike):
        tokenizer = loader.tokenizer(os.fspath(tokenizer), more={})
    folder = Path(place)
    config = None if folder.is_dir() and not (folder / "config.json").is_file() else loader.config(place)
    return tokenizer, config, place


def take_object(
    model: Any,
    *,
    adapter: str | None,
    tokenizer: Any,
    dtype: Any,
    device: Any,
    adapter_revision: str | None,
    attn_implementation: str | None,
    trust_remote_code: bool,
) -> Loaded:
    """Take a model object as it is, but for what is asked: precision, device, attention that knows its soft cap."""
    loader = _Loader(revision=None, trust_remote_code=trust_remote_code)
    if dtype is not None:
        model.to(dtype)
    if device is not None:
        import torch

        model.to(chosen_device(torch, device))
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    now = getattr(base.config, "_attn_implementation", None)
    attention = _attention(base.config.get_text_config(), attn_implementation, now=now)
    if attention is not None and attention != now:
        base.set_attn_implementation(attention)
    if isinstance(tokenizer, str | os.PathLike):
        tokenizer = loader.tokenizer(os.fspath(tokenizer), more={})
    opened = None
    if adapter is not None:
        opened = open_adapter(adapter, revision=adapter_revision, local_only=loader.local_only(adapter))
    return Loaded(model=model, tokenizer=tokenizer, adapter=opened, folder=None)


@dataclass(slots=True, kw_only=True)
class _Loader:
    """Loads from folders and the hub; a failure is said in one line with its cure, and chained."""

    revision: str | None
    trust_remote_code: bool
    _hub_is_up: bool | None = None

    def local_only(self, source: str) -> bool:
        """Whether to stay off the network: a folder needs none, and an unreachable hub costs a minute of retries."""
        if Path(source).expanduser().is_dir() or _offline():
            return True
        if self._hub_is_up is None:
            self._hub_is_up = hub_answers()
        return not self._hub_is_up

    def is_adapter(self, source: str) -> bool:
        """Whether `source` (folder or hub id) holds an adapter instead of a model."""
        if Path(source).is_dir():
            return is_adapter_folder(source)
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

        def holds(name: str) -> bool:
            try:
                hf_hub_download(source, name, revision=self.revision, local_files_only=self.local_only(source))
            except (OSError, ValueError, EntryNotFoundError, HfHubHTTPError):  # loading it will say what is wrong
                return False
            return True

        return not holds("config.json") and holds("adapter_config.json")

    def base_of(self, source: str) -> str:
        """The base model an adapter names, which must be there or on the hub."""
        adapter = open_adapter(source, revision=self.revision, local_only=self.local_only(source))
        base = adapter.base
        if base is None:
            raise MissingResource(
                f"the adapter '{source}' names no base model; give the base as model, this as adapter"
            )
        if (base.startswith(("/", ".", "~")) or base.count("/") > 1) and not Path(base).expanduser().is_dir():
            raise MissingResource(
                f"the adapter '{source}' was trained on '{base}', which is not here; give the base as model and "
                f"'{source}' as adapter"
            )
        self.revision = adapter.settings.get("revision")
        return resolve_model(base)

    def model(
        self,
        source: str,
        *,
        dtype: Any,
        device: Any,
        device_map: Any,
        attn_implementation: str | None,
        more: Mapping[str, Any],
    ) -> Any:
        """Load a causal language model, onto `device` unless `device_map` places it."""
        import torch
        import transformers

        folder = Path(source).expanduser()
        if folder.is_dir() and not (folder / "config.json").is_file():
            raise MissingResource(f"{folder} holds no config.json, so it is no model folder")
        with self._explained(source), no_bars():
            config = transformers.AutoConfig.from_pretrained(source, **self._common(source), **_only(more, "subfolder"))
            kinds = getattr(config, "architectures", None) or []
            if kinds and all(kind.endswith("Classification") for kind in kinds):  # its head would be made up of noise
                raise ModelMismatch(
                    f"'{source}' is a classifier ({kinds[0]}) and has no output head to read grades from; give the "
                    "causal language model it was made of"
                )
            text = config.get_text_config()
            how: dict[str, Any] = {"config": config, "dtype": _choose_dtype(torch, dtype, device, text), **more}
            attention = _attention(text, attn_implementation)
            if attention is not None:
                how["attn_implementation"] = attention
            if device_map is not None:
                how["device_map"] = device_map
            model = transformers.AutoModelForCausalLM.from_pretrained(source, **self._common(source), **how)
            if device is not None:
                model.to(device)
        return model.eval()

    def config(self, source: str) -> Any:
        """Load a model's configuration."""
        import transformers

        with self._explained(source):
            return transformers.AutoConfig.from_pretrained(source, **self._common(source))

    def tokenizer(self, source: str, *, more: Mapping[str, Any]) -> Any:
        """Load a tokenizer; without a padding token it pads with its end token, and nothing is resized."""
        import transformers

        with self._explained(source):
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, **self._common(source), **more)
        if tokenizer.pad_token is None and tokenizer.eos_token is not None:
            tokenizer.pad_token = tokenizer.eos_token
        # Long texts are tokenised on purpose, to be cut to fit; the warning about them would reach stderr.
        getattr(tokenizer, "deprecation_warnings", {})["sequence-length-is-longer-than-the-specified-maximum"] = True
        return tokenizer

    def _common(self, source: str) -> dict[str, Any]:
        how: dict[str, Any] = {
            "trust_remote_code": self.trust_remote_code,
            "local_files_only": self.local_only(source),
        }
        if self.revision is not None and not Path(source).is_dir():
            how["revision"] = self.revision
        return how

    @contextmanager
    def _explained(self, source: str) -> Iterator[None]:
        try:
            yield
        except PdRerankError:
            raise
        except OSError as error:
            raise MissingResource(self._absent(source, error)) from error
        except ValueError as error:
            if "trust_remote_code" in str(error):
                raise BadArgument(
                    f"'{source}' runs code of its own; read that code, then pass trust_remote_code=True"
                ) from error
            raise ModelMismatch(f"'{source}' cannot be loaded as a causal language model: {_line(error)}") from error
        except Exception as error:
            if out_of_memory(error):
                raise EngineFailure(
                    f"'{source}' does not fit into memory; load it in a smaller dtype (bfloat16), over several devices "
                    "(device_map='auto'), or take a smaller model"
                ) from error
            if type(error).__name__ == "SafetensorError":
                raise InvalidData(f"a weight file of '{source}' is damaged ({_line(error)}); fetch it again") from error
            raise

    def _absent(self, source: str, error: OSError) -> str:
        folder = Path(source).expanduser()
        if folder.is_dir():
            return f"the model folder {folder} lacks a file: {_line(error)}"
        if folder.is_absolute() or source.startswith((".", "~")):
            return f"no model folder {folder}; check the path"
        fetch = f"fetch it once where there is a network (hf download {source}), or give a folder"
        if _offline():
            return f"the model '{source}' is not in the hub's cache, and offline mode is on (HF_HUB_OFFLINE); {fetch}"
        if not self._hub_is_up:
            return f"the model '{source}' is not in the hub's cache, and the hub does not answer; {fetch}"
        return (
            f"the hub has no '{source}' for you: {_line(error)}; check the name, and 'hf auth login' for gated models"
        )


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out; torch says so in a class of its own only on some devices."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


def _attention(text_config: Any, asked: str | None, *, now: str | None = None) -> str | None:
    """The attention to set, or None to leave it: `sdpa` ignores or refuses a soft cap, so such models get `eager`."""
    if not getattr(text_config, "attn_logit_softcapping", None):
        return asked
    if asked == "sdpa":
        raise BadArgument(
            "this model soft-caps its attention logits, which 'sdpa' cannot do; use attn_implementation='eager'"
        )
    return asked or ("eager" if now in (None, "sdpa") else None)


def named_dtype(torch: Any, given: Any) -> Any:
    """A torch dtype, or None for auto."""
    if given is None or given == "auto":
        return None
    if isinstance(given, torch.dtype):
        return given
    name = _DTYPES.get(str(given).removeprefix("torch."))
    if name is None:
        raise BadArgument(f"unknown dtype '{given}'; choose auto, {', '.join(_DTYPES)}")
    return getattr(torch, name)


def _choose_dtype(torch: Any, given: Any, device: Any, text_config: Any) -> Any:
    if given is not None:
        return given
    # With a device_map there is no device yet; without an accelerator every part of it lands on the CPU.
    place = device if device is not None else chosen_device(torch, None)
    if place.type == "cpu":
        return torch.bfloat16 if cpu_computes_bfloat16() else torch.float32
    stated = getattr(text_config, "dtype", None)
    stated = getattr(torch, stated, None) if isinstance(stated, str) else stated
    return stated if stated is not None else torch.bfloat16


def cpu_computes_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX512-BF16, AMX, Arm BF16); elsewhere float32 is faster."""
    if platform.system() != "Linux":
        return False
    try:
        words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split())
    except OSError:
        return False
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


def chosen_device(torch: Any, asked: Any) -> Any:
    """The device asked for; None and "auto" are the first accelerator there is, else the CPU."""
    if asked is not None and asked != "auto":
        try:
            device = torch.device(asked)
        except RuntimeError as error:
            raise BadArgument(f"unknown device '{asked}'; choose cpu, cuda, cuda:0, mps …") from error
        there = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
        if device.type in there and not there[device.type]():
            raise BadArgument(f"device '{asked}' is not to be had: this torch sees no {device.type} device; use cpu")
        return device
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def _only(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: options[name] for name in names if name in options}


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


@contextmanager
def no_bars() -> Iterator[None]:
    """Loading and writing bars off: they say nothing for seconds-long work and cannot be told from output."""
    from transformers.utils import logging as log

    shown = log.is_progress_bar_enabled()
    log.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            log.enable_progress_bar()
