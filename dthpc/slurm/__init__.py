"""Reads what Slurm says and asks it: host lists, scontrol, squeue, sinfo, sacct, environments. Free of torch."""
