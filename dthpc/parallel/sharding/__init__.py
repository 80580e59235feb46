"""Data parallelism and ZeRO: flat buckets of parameters and gradients, sharded and reduced over ranks."""

from dthpc.parallel.sharding.shards import ShardOptions, Shards

__all__ = ["ShardOptions", "Shards"]
