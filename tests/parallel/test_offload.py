from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from dthpc.errors import UserError
from dthpc.parallel.offload import Offload, file_tensor, make_offload
from dthpc.parallel.parts import Part, Piece
from dthpc.train.optim import build_optimizer
from tests.parallel import memory_tasks
from tests.ranks import pool, repository

CPU = torch.device("cpu")
PLACES = [None, "cpu", "nvme"]
OPTIMIZERS = ["AdamW", "SGD", "RMSprop", "Adagrad"]


class HalfStep(torch.optim.Optimizer):
    """An optimizer from elsewhere that counts its updates in its group, and moves half as far in each."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "updates": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["updates"] += 1
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                p.sub_(state["sum"] * group["lr"] / 2 ** group["updates"])


def train(offload: Offload, target: str, steps: int = 4, start: dict[str, Any] | None = None) -> dict[str, Any]:
    """A plain loop over masters that are placed; returns values and optimizer state."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    pieces = [
        Piece(Part(name, tuple(p.shape)), 0, p.numel(), nn.Parameter(offload.place(p.detach(), "optimizer")))
        for name, p in net.named_parameters()
    ]
    arguments = {"momentum": 0.9} if target.endswith("SGD") else {}
    config = {"_target_": target, "lr": 0.05, "weight_decay": 0.1, "arguments": arguments}
    optimizer = build_optimizer(pieces, OmegaConf.create(config))
    if start is not None:
        for piece, state in zip(pieces, start["state"], strict=True):
            piece.tensor.data.copy_(start["values"][piece.part.name])
            optimizer.state[piece.tensor] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
    for step in range(steps):
        with torch.no_grad():
            for parameter, piece in zip(net.parameters(), pieces, strict=True):
                parameter.copy_(piece.tensor)
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step + (0 if start is None else start["steps"])))
        net.zero_grad()
        net(x).square().sum().backward()
        for parameter, piece in zip(net.parameters(), pieces, strict=True):
            piece.tensor.grad = parameter.grad
        offload.step(optimizer)
    state = [dict(optimizer.state[piece.tensor]) for piece in pieces]
    return {"values": {piece.part.name: piece.tensor.detach() for piece in pieces}, "state": state, "steps": steps}


def assert_same_bits(a: dict[str, Any], b: dict[str, Any]) -> None:
    torch.testing.assert_close(a["values"], b["values"], rtol=0, atol=0)
    torch.testing.assert_close(a["state"], b["state"], rtol=0, atol=0)


def mapped_file(tensor: Tensor) -> str:
    """The file behind a tensor's memory, as the kernel names it; empty if there is none."""
    address = tensor.untyped_storage().data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = [*line.split(maxsplit=5), ""][:6] if len(line.split()) > 5 else [*line.split(), ""]
        low, high = (int(end, 16) for end in span.split("-"))
        if low <= address < high:
            return name
    return ""


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_updates_have_the_same_bits_as_without_offload(tmp_path: Path, name: str, place: str) -> None:
    target = f"torch.optim.{name}"
    there = train(Offload(CPU, optimizer=place, folder=tmp_path), target)
    assert_same_bits(there, train(Offload(CPU), target))


def test_an_optimizer_that_counts_updates_in_its_group_is_called_once_a_step(tmp_path: Path) -> None:
    target = f"{HalfStep.__module__}.{HalfStep.__qualname__}"
    there = train(Offload(CPU, optimizer="nvme", folder=tmp_path), target)
    assert_same_bits(there, train(Offload(CPU), target))
    assert str(tmp_path) in mapped_file(there["state"][0]["sum"])


def test_masters_and_state_lie_in_files_of_the_folder(tmp_path: Path) -> None:
    there = train(Offload(CPU, optimizer="nvme", folder=tmp_path), "torch.optim.AdamW")
    kept = [*there["values"].values(), *(state[key] for state in there["state"] for key in ("exp_avg", "exp_avg_sq"))]
    assert len(kept) == 12
    assert all(str(tmp_path) in mapped_file(tensor) for tensor in kept)
    here = train(Offload(CPU, optimizer="cpu"), "torch.optim.AdamW")
    assert not any(str(tmp_path) in mapped_file(tensor) for tensor in here["values"].values())


@pytest.mark.parametrize("place", PLACES)
def test_state_that_was_restored_before_the_first_update_goes_on_and_moves_too(tmp_path: Path, place: str) -> None:
    whole = train(Offload(CPU), "torch.optim.AdamW", steps=5)
    half = train(Offload(CPU), "torch.optim.AdamW", steps=2)
    rest = train(Offload(CPU, optimizer=place, folder=tmp_path), "torch.optim.AdamW", steps=3, start=half)
    assert_same_bits(rest, whole)
    assert (str(tmp_path) in mapped_file(rest["state"][0]["exp_avg"])) == (place == "nvme")


def test_what_stays_is_not_copied() -> None:
    tensor = torch.ones(3)
    assert Offload(CPU, parameters="cpu").place(tensor, "optimizer") is tensor
    copy = Offload(CPU, parameters="cpu").place(tensor, "parameters")
    assert copy.data_ptr() != tensor.data_ptr()
    assert torch.equal(copy, tensor)


