"""The daemons: how each is started inside its host, and how to tell that it serves."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

from . import conf, host, procs
from .errors import MiniError
from .spec import LOGIN

START_SECONDS = 30


class Daemons:
    """Starts, watches and stops the daemons of one cluster."""

    def __init__(self, spec, layout):
        self.spec = spec
        self.layout = layout

    def names(self):
        """Every daemon the cluster has, in the order of their start."""
        accounting = ["mariadb", "slurmdbd"] if self.spec.accounting else []
        return ["munged", *accounting, "slurmctld", *(f"slurmd.{node}" for node in self.spec.node_names)]

    def pidfile(self, daemon):
        """Where the daemon recorded itself."""
        return self.layout.pids / daemon

    def pid(self, daemon):
        """The daemon's pid, or None when it is not alive."""
        return procs.alive_pid(self.pidfile(daemon))

    def start(self, daemon, machine, command, environment=None):
        """Start `command` on a host of the cluster, detached from us, and wait until it has recorded itself."""
        self.pidfile(daemon).unlink(missing_ok=True)
        settings = {**clean_environment(), "MINICLUSTER_PIDFILE": str(self.pidfile(daemon)), **(environment or {})}
        with open(self.layout.output_of(daemon), "ab") as output:
            # --fork hands the daemon to init, which reaps it whatever becomes of us.
            words = ["setsid", "--fork", self.layout.enter, machine, *command]
            subprocess.run(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=settings, cwd="/", check=True)
        if not procs.wait_for(lambda: self.pid(daemon), 5, 0.005):
            raise self.failure(daemon, "did not start")

    def wait_until(self, daemon, ready):
        """Wait until `ready()` holds; a daemon that dies meanwhile, or takes too long, is an error that shows its log."""
        if not procs.wait_for(lambda: ready() or self.pid(daemon) is None, START_SECONDS):
            raise self.failure(daemon, f"does not answer after {START_SECONDS} s")
        if self.pid(daemon) is None:
            raise self.failure(daemon, "ended while starting")

    def failure(self, daemon, what):
        """The error for a daemon, with the last lines it left."""
        return MiniError(f"{daemon} {what}; its last lines:\n{self.last_lines(daemon)}")

    def last_lines(self, daemon, count=12):
        """What the daemon logged last, or printed if it never came to log anything."""
        for path in (self.layout.log_of(daemon), self.layout.output_of(daemon)):
            lines = path.read_text(errors="replace").splitlines() if path.exists() else []
            if lines:
                return "\n".join(f"  {line}" for line in lines[-count:])
        return "  (it left no line)"

    def stop(self, daemon, number=signal.SIGKILL):
        """End one daemon and wait for it; fine if it is gone."""
        pid = self.pid(daemon)
        if pid is not None:
            procs.kill(pid, number)
            if not procs.wait_gone(self.pidfile(daemon)):
                raise MiniError(f"{daemon}: pid {pid} is still there 5 s after signal {number}")

    def start_munged(self):
        """munged, with a key of this cluster's own."""
        key = self.layout.munge / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        options = {"socket": self.layout.munge_socket, "key-file": key, "log-file": self.layout.log_of("munged")}
        options |= {"pid-file": self.layout.pids / "munged.munge", "seed-file": self.layout.munge / "seed"}
        self.start("munged", LOGIN, [host.find("munged"), "--foreground", "--force", *(f"--{key}={value}" for key, value in options.items())])
        self.wait_until("munged", lambda: self.layout.munge_socket.exists())

    def start_mariadb(self):
        """MariaDB on a directory and socket of its own, without any network port."""
        directory = self.layout.database
        shutil.chown(directory, "mysql", "mysql")
        options = [f"--datadir={directory}", "--user=mysql", *DATABASE_OPTIONS]
        install = [host.find("mariadb-install-db"), "--no-defaults", *options, "--skip-test-db", "--auth-root-authentication-method=normal"]
        created = self.on_login(install)
        if created.returncode:
            raise MiniError(f"mariadb-install-db failed:\n{created.stdout}{created.stderr}")
        network = ["--skip-networking", f"--socket={self.layout.database_socket}", f"--pid-file={directory}/pid"]
        self.start("mariadb", LOGIN, [host.find("mariadbd"), "--no-defaults", *options, *network, f"--log-error={self.layout.log_of('mariadb')}"])
        self.wait_until("mariadb", lambda: self.layout.database_socket.exists())

    def start_slurmdbd(self):
        """slurmdbd, and the cluster's own record in it."""
        # slurmdbd.conf cannot name a socket; MariaDB's client library takes it from here.
        self.start("slurmdbd", LOGIN, [host.find("slurmdbd"), "-D"], {"MYSQL_UNIX_PORT": str(self.layout.database_socket)})
        self.wait_until("slurmdbd", lambda: self.sacctmgr(f"add cluster {self.spec.name}").returncode == 0)

    def sacctmgr(self, *lines):
        """Run sacctmgr on some lines, one process for all."""
        return self.on_login(["sacctmgr", "-i"], input="".join(f"{line}\n" for line in lines))

    def start_slurmctld(self):
        """slurmctld, up to the point where it answers."""
        self.start("slurmctld", LOGIN, [host.find("slurmctld"), "-D"])
        self.wait_until("slurmctld", lambda: self.on_login(["sinfo", "-h"]).returncode == 0)

    def start_slurmd(self, node):
        """slurmd on one node; it registers with slurmctld by itself."""
        self.start(f"slurmd.{node}", node, [host.find("slurmd"), "-D"])

    def on_login(self, command, **options):
        """Run a short command on the login host."""
        settings = {**clean_environment(), "PATH": host.search_path()}
        return subprocess.run([self.layout.enter, LOGIN, *command], capture_output=True, text=True, env=settings, **options)

    def write_files(self, addresses, groups):
        """Write configuration and directories: everything that must exist before the first daemon."""
        for path in (self.layout.etc, self.layout.pids, self.layout.log, self.layout.spool, self.layout.gpus, self.layout.root / "sys"):
            path.mkdir()
        for path in (self.layout.save, self.layout.database):
            path.mkdir(mode=0o700)
        self.layout.munge.mkdir(mode=0o755)
        self.layout.hosts.write_text(conf.hosts_file(addresses))
        (self.layout.root / "cgroups").write_text("".join(f"{line}\n" for line in groups))
        shutil.copy(Path(__file__).with_name("enter.sh"), self.layout.enter)
        self.layout.enter.chmod(0o755)
        self.layout.slurm_conf.write_text(conf.slurm_conf(self.spec, self.layout, addresses))
        (self.layout.etc / "gres.conf").write_text(conf.gres_conf(self.spec, self.layout))
        # 22.05 brought the key; older versions refuse what they do not know.
        (self.layout.etc / "cgroup.conf").write_text(conf.cgroup_conf(self.spec, host.slurm_version() >= (22, 5)))
        if self.spec.accounting:
            self.layout.slurmdbd_conf.touch(0o600)
            self.layout.slurmdbd_conf.write_text(conf.slurmdbd_conf(self.layout, addresses))
        for i in range(self.spec.gpus):
            os.mknod(self.layout.gpus / f"nvidia{i}", 0o666 | 0o020000, os.makedev(1, 3))
        if self.spec.private_tmp:
            for node in self.spec.node_names:
                for kind in ("tmp", "shm"):
                    (self.layout.private / node / kind).mkdir(parents=True)
                    (self.layout.private / node / kind).chmod(0o1777)


# Small files and no waiting for the disk: the database is worth nothing after `down`.
DATABASE_OPTIONS = [
    "--innodb-log-file-size=8M",
    "--innodb-flush-log-at-trx-commit=0",
    "--skip-innodb-doublewrite",
    "--innodb-use-native-aio=0",
    "--innodb-lock-wait-timeout=900",
    "--skip-log-bin",
    "--performance-schema=OFF",
]


def clean_environment():
    """Our environment without a trace of any Slurm job or cluster that we may run in."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH", "SRUN", "SALLOC", "SINFO", "SQUEUE"))}
