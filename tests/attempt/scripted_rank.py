"""A rank without torch that does what its test wrote into `script.json`: `[[what rank 0 does, what rank 1 does], …]`,
one list for each attempt, the last one for all later attempts too.

`finish`, `crash`, `user_error` and `kill` end as soon as all ranks are there, `reset` as soon as another one is gone,
with a connection that breaks; `save` waits for a stop signal and ends with its state saved, `late` with its work
finished; `work` commits a checkpoint first and then does as `save`; `deaf` ignores stop signals; `helper` is `deaf`
with a child process whose id it leaves in `helper-<rank>`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from dthpc.resilience.outcome import RankRecord
from dthpc.resilience.stop import StopFlag
from dthpc.rundir import RunDir
from tests.attempt.runs import alive

SLEEP = [sys.executable, "-c", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"]


def main() -> int:
    stop = StopFlag().install()
    run = RunDir(Path(sys.argv[1]))
    number, rank = int(os.environ["DTHPC_ATTEMPT"]), int(os.environ["DTHPC_RANK"])
    script = json.loads((run.path / "script.json").read_text())
    what = script[min(number, len(script) - 1)][rank]
    attempt = run.attempt(number)
    if what == "work":
        (run.checkpoints / f"step-{number + 1:08d}").mkdir(parents=True, exist_ok=True)
    if what == "helper":
        helper = subprocess.Popen(SLEEP)
        (run.path / f"helper-{rank}").write_text(str(helper.pid))
    (attempt.path / f"ready-{rank}").write_text(str(os.getpid()))
    # Nobody strikes before all can hear of it.
    while not all((attempt.path / f"ready-{other}").exists() for other in range(int(os.environ["DTHPC_WORLD_SIZE"]))):
        time.sleep(0.01)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "reset":
        peers = list(attempt.path.glob("ready-*"))
        while all(alive(int(path.read_text() or os.getpid())) for path in peers):
            time.sleep(0.01)
        record = RankRecord(rank, "crash", error="RuntimeError: Connection reset by peer")
    elif what in ("crash", "user_error", "finish"):
        cause = {"finish": "finished"}.get(what, what)
        record = RankRecord(rank, cause, error=None if what == "finish" else f"the test's {what}")
    else:
        while stop.requested is None or what in ("deaf", "helper"):
            time.sleep(0.01)
        cause = "finished" if what == "late" else "preempted"
        record = RankRecord(rank, cause, signal=stop.requested, step=number + 1)
    record.write(attempt)
    return record.code


if __name__ == "__main__":
    sys.exit(main())
