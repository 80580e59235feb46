from __future__ import annotations

import socket

from dthpc.comm.hello import HelloServer, dial


def test_the_right_machine_is_known_by_its_word_over_both_families() -> None:
    server = HelloServer()
    try:
        answer = dial("127.0.0.1", server.port, server.word, 5.0)
        assert (answer.local, answer.why) == ("127.0.0.1", "reached")
        if socket.has_dualstack_ipv6():
            assert dial("::1", server.port, server.word, 5.0).local == "::1"
    finally:
        server.close()


def test_another_word_another_program_and_nobody_are_told_apart() -> None:
    server, other = HelloServer(), HelloServer()
    assert server.word != other.word
    assert dial("127.0.0.1", other.port, server.word, 5.0).why == "another machine or program answered"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert dial("127.0.0.1", port, server.word, 0.2).why == "no answer within 0.2 s"
    other.close()
    assert dial("127.0.0.1", other.port, other.word, 5.0).why == "connection refused"
    server.close()
    server.close()