def test_no_file_is_seen_in_the_folder_and_none_outlives_its_tensor(tmp_path: Path) -> None:
    kept = train(Offload(CPU, optimizer="nvme", folder=tmp_path), "torch.optim.AdamW")
    assert list(tmp_path.iterdir()) == []
    assert Path("/proc/self/maps").read_text().count(str(tmp_path)) == 12
    del kept
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_killed_rank_leaves_nothing_behind(tmp_path: Path) -> None:
    code = """
import sys, torch
from pathlib import Path
from dthpc.parallel.offload import file_tensor
held = file_tensor(Path(sys.argv[1]), 1 << 20, torch.float32).fill_(1)
print("held", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=repository()) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        process.send_signal(signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


MEMORY = """
import sys, torch
from pathlib import Path
from torch import nn
from dthpc.parallel.offload import Offload

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

def grown(place, count, size):
    before, most = anonymous(), []
    offload = Offload(torch.device("cpu"), optimizer=place, folder=sys.argv[1])
    tensors = [nn.Parameter(offload.place(torch.ones(size), "optimizer")) for _ in range(count)]
    optimizer = torch.optim.AdamW(tensors, fused=True)
    optimizer.register_step_post_hook(lambda *_: most.append(anonymous()))
    gradient = torch.ones(size)
    for _ in range(2):
        for tensor in tensors:
            tensor.grad = gradient
        offload.step(optimizer)
    return max(most) - before

grown("cpu", 1, 2)  # imports and threads
print(grown("nvme", 16, 1 << 20), grown("cpu", 16, 1 << 20))
"""


def test_files_free_memory_already_in_the_first_step(tmp_path: Path) -> None:
    """16 masters of 4 MiB with two moments each are 192 MiB; in files, a few of them are in memory at once."""
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=repository())
    files, host = (int(number) / 2**20 for number in done.stdout.split())
    assert files < 64
    assert host > 128


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("missing/folder", r"parallel.offload.folder=.*missing/folder: is no folder on node .*Instead: a folder on a"),
        ("file", "is no folder on node"),
    ],
)
def test_a_folder_that_is_not_there_is_told(tmp_path: Path, folder: str, words: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=words):
        file_tensor(tmp_path / folder, 4, torch.float32)


def test_a_folder_that_cannot_be_written_to_is_told() -> None:
    with pytest.raises(UserError, match=r"parallel.offload.folder=/sys: cannot be written to \(.+\), so 0.0 MiB"):
        file_tensor(Path("/sys"), 4, torch.float32)


def test_a_full_disk_is_told_before_it_is_written_to(tmp_path: Path) -> None:
    elements = 2 * shutil.disk_usage(tmp_path).total // 4
    with pytest.raises(UserError, match=r"has no room for another \d+.\d MiB .* Instead: a folder with more room"):
        file_tensor(tmp_path, elements, torch.float32)


def test_the_configuration_says_what_goes_where(tmp_path: Path) -> None:
    config = OmegaConf.create({"optimizer": None, "parameters": "nvme", "folder": str(tmp_path)})
    offload = make_offload(config, CPU)
    assert (offload.active, offload.moves("optimizer"), offload.moves("parameters")) == (True, False, True)
    assert str(tmp_path) in mapped_file(offload.place(torch.ones(2, 2, dtype=torch.bfloat16), "parameters"))


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_every_stage_trains_with_the_same_bits_as_without(
    tmp_path: Path, zero: int, place: str, storage: torch.dtype
) -> None:
    """Masters and state, and with ZeRO 3 parameter shards, on two ranks over three steps."""
    degrees = {"shard": 2, "zero": zero} if zero else {"replicate": 2}
    places = {"optimizer": place, "parameters": place if zero == 3 else None, "folder": str(tmp_path)}
    there = pool().run(2, memory_tasks.after_steps, degrees, storage, places)
    here = pool().run(2, memory_tasks.after_steps, degrees, storage)
    for offloaded, plain in zip(there, here, strict=True):
        assert offloaded["norms"] == plain["norms"]
        torch.testing.assert_close(offloaded["parameters"], plain["parameters"], rtol=0, atol=0)
        for (name, start, values), (expected_name, expected_start, expected) in zip(
            offloaded["values"], plain["values"], strict=True
        ):
            assert (name, start) == (expected_name, expected_start)
            assert torch.equal(values.flatten(), expected.flatten())
        assert bool(offloaded["files"]) == (place == "nvme")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_parameter_shards_may_leave_alone(tmp_path: Path, place: str) -> None:
    degrees, places = {"shard": 2, "zero": 3}, {"parameters": place, "folder": str(tmp_path)}
    (there, _), (here, _) = (
        pool().run(2, memory_tasks.after_steps, degrees, torch.float32, chosen) for chosen in (places, None)
    )
    torch.testing.assert_close(there["parameters"], here["parameters"], rtol=0, atol=0)
    assert there["measured"] == here["measured"]
    # One file for each bucket's shard, and none for the optimizer's state.
    assert bool(there["files"]) == (place == "nvme")
