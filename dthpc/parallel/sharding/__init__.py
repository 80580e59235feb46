"""Data parallelism and ZeRO: flat buckets of parameters and gradients, sharded and reduced over ranks."""
