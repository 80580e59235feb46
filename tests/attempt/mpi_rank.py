"""A scripted rank (`scripted_rank.py`) that meets the others by MPI first, and leaves what it saw in `mpi-<rank>.json`.

`abort` calls MPI_Abort as soon as they have met; whatever else a rank does, its script says. A rank that lives to its
end takes MPI down; one that crashes or is killed does not.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.attempt import scripted_rank


def main() -> int:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    total = world.allreduce(world.rank + 1)
    rank = int(os.environ["DTHPC_RANK"])
    attempt = Path(sys.argv[1]) / "attempts" / os.environ["DTHPC_ATTEMPT"]
    seen = {"rank": world.rank, "size": world.size, "total": total, "library": MPI.Get_library_version().split("\n")[0]}
    (attempt / f"mpi-{rank}.json").write_text(json.dumps(seen))
    script = json.loads((Path(sys.argv[1]) / "script.json").read_text())
    if script[0][rank] == "abort":
        (attempt / f"ready-{rank}").write_text(str(os.getpid()))  # for the other, which is at its work by then
        print("this rank gives up", flush=True)
        world.Abort(7)
    code = scripted_rank.main()
    if code == 1:
        os._exit(code)  # as a rank that crashed does
    return code


if __name__ == "__main__":
    sys.exit(main())
