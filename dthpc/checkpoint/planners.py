"""Planners that tell torch.distributed.checkpoint which rectangles of which tensors a rank writes and reads."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dthpc.checkpoint.rectangles import Rectangle
from dthpc.checkpoint.shares import Share

_STORED_BYTES = 32 << 20
"""Largest rectangle that is stored in one piece: a reader that wants any of it loads all of it."""


class WritePlanner(DefaultSavePlanner):
    """Writes shares. torch drops what another rank writes already, and checks that chunks lie within their tensors
    and do not overlap; that they also fill them is checked here, which torch does for several ranks only."""

    def __init__(self, shares: Sequence[Share]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shares = shares
        self._values: dict[MetadataIndex, tuple[Share, Rectangle]] = {}

    def create_local_plan(self) -> SavePlan:
        items = [item for share in self._shares if share.counts for item in self._items(share)]
        self.plan = SavePlan(items)
        return self.plan

    def _items(self, share: Share) -> list[WriteItem]:
        properties = TensorProperties(dtype=share.tensor.dtype)
        items = []
        for box in share.boxes(_STORED_BYTES // share.tensor.element_size()):
            chunk = _chunk(share, box)
            index = MetadataIndex(share.name, chunk.offsets)
            if index in self._values:
                continue
            self._values[index] = share, box
            data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(share.shape))
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        return items

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        for name, saved in metadata.state_dict_metadata.items():
            if isinstance(saved, TensorStorageMetadata):
                missing = math.prod(saved.size) - sum(math.prod(chunk.sizes) for chunk in saved.chunks)
                if missing:
                    raise ValueError(f"no rank holds {missing} of the {math.prod(saved.size)} elements of {name}")
        return plans, metadata

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        share, box = self._values[write_item.index]
        return share.within(box)


class ReadPlanner(LoadPlanner):
    """Reads whatever overlaps a rank's shares, and nothing else; each element of a share must have been saved."""

    def __init__(self, shares: Sequence[Share]) -> None:
        self._wanted: dict[str, list[tuple[Share, Rectangle]]] = {}
        for share in shares:
            self._wanted.setdefault(share.name, []).extend((share, box) for box in share.boxes(max(share.numel, 1)))
        self._metadata: Metadata | None = None

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for name, wanted in self._wanted.items() if wanted for item in self._items(name, wanted)])

    def _items(self, name: str, wanted: list[tuple[Share, Rectangle]]) -> list[ReadItem]:
        assert self._metadata is not None
        saved = self._metadata.state_dict_metadata.get(name)
        if not isinstance(saved, TensorStorageMetadata):
            raise ValueError(f"the tensor {name} was not saved")
        shape = wanted[0][0].shape
        if tuple(saved.size) != shape:
            raise ValueError(f"{name} was saved with the shape {tuple(saved.size)} and not {shape}")
        items = create_read_items_for_chunk_list(name, saved, [_chunk(share, box) for share, box in wanted])
        found = sum(math.prod(item.lengths) for item in items)
        expected = sum(box.volume for _, box in wanted)
        if found != expected:
            raise ValueError(f"of {expected} elements of {name} only {found} were saved")
        return items

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        assert read_item.dest_index.index is not None
        share, box = self._wanted[read_item.dest_index.fqn][read_item.dest_index.index]
        target = share.within(box)
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


def _chunk(share: Share, box: Rectangle) -> ChunkStorageMetadata:
    offsets = [first + more for first, more in zip(share.offsets, box.offsets, strict=True)]
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(box.sizes))
