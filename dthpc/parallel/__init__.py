"""Layout → mesh → parallelize: gradient buckets and number formats."""
