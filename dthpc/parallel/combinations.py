"""Options of `config.parallel` that exclude each other, or the optimizer, or the number format; free of torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dthpc.config.parallel import ParallelConfig
from dthpc.errors import UserError

# Optimizers whose update of one element depends on others, by parts of their names.
_WHOLE_MATRIX = re.compile(r"adafactor|came$|muon|lamb(?!da)|lars|shampoo|soap|adam_?mini|sparseadam", re.IGNORECASE)
_WHOLE_MODEL = re.compile(r"lbfgs", re.IGNORECASE)


def value_at(config: Any, key: str) -> Any:
    """The value of a dotted key, or None where there is none."""
    for part in key.split("."):
        config = config.get(part) if config is not None else None
    return config


def find_conflicts(parallel: ParallelConfig, config: Any) -> Iterator[UserError]:
    """What can't go together, whatever the number of ranks.

    Args:
        parallel: the layout, whose single values are in their ranges.
        config: the whole configuration; groups that it lacks are not looked into.
    """
    for conflicts in (_optimizer, _powersgd, _offload, _outer, _pipedream):
        yield from conflicts(parallel, config)


def _optimizer(parallel: ParallelConfig, config: Any) -> Iterator[UserError]:
    """Ranks that hold shares of a matrix can update them only element by element."""
    target = str(value_at(config, "optim._target_") or "")
    name = target.rpartition(".")[2]
    cuts = [f"parallel.zero={parallel.zero}"] if parallel.zero else []
    cuts += [f"parallel.tp={parallel.tp}"] if parallel.tp > 1 else []
    if _WHOLE_MODEL.search(name):
        cuts += [f"parallel.pp={parallel.pp}"] if parallel.pp > 1 else []
        needs = "sees all parameters of the model at once"
    elif _WHOLE_MATRIX.search(name):
        needs = "sees whole matrices"
    else:
        return
    if cuts:
        yield UserError(
            f"{name} {needs}, and with {' and '.join(cuts)} a rank holds only a share of them: the update would depend "
            "on the layout",
            key="optim._target_",
            value=target,
            instead="an optimizer that works element by element (torch.optim.AdamW, SGD, RMSprop …), or "
            + " and ".join(cut.split("=")[0] + ("=0" if "zero" in cut else "=1") for cut in cuts),
        )


def _powersgd(parallel: ParallelConfig, config: Any) -> Iterator[UserError]:
    rank = parallel.gradients.powersgd_rank
    if rank == 0:
        return
    if parallel.zero:
        yield UserError(
            f"PowerSGD approximates whole matrices, and parallel.zero={parallel.zero} reduces shards of them",
            key="parallel.gradients.powersgd_rank",
            value=rank,
            instead="parallel.gradients.powersgd_rank=0 (perhaps parallel.gradients.dtype=bf16), or parallel.zero=0",
        )
    if is_16_bit(config):
        yield UserError(
            "PowerSGD's error feedback needs gradients held in fp32, and precision.parameters=compute holds them in "
            f"{value_at(config, 'precision.compute')}",
            key="parallel.gradients.powersgd_rank",
            value=rank,
            instead="precision.parameters=fp32, or parallel.gradients.powersgd_rank=0",
        )


def is_16_bit(config: Any) -> bool:
    """Whether matrices and their gradients are held in 16 bits; with fp32 arithmetic, `compute` means fp32."""
    compute = value_at(config, "precision.compute") or "fp32"
    return value_at(config, "precision.parameters") == "compute" and compute != "fp32"


def _offload(parallel: ParallelConfig, config: Any) -> Iterator[UserError]:
    offload = parallel.offload
    if offload.parameters is not None and parallel.zero != 3:
        yield UserError(
            f"only parameters that are sharded can lie elsewhere, and parallel.zero={parallel.zero} keeps them whole",
            key="parallel.offload.parameters",
            value=offload.parameters,
            instead="parallel.zero=3, or parallel.offload.parameters=null",
        )
    for name in ("optimizer", "parameters"):
        if getattr(offload, name) == "nvme" and not offload.folder:
            yield UserError(
                "needs a folder on a local disk for its files, and parallel.offload.folder is not set",
                key=f"parallel.offload.{name}",
                value="nvme",
                instead=f"parallel.offload.folder=/local/scratch, or parallel.offload.{name}=cpu",
            )
    # Elsewhere the folder is one of the nodes'.
    here = value_at(config, "cluster.kind") == "local" and "nvme" in (offload.optimizer, offload.parameters)
    if here and offload.folder and not _is_writable(Path(offload.folder)):
        yield UserError(
            "is no folder that you may write to",
            key="parallel.offload.folder",
            value=offload.folder,
            instead="a folder on a local disk, or parallel.offload.*=cpu",
        )


def _is_writable(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK)


def _outer(parallel: ParallelConfig, config: Any) -> Iterator[UserError]:
    outer = parallel.outer
    if outer.every == 0:
        return
    if outer.delay >= outer.every:
        yield UserError(
            f"an exchange must arrive before the next meeting, parallel.outer.every={outer.every} steps later",
            key="parallel.outer.delay",
            value=outer.delay,
            instead=f"at most {outer.every - 1}, or a larger parallel.outer.every",
        )
    if not 0 < outer.lr < float("inf"):
        yield UserError(
            "a learning rate is positive and finite", key="parallel.outer.lr", value=outer.lr, instead="0.7, or 1.0"
        )
    if not 0 <= outer.momentum < 1:
        yield UserError(
            "a momentum is at least 0 and less than 1",
            key="parallel.outer.momentum",
            value=outer.momentum,
            instead="0.9, or 0 for plain averaging",
        )


def _pipedream(parallel: ParallelConfig, config: Any) -> Iterator[UserError]:
    """Updates come after each micro-batch, and each stage makes its own."""
    if parallel.schedule != "pipedream" or parallel.pp == 1:
        return
    clip = value_at(config, "train.grad_clip")
    reasons = {
        f"parallel.zero={parallel.zero}": (
            parallel.zero > 0,
            "keeps several versions of whole weights, which ZeRO would shard",
            "parallel.zero=0",
        ),
        f"train.grad_clip={clip}": (
            clip is not None,
            "updates each stage after each micro-batch, when the global gradient norm is not known",
            "train.grad_clip=null",
        ),
        "precision.compute=fp16": (
            value_at(config, "precision.compute") == "fp16",
            "updates each stage by itself, and fp16 needs all ranks to agree on whether an update is skipped",
            "precision.compute=bf16",
        ),
        f"parallel.outer.every={parallel.outer.every}": (
            parallel.outer.every > 0,
            "is one kind of controlled staleness, and outer steps are another",
            "parallel.outer.every=0",
        ),
    }
    for setting, (present, why, instead) in reasons.items():
        if present:
            yield UserError(
                f"pipedream {why}, so {setting} does not go with it",
                key="parallel.schedule",
                value="pipedream",
                instead=f"{instead}, or parallel.schedule=1f1b",
            )
