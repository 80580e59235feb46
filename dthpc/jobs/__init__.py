"""What a run executes: `run(config, context)` of each job, and what builds its parts. Needs torch."""
