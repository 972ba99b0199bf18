"""What a training run leaves in its folder: a record of itself, a line per step, and checkpoints to go on from.

    run.json                  settings and data of the run; other ones may not go on in this folder
    steps.jsonl               one line per optimizer step
    evaluations.jsonl         one line per evaluation on held-out queries
    checkpoints/step-000200/  adapter/ (to serve), state.safetensors (to go on from) and state.json
    adapter/                  the adapter that was kept

A checkpoint is there whole or not at all: it is written beside its place, flushed to disk and renamed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pd_rerank.errors import BadArgument, EngineFailure, InvalidData
from pd_rerank.files import (
    hold_folder,
    read_json,
    read_jsonl,
    sha256_file,
    whole_file,
    whole_folder,
    write_json,
    write_jsonl,
)

logger = logging.getLogger("pd_rerank")

_RUN, _STEPS, _EVALUATIONS, _CHECKPOINTS, _ADAPTER = (
    "run.json", "steps.jsonl", "evaluations.jsonl", "checkpoints", "adapter",
)  # fmt: skip
_OURS = (_RUN, _STEPS, _EVALUATIONS, _CHECKPOINTS, _ADAPTER, "frontier.svg", "trackers")
_TENSORS, _STATE = "state.safetensors", "state.json"
_PARTS = ("parameters", "exp_avg", "exp_avg_sq")

LEARNT = ("base_fingerprint",)
"""What `RunFolder.hold_to` adds to the record."""


class RunFolder:
    """A training run's folder, held by one process at a time.

    `run` (JSON values) is what must be the same for training to go on here; a folder of another run is a
    `BadArgument` that names what differs, unless `overwrite` clears it. What a killed process left half written is
    removed. `states` checkpoints, the last ones, keep what training goes on from; older ones keep their adapter.
    """

    def __init__(self, folder: str | Path, *, run: Mapping[str, Any], overwrite: bool = False, states: int = 2) -> None:
        self.folder = Path(folder)
        self.states = states
        if self.folder.exists() and not self.folder.is_dir():
            raise BadArgument(f"{self.folder} is a file; name a folder for the training run")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadArgument(f"{self.folder} cannot be made ({error.strerror}); name another folder") from error
        self._lock = hold_folder(
            self.folder, busy=f"another process trains in {self.folder}; wait for it, or name another"
        )
        try:
            if overwrite:
                self._clear()
            self._check(json.loads(json.dumps(run)))
        except BaseException:
            self.close()
            raise
        killed = [path for name in _OURS for path in self.folder.glob(f".{name}.*")]
        for half in (*killed, *(self.folder / _CHECKPOINTS).glob(".*")):
            shutil.rmtree(half, ignore_errors=True) if half.is_dir() else half.unlink()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process have the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _clear(self) -> None:
        for name in _OURS:
            path = self.folder / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _check(self, run: dict[str, Any]) -> None:
        path = self.folder / _RUN
        if not path.is_file():
            if foreign := sorted(p.name for p in self.folder.iterdir() if not p.name.startswith(".")):
                raise BadArgument(f"{self.folder} holds '{foreign[0]}' and no training run; name another folder")
            write_json(path, run)
            return
        there = read_json(path)
        self._refuse({name: value for name, value in there.items() if name in run or name not in LEARNT}, run)

    def hold_to(self, name: str, value: Any) -> None:
        """Record what is known of the run only once its model is loaded, or refuse what differs from the record.

        `name` is one of `LEARNT`; None, where it cannot be told, holds to nothing, nor does a record without it.
        """
        there = read_json(self.folder / _RUN)
        if value is None:
            return
        if there.get(name) is None:
            write_json(self.folder / _RUN, {**there, name: value})
        else:
            self._refuse({name: there[name]}, {name: value})

    def _refuse(self, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
        if differing := list(_differences(there, here)):
            raise BadArgument(
                f"{self.folder} holds another training run ({'; '.join(differing[:5])}"
                f"{'; …' if len(differing) > 5 else ''}); name another folder, or --overwrite it"
            )

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return _place(self.folder, step)

    @property
    def adapter(self) -> Path:
        """Where the adapter is that was kept."""
        return self.folder / _ADAPTER

    def steps(self) -> list[int]:
        """The steps that can be gone on from, in order."""
        found = (self.folder / _CHECKPOINTS).glob(f"step-*/{_TENSORS}")
        return sorted(int(path.parent.name.removeprefix("step-")) for path in found)

    def save(self, step: int, tensors: Mapping[str, Any], also: Callable[[Path], None]) -> Path:
        """Write the checkpoint of a step; `also` writes the adapter into the folder it is given.

        Where it cannot be written whole, nothing of it stays, what was there before does, and the error is an
        `EngineFailure` that says how to go on.
        """
        from safetensors.torch import save

        target = self.checkpoint(step)
        try:
            with whole_folder(target, holds=(_TENSORS, _STATE, _ADAPTER)) as fresh:
                also(fresh / _ADAPTER)
                with whole_file(fresh / _TENSORS, "wb") as stream:
                    stream.write(save({name: t.detach().cpu().contiguous() for name, t in tensors.items()}))
                write_json(fresh / _STATE, {"step": step, "sha256": {_TENSORS: sha256_file(fresh / _TENSORS)}})
                _flush(fresh)
            _flush(target.parent)
        except Exception as error:
            if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":
                raise
            last = self.steps()
            kept = f"step {last[-1]} is kept" if last else "nothing is kept so far"
            raise EngineFailure(
                f"the checkpoint of step {step} could not be written to {target.parent} ({error}); {kept}: free some "
                "space and run the same command to go on from there"
            ) from error
        for old in self.steps()[: -self.states]:
            (self.checkpoint(old) / _TENSORS).unlink()
        return target

    # -- lines ----------------------------------------------------------------------------------------------------

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Forget lines and evaluations after `step`, and return the lines up to it."""
        for name in (_STEPS, _EVALUATIONS):
            path = self.folder / name
            if path.is_file():
                write_jsonl(path, [line for line in _whole_lines(path) if line["step"] <= step])
        path = self.folder / _STEPS
        return [line for _, line in read_jsonl(path)] if path.is_file() else []

    def add_step(self, line: Mapping[str, Any]) -> None:
        """Add a step's line."""
        with open(self.folder / _STEPS, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    @property
    def evaluations(self) -> Path:
        """Where the evaluations are."""
        return self.folder / _EVALUATIONS


def read_state(folder: str | Path, step: int) -> dict[str, Any]:
    """The tensors that a run's checkpoint of a step holds, on the CPU; a damaged file is `InvalidData`."""
    from safetensors.torch import load_file

    place = _place(Path(folder), step)
    want, found = read_json(place / _STATE)["sha256"][_TENSORS], sha256_file(place / _TENSORS)
    if want != found:
        raise InvalidData(
            f"{place / _TENSORS} is not what {_STATE} records; remove {place} to go on from the checkpoint before"
        )
    return dict(load_file(place / _TENSORS))


def _place(folder: Path, step: int) -> Path:
    return folder / _CHECKPOINTS / f"step-{step:06d}"


# -- what a checkpoint holds --------------------------------------------------------------------------------------


def state_of(weights: Mapping[str, Any], optimizer: Any, means: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Tensors to go on from: the weights in training, AdamW's two moments, and running means where there are any."""
    tensors: dict[str, Any] = {}
    for name, weight in weights.items():
        tensors[f"parameters.{name}"] = weight
        for part in _PARTS[1:]:
            tensors[f"{part}.{name}"] = optimizer.state[weight][part]
    return tensors | {f"means.{name}": mean for name, mean in (means or {}).items()}


def restore(
    tensors: Mapping[str, Any],
    weights: Mapping[str, Any],
    optimizer: Any,
    means: Mapping[str, Any] | None = None,
    *,
    step: int,
) -> None:
    """Put the tensors of `state_of` back in place; `step` is how many steps the optimizer has taken."""
    import torch

    wanted = {f"{part}.{name}" for name in weights for part in _PARTS} | {f"means.{name}" for name in means or {}}
    if wanted != set(tensors):
        odd = sorted(wanted ^ set(tensors))
        raise InvalidData(f"the checkpoint does not fit this model: '{odd[0]}' is in one of them only")
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(tensors[f"parameters.{name}"])
            optimizer.state[weight] = {
                "step": torch.tensor(float(step)),
                **{part: tensors[f"{part}.{name}"].to(weight.device) for part in _PARTS[1:]},
            }
        for name, mean in (means or {}).items():
            mean.copy_(tensors[f"means.{name}"])


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file whose last one a killed process may have left half written."""
    with open(path, encoding="utf-8") as stream:
        for line in stream:
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)


def _flush(folder: Path) -> None:
    """Have everything in a folder on the disk before it gets its name."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError:
            if path.is_file():  # not every file system takes this for a folder
                raise
        finally:
            os.close(handle)


def _differences(there: Any, here: Any, name: str = "") -> Iterator[str]:
    if isinstance(there, dict) and isinstance(here, dict):
        for key in sorted({*there, *here}):
            yield from _differences(there.get(key), here.get(key), f"{name}.{key}" if name else key)
    elif there != here:
        yield f"{name} is {there!r} there, {here!r} here"
