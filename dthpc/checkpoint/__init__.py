"""Checkpoints: snapshot → write → verify → commit → retain, and the way back.

`manifest` and `retain` import no torch, so that a login node can list, verify and clean; a job calls `store`.
"""
