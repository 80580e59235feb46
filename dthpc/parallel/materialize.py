"""The first values of a rank's parts: those of the whole model, whatever the layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dthpc.models.init import InitByName, named_seed
from dthpc.parallel.parts import Part, Parts


def is_meta(module: nn.Module) -> bool:
    """Whether a model was built without memory, to be filled by name once it is clear which parts a rank holds."""
    return any(parameter.is_meta for parameter in module.parameters())


@torch.no_grad()
def fill(chunks: Sequence[nn.Module], parts: Parts, seed: int, device: torch.device) -> None:
    """Give every part its first values, on its device.

    Parameters on the meta device get memory for their part alone and are drawn from (seed, global name); the whole
    parameter exists only while it is drawn, on the CPU. Parameters that hold values keep them.

    Args:
        chunks: this rank's part of the model; one built on the meta device fills itself by name (`InitByName`).
        parts: what each parameter is.
        seed: of the run.
        device: where the rank computes.
    """
    by_name = [chunk for chunk in chunks if isinstance(chunk, InitByName)]
    drawn = {parameter: chunk for chunk in by_name for parameter in chunk.parameters() if parameter.is_meta}
    for module in chunks:
        _allocate(module, device)
    for parameter, chunk in drawn.items():
        parameter.copy_(slice_of(_draw(chunk, parts[parameter], seed), parts[parameter]))


def slice_of(whole: Tensor, part: Part) -> Tensor:
    """The part of a whole parameter, as a view."""
    if part.dim is None or part.size is None:
        return whole
    return whole.narrow(part.dim, part.start, part.size)


def broadcast_values(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Give all ranks the first one's parameters and buffers; collective.

    For models that draw their own values, as they like, when they are built.
    """
    if group is None:
        return
    source = dist.get_global_rank(group, 0)
    tensors = [*model.parameters(), *model.buffers()]
    works = [dist.broadcast(tensor.detach(), source, group=group, async_op=True) for tensor in tensors]
    for work in works:
        if work is not None:
            work.wait()


def _draw(model: InitByName, part: Part, seed: int) -> Tensor:
    whole = torch.empty(part.shape, dtype=torch.float32, device="cpu")
    model.init_parameter(part.name, whole, torch.Generator(device="cpu").manual_seed(named_seed(seed, part.name)))
    return whole


def _allocate(chunk: nn.Module, device: torch.device) -> None:
    """Move a chunk to its device in place: its parameters stay the same objects, which `parts` and optimizers know."""
    emptied = is_meta(chunk)
    for module in chunk.modules():
        for parameter in module.parameters(recurse=False):
            # Swapping what a parameter holds keeps its identity; `Module.to_empty` would not.
            if parameter.is_meta:
                fresh = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
                torch.utils.swap_tensors(parameter, fresh)  # type: ignore[no-untyped-call]
            elif parameter.device != device:
                parameter.data = parameter.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
    if emptied:
        reset = getattr(chunk, "reset_buffers", None)
        if reset is not None:
            reset()
