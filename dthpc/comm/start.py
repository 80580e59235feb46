"""From one rank's configuration to a process group: choose, meet, settle on the network, start MPI, measure, begin."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dthpc.comm.backend import Decision, Facts, Wanted, candidates, choose, wanted_of, without_mpi
from dthpc.comm.evidence import find_facts
from dthpc.comm.fabric.decide import FabricWish
from dthpc.comm.fabric.presets import environment_of
from dthpc.comm.fabric.settle import Request, Store
from dthpc.comm.rendezvous import Identity, Rendezvous, begin, export_fabric, meet
from dthpc.errors import UserError
from dthpc.rundir import AttemptDir

_AGREED = "dthpc/agreed"


@dataclass(frozen=True)
class Choice:
    """What this rank decides before it meets the others, and what that rests on."""

    comm: Any
    """The `comm` group of the configuration, which may be older than this version."""

    wanted: Wanted
    facts: Facts
    decision: Decision

    @classmethod
    def of(cls, comm: Any, device: str, world_size: int, nodes: int, env: Mapping[str, str] = os.environ) -> Choice:
        """Decide.

        Args:
            comm: the `comm` group.
            device: `cpu` or `cuda`.
            world_size: number of ranks.
            nodes: number of nodes.
            env: the rank's environment.

        Raises:
            UserError: what is asked for can't work here.
        """
        wanted = wanted_of(comm)
        facts = find_facts(device, world_size, nodes, env)
        return cls(comm, wanted, facts, choose(wanted, facts))

    @property
    def tunes(self) -> bool:
        return bool(getattr(self.comm, "tune", False)) and self.facts.world_size > 1

    @property
    def may_take_mpi(self) -> bool:
        """Whether MPI may serve although nobody named it; the same on all ranks, whatever they find."""
        auto = self.wanted.devices[self.facts.device] == "auto"
        return self.facts.world_size > 1 and auto and (self.facts.device == "cpu" or self.tunes)

    def request(self, placed: Mapping[str, str], near: Sequence[str]) -> Request:
        """What this rank wants of the network.

        Args:
            placed: variables that the placement has set.
            near: interfaces of the adapters that are nearest to this rank.
        """
        fabric = str(getattr(self.comm, "fabric", None) or "auto")
        libraries = self.decision.libraries()
        if self.tunes:
            libraries |= set(candidates(self.wanted, self.facts))
        return Request(
            FabricWish(self.comm.interface, fabric),
            frozenset(libraries),
            environment_of(getattr(self.comm, "environment", None)),
            dict(placed),
            tuple(near),
        )


@dataclass(frozen=True)
class Start:
    """Ranks that have met and have a process group."""

    meeting: Rendezvous
    decision: Decision
    exported: Mapping[str, str] = field(default_factory=dict)
    """Variables that were set for the network."""

    def record(self) -> dict[str, Any]:
        """For the run's events."""
        fabric = self.meeting.fabric
        return {
            "backend": self.decision.spec,
            "backend_reason": self.decision.reason,
            "axis_backends": self.decision.axis_specs(),
            "fabric": fabric.fabric,
            "fabric_reason": fabric.reason,
            "fabric_environment": dict(self.exported),
            "fabric_kept": dict(fabric.kept),
            "fabric_notes": list(fabric.notes),
        }

    def lines(self) -> list[str]:
        """What the log says of it."""
        fabric = self.meeting.fabric
        said = [f"backend {self.decision.spec}: {self.decision.reason}"]
        if not self.meeting.single_host:
            said.append(f"network {self.meeting.interface or os.environ.get('GLOO_SOCKET_IFNAME')}: {fabric.reason}")
        if fabric.kept:
            said.append("exported by the user, and kept: " + ", ".join(f"{n}={v}" for n, v in fabric.kept.items()))
        return [*said, *fabric.notes]


