"""The configuration as options of `sbatch` and `srun`, each by its long name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dthpc.errors import UserError, nearest, raise_together
from dthpc.launch.dependencies import dependency_text
from dthpc.launch.request import Request
from dthpc.launch.site import Decisions, Site
from dthpc.rundir import RunDir
from dthpc.slurm.client import SlurmClient
from dthpc.slurm.hostlist import compress

OWNERS = {
    "job-name": "run.name",
    "partition": "cluster.partition",
    "account": "cluster.account",
    "qos": "cluster.qos",
    "constraint": "cluster.constraint",
    "reservation": "cluster.reservation",
    "nodelist": "cluster.nodelist",
    "exclude": "cluster.exclude",
    "exclusive": "cluster.exclusive",
    "time": "cluster.time",
    "mem": "cluster.memory",
    "mem-per-cpu": "cluster.memory_per_cpu",
    "nodes": "cluster.nodes",
    "ntasks": "cluster.nodes and cluster.tasks_per_node",
    "ntasks-per-node": "cluster.tasks_per_node",
    "cpus-per-task": "cluster.cpus_per_task",
    "gpus-per-node": "cluster.gpus_per_node",
    "gpus-per-task": "cluster.gpus_per_task",
    "mail-user": "cluster.mail_user",
    "mail-type": "cluster.mail_type",
    "comment": "cluster.comment",
    "dependency": "cluster.after or cluster.dependency",
    "requeue": "cluster.requeue",
    "no-requeue": "cluster.requeue",
    "signal": "checkpoint.save_lead_s",
    "array": "a sweep (`-m`)",
}
"""The configuration key of each option that has one of its own."""

_OURS = frozenset(["output", "error", "input", "open-mode", "wrap", "parsable", "test-only", "wait", "help", "version"])
_OURS_OF_SRUN = frozenset(["output", "error", "input", "open-mode", "export", "kill-on-bad-exit", "help", "version"])
_SRUN_OWNERS = {
    "nodes": "cluster.nodes",
    "ntasks": "cluster.nodes and cluster.tasks_per_node",
    "ntasks-per-node": "cluster.tasks_per_node",
    "cpus-per-task": "cluster.cpus_per_task",
    "jobid": "cluster.kind=allocation",
}


def sbatch_options(cfg: Any, run: RunDir, request: Request, site: Site | None, decisions: Decisions) -> dict[str, Any]:
    """The options of the batch script; `True` stands for an option without a value.

    Raises:
        UserError: an option is given twice or belongs to dthpc, or a dependency does not resolve.
    """
    cluster = cfg.cluster
    raise_together(option_mistakes(cfg))
    dependency = dependency_text(cfg)
    options: dict[str, Any] = {
        "job-name": run.name,
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "reservation": cluster.reservation,
        "nodelist": cluster.nodelist,
        "exclude": compress(request.exclude) or None,
        "exclusive": cluster.exclusive or None,
        "time": cluster.time,
        "mem": cluster.memory,
        "mem-per-cpu": cluster.memory_per_cpu,
        "nodes": request.nodes_text,
        "ntasks-per-node": request.tasks_per_node,
        "cpus-per-task": request.cpus_per_task,
        "mail-user": cluster.mail_user,
        "mail-type": cluster.mail_type,
        "comment": cluster.comment,
        "dependency": dependency,
        "kill-on-invalid-dep": "yes" if dependency else None,
        "output": file_pattern(run.submissions, "%j.log"),
        "signal": decisions.signal,
        "requeue" if decisions.requeue == "requeue" else "no-requeue": True,
        **_gpu_options(cfg, site),
    }
    options.update({_long(name): value for name, value in cluster.sbatch.items()})
    return {name: value for name, value in options.items() if value is not None and value is not False}


def srun_options(cfg: Any, request: Request, site: Site | None, mpi: str | None = None) -> list[str]:
    """The options of the ranks' `srun`; the keeper adds numbers of nodes and tasks, and where the output goes.

    Args:
        cfg: the configuration.
        request: what it asks for.
        site: the Slurm site.
        mpi: how Slurm wires up MPI; `None`: as the site's default says.
    """
    options: dict[str, Any] = {
        "ntasks-per-node": request.tasks_per_node,
        # srun of 22.05 and 23.02 does not inherit it from the job.
        "cpus-per-task": request.cpus_per_task,
        "distribution": "block:block",
        "cpu-bind": "cores" if site is not None and site.binds_cores else None,
        # Otherwise a step goes on without a rank that died, and its peers wait for it.
        "kill-on-bad-exit": 1,
        # A submission with --export=NONE would otherwise start ranks without their environment. Single variables are
        # never passed here: srun cuts a value at its first comma.
        "export": "ALL",
        "input": "none",
        "mpi": mpi,
    }
    options.update({_long(name): value for name, value in cfg.cluster.srun.items()})
    return [_word(name, value) for name, value in options.items() if value is not None and value is not False]


def option_mistakes(cfg: Any) -> list[UserError]:
    """Options in `cluster.sbatch` and `cluster.srun` that have a key of their own, or that dthpc sets itself."""
    errors = []
    for name, value in cfg.cluster.sbatch.items():
        errors += _mistake("cluster.sbatch", str(name), value, OWNERS, _OURS)
    for name, value in cfg.cluster.srun.items():
        errors += _mistake("cluster.srun", str(name), value, _SRUN_OWNERS, _OURS_OF_SRUN)
    if "gres" in cfg.cluster.sbatch and "gpu" in str(cfg.cluster.sbatch["gres"]) and cfg.cluster.gpus_per_node:
        why = f"GPUs are asked for twice: cluster.gpus_per_node={cfg.cluster.gpus_per_node} asks for them too"
        value = cfg.cluster.sbatch["gres"]
        errors.append(UserError(why, key="cluster.sbatch.gres", value=value, instead="leave one of them out"))
    for name, text in cfg.cluster.environment.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", str(name), re.ASCII) or "\0" in str(text):
            key = f"cluster.environment.{name}"
            errors.append(UserError("is no environment variable", key=key, value=text, instead="NAME: value"))
    return errors


def unknown_options(cfg: Any, client: SlurmClient) -> list[UserError]:
    """Options in `cluster.sbatch` and `cluster.srun` that this site's commands do not take.

    The commands themselves are asked, each option followed by `--help`: their help texts leave options out.
    """
    errors = []
    for command, given in (("sbatch", cfg.cluster.sbatch), ("srun", cfg.cluster.srun)):
        if client.find(command) is None:
            continue
        for name, value in given.items():
            if value is None or value is False:
                continue
            answer = client.try_once([command, _word(_long(name), value), "--help"])
            if answer.code != 0 or "Usage:" not in answer.output:
                errors.append(_refused_option(client, command, str(name), value, answer.errors))
    return errors


def _refused_option(client: SlurmClient, command: str, name: str, value: Any, said: str) -> UserError:
    text = next((line for line in said.splitlines() if line.strip()), "no reason given")
    text = re.sub(rf"^{command}: (error: )?", "", text.strip())
    instead = f"see `{command} --help`"
    if "unrecognized" in text or "ambiguous" in text:
        instead = nearest(_long(name), known_options(client.try_once([command, "--help"]).output))
    return UserError(
        f"{command} does not take it ({text})", key=f"cluster.{command}.{name}", value=value, instead=instead
    )


def known_options(help_text: str) -> frozenset[str]:
    """The long options in a help text; both forms of `--[no-]name`."""
    found = set(re.findall(r"--([a-z][a-z0-9-]*)", help_text))
    for name in re.findall(r"--\[no-\]([a-z][a-z0-9-]*)", help_text):
        found |= {name, f"no-{name}"}
    return frozenset(found)


def file_pattern(folder: Path, name: str) -> str:
    """A path for `--output` whose name holds Slurm's `%` patterns, while a `%` in the folder means itself."""
    return f"{str(folder).replace('%', '%%')}/{name}"


