"""The frozen base shared out among processes (fully sharded data parallelism, torch's FSDP2).

Every process keeps its part of every layer and gathers a whole layer only while it runs. The adapter is small and
stays whole in every process, so that optimizer, checkpoints and what goes on from them are those of any other run; its
gradients are averaged once per step. A layer is gathered by all processes together: each has to run the model as often
as the others do, while training and while evaluating.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pd_rerank.errors import BadArgument, ModelMismatch

if TYPE_CHECKING:
    from pd_rerank.training.student import Student


class SharedBase:
    """Shares a base out among the processes of an `accelerate.Accelerator`, which are two or more."""

    def __init__(self, accelerator: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        if accelerator.num_processes < 2:
            raise BadArgument(
                "--shard-base shares the base out among processes and there is one; start several ('accelerate launch "
                "--num_processes 2', on a CPU 'torchrun --nproc_per_node 2'), or leave it out"
            )
        self._accelerator = accelerator
        self._mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))

    @contextmanager
    def turn(self) -> Iterator[None]:
        """What the processes do one after another, so that memory holds one whole base at a time."""
        ranks, rank = self._accelerator.num_processes, self._accelerator.process_index
        for _ in range(rank):
            self._accelerator.wait_for_everyone()
        yield
        for _ in range(ranks - rank):
            self._accelerator.wait_for_everyone()

    def take(self, model: Any) -> None:
        """Keep this process's part of the base of a PEFT model, on this process's device; changes it in place.

        Layers are what transformers never splits between devices; the rest is gathered as one.
        """
        from torch.distributed.fsdp import fully_shard

        base = model.get_base_model()
        kinds = set(getattr(base, "_no_split_modules", None) or ())
        layers = [module for module in model.modules() if type(module).__name__ in kinds]
        if not layers:
            raise ModelMismatch(
                f"{type(base).__name__} does not say which of its modules are layers, so it cannot be shared out; "
                "leave out --shard-base"
            )
        whole = {weight for weight in model.parameters() if weight.requires_grad}
        for weight in whole:
            weight.data = weight.data.to(self._accelerator.device)
        for module in (*layers, model):
            fully_shard(module, mesh=self._mesh, ignored_params=whole & set(module.parameters()))

    def start(self, model: Any) -> None:
        """Gather every layer once. Done first in inference mode, what is gathered into could not be trained through."""
        import torch

        with torch.no_grad():
            model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=self._accelerator.device), use_cache=False)

    def level(self, student: Student, prompt: Any, passes: tuple[int, int]) -> Any:
        """Run the model on `prompt` as often as another process will more often than this one; 0, with a gradient of 0.

        `passes` is how often this process is about to run it, with gradients and without.
        """
        import torch

        mine = torch.tensor([passes], device=self._accelerator.device)
        with_gradients, without = (self._accelerator.gather(mine).amax(dim=0) - mine[0]).tolist()
        with torch.no_grad():
            for _ in range(without):
                student.logits(prompt)
        nothing: Any = 0.0
        for _ in range(with_gradients):
            nothing = nothing + 0.0 * student.logits(prompt).sum()
        return nothing

    def average(self, weights: Mapping[str, Any]) -> None:
        """Put the mean over the processes in place of every gradient."""
        import torch

        some = [weight for weight in weights.values() if weight.grad is not None]
        flat = torch.cat([weight.grad.reshape(-1) for weight in some])
        mean = self._accelerator.reduce(flat, "mean").split([weight.numel() for weight in some])
        for weight, part in zip(some, mean, strict=True):
            weight.grad.copy_(part.view_as(weight))
