"""The files that the daemons read, rendered from a Spec. Pure text: nothing here touches the machine."""

from .spec import LOGIN, partition_name, switch_name

# What every partition has unless told otherwise.
COMMON = {"Nodes": "ALL", "State": "UP", "MaxTime": "INFINITE", "DefaultTime": 60}


def hosts_file(addresses):
    """/etc/hosts for every host of the cluster."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
    return "\n".join(lines + [f"{address} {host}" for host, address in addresses.items()]) + "\n"


def slurm_conf(spec, layout, addresses):
    """slurm.conf: the tool's own keys, then defaults under the user's settings, then nodes and partitions."""
    owned = owned_settings(spec, layout, addresses)
    chosen = merge(default_settings(spec), spec.settings)
    lines = [f"# Cluster '{spec.name}', written by minicluster; lost at `down`."]
    lines += [f"{key}={value}" for key, value in {**owned, **chosen}.items()]
    lines += [node_line(spec, name, addresses[name]) for name in spec.node_names]
    return "\n".join(lines + partition_lines(spec)) + "\n"


def owned_settings(spec, layout, addresses):
    """The keys that tie the daemons to this cluster's directory and addresses."""
    settings = {
        "ClusterName": spec.name,
        "SlurmctldHost": f"{LOGIN}({addresses[LOGIN]})",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={layout.munge_socket}",
        "StateSaveLocation": layout.save,
        "SlurmdSpoolDir": layout.spool / "%n",
        "SlurmctldPidFile": layout.pids / "slurmctld.slurm",
        "SlurmdPidFile": layout.pids / "slurmd.%n.slurm",
        "SlurmctldLogFile": layout.log_of("slurmctld"),
        "SlurmdLogFile": layout.log_of("slurmd.%n"),
        "PreemptType": {"partition": "preempt/partition_prio", "qos": "preempt/qos", "none": "preempt/none"}[
            spec.preempt
        ],
        "AccountingStorageType": "accounting_storage/none",
    }
    if spec.accounting:
        settings["AccountingStorageType"] = "accounting_storage/slurmdbd"
        settings["AccountingStorageHost"] = addresses[LOGIN]
        settings["AccountingStoragePass"] = layout.munge_socket  # towards slurmdbd AuthInfo is not looked at
    if spec.gpus:
        settings["GresTypes"] = "gpu"
    if spec.switches:
        settings["TopologyPlugin"] = "topology/tree"
    return settings


