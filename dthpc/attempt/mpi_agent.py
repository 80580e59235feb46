"""Stands for one rank under an MPI launcher: `python -I -S mpi_agent.py SOCKET`, started by `mpiexec`.

It hands the keeper what the launcher gave it, its variables and its open connection to the launcher, and then stays
until the keeper has seen its rank end: to the launcher, it is the rank. It knows the standard library alone, so that it
starts in a few milliseconds and in any environment.
"""

import json
import os
import socket
import sys

CONNECTIONS = ("PMI_FD", "PMI2_FD")
"""Variables that hold the number of an open connection to the launcher (PMI-1 and PMI-2; PMIx names a socket)."""


def main(address: str) -> int:
    """Hand over, and wait for the end of the connection: the keeper closes it, or it closes with the keeper."""
    handed = [name for name in CONNECTIONS if os.environ.get(name, "").isdigit()]
    with socket.socket(socket.AF_UNIX) as keeper:
        keeper.connect(address)
        word = json.dumps({"environment": dict(os.environ), "handed": handed, "pid": os.getpid()}).encode()
        descriptors = [int(os.environ[name]) for name in handed]
        sent = socket.send_fds(keeper, [len(word).to_bytes(8, "big")], descriptors)
        assert sent == 8
        keeper.sendall(word)
        keeper.recv(1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
