"""Finding out which of a machine's addresses really lead to it.

Several machines may hold the same address (every docker host has a 172.17.0.1), and a name may resolve to the machine
that asks. So rank 0 runs a server that says a random word, and a peer believes an address where it hears that word.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from dataclasses import dataclass

_WORD_BYTES = 32


class HelloServer:
    """Says this attempt's random word to everyone who connects, until it is closed."""

    def __init__(self) -> None:
        """Listen on a free port of every address, IPv4 and IPv6."""
        self.word = secrets.token_hex(_WORD_BYTES // 2)
        dual = socket.has_dualstack_ipv6()
        self._socket = socket.create_server(
            ("", 0), family=socket.AF_INET6 if dual else socket.AF_INET, backlog=1024, dualstack_ipv6=dual
        )
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, name="hello", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            with connection, contextlib.suppress(OSError):
                connection.sendall(self.word.encode())

    def close(self) -> None:
        """Stop answering."""
        # close() alone does not wake a thread that is blocked in accept().
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(timeout=5)


@dataclass(frozen=True)
class Answer:
    """What came of dialling one address."""

    address: str
    """The address that was dialled."""

    local: str | None
    """This machine's own address on the connection; `None` where the right machine did not answer."""

    why: str
    """Why the address is not taken, or `reached`."""


def dial(address: str, port: int, word: str, timeout_s: float) -> Answer:
    """Connect to an address and check that the machine there knows the word.

    Args:
        address: IPv4 or IPv6 address.
        port: port of the hello server.
        word: what it must say.
        timeout_s: seconds to wait for the connection, and again for the word.
    """
    try:
        with socket.create_connection((address, port), timeout=timeout_s) as connection:
            local = str(connection.getsockname()[0])
            heard = b""
            while len(heard) < _WORD_BYTES:
                part = connection.recv(_WORD_BYTES - len(heard))
                if not part:
                    break
                heard += part
    except TimeoutError:
        return Answer(address, None, f"no answer within {timeout_s:g} s")
    except OSError as error:
        return Answer(address, None, (error.strerror or str(error)).lower())
    if heard.decode(errors="replace") != word:
        return Answer(address, None, "another machine or program answered")
    return Answer(address, local, "reached")
