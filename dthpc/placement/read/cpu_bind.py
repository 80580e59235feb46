"""What `srun --cpu-bind=verbose` tells of the masks that it set."""

from __future__ import annotations

import re

from dthpc.placement.cpuset import CpuSet, parse_mask
from dthpc.placement.read.text import clean, refuse

_LINE = re.compile(r"cpu[-_]bind=(\w+) - ([\w.-]+), task\s+(\d+)\s+(\d+) \[\d+\]: mask (\S+)")


def read_cpu_bind(text: str, where: str = "srun --cpu-bind=verbose") -> dict[int, CpuSet]:
    """The CPUs of each task by its number in the step.

    Raises:
        UserError: there is no such line, or a task has two masks.
    """
    masks: dict[int, CpuSet] = {}
    for _, _, task, _, mask in _LINE.findall(clean(text)):
        if masks.setdefault(int(task), parse_mask(mask, where)) != parse_mask(mask, where):
            raise refuse(where, f"task {task} has two masks", mask, "save the lines of one step")
    if not masks:
        raise refuse(where, "there is no line `cpu-bind=MASK - …`", text[:80], "run srun with --cpu-bind=verbose")
    return masks
