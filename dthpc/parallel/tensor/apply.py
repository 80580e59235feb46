"""Splits a model's layers over tensor-parallel ranks, in place, as its plan says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dthpc.errors import UserError
from dthpc.parallel.mesh import Mesh
from dthpc.parallel.parts import Parts
from dthpc.parallel.tensor.axis import TensorAxis
from dthpc.parallel.tensor.functions import gather_whole, split
from dthpc.parallel.tensor.linear import ColumnLinear, RowLinear, SharedInput
from dthpc.parallel.tensor.plan import check_coverage, roles_of, wrong
from dthpc.parallel.tensor.vocab import VocabEmbedding, VocabHead

PARENTS = ("attention", "shared_input")


def split_tensors(chunks: Sequence[nn.Module], parts: Parts, mesh: Mesh, sequence_parallel: bool) -> None:
    """Leave on each tensor-parallel rank its part of every layer that the model's plan splits.

    Modules keep their names, and so do parameters, on the meta device or with their values. Widths and vocabularies
    that do not divide are split unevenly, the first ranks getting one more.

    Args:
        chunks: this rank's part of the model; changed in place. Each declares `tensor_plan`.
        parts: what each parameter is; changed in place. Parameters of split layers are new objects.
        mesh: the axes; nothing is done where its tensor-parallel degree is 1.
        sequence_parallel: whether the sequence is split between matrices.

    Raises:
        UserError: no plan, or one that does not fit the model; heads that do not divide; a width below the degree.
    """
    if mesh.size("tp") == 1:
        return
    splitter = _Splitter(TensorAxis.of(mesh, sequence_parallel), parts)
    for chunk in chunks:
        splitter.split(chunk, roles_of(chunk, splitter.axis.size))
    splitter.finish(chunks)


class _Splitter:
    """Replaces layers, and keeps account of which new parameter stands for which old one."""

    def __init__(self, axis: TensorAxis, parts: Parts) -> None:
        self.axis = axis
        self.parts = parts
        self.taken: dict[nn.Parameter, nn.Parameter] = {}
        self.partial: set[nn.Parameter] = set()

    def split(self, chunk: nn.Module, roles: dict[str, str]) -> None:
        """Treat all modules of a chunk by their roles."""
        modules = {name: chunk.get_submodule(name) for name in roles}
        for name, role in roles.items():
            if role == "attention":
                self._check_heads(name, modules[name], roles)
        check_coverage(chunk, roles, self.axis.sequence_parallel)
        for name, role in roles.items():
            self._treat(chunk, name, modules[name], role)
        for name, role in roles.items():
            if role in PARENTS:
                self._share_input(modules[name])

    def finish(self, chunks: Sequence[nn.Module]) -> None:
        """Write the parts anew, in their old order; a weight that only some of its users split is refused."""
        old = [(self.taken.get(parameter, parameter), part) for parameter, part in self.parts.items()]
        self.parts.clear()
        first = self.axis.index == 0
        for parameter, part in old:
            whole = part.dim is None
            partial = part.partial or parameter in self.partial
            self.parts[parameter] = part.but(partial=partial, counts=part.counts and (first or not whole))
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if parameter not in self.parts:
                    raise UserError(
                        "this weight is also used by a layer that the tensor plan splits, but not here",
                        key="tensor_plan",
                        value=name,
                        instead="give both layers a role, such as vocab_embedding and vocab_head, or neither",
                    )

    def _treat(self, chunk: nn.Module, name: str, module: nn.Module, role: str) -> None:
        if role in ("column", "row", "vocab_head"):
            _replace(chunk, name, self._linear(name, module, role))
        elif role == "vocab_embedding":
            _replace(chunk, name, self._embedding(name, module))
        elif role == "inner":
            self.partial.update(module.parameters())
        elif self.axis.sequence_parallel:
            self._enter_sequence(module, role)

    def _linear(self, name: str, module: nn.Module, role: str) -> nn.Module:
        if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
            raise wrong(name, role, "is for torch.nn.Linear", module)
        if role == "row":
            weight = self._take(name, module.weight, 1)
            if module.bias is not None and self.axis.sequence_parallel:
                self.partial.add(module.bias)
            return RowLinear(self.axis, weight, module.bias)
        weight = self._take(name, module.weight, 0)
        bias = None if module.bias is None else self._take(f"{name}.bias", module.bias, 0)
        if role == "column":
            return ColumnLinear(self.axis, weight, bias)
        return VocabHead(self.axis, weight, bias, module.out_features)

    def _embedding(self, name: str, module: nn.Module) -> nn.Module:
        if not isinstance(module, nn.Embedding) or module.max_norm is not None or module.sparse:
            raise wrong(name, "vocab_embedding", "is for torch.nn.Embedding without max_norm and sparse", module)
        if module.scale_grad_by_freq:
            raise wrong(name, "vocab_embedding", "is for torch.nn.Embedding without scale_grad_by_freq", module)
        weight = self._take(name, module.weight, 0)
        return VocabEmbedding(self.axis, weight, module.num_embeddings, module.padding_idx)

    def _take(self, name: str, parameter: Any, dim: int) -> nn.Parameter:
        """The new parameter that holds this rank's share of `parameter` along a dimension."""
        if parameter in self.taken:
            if self.parts[parameter].dim != dim:
                raise UserError(
                    "two layers share this weight, and the tensor plan splits it in two ways",
                    key="tensor_plan",
                    value=name,
                    instead="roles that agree, such as vocab_embedding and vocab_head",
                )
            return self.taken[parameter]
        total = parameter.shape[dim]
        if total < self.axis.size:
            raise UserError(
                f"{name} has a width of {total}, which cannot be split among {self.axis.size} tensor-parallel ranks",
                key="parallel.tp",
                value=self.axis.size,
                instead=f"parallel.tp={total} or less",
            )
        start, size = self.axis.share(total)
        values = parameter.detach().narrow(dim, start, size)
        values = (
            torch.empty_like(values, memory_format=torch.contiguous_format) if parameter.is_meta else values.clone()
        )
        fresh = nn.Parameter(values.contiguous(), parameter.requires_grad)
        self.taken[parameter] = fresh
        self.parts[parameter] = self.parts[parameter].but(dim=dim, start=start, size=size)
        return fresh

    def _check_heads(self, name: str, module: nn.Module, roles: dict[str, str]) -> None:
        """Refuse heads that cannot stay whole; tell the module which are its own."""
        head_dim: Any = getattr(module, "head_dim", None)
        columns = [child for child in module._modules if roles.get(f"{name}.{child}") == "column"]
        if not isinstance(head_dim, int) or len(columns) < 2:
            raise wrong(name, "attention", "is for a module with `head_dim` and several `column` children", module)
        for child in columns:
            width: Any = module.get_submodule(child).out_features
            heads = width // head_dim
            if width != heads * head_dim or heads % self.axis.size:
                divisors = [degree for degree in range(1, self.axis.size) if heads % degree == 0]
                raise UserError(
                    f"{name}.{child} makes {heads} heads, which do not divide among {self.axis.size} ranks",
                    key="parallel.tp",
                    value=self.axis.size,
                    instead=f"parallel.tp={divisors[-1]}",
                )
        queries: Any = module.get_submodule(columns[0]).out_features
        module.first_head = self.axis.index * (queries // head_dim // self.axis.size)

    def _share_input(self, module: nn.Module) -> None:
        columns = [child for child in module.children() if type(child) is ColumnLinear]
        if len(columns) > 1:
            shared = SharedInput(columns)
            for column in columns:
                column.shared = shared

    def _enter_sequence(self, module: nn.Module, role: str) -> None:
        """What sequence parallelism changes at a module that is not split."""
        axis = self.axis
        if role == "sequence":
            self.partial.update(module.parameters())
            inside: list[Any] = [part for part in module.modules() if hasattr(part, "shard")]
            for part in inside:
                part.shard = (1, axis.index, axis.size)
        elif role == "scatter":
            module.register_forward_hook(lambda _module, _args, output: split(output, axis))
        elif role == "gather":
            module.register_forward_pre_hook(lambda _module, args: (gather_whole(args[0], axis), *args[1:]))


def _replace(chunk: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    chunk.get_submodule(parent)._modules[child] = module
