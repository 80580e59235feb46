"""Puts the configuration key behind sbatch's refusal, whose own words name options at best."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dthpc.errors import UserError, nearest
from dthpc.launch.site import Site

_DEMANDS = "cluster.nodes, tasks_per_node, cpus_per_task, gpus_per_node, memory or constraint"

_CAUSES: list[tuple[str, str, str | None, str]] = [
    # words of Slurm's message, key, option that holds its value, what to do
    ("invalid partition|partition name", "cluster.partition", "partition", "name a partition that `sinfo` lists"),
    ("partition not available|permitted to use this partition", "cluster.partition", "partition", "name another one"),
    ("invalid account", "cluster.account", "account", "name an account of yours (`sacctmgr show assoc user=$USER`)"),
    ("invalid qos", "cluster.qos", "qos", "name a QOS that your account may use (`sacctmgr show qos`)"),
    ("accounting/QOS policy", "cluster.qos", "qos", "stay within the limits of your account and QOS"),
    ("time limit|time specification|--time", "cluster.time", "time", "ask for less, or another partition"),
    ("feature specification|invalid constraint", "cluster.constraint", "constraint", "features are in `sinfo -o %f`"),
    ("reservation", "cluster.reservation", "reservation", "name one that `scontrol show reservation` lists"),
    ("invalid node name|node name specified", "cluster.nodelist", "nodelist", "name nodes that `sinfo -N` lists"),
    ("memory specification|memory required|--mem", "cluster.memory", "mem", "ask for less than a node has"),
    ("dependency", "cluster.after or cluster.dependency", "dependency", "name a run or job that Slurm still knows"),
    ("gres|TRES|generic resource", "cluster.gpus_per_node", "gpus-per-node", "GPUs are in `sinfo -o '%N %G'`"),
    ("more processors requested", "cluster.cpus_per_task", "cpus-per-task", "ask for fewer tasks or cores a node"),
    ("node count", "cluster.nodes", "nodes", "ask for fewer nodes"),
    ("node configuration", _DEMANDS, None, "ask for what one kind of node offers (`sinfo -o '%P %D %c %m %G %f'`)"),
    ("mail", "cluster.mail_type", "mail-type", "BEGIN, END, FAIL, REQUEUE or ALL"),
    ("array", "--multirun", None, "a smaller sweep"),
    ("access/permission denied", "cluster.account", "account", "an account and partition that are open to you"),
]


def explain_refusal(said: str, options: Mapping[str, Any], site: Site | None = None) -> UserError:
    """The error that names the configuration key behind what sbatch said, and cites it.

    Args:
        said: what sbatch wrote.
        options: the options of the submission, by long name (`-` or `_`).
        site: the site, whose partitions are suggested.
    """
    text = "; ".join(re.sub(r"^sbatch: (error: )?", "", line.strip()) for line in said.strip().splitlines())
    given = {name.replace("_", "-"): value for name, value in options.items()}
    unknown = re.search(r"(?:unrecognized|invalid|ambiguous) option (?:--|'--)([a-z-]+)", text)
    if unknown:
        why = f"sbatch does not know the option ({text})"
        return UserError(why, key=f"cluster.sbatch.{unknown[1]}", instead="see `sbatch --help`")
    for words, key, option, instead in _CAUSES:
        if re.search(words, text, re.IGNORECASE):
            value = given.get(option) if option else None
            if option == "partition" and site is not None and value is not None:
                instead = nearest(str(value), [record.name for record in site.partitions])
            if option == "nodelist" and value is None:
                key, value = "cluster.exclude", given.get("exclude")
            return UserError(f"sbatch refused it: {text}", key=key, value=value, instead=instead)
    return UserError(f"sbatch failed: {text or 'it said nothing'}", key="cluster", instead="see Slurm's message")
