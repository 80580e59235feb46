from __future__ import annotations

from dthpc.jobs.collectives.groups import place_ranks
from dthpc.jobs.collectives.pairs import member_sets
from tests.jobs.collectives import tasks
from tests.ranks import pool


def test_all_pairs_of_nodes_and_of_the_ranks_inside_are_measured_both_ways() -> None:
    answers = pool().run(5, tasks.matrices, ["a", "a", "b", "b", "c"])
    assert all(answer == answers[0] for answer in answers)
    nodes, inside_a, inside_b = answers[0]
    assert (nodes["name"], nodes["labels"]) == ("nodes", ["a", "b", "c"])
    assert (inside_a["name"], inside_a["labels"]) == ("ranks of a", ["rank 0", "rank 1"])
    assert inside_b["labels"] == ["rank 2", "rank 3"]
    for matrix in answers[0]:
        for a, row in enumerate(matrix["bandwidth"]):
            assert [value is None for value in row] == [a == b for b in range(len(row))]
            assert all(value > 0 for value in row if value is not None)
        latency = matrix["latency_us"]
        assert all(latency[a][b] == latency[b][a] for a in range(len(latency)) for b in range(len(latency)))


def test_what_has_one_member_is_not_measured() -> None:
    places = place_ranks([("a", "a"), ("a", "a")])
    assert member_sets(places, "auto") == [("ranks", [("ranks of a", [0, 1])])]
    assert member_sets(places, "nodes") == []
    assert member_sets(place_ranks([("a", "a"), ("b", "b")]), "both") == [("nodes", [("nodes", [0, 1])])]
