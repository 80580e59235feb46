"""What the checks say of the placement: numeric threads, who binds, and whether the ranks fit a node that is known."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dthpc.errors import UserError, UserErrors
from dthpc.launch.request import Request
from dthpc.launch.verdicts import Verdict, error, ok, plural, warning
from dthpc.placement.plan.nodes import Plan
from dthpc.placement.plan.offline import planned
from dthpc.placement.table import remarks

THREADS = "OMP_NUM_THREADS"

_BINDERS = {
    "auto": "each rank binds itself where the step's cores are the run's alone",
    "rank": "each rank binds itself before torch starts",
    "srun": "srun binds the ranks by masks made on the first node",
    "none": "cores are not bound",
}


def threads_of(cfg: Any, request: Request, env: Mapping[str, str]) -> tuple[int, str]:
    """Numeric threads of each rank, and why so many.

    What the user exported wins over what follows from the cores, and a key of the configuration over both. It is
    recorded at the submission: threads decide the last bits of a result, so that a restart must not find others.

    Args:
        cfg: the configuration.
        request: what it asks for.
        env: the environment of the submission.
    """
    asked = cfg.placement.threads_per_rank
    if asked:
        return int(asked), f"placement.threads_per_rank={asked}"
    given = cfg.cluster.environment.get(THREADS)
    where = "cluster.environment" if given is not None else "the environment"
    exported = exported_threads(str(given if given is not None else env.get(THREADS, "")))
    if exported is not None:
        return exported, f"{THREADS}={exported} of {where}"
    return request.cpus_per_task, f"one a core of cluster.cpus_per_task={request.cpus_per_task}"


def exported_threads(text: str) -> int | None:
    """The number in `OMP_NUM_THREADS`; the outermost of a list for nested regions; `None` where there is none."""
    match = re.fullmatch(r"\s*(\d{1,5})\s*(?:,[\d,\s]*)?", text, re.ASCII)
    return int(match[1]) if match and int(match[1]) > 0 else None


def placement_verdicts(
    cfg: Any, request: Request, wanted: Mapping[str, Any] | None, env: Mapping[str, str]
) -> Iterator[Verdict]:
    """What is to be said of threads and of the placement.

    Args:
        cfg: the configuration.
        request: what it asks for.
        wanted: what `wanted_of` made of it; `None` where that failed, which is told elsewhere.
        env: the environment of the submission.
    """
    yield from _threads(cfg, request, env)
    if wanted is None:
        return
    try:
        plan = planned(wanted, here=request.kind == "local")
    except UserError as found:
        every = found.errors if isinstance(found, UserErrors) else [found]
        yield from (error("placement", _with_key(one, wanted)) for one in every)
        return
    yield _binding(wanted, plan, request)
    if plan is not None:
        yield from (warning("placement", line) for line in remarks(plan) if _costs(line, request))


def _threads(cfg: Any, request: Request, env: Mapping[str, str]) -> Iterator[Verdict]:
    count, why = threads_of(cfg, request, env)
    text = str(cfg.cluster.environment.get(THREADS) or env.get(THREADS, ""))
    told = f"{plural(count, 'thread')} a rank: {why}"
    cores = request.cpus_per_task
    if text and exported_threads(text) is None:
        yield warning("threads", f"{told}; {THREADS}={text!r} is no number of threads and is passed over")
    elif count > cores:
        yield warning("threads", f"{told}, more than its {plural(cores, 'core')}: they take turns")
    elif count < cores and not cfg.placement.threads_per_rank:
        more = f"placement.threads_per_rank={cores} uses all {cores} cores"
        yield warning("threads", f"{told}, which wins over its {cores} cores; {more}")
    else:
        yield ok("threads", told)


def _binding(wanted: Mapping[str, Any], plan: Plan | None, request: Request) -> Verdict:
    if request.kind == "local" and wanted["bind"] == "auto":
        return ok("placement", "cores are not bound: other runs may use this machine (placement.bind=rank binds them)")
    known = (
        "" if plan is not None else "; nodes are read when the ranks start (placement.topology=FILE plans for one now)"
    )
    strict = ", and one that runs elsewhere ends the run (placement.strict)" if wanted["strict"] else ""
    return ok("placement", f"{_BINDERS[str(wanted['bind'])]}{strict}{known}")


def _costs(line: str, request: Request) -> bool:
    """Whether a remark tells what the demand costs; of too few cores of this machine another check speaks."""
    return "get fewer" in line or ("take turns" in line and request.kind != "local")


def _with_key(found: UserError, wanted: Mapping[str, Any]) -> UserError:
    """The error under a key of the configuration: a reader names the file that it reads."""
    if found.key is not None and found.key.startswith(("placement.", "cluster.")):
        return found
    return UserError(found.why, key="placement.topology", value=wanted["topology"], instead=found.instead)
