"""sbatch's words, and the configuration keys behind them."""

from __future__ import annotations

import pytest

from dthpc.launch.refusals import explain_refusal
from tests.launch.sites import make_site

FAILED = "sbatch: error: Batch job submission failed: "


@pytest.mark.parametrize(
    ("said", "options", "key", "value"),
    [
        (FAILED + "Invalid partition name specified", {"partition": "mian"}, "cluster.partition", "mian"),
        (
            FAILED + "Invalid account or account/partition combination specified",
            {"account": "a"},
            "cluster.account",
            "a",
        ),
        (FAILED + "Invalid qos specification", {"qos": "q"}, "cluster.qos", "q"),
        (
            FAILED + "Requested time limit is invalid (missing or exceeds some limit)",
            {"time": "9-0"},
            "cluster.time",
            "9-0",
        ),
        (FAILED + "Invalid feature specification", {"constraint": "x"}, "cluster.constraint", "x"),
        (FAILED + "Requested reservation is invalid", {"reservation": "r"}, "cluster.reservation", "r"),
        (FAILED + "Invalid node name specified", {"nodelist": "z"}, "cluster.nodelist", "z"),
        (FAILED + "Invalid node name specified", {"exclude": "z"}, "cluster.exclude", "z"),
        ("sbatch: error: Memory specification can not be satisfied", {"mem": "9T"}, "cluster.memory", "9T"),
        (FAILED + "Job dependency problem", {"dependency": "x"}, "cluster.after or cluster.dependency", "x"),
        (FAILED + "Invalid generic resource (gres) specification", {"gpus_per_node": 9}, "cluster.gpus_per_node", 9),
        (FAILED + "More processors requested than permitted", {"cpus_per_task": 99}, "cluster.cpus_per_task", 99),
        (FAILED + "Node count specification invalid", {"nodes": 99}, "cluster.nodes", 99),
        (FAILED + "Job violates accounting/QOS policy (job submit limit)", {}, "cluster.qos", None),
        ("sbatch: unrecognized option '--bogus=1'\nTry \"sbatch --help\"", {}, "cluster.sbatch.bogus", None),
        ("sbatch: error: the plugin says no", {}, "cluster", None),
    ],
)
def test_the_key_is_named_and_slurm_cited(said: str, options: dict[str, object], key: str, value: object) -> None:
    error = explain_refusal(said, options, make_site())
    assert (error.key, error.value) == (key, value)
    assert said.splitlines()[0].removeprefix("sbatch: ").removeprefix("error: ") in error.message()


def test_the_nearest_partition_is_suggested() -> None:
    error = explain_refusal(FAILED + "Invalid partition name specified", {"partition": "mian"}, make_site())
    assert error.instead == "did you mean main?"