def default_settings(spec):
    """Defaults that make a small cluster quick to react; every one may be replaced."""
    settings = {
        "SlurmdParameters": "config_overrides",  # believe the invented cores, not the machine
        "ReturnToService": 2,
        # Together they let a vanished node be noticed, and its job be requeued, in half a minute.
        "SlurmdTimeout": 10,
        "MessageTimeout": 5,
        "KillWait": 30,
        "JobRequeue": 1,
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=2",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        # Without it a job that asks for no memory takes all of a node's, and nothing shares a node.
        "DefMemPerCPU": max(1, spec.memory // spec.cpus),
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "MpiDefault": "none",
        "MailProg": "/bin/true",
        "JobAcctGatherType": "jobacct_gather/linux",
        "JobAcctGatherFrequency": 5,
        "SlurmctldDebug": "verbose",
        "SlurmdDebug": "verbose",
    }
    if spec.preempt != "none":
        settings["PreemptMode"] = "REQUEUE"
    if spec.preempt == "qos":
        # Else an urgent job waits in the queue behind the very jobs it may preempt.
        settings.update(PriorityType="priority/multifactor", PriorityWeightQOS=10000)
    if spec.accounting and spec.gpus:
        settings["AccountingStorageTRES"] = "gres/gpu"
    return settings


def merge(defaults, chosen):
    """`chosen` over `defaults`, with Slurm's indifference to the case of keys."""
    replaced = {key.lower() for key in chosen}
    return {**{key: value for key, value in defaults.items() if key.lower() not in replaced}, **chosen}


def node_line(spec, name, address):
    """One NodeName line."""
    settings = {
        "NodeAddr": address,
        "CPUs": spec.cpus,
        "SocketsPerBoard": 1,
        "CoresPerSocket": spec.cpus,
        "ThreadsPerCore": 1,
    }
    settings.update(Boards=1, RealMemory=spec.memory, State="UNKNOWN")
    if any(
        key.lower() in ("sockets", "socketsperboard", "corespersocket", "threadspercore") for key in spec.node_settings
    ):
        # The user describes the sockets: ours would contradict them.
        for key in ("SocketsPerBoard", "CoresPerSocket", "ThreadsPerCore", "Boards"):
            del settings[key]
    if spec.gpus:
        settings["Gres"] = f"gpu:{spec.gpus}"
    return f"NodeName={name} " + pairs(merge(settings, spec.node_settings))


def partition_lines(spec):
    """The default partitions under the user's lines, which change those of the same name and add others."""
    partitions = default_partitions(spec)
    for line in spec.partitions:
        name, words = (
            partition_name(line),
            dict(
                word.split("=", 1)
                for word in line.split()
                if "=" in word and not word.lower().startswith("partitionname=")
            ),
        )
        partitions[name] = merge(partitions.get(name, COMMON), words)
    if not any(is_default(settings) for settings in partitions.values()):
        next(iter(partitions.values()))["Default"] = "YES"
    return [f"PartitionName={name} {pairs(settings)}" for name, settings in partitions.items()]


def default_partitions(spec):
    """`main`; and where partitions preempt, its variants and `urgent`, which preempts them all."""
    if spec.preempt != "partition":
        return {"main": dict(COMMON)}
    return {
        "main": {"PriorityTier": 10, "PreemptMode": "REQUEUE", "GraceTime": 0, **COMMON},
        "grace": {"PriorityTier": 10, "PreemptMode": "REQUEUE", "GraceTime": 20, **COMMON},
        "cancel": {"PriorityTier": 10, "PreemptMode": "CANCEL", "GraceTime": 0, **COMMON},
        "urgent": {"PriorityTier": 100, "PreemptMode": "OFF", **COMMON},
    }


def is_default(words):
    """Whether a partition's settings make it the default one."""
    return any(key.lower() == "default" and str(value).lower() == "yes" for key, value in words.items())


def pairs(settings):
    """`Key=Value Key=Value …`."""
    return " ".join(f"{key}={value}" for key, value in settings.items())


def topology_conf(spec):
    """topology.conf: the tree of switches."""
    lines = [f"SwitchName={switch_name(line)} {' '.join(line.split()[1:])}" for line in spec.switches]
    return "\n".join(lines) + "\n"


def gres_conf(spec, layout):
    """gres.conf: the files' trailing numbers are what a job sees in CUDA_VISIBLE_DEVICES."""
    if not spec.gpus:
        return "AutoDetect=off\n"
    files = layout.gpus / ("nvidia0" if spec.gpus == 1 else f"nvidia[0-{spec.gpus - 1}]")
    return f"AutoDetect=off\nName=gpu File={files}\n"


def cgroup_conf(spec, systemd_switch):
    """cgroup.conf. Slurm must make its own cgroups: no unit of a service manager stands behind these daemons."""
    defaults = {"IgnoreSystemd": "yes"} if systemd_switch else {}
    return "".join(f"{key}={value}\n" for key, value in merge(defaults, spec.cgroup_settings).items())


def slurmdbd_conf(layout, addresses):
    """slurmdbd.conf; the database's socket comes by environment, since this file has no key for it."""
    settings = {
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={layout.munge_socket}",
        "DbdHost": LOGIN,
        "DbdAddr": addresses[LOGIN],
        "SlurmUser": "root",
        "LogFile": layout.log_of("slurmdbd"),
        "PidFile": layout.pids / "slurmdbd.slurm",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "localhost",
        "StorageUser": "root",
        "StorageLoc": "slurm_acct_db",
    }
    return "".join(f"{key}={value}\n" for key, value in settings.items())