def _mistake(group: str, name: str, value: Any, owners: dict[str, str], ours: frozenset[str]) -> list[UserError]:
    long = _long(name)
    key = f"{group}.{name}"
    if not re.fullmatch(r"[a-z][a-z0-9-]+", long):
        return [UserError("is no long option", key=key, value=value, instead="the name after --, such as nice or hint")]
    if long in owners:
        why = f"--{long} comes from {owners[long]}, and an option given twice has no sure value"
        return [UserError(why, key=key, value=value, instead=f"set {owners[long]}")]
    if long in ours:
        return [UserError(f"dthpc sets --{long} itself", key=key, value=value, instead="leave it out")]
    if "\n" in str(value) or "\0" in str(value):
        return [UserError("an option is one line", key=key, value=repr(value), instead="take the line break out")]
    return []


def _gpu_options(cfg: Any, site: Site | None) -> dict[str, Any]:
    cluster = cfg.cluster
    kind = f"{cluster.gpu_type}:" if cluster.gpu_type else ""
    if site is not None and not site.takes_gpu_options:
        each = cluster.gpus_per_node or (cluster.gpus_per_task or 0) * cluster.tasks_per_node
        return {"gres": f"gpu:{kind}{each}"} if each else {}
    if cluster.gpus_per_task:
        return {"gpus-per-task": f"{kind}{cluster.gpus_per_task}"}
    return {"gpus-per-node": f"{kind}{cluster.gpus_per_node}"} if cluster.gpus_per_node else {}


def _long(name: Any) -> str:
    return str(name).replace("_", "-")


def _word(name: str, value: Any) -> str:
    return f"--{name}" if value is True else f"--{name}={value}"
