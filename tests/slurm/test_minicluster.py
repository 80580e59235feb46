"""minicluster against a real Slurm: whatever a job, a user or a kill -9 can do to a cluster, on clusters that are real.

What takes Slurm long (a grace time, a vanished node) is set off by the fixture `scene` and looked at by the last tests.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from mini import Cluster, MiniError, Spec, cgroups, conf, host, network, procs
from mini.layout import Layout

REPOSITORY = Path(__file__).resolve().parents[2]
MINICLUSTER = REPOSITORY / "slurm" / "minicluster"
# Of this test run alone, so that two of them do not meet; names have 12 characters at most.
TAG = f"{os.getpid() % 100000:05d}"

# Writes down every signal it gets, until it is killed.
RECORDER = """
import os, signal, sys, time
def record(what):
    with open(sys.argv[1], "a") as file:
        file.write(f"{time.time():.2f} {what}\\n")
for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: record(signal.Signals(number).name))
record("start " + os.environ.get("SLURM_RESTART_COUNT", "0"))
while True:
    signal.pause()
"""


@pytest.fixture(scope="module")
def slurm():
    """A machine that can host a cluster."""
    try:
        host.require()
    except MiniError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def shared():
    """A directory that every node and every user sees."""
    with tempfile.TemporaryDirectory(prefix="minicluster-test-") as path:
        Path(path).chmod(0o777)
        Path(path, "recorder.py").write_text(RECORDER)
        yield Path(path)


@pytest.fixture(scope="module")
def cluster(slurm):
    """One cluster for most tests: the scene plays on its first four nodes, and jobs go to the fifth unless told."""
    partitions = ["apart Nodes=node4", "quick Nodes=node5 Default=YES"]
    with Cluster(f"main{TAG}", nodes=5, settings={"KillWait": "3"}, partitions=partitions) as running:
        yield running


@pytest.fixture(scope="module")
def qos_cluster(slurm):
    """A second cluster, beside the first."""
    with Cluster(f"qos{TAG}", nodes=1, gpus=0, preempt="qos", settings={"KillWait": "2"}) as running:
        yield running


@pytest.fixture
def third(slurm):
    """The name of a cluster that the test starts and breaks itself."""
    name = f"odd{TAG}"
    yield name
    Cluster(name).down()


@pytest.fixture(scope="module")
def scene(cluster, shared):
    """Jobs in each partition, preempted, and a node that vanishes under its job: all at once, ahead of need."""
    homes = {"grace": "node1", "main": "node2", "cancel": "node3"}
    jobs = {name: Job(cluster, shared, name, ["-p", name, "-w", node]) for name, node in homes.items()}
    jobs["vanish"] = Job(cluster, shared, "vanish", ["-p", "apart"])
    for job in jobs.values():
        job.wait_for_record("start")
    for name in homes:
        jobs[name].preempted_at = time.time()
        jobs[name].preemptor = cluster.preempt(jobs[name].id)
    cluster.link_down("node4")
    return jobs


class Job:
    """A batch job whose one step records the signals it gets."""

    def __init__(self, cluster, shared, name, options=()):
        self.cluster = cluster
        self.record = shared / f"{cluster.name}-{name}.record"
        step = f"srun {sys.executable} {shared}/recorder.py {self.record}"
        files = ["-o", shared / f"{name}.log", "--open-mode=append", "--wrap", step]
        self.id = cluster.output("sbatch", "--parsable", *options, *files, cwd=shared)

    def signals(self):
        """`[(when, what), …]`, of all starts together."""
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        return [(float(when), what) for when, what in (line.split(" ", 1) for line in lines)]

    def wait_for_record(self, what, seconds=30, count=1):
        """Wait until the step has recorded this so many times."""
        seen = procs.wait_for(lambda: sum(w.startswith(what) for _, w in self.signals()) >= count, seconds)
        assert seen, f"job {self.id}: no {what} in {self.signals()}; {self.cluster.job(self.id)}"

    def wait(self, *states, seconds=60):
        """Wait for a state of the job."""
        return self.cluster.wait_job(self.id, *states, seconds=seconds)


def cli(*words, **options):
    """The command as a user types it."""
    return subprocess.run([MINICLUSTER, *map(str, words)], capture_output=True, text=True, **options)


def remains(name):
    """Everything of a cluster that is still on this machine."""
    found = [*network.existing(name).values(), *host.STATE_ROOT.glob(f"{name}*")]
    found += [path for path in [Path("/sys/class/net", network.uplink_name(name))] if path.exists()]
    found += Path("/sys/fs/cgroup").glob(f"**/minicluster.{name}")
    found += [line for line in Path("/proc/self/mounts").read_text().splitlines() if name in line]
    for pid in procs.pids():
        with contextlib.suppress(OSError):
            if (
                name in Path(f"/proc/{pid}/cmdline").read_text()
                or f"/{name}/" in Path(f"/proc/{pid}/environ").read_text()
            ):
                found.append(pid)
    return found


# --- without Slurm ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "must_say"),
    [
        ({"name": "Two_Words"}, "--name Two_Words"),
        ({"name": "a-name-too-long"}, "1 to 12"),
        ({"nodes": 0}, "--nodes 0"),
        ({"preempt": "fair"}, "partition, qos or none"),
        ({"preempt": "qos", "accounting": False}, "drop --no-accounting"),
        ({"settings": {"SlurmUser": "slurm"}}, "--set SlurmUser=slurm"),
        ({"settings": {"preempttype": "preempt/qos"}}, "use --preempt"),
        ({"partitions": ["debug MaxTime"]}, "--partition 'debug MaxTime'"),
    ],
)
def test_what_cannot_work_is_refused_by_name(options, must_say):
    with pytest.raises(MiniError, match=must_say):
        Spec(**options)


def slurm_conf(**options):
    spec = Spec(**options)
    addresses = {name: f"198.19.0.{i}" for i, name in enumerate(spec.hosts, 1)}
    return conf.slurm_conf(spec, Layout(Path("/state")), addresses).splitlines()


def test_settings_replace_defaults_whatever_their_case():
    lines = slurm_conf(settings={"killwait": "7", "Licenses": "a=1"})
    assert [line for line in lines if line.lower().startswith("killwait")] == ["killwait=7"]
    assert "Licenses=a=1" in lines


def test_a_partition_line_changes_that_partition_or_adds_one():
    lines = slurm_conf(partitions=["grace gracetime=5", "PartitionName=debug Default=YES MaxTime=30"])
    partitions = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("PartitionName=")}
    assert "gracetime=5" in partitions["PartitionName=grace"]
    assert "PriorityTier=10" in partitions["PartitionName=grace"]
    assert {"MaxTime=30", "Nodes=ALL"} <= set(partitions["PartitionName=debug"])
    assert [name for name, words in partitions.items() if "Default=YES" in words] == ["PartitionName=debug"]


def test_a_recycled_pid_is_not_ours(tmp_path):
    stat = Path("/proc/self/stat").read_text()
    (tmp_path / "same").write_text(stat)
    fields = stat.rpartition(")")[2].split()
    fields[19] = str(int(fields[19]) - 1)
    (tmp_path / "older").write_text(f"{os.getpid()} (x y) " + " ".join(fields))
    assert procs.alive_pid(tmp_path / "same") == os.getpid()
    assert procs.alive_pid(tmp_path / "older") is None
    assert procs.alive_pid(tmp_path / "absent") is None


def test_without_root_one_message_says_what_to_type(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(host, "find", lambda program: None if program == "slurmdbd" else program)
    with pytest.raises(MiniError, match=r"slurmdbd.*sudo slurm/minicluster install && sudo slurm/minicluster up"):
        Cluster("x").up()


def test_install_does_nothing_twice_and_lets_no_service_start(monkeypatch, tmp_path, capsys):
    seen = []
    monkeypatch.setattr(host, "POLICY", tmp_path / "policy-rc.d")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(host.shutil, "which", lambda program, path=None: None if program == "systemctl" else program)
    monkeypatch.setattr(host, "find", lambda program: seen or program != "munged")
    monkeypatch.setattr(host, "apt", lambda *words: seen.append((words, host.POLICY.read_text())))
    host.install(print)
    assert [words[0] for words, _ in seen] == ["update", "install"]
    assert "munge" in seen[1][0]
    assert all(policy.endswith("exit 101\n") for _, policy in seen)
    assert not host.POLICY.exists()
    host.install(print)
    assert len(seen) == 2
    assert capsys.readouterr().out == "installed munge\neverything is installed already\n"


# --- a cluster --------------------------------------------------------------------------------------------------------


@pytest.mark.slurm
@pytest.mark.usefixtures("scene")
def test_status_and_list_show_a_healthy_cluster(cluster):
    found = json.loads(cli("status", "--name", cluster.name, "--json").stdout)
    assert found["healthy"]
    assert set(found["daemons"]) >= {"munged", "mariadb", "slurmdbd", "slurmctld", "slurmd.node5"}
    assert {partition["name"] for partition in found["partitions"]} == {
        "main",
        "grace",
        "cancel",
        "urgent",
        "apart",
        "quick",
    }
    assert cluster.name in cli("list").stdout
    assert "slurmctld version" in cli("logs", "--name", cluster.name, "slurmctld", "-n", 1000).stdout


@pytest.mark.slurm
def test_run_is_the_command_itself(cluster, shared):
    words = ["run", "--name", cluster.name, "--"]
    result = cli(*words, "bash", "-c", "hostname; pwd; echo -- $0; exit 7", "--", cwd=shared)
    assert (result.returncode, result.stdout.split()) == (7, ["login", str(shared), "--", "--"])
    process = subprocess.Popen([MINICLUSTER, *words, "sh", "-c", "echo ready; exec sleep 100"], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGUSR1)
    assert process.wait(10) == -signal.SIGUSR1
    process.stdout.close()


@pytest.mark.slurm
def test_a_node_has_its_own_name_address_network_and_gpus(cluster):
    script = "hostname; hostname --ip-address; getent hosts node5; ls /sys/class/net; echo $CUDA_VISIBLE_DEVICES"
    step = ["--gpus=2", "-n1"]
    name, address, found, *interfaces, gpus = cluster.output("srun", *step, "bash", "-c", script).splitlines()
    assert name == "node5"
    assert found.split() == [address, "node5"]
    assert sorted(interfaces) == ["eth0", "lo"]
    assert gpus == "0,1"


@pytest.mark.slurm
def test_ordinary_users_submit_from_the_login_host_and_from_this_machine(cluster, shared):
    job = cluster.output("sbatch", "--parsable", "-o", shared / "by-%u", "--wrap", "id -un", user="nobody", cwd=shared)
    cluster.wait_job(job, "COMPLETED")
    assert (shared / "by-nobody").read_text() == "nobody\n"
    # They may not enter everybody's folders: the checkout can lie in one that is closed to them.
    command = shutil.copytree(MINICLUSTER.parent, shared / "slurm") / MINICLUSTER.name
    script = f'eval "$({command} env --name {cluster.name})"; srun -N1 id -un; squeue -h'
    result = subprocess.run(
        ["runuser", "-u", "nobody", "--", "bash", "-c", script], capture_output=True, text=True, cwd="/"
    )
    assert result.stdout.startswith("nobody\n"), result.stderr


@pytest.mark.slurm
def test_a_job_without_any_slurm_variable_still_finds_its_cluster(cluster):
    script = "env -i PATH=$PATH scontrol show hostnames node[1-2]; env -i PATH=$PATH sinfo -h -o %P"
    assert cluster.output("srun", "-N1", "bash", "-c", script).split()[:2] == ["node1", "node2"]


@pytest.mark.slurm
def test_a_requeued_job_waits_until_it_is_released(cluster, shared):
    job = Job(cluster, shared, "requeue")
    job.wait_for_record("start 0")
    cluster.output("scontrol", "requeue", job.id)
    job.wait("PENDING")
    assert cluster.job(job.id)["Reason"] == "BeginTime"
    cluster.release(job.id)
    job.wait_for_record("start 1")
    cluster.output("scancel", job.id)


@pytest.mark.slurm
def test_a_limited_link_is_slower(cluster):
    server = (
        "import socket\ns=socket.create_server(('', 9)); print(flush=True); c=s.accept()[0]\nwhile c.recv(1<<20): pass"
    )
    client = (
        "import socket\nc=socket.create_connection(('node5', 9)); c.sendall(bytes(8<<20)); c.shutdown(1); c.recv(1)"
    )
    cluster.limit("node5", "80mbit")
    command = [cluster.layout.enter, "node5", sys.executable, "-c", server]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        began = time.monotonic()
        cluster.output(sys.executable, "-c", client)
        # 8 MiB at 10 MB/s; unlimited they take 20 ms.
        assert 0.6 < time.monotonic() - began < 5
    cluster.limit("node5", None)
    with pytest.raises(MiniError, match="is not a rate"):
        cluster.limit("node5", "fast")


@pytest.mark.slurm
def test_two_clusters_side_by_side(cluster, qos_cluster):
    assert {cluster.name, qos_cluster.name} <= set(cli("list").stdout.split())
    step = ["srun", "-p", "main", "-N1", "hostname", "--ip-address"]
    mine, other = cluster.output(*step), qos_cluster.output(*step)
    assert mine.rpartition(".")[0] != other.rpartition(".")[0]
    assert qos_cluster.node_states() == {"node1": "idle"}


@pytest.mark.slurm
def test_qos_preempts_and_sacct_tells(qos_cluster, shared):
    job = Job(qos_cluster, shared, "low", ["--qos=low"])
    job.wait_for_record("start 0")
    preemptor = qos_cluster.preempt(job.id)
    job.wait_for_record("SIGTERM")
    qos_cluster.wait_job(preemptor, "COMPLETED")
    job.wait("PENDING", "RUNNING")

    def states():
        return qos_cluster.output(
            "sacct", "-D", "-X", "-n", "-P", "-j", f"{job.id},{preemptor}", "-o", "state,qos"
        ).split()

    assert procs.wait_for(lambda: {"PREEMPTED|low", "COMPLETED|high"} <= set(states()), 15), states()
    graces = qos_cluster.output("sacctmgr", "-n", "-P", "show", "qos", "format=name,gracetime")
    assert "low-grace|00:00:20" in graces.split()


@pytest.mark.slurm
def test_a_daemon_may_die_and_come_back(qos_cluster):
    for daemon in ("slurmctld", "slurmd.node1"):
        assert cli("daemon", "--name", qos_cluster.name, daemon, "kill").returncode == 0
        assert f"{daemon:16} DEAD" in cli("status", "--name", qos_cluster.name).stdout
        assert cli("daemon", "--name", qos_cluster.name, daemon, "restart").returncode == 0
    assert cli("node", "--name", qos_cluster.name, "node1", "crash").returncode == 0
    assert cli("status", "--name", qos_cluster.name).returncode == 1
    assert cli("node", "--name", qos_cluster.name, "node1", "restart").returncode == 0
    # Killed, slurmctld forgets its last seconds: it may still believe in a job that had ended.
    qos_cluster.wait_node("node1", "idle", "mixed")
    assert cli("status", "--name", qos_cluster.name).returncode == 0


# --- what breaks ------------------------------------------------------------------------------------------------------


@pytest.mark.slurm
@pytest.mark.parametrize("moment", ["network", "slurmctld"])
def test_up_killed_midway_leaves_nothing_after_down(third, moment):
    starting = subprocess.Popen([MINICLUSTER, "up", "--name", third, "--nodes", "1"], stderr=subprocess.DEVNULL)
    layout = Layout(host.STATE_ROOT / third)
    reached = {"network": lambda: network.existing(third), "slurmctld": (layout.pids / "slurmctld").exists}[moment]
    assert procs.wait_for(reached, 30, 0.002)
    starting.kill()
    starting.wait()
    assert remains(third)
    assert cli("down", "--name", third).returncode == 0
    assert remains(third) == []
    assert cli("down", "--name", third).returncode == 0


@pytest.mark.slurm
def test_up_follows_a_killed_up_and_a_second_one_is_refused(third):
    starting = subprocess.Popen([MINICLUSTER, "up", "--name", third, "--nodes", "1"], stderr=subprocess.DEVNULL)
    layout = Layout(host.STATE_ROOT / third)
    assert procs.wait_for((layout.pids / "munged").exists, 30, 0.002)
    assert "busy with `up, pid" in cli("up", "--name", third).stderr
    starting.kill()
    starting.wait()
    options = ["--nodes", "2", "--no-accounting", "--private-tmp", "--set", "ProctrackType=proctrack/cgroup"]
    result = cli("up", "--name", third, *options)
    assert result.returncode == 0, result.stderr
    assert "up already" in cli("up", "--name", third).stderr

    again = Cluster.attach(third)
    groups = again.output("srun", "-N1", "-w", "node1", "cat", "/proc/self/cgroup")
    assert "slurm_node1" in groups or "node1_slurmstepd" in groups
    again.output("srun", "-N2", "bash", "-c", "touch /tmp/$(hostname)")
    assert again.output("srun", "-N1", "-w", "node2", "ls", "/tmp") == "node2"

    # Down while jobs run, one of them with an orphan that ignores what it can, and with dead daemons.
    script = "trap '' TERM HUP; setsid nohup sleep 4321 & srun -N2 sleep 4321 & wait"
    job = again.output("sbatch", "--parsable", "-N2", "-o", "/dev/null", "--wrap", script, cwd="/")
    again.wait_job(job, "RUNNING")
    again.kill("munged")
    again.kill("slurmctld")
    began = time.monotonic()
    assert cli("down", "--name", third).returncode == 0
    assert time.monotonic() - began < 5
    assert remains(third) == []


@pytest.mark.slurm
@pytest.mark.may_skip
def test_cgroups_hold_a_job_to_its_gpus_and_memory(third):
    if cgroups.hierarchies()[0][0] == cgroups.V2:
        pytest.skip("Slurm's device and memory groups are relied on with cgroup v1 only")
    settings = {"ProctrackType": "proctrack/cgroup", "TaskPlugin": "task/cgroup"}
    constraints = {"ConstrainDevices": "yes", "ConstrainRAMSpace": "yes"}
    with Cluster(third, nodes=1, accounting=False, settings=settings, cgroup_settings=constraints) as cluster:
        devices = cluster.layout.gpus
        job = cluster.run(["srun", "-n1", "--gpus=1", "cat", devices / "nvidia0", devices / "nvidia1"])
        assert "nvidia0: No such device or address" in job.stderr
        assert "nvidia1: Operation not permitted" in job.stderr
        greedy = cluster.run(["srun", "-n1", "--mem=100", sys.executable, "-c", "b'x' * (300 << 20)"])
        assert greedy.returncode != 0
        assert "oom" in greedy.stderr.lower()


@pytest.mark.slurm
def test_a_failed_up_shows_why_and_leaves_nothing(third):
    unknown = cli("up", "--name", third, "--no-accounting", "--set", "KilWait=5")
    assert unknown.returncode == 1
    assert "unrecognized key: KilWait" in unknown.stderr
    fatal = cli("up", "--name", third, "--no-accounting", "--set", "SelectType=select/none")
    assert fatal.returncode == 1
    assert "slurmctld ended while starting" in fatal.stderr
    assert "select/none" in fatal.stderr
    assert remains(third) == []


# --- what the scene has become ----------------------------------------------------------------------------------------


def after_start(job):
    """The signals of the job's first start, by name, and how long after the preemption the first one came."""
    signals = [entry for entry in job.signals() if not entry[1].startswith("start 1")]
    return [what for _, what in signals[1:]], signals[1][0] - job.preempted_at, signals[-1][0] - signals[1][0]


