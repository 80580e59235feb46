"""The job that trains a model: data → model → mesh → parallelize → optimizer → restore → loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dthpc.checkpoint.store import restore
from dthpc.comm.mpi import BACKEND as MPI
from dthpc.errors import UserError
from dthpc.jobs.build import build_data, build_loss, build_model, instantiate
from dthpc.jobs.changes import tell_changes
from dthpc.jobs.levels import with_levels
from dthpc.jobs.preflight.gate import refuse_bad_nodes
from dthpc.jobs.stages import dealt_stages
from dthpc.monitor.tensorboard import ScalarWriter
from dthpc.parallel.apply import parallelize
from dthpc.parallel.layout import Layout
from dthpc.parallel.mesh import Mesh, make_mesh
from dthpc.parallel.precision import make_deterministic
from dthpc.train.callbacks import Callback
from dthpc.train.header import Header
from dthpc.train.loop import Training, train
from dthpc.train.optim import build_optimizer
from dthpc.train.records import EventRecorder, TensorBoard
from dthpc.train.saver import Saver
from dthpc.train.state import live_state, take_over

if TYPE_CHECKING:
    from dthpc.context import RankContext


def run(config: Any, context: RankContext) -> None:
    """Train `config.model` on `config.data`, from the newest checkpoint of the run if there is one.

    Args:
        config: the whole configuration, resolved.
        context: this rank; `torch.distributed` is initialised.

    Raises:
        UserError: something that the user can mend.
        BadNodes: a node would hold the others up, and `resilience.preflight` is set.
        Stopped: the run was asked to stop, and its state is saved.
        FloatingPointError: a loss or gradient is not finite.
    """
    if config.precision.deterministic:
        make_deterministic(context.device)
    refuse_bad_nodes(config, context)
    data = build_data(config.data)
    _check_data(data, config)
    model = build_model(config, data)
    layout = Layout.resolve(config, context.identity.world_size)
    mesh = make_mesh(
        layout, context.device.type, shared_memory=config.comm.shared_memory, backends=context.axis_backends
    )
    tell_changes(layout, config, context)
    _tell_memory(mesh, context)
    mesh = with_levels(mesh, config, context)
    loss = build_loss(config.loss)
    dealt = dealt_stages(model, loss, data.train, mesh, config, context)
    parallel = parallelize(model, loss, mesh, config, context.device, dealt)
    training = Training(
        config=config,
        context=context,
        data=data,
        model=parallel,
        optimizer=build_optimizer(parallel.shards.pieces, config.optim),
        header=Header(_control_group(context)),
        saver=_make_saver(config, context, data),
    )
    parallel.optimizer = training.optimizer
    _restore(training)
    training.callbacks = _make_callbacks(training)
    train(training)


def _tell_memory(mesh: Mesh, context: RankContext) -> None:
    """Write down between which ranks collectives go over memory."""
    if mesh.memory and context.events is not None:
        axes = {axis: {"shared": met.exchange is not None, "reason": met.reason} for axis, met in mesh.memory.items()}
        context.events.write("shared_memory", axes=axes)


def _check_data(data: Any, config: Any) -> None:
    """All ranks must see the same, non-empty data; collective."""
    evaluates = config.train.eval_every >= 0
    for split in ("train", "valid") if evaluates else ("train",):
        _check_split(data, split, config.data["_target_"])
    if not len(data.train):
        raise UserError("the training data set has no samples", key="data", instead="more text, or a smaller seq_len")
    if evaluates and not len(data.valid):
        raise UserError("the held-out data set has no samples", key="data", instead="more data, or train.eval_every=-1")
    if dist.get_world_size() == 1:
        return
    seen: list[Any] = [None] * dist.get_world_size()
    held_out = len(data.valid) if evaluates else 0
    dist.all_gather_object(seen, (len(data.train), held_out, getattr(data, "fingerprint", None)))
    for rank, other in enumerate(seen):
        if other != seen[0]:
            raise UserError(
                f"rank 0 has {seen[0][0]} training and {seen[0][1]} held-out samples, and rank {rank} has {other[0]} "
                f"and {other[1]}" + (" of other text" if other[2] != seen[0][2] else ""),
                key="data",
                instead="data on a file system that all nodes share, or the same files and the same Python on each",
            )


def _check_split(data: Any, split: str, target: str) -> None:
    part = getattr(data, split, None)
    if hasattr(part, "__len__") and hasattr(part, "__getitem__"):
        return
    instead = f"give the class a `{split}` with `len` and `[i] -> (input, target)`"
    if part is None:
        why = f"it has no `{split}` data set"
    else:
        why = f"its `{split}` is of type {type(part).__name__} and no map-style data set"
    if split == "valid":
        instead += ", or write train.eval_every=-1 to evaluate nothing"
    raise UserError(why, key="data._target_", value=target, instead=instead)


def _control_group(context: RankContext) -> dist.ProcessGroup | None:
    """The ranks, over a backend that moves CPU tensors: flags must not queue behind a GPU's work."""
    if context.identity.world_size == 1:
        return None
    on_host = ("gloo", MPI)
    return dist.group.WORLD if context.backend.removeprefix("cpu:") in on_host else dist.new_group(backend="gloo")


def _make_saver(config: Any, context: RankContext, data: Any) -> Saver:
    fingerprint = getattr(data, "fingerprint", None)
    return Saver(
        run=context.run,
        attempt=context.identity.attempt,
        every=config.checkpoint.every,
        keep=config.checkpoint.keep,
        keep_every=config.checkpoint.keep_every,
        meta={} if fingerprint is None else {"data": fingerprint},
        removes=context.is_first,
    )


def _restore(t: Training) -> None:
    """Go on from the newest checkpoint that verifies; collective."""
    state = live_state(t.model, t.optimizer, t.state)
    expected = t.saver.meta if t.config.run.on_change == "refuse" else {}
    info = restore(t.saver.run.checkpoints, state, expect_meta=expected)
    if info is None:
        return
    take_over(t.model, state)
    t.resumed_from = t.last_saved = info.step
    t.context.step = info.step
    if t.context.events is not None:
        for rejected in info.rejected:
            t.context.events.write("checkpoint_rejected", path=rejected.checkpoint.path, why=rejected.why)
        t.context.events.write("checkpoint_restored", step=info.step, path=info.path, seconds=info.seconds)
        for note in info.notes:
            t.context.events.write("incident", what="not restored as it was saved", why=note, step=info.step)


def _make_callbacks(t: Training) -> list[Callback]:
    """The records on rank 0, then the user's callbacks on every rank."""
    callbacks: list[Callback] = []
    monitor = t.config.monitor
    if t.context.events is not None:
        bigram = getattr(t.data, "bigram_bits_per_byte", None)
        callbacks.append(EventRecorder(t.context.events, monitor.log_every, bigram() if bigram else None))
        if monitor.tensorboard:
            callbacks.append(TensorBoard(ScalarWriter(t.context.run.tensorboard, t.state.step), monitor.log_every))
    for name, node in (t.config.get("callbacks") or {}).items():
        callback = instantiate(node, f"callbacks.{name}")
        if not isinstance(callback, Callback):
            raise UserError(
                f"a {type(callback).__name__} is no callback",
                key=f"callbacks.{name}._target_",
                value=node["_target_"],
                instead="a class derived from dthpc.train.callbacks.Callback",
            )
        callbacks.append(callback)
    return callbacks
