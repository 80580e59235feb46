"""The daemons: how each is started inside its host, and how to tell that it serves."""

import os
import shutil
import signal
import subprocess

from . import host, procs
from .errors import MiniError
from .layout import daemon_names, machine_of
from .spec import LOGIN

START_SECONDS = 30

# Small files and no waiting for the disk: the database is worth nothing after `down`.
DATABASE_OPTIONS = [
    "--user=mysql",
    "--innodb-log-file-size=8M",
    "--innodb-flush-log-at-trx-commit=0",
    "--skip-innodb-doublewrite",
    "--innodb-use-native-aio=0",
    "--innodb-lock-wait-timeout=900",
    "--skip-log-bin",
    "--performance-schema=OFF",
]


class Daemons:
    """Starts, watches and stops the daemons of one cluster; they are called munged, slurmd.node1 and so on."""

    def __init__(self, spec, layout):
        self.spec = spec
        self.layout = layout
        self.names = daemon_names(spec)

    def start(self, daemon):
        """Start one daemon and wait until it serves (a slurmd: until it runs; it registers by itself)."""
        kind = daemon.partition(".")[0]
        getattr(self, f"_start_{kind}")(daemon)

    def stop(self, daemon, number=signal.SIGKILL):
        """End one daemon and wait for its end; fine if it is gone."""
        self.signal(daemon, number)
        if not procs.wait_for(lambda: self.pid(daemon) is None, 5):
            raise MiniError(f"{daemon}: pid {self.pid(daemon)} is still there 5 s after signal {number}")

    def signal(self, daemon, number):
        """Send the daemon a signal; fine if it is gone."""
        pid = self.pid(daemon)
        if pid is not None:
            procs.kill(pid, number, lambda: self.pid(daemon) == pid)

    def pid(self, daemon):
        """The daemon's pid, or None when it is not alive."""
        return procs.alive_pid(self.pidfile(daemon))

    def pidfile(self, daemon):
        """Where the daemon recorded itself."""
        return self.layout.pids / daemon

    def wait_until(self, daemon, ready):
        """Wait until `ready()` holds; it is an error, with the log shown, if the daemon dies or takes too long."""
        if not procs.wait_for(lambda: ready() or self.pid(daemon) is None, START_SECONDS):
            raise self.failure(daemon, f"is not ready after {START_SECONDS} s")
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

    def on_login(self, command, **options):
        """Run a short command on the login host; who is not root runs it here, which reaches the cluster too."""
        prefix = [self.layout.enter, LOGIN] if os.geteuid() == 0 else []
        settings = {**clean_environment(), "SLURM_CONF": str(self.layout.slurm_conf)}
        return subprocess.run([*prefix, *command], capture_output=True, text=True, env=settings, **options)

    def sacctmgr(self, *lines):
        """Run sacctmgr on some lines, one process for all."""
        return self.on_login(["sacctmgr", "-i"], input="".join(f"{line}\n" for line in lines))

    def check_settings(self):
        """Have Slurm read its files before any daemon does, since every client fails on what it does not know."""
        result = self.on_login(["scontrol", "show", "hostnames", LOGIN])
        # A node whose numbers contradict each other is no failure to Slurm, which then chooses some of them.
        if result.returncode or "match no Sockets" in result.stderr:
            said = result.stderr.rstrip()
            raise MiniError(f"Slurm refuses its settings (see --set, --node-set, --partition):\n{said}")

    def _launch(self, daemon, command, environment=None):
        """Start `command` on the daemon's host, detached from us, and wait until it has recorded itself."""
        self.pidfile(daemon).unlink(missing_ok=True)
        settings = {**clean_environment(), "MINICLUSTER_PIDFILE": str(self.pidfile(daemon)), **(environment or {})}
        program, *words = command
        # --fork hands the daemon to init, which reaps it whatever becomes of us.
        words = ["setsid", "--fork", self.layout.enter, machine_of(daemon), host.find(program), *words]
        with open(self.layout.output_of(daemon), "ab") as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            subprocess.run(words, env=settings, cwd="/", umask=0o022, check=True, **streams)
        if not procs.wait_for(lambda: self.pid(daemon), 5, 0.005):
            raise self.failure(daemon, "did not start")

    def _start_munged(self, daemon):
        key = self.layout.munge / "key"
        if not key.exists():
            key.write_bytes(os.urandom(128))
            key.chmod(0o400)
        files = {"socket": self.layout.munge_socket, "key-file": key, "seed-file": self.layout.munge / "seed"}
        files |= {"pid-file": self.layout.pids / "munged.own", "log-file": "/dev/null"}
        options = [f"--{option}={path}" for option, path in files.items()]
        self._launch(daemon, ["munged", "--foreground", "--force", *options])
        self.wait_until(daemon, lambda: self.on_login(["munge", "-n", "-S", self.layout.munge_socket]).returncode == 0)

    def _start_mariadb(self, daemon):
        """MariaDB on a directory and a socket of its own, without any network port."""
        directory, socket = self.layout.database, self.layout.database_socket
        options = ["--no-defaults", f"--datadir={directory}", *DATABASE_OPTIONS]
        if not (directory / "mysql").exists():
            shutil.chown(directory, "mysql", "mysql")
            create = [*options, "--skip-test-db", "--auth-root-authentication-method=normal"]
            created = self.on_login([host.find("mariadb-install-db"), *create])
            if created.returncode:
                raise MiniError(f"mariadb-install-db failed:\n{created.stdout}{created.stderr}")
        own = ["--skip-networking", f"--socket={socket}", f"--pid-file={directory}/pid"]
        self._launch(daemon, ["mariadbd", *options, *own])
        self.wait_until(daemon, socket.exists)

    def _start_slurmdbd(self, daemon):
        """slurmdbd, and the cluster's own record in it."""
        # slurmdbd.conf cannot name a socket; MariaDB's client library takes it from here.
        self._launch(daemon, ["slurmdbd", "-D"], {"MYSQL_UNIX_PORT": str(self.layout.database_socket)})
        self.wait_until(daemon, lambda: self.sacctmgr("list cluster").returncode == 0)
        self.sacctmgr(f"add cluster {self.spec.name}")

    def _start_slurmctld(self, daemon):
        self._launch(daemon, ["slurmctld", "-D"])
        self.wait_until(daemon, lambda: self.on_login(["sinfo", "-h"]).returncode == 0)

    def _start_slurmd(self, daemon):
        self._launch(daemon, ["slurmd", "-D"])


def clean_environment():
    """Our environment with the system's programs, and without a trace of a Slurm job that we may run in."""
    foreign = ("SLURM", "SBATCH", "SRUN", "SALLOC", "SINFO", "SQUEUE", "SACCT")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    return {**kept, "PATH": procs.search_path()}
