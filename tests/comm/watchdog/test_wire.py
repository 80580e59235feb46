from __future__ import annotations

import os
import socket

from dthpc.comm.watchdog.wire import Line


def pair() -> tuple[Line, Line]:
    one, other = socket.socketpair()
    return Line(one), Line(other)


def test_messages_arrive_whole_and_in_order() -> None:
    one, other = pair()
    one._socket.sendall(b'{"kind": "a"}\n{"ki')
    assert other.receive() == [{"kind": "a"}]
    one._socket.sendall(b'nd": "b"}\nno json\n[]\n')
    assert other.receive() == [{"kind": "b"}]
    assert one.send({"kind": "long", "text": "x" * 200_000})
    got: list[object] = []
    while not got:
        got = list(other.receive())
    assert len(str(got[0])) > 200_000


def test_the_end_of_a_connection_is_seen() -> None:
    one, other = pair()
    one.close()
    assert other.receive() == []
    assert other.closed
    assert not other.send({"kind": "late"})


def test_a_forked_child_does_not_keep_the_connection_open() -> None:
    one, other = pair()
    hold, release = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(release)
        os.read(hold, 1)
        os._exit(0)
    one._socket.close()
    try:
        assert other.receive() == []
        assert other.closed
    finally:
        os.close(release)
        os.waitpid(child, 0)
