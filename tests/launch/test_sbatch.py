"""The configuration as options of sbatch and srun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dthpc.errors import UserError
from dthpc.launch.request import read_request
from dthpc.launch.sbatch import (
    file_pattern,
    known_options,
    option_mistakes,
    sbatch_options,
    srun_options,
    unknown_options,
)
from dthpc.launch.site import Site, derive
from dthpc.rundir import RunDir
from tests.launch.sites import add_command, client_of, make_config, make_site

RUN = RunDir(Path("/shared/runs/r"))


def options_of(site: Site | None = None, **cluster: Any) -> dict[str, Any]:
    config = make_config(**cluster)
    site = site or make_site()
    request = read_request(config)
    return sbatch_options(config, RUN, request, site, derive(site, config, request))


def test_every_key_becomes_its_option() -> None:
    options = options_of(
        nodes="2-4", tasks_per_node=2, cpus_per_task=3, gpus_per_node=4, gpu_type="h100", partition="main", account="a",
        qos="q", constraint="x&y", reservation="r", nodelist="n1", exclude="n2", exclusive=True, time="2-0",
        memory="8G", mail_user="me@site", mail_type="END", comment="why not", dependency="singleton",
        sbatch={"nice": 5, "hold": False},
    )  # fmt: skip
    assert options == {
        "job-name": "r", "nodes": "2-4", "ntasks-per-node": 2, "cpus-per-task": 3, "gpus-per-node": "h100:4",
        "partition": "main", "account": "a", "qos": "q", "constraint": "x&y", "reservation": "r", "nodelist": "n1",
        "exclude": "n2", "exclusive": True, "time": "2-0", "mem": "8G", "mail-user": "me@site", "mail-type": "END",
        "comment": "why not", "dependency": "singleton", "kill-on-invalid-dep": "yes", "signal": "USR2@300",
        "output": "/shared/runs/r/submissions/%j.log", "requeue": True, "nice": 5,
    }  # fmt: skip


def test_gpus_by_task_and_by_gres_on_older_sites() -> None:
    assert options_of(gpus_per_task=2, tasks_per_node=2)["gpus-per-task"] == "2"
    old = make_site(select_type="select/cons_res")
    assert options_of(old, gpus_per_task=2, tasks_per_node=2)["gres"] == "gpu:4"
    assert "gres" not in options_of(old)


def test_a_run_that_goes_on_in_new_jobs_is_not_requeued_by_slurm_as_well() -> None:
    options = options_of(requeue="resubmit")
    assert options["no-requeue"] is True
    assert "requeue" not in options


@pytest.mark.parametrize(
    ("cluster", "told"),
    [
        ({"sbatch": {"partition": "p"}}, r"cluster\.sbatch\.partition=p: --partition comes from cluster\.partition"),
        ({"sbatch": {"ntasks_per_node": 2}}, r"comes from cluster\.tasks_per_node"),
        ({"sbatch": {"output": "x"}}, "dthpc sets --output itself"),
        ({"sbatch": {"N": 2}}, "is no long option"),
        ({"sbatch": {"comment": "x"}}, r"comes from cluster\.comment"),
        ({"sbatch": {"licenses": "a\nb"}}, "an option is one line"),
        ({"sbatch": {"gres": "gpu:2"}, "gpus_per_node": 2}, "GPUs are asked for twice"),
        ({"srun": {"ntasks": 2}}, r"cluster\.srun\.ntasks=2"),
        ({"srun": {"export": "X=1"}}, "dthpc sets --export itself"),
        ({"environment": {"A-B": "1"}}, r"cluster\.environment\.A-B"),
    ],
)
def test_options_that_have_an_owner_are_refused(cluster: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        options_of(**cluster)


def test_srun_options_and_their_overrides() -> None:
    config = make_config(
        cpus_per_task=3, tasks_per_node=2, srun={"distribution": "cyclic", "mpi": "pmi2", "label": True}
    )
    words = srun_options(config, read_request(config), make_site(task_plugins="task/affinity"))
    assert words == [
        "--ntasks-per-node=2", "--cpus-per-task=3", "--distribution=cyclic", "--cpu-bind=cores", "--kill-on-bad-exit=1",
        "--export=ALL", "--input=none", "--mpi=pmi2", "--label",
    ]  # fmt: skip
    assert not any("cpu-bind" in word for word in srun_options(make_config(), read_request(make_config()), make_site()))


def test_the_commands_are_asked_whether_they_take_an_option(tmp_path: Path) -> None:
    add_command(
        tmp_path,
        "sbatch",
        'case "$1" in --nice=*|--help) echo "Usage: sbatch"; echo "  --nice[=value]  --licenses=x";;'
        " *) echo \"sbatch: unrecognized option '$1'\" >&2; exit 1;; esac",
    )
    config = make_config(sbatch={"nice": 1, "license": "x", "hold": None})
    (error,) = unknown_options(config, client_of(tmp_path))
    assert error.key == "cluster.sbatch.license"
    assert "does not take it (unrecognized option '--license=x')" in error.message()
    assert "did you mean licenses" in error.message()


def test_options_in_a_help_text() -> None:
    assert known_options("  -x, --exclude=list\n  --[no-]kill  --gres-flags=o") >= {
        "exclude",
        "kill",
        "no-kill",
        "gres-flags",
    }


def test_a_percent_sign_in_a_folder_means_itself() -> None:
    assert file_pattern(Path("/a%b"), "%j.log") == "/a%%b/%j.log"
    assert not option_mistakes(make_config(sbatch={"nice": 1}))
