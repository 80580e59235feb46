"""dthpc: trains large models on HPC clusters, through Slurm, preemption and requeue."""

__version__ = "0.1.0"
