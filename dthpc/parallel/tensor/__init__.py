"""Tensor and sequence parallelism: split layers, and the plan that says which layers are split how."""
