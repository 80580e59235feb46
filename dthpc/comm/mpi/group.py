"""The process group: what `torch.distributed` calls, put into the words of `Collectives`, `Reducers` and `Messages`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dthpc.comm.mpi import BACKEND
from dthpc.comm.mpi.agreement import agreed
from dthpc.comm.mpi.board import Board
from dthpc.comm.mpi.buffers import Buffers
from dthpc.comm.mpi.call import Call
from dthpc.comm.mpi.collectives import Collectives, together
from dthpc.comm.mpi.errors import CommunicationTimeout
from dthpc.comm.mpi.join import join
from dthpc.comm.mpi.lane import Lane
from dthpc.comm.mpi.messages import Messages
from dthpc.comm.mpi.near import near
from dthpc.comm.mpi.operation import Operation, Request, Steps, briefly, done, within
from dthpc.comm.mpi.reducers import Reducers
from dthpc.comm.mpi.runtime import Runtime
from dthpc.comm.mpi.work import MPIWork
from dthpc.comm.rendezvous import ranges
from dthpc.comm.shared.room import ExchangeError

_DEFAULT: Any = dist.AllreduceOptions()
"""Options where the caller gives none: sum, asynchronous, the group's time-out."""

_SMALL_BYTES = 65536

# Some of torch's stubs name other parameters than torch passes.
_ProcessGroup: Any = dist.ProcessGroup


def creator(runtime: Runtime) -> Callable[[Any, Any], MPIProcessGroup]:
    """What `torch.distributed` calls to make a group of this process's MPI."""

    def create(options: Any, _: Any) -> MPIProcessGroup:
        members = list(options.global_ranks_in_group) or list(range(options.group_size))
        return MPIProcessGroup(
            runtime, options.store, str(options.group_id), members, options.group_rank, options.timeout
        )

    return create


class MPIProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """The ranks of one communicator.

    Collectives are started in the order of the calls, which must be the same on all ranks. A synchronous one is driven
    to its end in the calling thread; an asynchronous one by the process's progress thread, or by the thread that waits
    for it, from its start on. Several threads may use a group, if they agree on that order.

    Between ranks of one node, sums of large tensors go through memory that they share (`Near`).

    Errors are `CommunicationError`s. After a time-out or an error of MPI the group is unusable, and says so.
    """

    def __init__(
        self, runtime: Runtime, store: Any, name: str, members: Sequence[int], rank: int, timeout: timedelta
    ) -> None:
        """Make the communicator together with the other members.

        Args:
            runtime: this process's MPI.
            store: the group's part of the key-value store.
            name: of the group, the same on all members and different from other groups'.
            members: the default group's ranks, in this group's order.
            rank: this rank's position among them.
            timeout: after which an operation is an error.

        Raises:
            CommunicationTimeout: not all members came.
        """
        super().__init__(rank, len(members))
        self._runtime, self._store, self._members = runtime, store, tuple(members)
        self._own_name, self._description = name, "undefined"
        self._timeout_s = timeout.total_seconds()
        self._comm = join(runtime, store, name, members, rank, self._timeout_s)
        runtime.groups += 1
        mpi = runtime.mpi
        buffers = Buffers(mpi, wide=runtime.wide, cuda_aware=runtime.cuda_aware)
        self._messages = Messages(mpi, self._comm, buffers)
        self._collectives = Collectives(mpi, self._comm, buffers, self._messages.collective_tag)
        self._reducers = Reducers(self._collectives)
        self._near = near(runtime, self._comm, members, buffers)
        self._board = Board(store, name, members, rank)
        self._lane = Lane(self._board, runtime.keep, runtime.per_offer)
        self._rank, self._size = rank, len(members)
        self._done = MPIWork(done(self._lane), None)
        self._closed = False
        self._checked = runtime.check or _in_detail()

    # --- what it is -------------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        """`mpi4py`."""
        return BACKEND

    name = _get_backend_name = getBackendName

    def getRank(self) -> int:
        """This rank's position in the group."""
        return self._rank

    rank = getRank

    def getSize(self) -> int:
        """Number of ranks in the group."""
        return self._size

    size = getSize

    def getGroupName(self) -> str:
        """The group's name, the same on all its ranks."""
        return self._own_name

    def setGroupName(self, name: str) -> None:
        """Rename the group."""
        self._own_name = name

    group_name = property(getGroupName)
    _set_group_name = setGroupName

    def getGroupDesc(self) -> str:
        """What the group is for."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Say what the group is for."""
        self._description = description

    group_desc = property(getGroupDesc)
    _set_group_desc = setGroupDesc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    # torch asks a group's back end for a device; ours is its own.
    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = False
    options = None

    def _get_backend(self, device: torch.device) -> MPIProcessGroup:
        return self

    def _set_sequence_number_for_group(self) -> None:
        return None

    def _get_sequence_number_for_group(self) -> int:
        return self._lane.count

    def get_group_store(self) -> Any:
        """The group's part of the key-value store."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Change after which time an operation is an error."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    # --- collectives ------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = _DEFAULT) -> MPIWork:
        """Reduce tensors in place, with the same bits on all ranks."""
        return self._all_reduce("all_reduce", _listed(tensors), opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = _DEFAULT) -> MPIWork:
        """Reduce several tensors in place, all at once."""
        return self._all_reduce("all_reduce_coalesced", tensors, opts)

    def _all_reduce(self, name: str, tensors: list[Tensor], opts: Any) -> MPIWork:
        rules = [self._reducers.rule(tensor, opts.reduceOp) for tensor in tensors]
        staged = any(
            self._reducers.staged(rule, tensor) and not self._near.reduces(tensor, rule)
            for rule, tensor in zip(rules, tensors, strict=True)
        )
        parts = [
            (self._near if self._near.reduces(tensor, rule) else self._reducers).all_reduce(tensor, rule)
            for tensor, rule in zip(tensors, rules, strict=True)
        ]
        call = Call(name, tensors[:8], rules[0].name)
        return self._run(call, together(parts), tensors, opts, staged=staged)

    def broadcast(self, tensors: Any, opts: Any) -> MPIWork:
        """Give all ranks the tensor of `opts.rootRank`."""
        tensor = _listed(tensors)[opts.rootTensor]
        call = Call("broadcast", [tensor], f"from rank {self._members[opts.rootRank]}")
        return self._run(call, self._collectives.broadcast(tensor, opts.rootRank), [tensor], opts)

    def reduce(self, tensors: Any, opts: Any) -> MPIWork:
        """Reduce into the tensor of `opts.rootRank`."""
        tensor = _listed(tensors)[opts.rootTensor]
        rule = self._reducers.rule(tensor, opts.reduceOp)
        call = Call("reduce", [tensor], f"{rule.name} to rank {self._members[opts.rootRank]}")
        steps = self._reducers.reduce(tensor, rule, opts.rootRank)
        return self._run(call, steps, [tensor], opts, staged=rule.combine is not None)

    def allgather(self, outs: list[list[Tensor]], inputs: list[Tensor], opts: Any = _DEFAULT) -> MPIWork:
        """Give all ranks the ranks' tensors, whose sizes may differ."""
        parts = [self._collectives.all_gather_uneven(out, mine) for out, mine in zip(outs, inputs, strict=True)]
        return self._run(Call("all_gather", inputs, uneven=True), together(parts), outs, opts)

    def allgather_coalesced(self, outs: list[list[Tensor]], inputs: list[Tensor], opts: Any = _DEFAULT) -> MPIWork:
        """Gather several tensors at once; `outs[rank][i]` is what `inputs[i]` was on a rank."""
        by_input = [[out[i] for out in outs] for i in range(len(inputs))]
        parts = [self._collectives.all_gather_uneven(out, mine) for out, mine in zip(by_input, inputs, strict=True)]
        return self._run(Call("all_gather_coalesced", inputs, uneven=True), together(parts), outs, opts)

    def all_gather_single(self, out: Tensor, mine: Tensor, opts: Any = _DEFAULT) -> MPIWork:
        """Concatenate the ranks' tensors in one."""
        return self._run(Call("all_gather_single", [mine]), self._collectives.all_gather(out, mine), out, opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outs: list[Tensor], inputs: list[Tensor], opts: Any = _DEFAULT) -> MPIWork:
        """Concatenate several tensors, all at once."""
        parts = [self._collectives.all_gather(out, mine) for out, mine in zip(outs, inputs, strict=True)]
        return self._run(Call("all_gather_single_coalesced", inputs), together(parts), outs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outs: Any, shares: list[Any], opts: Any = _DEFAULT) -> MPIWork:
        """Reduce lists of one tensor for each rank, whose sizes may differ; every rank gets its own."""
        pairs = [(outs, shares)] if isinstance(outs, Tensor) else list(zip(outs, shares, strict=True))
        rules = [self._reducers.rule(out, opts.reduceOp) for out, _ in pairs]
        parts = [
            self._reducers.reduce_scatter(out, given, rule) for (out, given), rule in zip(pairs, rules, strict=True)
        ]
        call = Call("reduce_scatter", [tensor for _, given in pairs for tensor in given], rules[0].name)
        return self._run(call, together(parts), [out for out, _ in pairs], opts)

    def reduce_scatter_single(self, out: Tensor, flat: Tensor, opts: Any = _DEFAULT) -> MPIWork:
        """Reduce a tensor of which every rank gets an equal part."""
        return self._reduce_scatter("reduce_scatter_single", [out], [flat], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outs: list[Tensor], flats: list[Tensor], opts: Any = _DEFAULT) -> MPIWork:
        """Reduce several tensors of which every rank gets an equal part, all at once."""
        return self._reduce_scatter("reduce_scatter_single_coalesced", outs, flats, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, name: str, outs: list[Tensor], flats: list[Tensor], opts: Any) -> MPIWork:
        rule = self._reducers.rule(outs[0], opts.reduceOp)
        parts = [
            (self._near if self._near.reduces(flat, rule) else self._reducers).reduce_scatter_flat(out, flat, rule)
            for out, flat in zip(outs, flats, strict=True)
        ]
        return self._run(Call(name, flats, rule.name), together(parts), outs, opts)

    def gather(self, outs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> MPIWork:
        """Give `opts.rootRank` the ranks' tensors."""
        call = Call("gather", inputs, f"to rank {self._members[opts.rootRank]}", uneven=True)
        steps = self._collectives.gather(outs[0] if outs else None, inputs[0], opts.rootRank)
        return self._run(call, steps, outs, opts)

    def scatter(self, outs: list[Tensor], shares: list[list[Tensor]], opts: Any) -> MPIWork:
        """Give every rank its one of the tensors of `opts.rootRank`."""
        call = Call("scatter", outs, f"from rank {self._members[opts.rootRank]}", uneven=True)
        steps = self._collectives.scatter(outs[0], shares[0] if shares else None, opts.rootRank)
        return self._run(call, steps, outs, opts)

    def alltoall(self, outs: list[Tensor], shares: list[Tensor], opts: Any = _DEFAULT) -> MPIWork:
        """Give every rank one tensor, and get one of each; sizes may differ."""
        return self._run(
            Call("all_to_all", shares, uneven=True), self._collectives.all_to_all(outs, shares), outs, opts
        )

    def all_to_all_single(
        self, out: Tensor, flat: Tensor, out_splits: list[int], splits: list[int], opts: Any = _DEFAULT
    ) -> MPIWork:
        """Give every rank a part of a tensor, split along its first dimension, and get one of each."""
        steps = self._collectives.all_to_all_single(out, flat, out_splits, splits)
        return self._run(Call("all_to_all_single", [flat], uneven=bool(splits)), steps, out, opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = _DEFAULT) -> MPIWork:
        """Return when all ranks have come."""
        return self._run(Call("barrier"), self._collectives.barrier(), [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names who did not come; slower than `barrier`.

        Raises:
            CommunicationTimeout: a rank did not come in time, on all that did.
        """
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        steps = self._messages.monitored_barrier(seconds, wait_all_ranks)
        # The ranks give up after rank 0, which has to tell them whom it misses.
        allowed_s = seconds + max(5.0, seconds / 2)
        operation = Operation(Call("monitored_barrier"), steps, self._lane, allowed_s, staged=True)
        self._lane.submit(operation)
        operation.wait()
        if operation.result:
            missing = ranges([self._members[rank] for rank in operation.result])
            self._lane.broken = f"rank {missing} did not come to monitored_barrier"
            self._runtime.keep(None)
            raise CommunicationTimeout(
                f"monitored_barrier of {self._board.group} on rank {self._board.rank}: after {seconds:.1f} s "
                f"had not come: rank {missing}"
            )

    # --- messages ---------------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> MPIWork:
        """Send a tensor to the group's rank `peer`."""
        self._messages.check_tag(tag)
        (tensor,) = tensors
        call = Call("send", tensors, f"to rank {self._members[peer]}, tag {tag}")
        return self._message(call, self._messages.send(tensor, peer, tag), tensors)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> MPIWork:
        """Receive a tensor from the group's rank `peer`."""
        self._messages.check_tag(tag)
        (tensor,) = tensors
        call = Call("recv", tensors, f"from rank {self._members[peer]}, tag {tag}")
        return self._message(call, self._messages.receive(tensor, peer, tag), tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> MPIWork:
        """Receive a tensor from any rank, which the work's `_source_rank()` then names."""
        self._messages.check_tag(tag)
        (tensor,) = tensors
        call = Call("recv", tensors, f"from any rank, tag {tag}")
        return self._message(call, self._messages.receive(tensor, None, tag), tensors)

    # --- beginning and end ------------------------------------------------------------------------------------------

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> MPIProcessGroup | None:
        """Make a group of some of this one's ranks, given by their positions; None on a rank that is not among them."""
        if self._rank not in ranks:
            return None
        name = group_name or f"{self._own_name}:split:{'-'.join(map(str, ranks))}"
        made = MPIProcessGroup(
            self._runtime,
            dist.PrefixStore(f"{name}/", self._store),  # type: ignore[attr-defined]
            name,
            [self._members[rank] for rank in ranks],
            list(ranks).index(self._rank),
            timeout or timedelta(seconds=self._timeout_s),
        )
        made.setGroupDesc(group_desc or f"{self._description}:split")
        return made

    splitGroup = split_group

    def shutdown(self) -> None:
        """Complete what is under way, and free the communicator; what does not end is left as it is."""
        if self._closed:
            return
        self._closed = True
        self._runtime.groups -= 1
        if self._lane.drain(self._timeout_s) and not self._runtime.mpi.Is_finalized():
            if self._lane.broken is None:
                self._near.close()
            self._comm.Free()
        else:
            self._runtime.keep(self._comm)
        self._lane.broken = self._lane.broken or "it is destroyed"

    def abort(self) -> None:
        """Make the group unusable at once; what is under way stays so."""
        self._lane.broken = self._lane.broken or "it was aborted"
        self._runtime.keep(self._comm)

    # --- how it is done ---------------------------------------------------------------------------------------------

    def _run(self, call: Call, steps: Steps, result: Any, opts: Any, *, staged: bool = False) -> MPIWork:
        if call.requires_gradients or _any_requires_gradients(result):
            steps = within(torch.no_grad, steps)
        steps = _on_stream_of_caller(call, steps)
        if self._checked:
            steps, staged = agreed(call, steps, self._collectives, self._members), True
        synchronous = not getattr(opts, "asyncOp", True)
        requests: Sequence[Request] | None = None
        if synchronous and not staged:
            try:
                requests = self._lane.start_alone(steps)
                if requests is not None and (requests := briefly(requests, steps, self._runtime.per_offer)) is None:
                    return self._done
            except (self._runtime.mpi.Exception, ExchangeError) as error:
                raise self._lane.error(self._operation(call, steps, opts), error) from error
        operation = self._operation(call, steps, opts, staged)
        if requests is None:
            self._lane.submit(operation)
        else:
            self._lane.adopt(operation, requests)
        if synchronous:
            operation.wait()
        elif not operation.over:
            self._runtime.progress.watch(operation)
        return MPIWork(operation, result)

    def _operation(self, call: Call, steps: Steps, opts: Any, staged: bool = False) -> Operation:
        timeout = opts.timeout.total_seconds() if opts is not _DEFAULT else 0.0
        return Operation(call, steps, self._lane, timeout if timeout > 0 else self._timeout_s, staged=staged)

    def _message(self, call: Call, steps: Steps, tensors: list[Tensor]) -> MPIWork:
        if call.requires_gradients:
            steps = within(torch.no_grad, steps)
        operation = Operation(call, steps, self._lane, self._timeout_s)
        self._lane.submit_now(operation)
        # A small message has often left or come by now; a thread would have to be woken for it.
        if not (tensors[0].nbytes <= _SMALL_BYTES and operation.poll()):
            self._runtime.progress.watch(operation)
        return MPIWork(operation, tensors)


def _in_detail() -> bool:
    """Whether torch's `TORCH_DISTRIBUTED_DEBUG=DETAIL` is set."""
    torch_says: Any = dist
    return bool(torch_says.get_debug_level() == torch_says.DebugLevel.DETAIL)


def _on_stream_of_caller(call: Call, steps: Steps) -> Steps:
    """Have a GPU's tensors waited for on the stream that makes them, whichever thread starts the collective."""
    device = call.device
    if device is None or device.type != "cuda":
        return steps
    stream = torch.cuda.current_stream(device)
    return within(lambda: torch.cuda.stream(stream), steps)


def _any_requires_gradients(result: Any) -> bool:
    """Whether autograd follows a tensor, or one of those in lists."""
    if isinstance(result, Tensor):
        return result.requires_grad
    return any(map(_any_requires_gradients, result))


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)
