"""A real Slurm cluster on one machine: nodes are network namespaces, every daemon is the distribution's own.

>>> from mini import Cluster
>>> with Cluster("demo", nodes=2) as cluster:
...     cluster.run(["srun", "-N2", "hostname"])

The rooms, top to bottom: `cli` (verbs) → `cluster` (the one object that tests and verbs use) → `daemons`, `network`,
`procs`, `host` (what exists on this machine) → `conf` (the files Slurm reads) → `spec` (what was asked for).
"""

from .cluster import Cluster
from .errors import MiniError
from .spec import Spec

__all__ = ["Cluster", "MiniError", "Spec"]
