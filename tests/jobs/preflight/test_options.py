"""Mistakes in a preflight's keys, told on the login node."""

from __future__ import annotations

import pytest

from dthpc.config.compose import read_command_line
from dthpc.errors import UserError
from dthpc.jobs.preflight.options import check


def mistakes(*words: str) -> list[str]:
    (found, _), *_ = read_command_line(list(words), "submit")[0]
    return [error.message() for error in check(found)]


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("job.compute_s=-1", "job.compute_s=-1.0: too small. Instead: give at least 0"),
        ("job.memory_mb=1000000", "job.memory_mb=1000000: too large. Instead: give at most 65536"),
        ("job.network_tolerance=1", "job.network_tolerance=1.0: a share by which a node may fall behind"),
        ("job.two_nodes_factor=1", "job.two_nodes_factor=1.0: of two nodes the slower one must be slower by more"),
        ("job.clock_skew_s=nan", "job.clock_skew_s=nan: too small"),
        ("+job.slowed.node2=0", "job.slowed.node2=0: a node does each product at least once"),
        ("resilience.checks.pairs=-1", "resilience.checks.pairs=-1: too small"),
    ],
)
def test_a_value_that_means_nothing_is_told_with_its_key(word: str, told: str) -> None:
    (found,) = mistakes("job=preflight", word)
    assert found.startswith(told)


def test_a_preflight_that_looks_at_nothing_is_refused() -> None:
    nothing = [f"job.{name}=0" for name in ("compute_s", "memory_s", "network_mb", "files_mb", "files")]
    (found,) = mistakes("job=preflight", "job.doctor=false", *nothing)
    assert found.startswith(
        "job.doctor=false: nothing is left to look at. Instead: job.doctor=true, or one of compute_s"
    )
    assert mistakes("job=preflight", *nothing) == []
    assert mistakes("job=preflight", "job.doctor=false", *nothing[:-1]) == []


def test_the_defaults_are_sound_and_the_training_job_has_no_keys_of_a_preflight() -> None:
    assert mistakes("job=preflight") == mistakes("job=train") == []
    with pytest.raises(UserError, match=r"job\.compute_s"):
        mistakes("job=train", "job.compute_s=1")


def test_a_wrong_type_is_told() -> None:
    with pytest.raises(UserError, match=r"job\.compute_s=soon: wrong type of value"):
        mistakes("job=preflight", "job.compute_s=soon")
