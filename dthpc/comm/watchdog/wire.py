"""Messages between the ranks' watchdogs and rank 0: JSON objects, one a line, over one TCP connection for each rank.

A connection of their own rather than keys in the rendezvous store: its end tells at once that a process is gone, and
nobody has to ask for news.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import Any

Message = dict[str, Any]

_CHUNK = 1 << 16
_SEND_TIMEOUT_S = 5.0


class Line:
    """One end of a connection. Sending blocks for a few seconds at most; receive only what `select` has told of."""

    def __init__(self, connection: socket.socket) -> None:
        """Take over a connected socket."""
        connection.settimeout(_SEND_TIMEOUT_S)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._heard = b""
        self._owner = os.getpid()
        self.closed = False
        # A child that was forked would hold the connection open when this process is gone.
        os.register_at_fork(after_in_child=self._close_in_child)

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    def send(self, message: Message) -> bool:
        """Send a message; False where the other end is gone."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[Message]:
        """Messages that have come; sets `closed` when the other end is gone."""
        try:
            data = self._socket.recv(_CHUNK)
        except TimeoutError:
            return []
        except OSError:
            data = b""
        if not data:
            self.closed = True
            return []
        *lines, self._heard = (self._heard + data).split(b"\n")
        messages = []
        for line in lines:
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    messages.append(message)
        return messages

    def close(self) -> None:
        """End the connection."""
        self.closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _close_in_child(self) -> None:
        self._socket.close()
