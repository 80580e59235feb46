"""What a job's environment says about it: the `SLURM_*` variables of a process, or a dump of them in a text.

Users export some of them by hand, sessions inherit them from an outer job, and dumps of several tasks run into each
other. So every value that comes twice, under one name or two, is compared, and a contradiction is told, not resolved.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dthpc.errors import UserError, raise_together
from dthpc.slurm.hostlist import expand, expand_tasks_per_node
from dthpc.slurm.keyvalues import clean_lines
from dthpc.slurm.units import is_absent, words

_LINE = re.compile(
    r"""\s*(?:(?P<label>\d+):\s*)?                       # srun --label
        (?:(?:declare\s+-x|export|setenv)\s+)?
        (?P<name>[A-Za-z_]\w*)(?:\s*=\s*|:\s+|\s+(?=\S+$))
        (?P<value>.*)""",
    re.VERBOSE,
)
_OF_INTEREST = re.compile(r"(SLURM_|SRUN_CPUS_PER_TASK$)")
_REDACTED = re.compile(
    r"[<\[({*]*\s*(redacted|removed|hidden|masked|censored|x{3,}|\*{2,}|\.{3})\s*[>\])}*]*", re.IGNORECASE
)

_OF_ONE_TASK = words(
    "SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_TASK_PID SLURM_GTIDS SLURM_CPUS_ON_NODE SLURMD_NODENAME "
    "SLURM_TOPOLOGY_ADDR SLURM_STEP_GPUS SLURM_CPU_BIND SLURM_CPU_BIND_LIST SLURM_MEM_BIND SLURM_PTY_PORT"
)
"""Variables that differ between the tasks of one step, so that a dump of several tasks proves nothing by them."""


@dataclass(frozen=True)
class JobEnvironment:
    """A job, and a task of it, as its environment describes them. `None`: not told."""

    job_id: str | None = None
    nodes: list[str] = field(default_factory=list)
    """Nodes in Slurm's order; of the step where the variables are a step's."""

    nnodes: int | None = None
    tasks_per_node: list[int] | None = None
    ntasks: int | None = None
    cpus_per_task: int | None = None

    rank: int | None = None
    local_rank: int | None = None
    node_rank: int | None = None

    gpus: list[int] | None = None
    """Physical indices of the GPUs of the step, else of the job. The process itself may see them as 0, 1, …"""

    array_job_id: str | None = None
    array_task_id: int | None = None
    het_groups: list[list[str]] = field(default_factory=list)
    """Nodes of each component of a heterogeneous job."""

    restarts: int = 0
    conflicts: list[UserError] = field(default_factory=list)
    """Contradictions, each naming both values; what they concern is left `None`."""

    @property
    def master(self) -> str | None:
        """The first node of the list, or `None` where no list is told.

        It is never the launch host, which may be a login node. With `--distribution=arbitrary` rank 0 may be on another
        node: rank 0 itself publishes its address.
        """
        return self.nodes[0] if self.nodes else None


def parse_environments(text: str) -> list[JobEnvironment]:
    """The environments in a text, one for each job or array task in it.

    Accepts `K=V`, `declare -x K="V"`, `export K=V` and srun's `0: K=V` among other lines. Blank lines separate
    environments that belong to different jobs; several tasks of one job that run into each other become one.

    Raises:
        UserError: there is no SLURM variable, a value that is needed was redacted, or two values contradict each other.
    """
    environments = [read_environment(block, strict=False) for block in _blocks(text)]
    if not environments:
        raise UserError("holds no SLURM_* variable", key="environment", value=text.strip()[:200] or "(nothing)")
    raise_together(error for environment in environments for error in environment.conflicts)
    return environments


def read_environment(variables: Mapping[str, str | list[str]], strict: bool = True) -> JobEnvironment:
    """What variables say, such as `os.environ`; a list holds the several values that a dump shows for one name.

    Raises:
        UserError: a value was redacted or is malformed, or (where `strict`) two values contradict each other.
    """
    reader = _Reader(variables)
    nodes = reader.nodes()
    tasks_per_node = reader.tasks_per_node()
    nnodes = reader.nnodes(nodes, tasks_per_node)
    environment = JobEnvironment(
        job_id=reader.agreed("job id", "SLURM_JOB_ID", "SLURM_JOBID"),
        nodes=nodes,
        nnodes=nnodes,
        tasks_per_node=tasks_per_node,
        ntasks=reader.ntasks(tasks_per_node),
        cpus_per_task=reader.cpus_per_task(),
        rank=reader.count("SLURM_PROCID"),
        local_rank=reader.count("SLURM_LOCALID"),
        node_rank=reader.count("SLURM_NODEID"),
        gpus=reader.gpus(),
        array_job_id=reader.agreed("array id", "SLURM_ARRAY_JOB_ID"),
        array_task_id=reader.count("SLURM_ARRAY_TASK_ID"),
        het_groups=reader.het_groups(),
        restarts=reader.count("SLURM_RESTART_COUNT") or 0,
        conflicts=reader.conflicts,
    )
    if strict:
        raise_together(environment.conflicts)
    return environment


class _Reader:
    """Looks values up under all their names and notes where they disagree."""

    def __init__(self, variables: Mapping[str, str | list[str]]) -> None:
        self.conflicts: list[UserError] = []
        self._values: dict[str, list[str]] = {}
        for name, value in variables.items():
            if _OF_INTEREST.match(name):
                distinct = dict.fromkeys([value] if isinstance(value, str) else value)
                self._values[name] = [one for one in distinct if not is_absent(one)]

    def agreed(self, what: str, *names: str) -> str | None:
        """The one value that all these variables have; notes a conflict where they have several."""
        found = [(name, value) for name in names for value in self._values.get(name, ())]
        for name, value in found:
            if _REDACTED.fullmatch(value):
                raise UserError(
                    "the value was blanked out, so that nothing can be read from this environment",
                    key=name,
                    value=value,
                    instead="give the environment with its values",
                )
        if len({value for _, value in found}) <= 1:
            return found[0][1] if found else None
        if found[0][0] in _OF_ONE_TASK:
            return None
        self._conflict(what, found)
        return None

    def count(self, *names: str) -> int | None:
        """The one whole number that all these variables have."""
        value = self.agreed(names[0], *names)
        if value is None:
            return None
        if not re.fullmatch(r"\d{1,9}", value, re.ASCII):
            raise UserError("is no whole number", key=names[0], value=value, instead="leave it to Slurm to set it")
        return int(value)

    @property
    def _in_step(self) -> bool:
        # Inside a step the short names are the step's, which may be smaller than the job: they do not contradict it.
        return "SLURM_STEP_NUM_NODES" in self._values or "SLURM_PROCID" in self._values

    def nodes(self) -> list[str]:
        if not self._in_step:
            return expand(self.agreed("node list", "SLURM_JOB_NODELIST", "SLURM_NODELIST") or "")
        for name in ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"):
            value = self.agreed("node list", name)
            if value is not None:
                return expand(value)
        return []

    def tasks_per_node(self) -> list[int] | None:
        for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
            value = self.agreed("tasks per node", name)
            if value is not None:
                return expand_tasks_per_node(value)
        return None

    def nnodes(self, nodes: list[str], tasks_per_node: list[int] | None) -> int | None:
        names = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
        claims = [(name, str(told)) for name in names if (told := self.count(name)) is not None]
        if self._in_step:
            del claims[1:]
        if nodes:
            claims.append(("hosts in the node list", str(len(nodes))))
        if tasks_per_node:
            claims.append(("counts in SLURM_TASKS_PER_NODE", str(len(tasks_per_node))))
        return self._same_number("number of nodes", claims)

    def ntasks(self, tasks_per_node: list[int] | None) -> int | None:
        names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
        claims = [(name, str(told)) for name in names if (told := self.count(name)) is not None]
        text = self._values.get("SLURM_TASKS_PER_NODE")
        # Without a number of tasks asked, Slurm fills in the CPUs of each node: that is no number of tasks.
        filled_in = not claims and text and text == self._values.get("SLURM_JOB_CPUS_PER_NODE")
        if tasks_per_node and not filled_in:
            claims.append(("sum of SLURM_TASKS_PER_NODE", str(sum(tasks_per_node))))
        return self._same_number("number of tasks", claims)

    def cpus_per_task(self) -> int | None:
        told = self.count("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK")
        tres = re.search(r"(?:^|,)cpu[=:](\d+)", self.agreed("TRES of a task", "SLURM_TRES_PER_TASK") or "")
        return int(tres[1]) if told is None and tres else told

    def gpus(self) -> list[int] | None:
        for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
            value = self.agreed("GPUs", name)
            # Some sites list unique ids instead of indices.
            if value is not None and re.fullmatch(r"[\d,-]+", value):
                return [int(index) for index in expand(f"[{value}]")]
        return None

    def het_groups(self) -> list[list[str]]:
        groups = []
        for kind in ("HET", "PACK"):
            prefix = f"SLURM_JOB_NODELIST_{kind}_GROUP_"
            numbers = sorted(int(name[len(prefix) :]) for name in self._values if name.startswith(prefix))
            groups += [expand(self.agreed("nodes of a component", f"{prefix}{number}") or "") for number in numbers]
        return groups

    def _same_number(self, what: str, claims: list[tuple[str, str]]) -> int | None:
        if len({value for _, value in claims}) > 1:
            self._conflict(what, claims)
            return None
        return int(claims[0][1]) if claims else None

    def _conflict(self, what: str, claims: list[tuple[str, str]]) -> None:
        told = ", ".join(f"{name}={value}" for name, value in dict.fromkeys(claims))
        self.conflicts.append(
            UserError(
                f"contradictory values for the {what}: {told}",
                key="environment",
                instead="unset the variable that was exported by hand or inherited from another job",
            )
        )


def _blocks(text: str) -> list[dict[str, list[str]]]:
    """The variables of each job in a text."""
    blocks: list[dict[str, list[str]]] = [{}]
    for line in clean_lines(text):
        match = _LINE.fullmatch(line)
        if not line.strip():
            blocks.append({})
        elif match is not None and _OF_INTEREST.match(match["name"]):
            blocks[-1].setdefault(match["name"], []).append(_unquoted(match["value"].strip()))
    return _joined([block for block in blocks if block])


def _joined(blocks: list[dict[str, list[str]]]) -> list[dict[str, list[str]]]:
    """Neighbouring blocks together, unless they belong to different jobs."""
    joined: list[dict[str, list[str]]] = []
    for block in blocks:
        ids = {value for name in ("SLURM_JOB_ID", "SLURM_JOBID") for value in block.get(name, ())}
        known = {
            value for name in ("SLURM_JOB_ID", "SLURM_JOBID") for value in (joined[-1] if joined else {}).get(name, ())
        }
        if joined and (not ids or not known or ids == known):
            for name, values in block.items():
                joined[-1].setdefault(name, []).extend(values)
        else:
            joined.append(block)
    return joined


def _unquoted(value: str) -> str:
    """A value without the shell's quotes."""
    if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        inner = value[1:-1]
        return re.sub(r"\\([\"$`\\])", r"\1", inner) if value[0] == '"' else inner
    return value