@pytest.mark.slurm
@pytest.mark.parametrize(("partition", "end"), [("main", "PENDING"), ("cancel", "PREEMPTED")])
def test_preemption_without_grace_terminates_at_once(scene, cluster, partition, end):
    job = scene[partition]
    job.wait_for_record("SIGTERM")
    cluster.wait_job(job.preemptor, "COMPLETED")
    job.wait(end)
    names, delay, lasted = after_start(job)
    assert set(names) == {"SIGTERM", "SIGCONT"}
    assert delay < 8
    assert lasted < 1


@pytest.mark.slurm
def test_preemption_with_grace_terminates_twice(scene, cluster):
    job = scene["grace"]
    job.wait_for_record("SIGTERM", count=2, seconds=60)
    cluster.wait_job(job.preemptor, "COMPLETED")
    job.wait("PENDING")
    names, delay, lasted = after_start(job)
    assert set(names) == {"SIGTERM", "SIGCONT"}
    assert delay < 8
    assert 15 < lasted < 45

    def states():
        return cluster.output("sacct", "-D", "-X", "-n", "-j", job.id, "-o", "state").split()

    assert procs.wait_for(lambda: "PREEMPTED" in states(), 15), states()


@pytest.mark.slurm
def test_a_vanished_node_is_down_and_its_job_runs_again(scene, cluster):
    job = scene["vanish"]
    cluster.wait_node("node4", "down*", "down", seconds=60)
    job.wait("PENDING")
    assert cluster.job(job.id)["Restarts"] == "1"
    cluster.output("scontrol", "update", f"JobId={job.id}", "Partition=quick")
    cluster.release(job.id)
    job.wait_for_record("start 1")
    cluster.link_up("node4")
    cluster.wait_node("node4", "idle", "mixed")