def start(
    choice: Choice,
    identity: Identity,
    attempt: AttemptDir,
    *,
    placed: Mapping[str, str] | None = None,
    near: Sequence[str] = (),
) -> Start:
    """Meet the other ranks and initialise `torch.distributed`.

    Args:
        choice: this rank's.
        identity: which rank this is.
        attempt: the attempt's folder.
        placed: variables that the placement has set.
        near: interfaces of the adapters that are nearest to this rank.

    Raises:
        RendezvousError: not all ranks came in time.
        UserError: what is asked for, or what the user exported, can't work.
    """
    comm = choice.comm
    request = choice.request(placed or {}, near)
    meeting = meet(identity, attempt, rendezvous_timeout_s=comm.rendezvous_timeout_s, request=request)
    exported = export_fabric(meeting, request)
    decision = _with_mpi(choice, meeting.store, identity)
    if choice.tunes:
        decision = _tuned(choice, decision, meeting, identity)
    begin(meeting, identity, decision.spec, float(comm.timeout_s))
    return Start(meeting, decision, exported)


def _with_mpi(choice: Choice, store: Any, identity: Identity) -> Decision:
    """Start MPI where it was chosen or is to be measured. On evidence alone, all ranks take it or none does."""
    decision, facts = choice.decision, choice.facts
    if decision.uses_mpi and not decision.tentative:
        _start_mpi(identity, choice.comm)
        return decision
    if not choice.may_take_mpi:
        return decision
    # A rank that can't would leave the others waiting for it in MPI_Init.
    why = all_agree(store, "able", identity, facts.no_mpi)
    if why is None:
        try:
            _start_mpi(identity, choice.comm)
        except UserError as error:
            why = error.why
        why = all_agree(store, "started", identity, why)
    return without_mpi(decision, why) if why is not None and decision.tentative else decision


def _start_mpi(identity: Identity, comm: Any) -> None:
    from dthpc.comm.mpi import register
    from dthpc.comm.mpi.runtime import load

    register(load(identity.rank, identity.world_size, windows=comm.shared_memory is not False))


def all_agree(store: Store, what: str, identity: Identity, why_not: str | None) -> str | None:
    """Whether all ranks say yes; collective.

    Args:
        store: where they meet.
        what: what is asked, once each.
        identity: this rank.
        why_not: this rank's objection, or `None`.

    Returns:
        An objection, the same on all ranks; `None` where there is none.
    """
    key = f"{_AGREED}/{what}"
    if why_not is not None:
        store.set(f"{key}/why", f"rank {identity.rank} on {identity.host}: {why_not}")
    objections = store.add(f"{key}/objections", int(why_not is not None))
    if store.add(f"{key}/asked", 1) == identity.world_size:
        objections = store.add(f"{key}/objections", 0)
        store.set(key, store.get(f"{key}/why").decode() if objections else "")
    return store.get(key).decode() or None


def _tuned(choice: Choice, decision: Decision, meeting: Rendezvous, identity: Identity) -> Decision:
    from dthpc.comm.tune import fastest

    libraries = [each for each in candidates(choice.wanted, choice.facts) if each != "mpi" or _mpi_is_up()]
    if len(libraries) < 2:
        return replace(decision, reason=f"{decision.reason}; nothing to measure: {libraries[0]} alone works here")
    device = choice.facts.device
    options = {each: replace(decision, devices={**decision.devices, device: each}) for each in libraries}
    name, told = fastest({each: option.spec for each, option in options.items()}, device, meeting.store, identity)
    axes = {axis: library for axis, library in choice.wanted.axes.items() if library != name}
    return replace(options[name], reason=f"{name} measured fastest (comm.tune): {told}", axes=axes, tentative=False)


def _mpi_is_up() -> bool:
    from dthpc.comm.mpi import BACKEND

    torch = sys.modules.get("torch.distributed")
    return torch is not None and BACKEND.upper() in torch.Backend._plugins
