"""Collectives of ranks that run on one host, through memory that they share instead of a network."""

from dthpc.comm.shared.exchange import Exchange, Mismatch, Ticket
from dthpc.comm.shared.handshake import Meeting, share_memory

__all__ = ["Exchange", "Meeting", "Mismatch", "Ticket", "share_memory"]
