"""What is known of runs: their states, from disk and from Slurm; the follower; texts for people. Free of torch."""
