"""States of shards in files: the same training, nothing of it in memory, and disks that fail."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engines.apply import apply_plan
from engines.legality import problems
from engines.offload.pool import OffloadPool
from engines.parallel import ParallelModel
from engines.plan import Plan
from profiles.capture.capture import capture
from profiles.errors import InputError, RankError
from profiles.torch_compat import move_to, storage_of
from profiles.units import MIB
from tests.contract.watch import LiveBytes, gradients, local, optimizer_states
from tests.engines.cases import CASES, cpu_ranks, profile_of
from tests.engines.data.test_parity import TOLERANCE
from tests.engines.parity import Parity, alone, local_rows, measure, parallelize
from tests.nightly import nightly
from tests.workers import Pool

CPU = torch.device("cpu")
IN_FILES = "offload=states offload_to=disk"
STAGES = "pp=2 microbatches=2 schedule=1f1b stages=blocks.1"
SPLIT = "tp=2 tensor_styles=blocks.*.mlp.0:column,blocks.*.mlp.2:row"


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def is_file(tensor: Tensor) -> bool:
    storage = storage_of(local(tensor))
    assert storage is not None
    return storage.filename is not None


def trained(parallel: ParallelModel, steps: int = 3) -> list[float]:
    batch = CASES["gpt"].batch(4)
    part = local_rows(parallel, batch, 4)
    return [parallel.train_step(part).item() for _ in range(steps)]


@pytest.mark.parametrize(
    ("zero", "in_files"),
    [(1, IN_FILES), (2, IN_FILES), (3, "offload=states,activations offload_to=disk")],
)
def test_training_in_files_is_the_same_to_the_last_digit(
    zero: int, in_files: str, tmp_path: Path
) -> None:
    results = []
    for settings in ("", in_files):
        torch.manual_seed(0)
        plan = Plan.parse(f"zero={zero} microbatches=2 {settings}")
        _, parallel = alone(
            "gpt", plan=plan, optimizer=adam, offload_folder=tmp_path, max_grad_norm=0.1
        )
        results.append((trained(parallel), parallel.state_dict()))
    (losses, state), (losses_in_files, state_in_files) = results
    assert losses_in_files == losses
    assert all(torch.equal(state_in_files[name], value) for name, value in state.items())
    assert os.listdir(tmp_path) == []


def test_parameters_gradients_and_states_stay_in_files(tmp_path: Path) -> None:
    plan = Plan.parse(f"zero=3 accumulation=2 {IN_FILES}")
    module, parallel = alone("gpt", plan=plan, optimizer=adam, offload_folder=tmp_path)
    for _ in range(2):
        parallel.forward_backward(CASES["gpt"].batch(4))
        assert all(map(is_file, gradients(parallel)))
        parallel.optimizer.step()
        parallel.optimizer.zero_grad()
    trained(parallel)
    parallel.save(tmp_path / "saved")
    parallel.load(tmp_path / "saved")
    parallel.load_state_dict(parallel.state_dict())
    module.to("cpu")  # FSDP2 looks at its parameters anew
    trained(parallel, steps=1)
    assert all(map(is_file, module.parameters()))
    states = [state for state in optimizer_states(parallel) if state.dim()]
    assert len(states) == 2 * len(list(module.parameters()))
    assert all(map(is_file, states))


def test_tensors_in_files_take_no_memory(tmp_path: Path) -> None:
    """Adam's states, parameters and gradients: four times the parameters, at the step."""

    def peak_bytes(settings: str) -> int:
        plan = Plan.parse(f"zero=1 {settings}")
        module, parallel = alone("gpt", plan=plan, optimizer=adam, offload_folder=tmp_path)
        trained(parallel, steps=1)
        with LiveBytes([*map(local, module.parameters()), *optimizer_states(parallel)]) as watched:
            trained(parallel, steps=1)
        return watched.peak_bytes

    size = sum(p.nbytes for p in CASES["gpt"].build().parameters())
    saved = peak_bytes("") - peak_bytes(IN_FILES)
    assert 3 * size <= saved <= 4.1 * size


@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        ("dp_replicate=2 offload=states offload_to=disk", "offload-unsharded"),
        ("dp_shard=2 offload=optimizer offload_to=disk", "offload-sharded"),
        (f"{STAGES} dp_shard=2 offload=activations offload_to=disk", "offload-stages"),
        (f"{STAGES} offload=optimizer", "offload-stages"),
    ],
)
def test_incompatible_offload_settings_are_refused_by_name(plan: str, rule: str) -> None:
    profile = profile_of(CASES["gpt"], CASES["gpt"].build())
    refusals = problems(Plan.parse(plan), profile, cpu_ranks(Plan.parse(plan).world_size))
    assert rule in [problem.rule for problem in refusals]


SWEEP = {
    2: (
        f"dp_replicate=2 zero=1 accumulation=2 {IN_FILES}",
        "dp_shard=2 offload=states,activations offload_to=disk",
        "dp_replicate=2 accumulation=2 offload=optimizer,activations offload_to=disk",
        f"{SPLIT} offload=optimizer,activations offload_to=disk",
        f"cp=2 zero=3 {IN_FILES}",
    ),
    4: (
        f"dp_replicate=2 dp_shard=2 accumulation=2 {IN_FILES}",
        f"{STAGES} dp_shard=2 accumulation=2 {IN_FILES}",
    ),
}
"""Every axis and kind once, with files; `tests.engines.offload.test_offload` has main memory."""


def _sweep(plans: tuple[str, ...], folder: str) -> list[Parity]:
    # Pipelines cut evenly: each step has as many rows more as a round takes.
    return [measure("gpt", plan, steps=1, more=8, offload_folder=folder) for plan in plans]


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [4, *nightly(2)])
def test_ranks_with_files_train_like_one_process(pool: Pool, ranks: int, tmp_path: Path) -> None:
    for result in pool.run(_sweep, SWEEP[ranks], str(tmp_path), world_size=ranks):
        for plan, parity in zip(SWEEP[ranks], result, strict=True):
            assert parity.loss <= TOLERANCE, plan
            assert parity.gradient <= TOLERANCE, plan
            assert parity.parameter_after_steps <= TOLERANCE, plan
    assert os.listdir(tmp_path) == []


def _goes_on(folder: str) -> tuple[bool, bool]:
    """Two steps, then two from the checkpoint of shards in main memory, clipped: whether shards in
    files come out the same, and are in files still."""
    states = []
    for settings in ("offload=states", IN_FILES):
        _, _, parallel = parallelize(
            "gpt",
            f"dp_shard=2 {settings}",
            optimizer=adam,
            max_grad_norm=0.05,
            offload_folder=folder,
        )
        trained(parallel, steps=2)
        if states:
            parallel.load(f"{folder}/saved")
        else:
            parallel.save(f"{folder}/saved")
        trained(parallel, steps=2)
        states.append(parallel.state_dict())
    first, second = states
    same = all(torch.equal(second[name], value) for name, value in first.items())
    return same, all(map(is_file, parallel.parameters()))


@pytest.mark.dist
def test_two_ranks_resume_from_each_others_checkpoint(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(_goes_on, str(tmp_path), world_size=2) == [(True, True)] * 2


class _Odd(nn.Module):
    """Three rows, which two ranks cannot share evenly, and one that one of them lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.three, self.one = nn.Linear(4, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.one(self.three(x))
        return out


def applied(
    model: nn.Module, plan: str, batch: tuple[Tensor, Tensor], folder: str
) -> ParallelModel:
    return apply_plan(
        model,
        Plan.parse(plan),
        profile=capture(model, batch, loss_fn=nn.functional.mse_loss),
        cluster=cpu_ranks(2),
        loss_fn=nn.functional.mse_loss,
        optimizer=adam,
        offload_folder=folder,
    )


def _odd(folder: str) -> bool:
    batch = (torch.arange(16.0).reshape(4, 4) / 16, torch.zeros(4, 1))
    states = []
    for settings in ("", IN_FILES):
        torch.manual_seed(0)
        parallel = applied(_Odd(), f"dp_shard=2 {settings}", batch, folder)
        for _ in range(3):
            parallel.train_step(local_rows(parallel, batch, 4))
        states.append(parallel.state_dict())
    return all(torch.equal(states[1][name], value) for name, value in states[0].items())


@pytest.mark.dist
def test_uneven_and_empty_shards_are_offloaded_to_files(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(_odd, str(tmp_path), world_size=2) == [True, True]


@contextlib.contextmanager
def _largest_file(size_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _full_on_rank_1(settings: str, folder: str, late: bool) -> str:
    """The error of a rank where files on rank 1 may have one MiB, from the start or the step."""
    is_full = os.environ["RANK"] == "1"

    def disk(now: bool) -> contextlib.AbstractContextManager[None]:
        return _largest_file(MIB) if is_full and now else contextlib.nullcontext()

    model, batch = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1)), torch.ones(4, 1024)
    target = torch.ones(4, 1)
    try:
        with disk(not late):
            parallel = applied(model, settings, (batch, target), folder)
        with disk(late):
            for _ in range(2):
                parallel.train_step((batch[:2], target[:2]))
    except (InputError, RankError) as error:
        return str(error)
    return "trained"


@pytest.mark.dist
@pytest.mark.parametrize("late", [False, True])
def test_a_full_disk_is_reported_on_every_rank(pool: Pool, late: bool, tmp_path: Path) -> None:
    """With shards when the plan is applied; with optimizer states in the first step."""
    kind = "dp_replicate=2 offload=optimizer" if late else "dp_shard=2 offload=states"
    plan = f"{kind} offload_to=disk"
    other, own = pool.run(_full_on_rank_1, plan, str(tmp_path), late, world_size=2)
    size = 1024 * 1024 * 4 // (1 if late else 2)
    for message in (own, other):
        assert f"no room for a file of {size:,} bytes in `{tmp_path}`, where " in message
        assert " bytes are free: File too large" in message
    assert "rank 1 failed: InputError" in other
    assert os.listdir(tmp_path) == []


def test_a_full_disk_raises_an_error_and_not_a_signal(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no small disk can be mounted here")
    try:
        room = OffloadPool(CPU, tmp_path)
        places = [room.allocate(16384) for _ in range(3)]
        with pytest.raises(InputError, match=r"a file of 32,768 bytes .* where 16,384 bytes are"):
            room.allocate(32768)
        del places
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_killed_process_leaves_no_files(tmp_path: Path) -> None:
    script = (
        "import sys, torch\n"
        "from engines.offload.pool import OffloadPool\n"
        "room = OffloadPool(torch.device('cpu'), sys.argv[1])\n"
        "home = room.tensor_like(torch.empty(1 << 20))\n"
        "print('writing', flush=True)\n"
        "while True:\n"
        "    home.fill_(1.0)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


def test_a_foreign_file_in_the_offload_folder_is_left_alone(tmp_path: Path) -> None:
    """A file has a name for a moment, when it is empty: killed just then, that is what stays."""
    (tmp_path / "offload-left").touch()
    plan = Plan.parse(f"zero=3 {IN_FILES}")
    _, parallel = alone("gpt", plan=plan, offload_folder=tmp_path)
    trained(parallel, steps=1)
    assert os.listdir(tmp_path) == ["offload-left"]


@pytest.mark.parametrize("folder", ["/proc", "missing"])
def test_an_unwritable_folder_is_refused_with_hints(folder: str, tmp_path: Path) -> None:
    plan = Plan.parse(f"zero=3 {IN_FILES}")
    with pytest.raises(
        InputError, match="no folder that can be written to: No such file"
    ) as refusal:
        alone("gpt", plan=plan, offload_folder=tmp_path / folder)
    assert refusal.value.hints == (
        "make it, on a fast local disk",
        "or keep nothing there: offload_to=host",
    )


def test_memory_of_a_tensor_is_moved_and_the_tensor_stays() -> None:
    tensor, home = torch.arange(4.0), torch.arange(4.0)
    view = tensor[1:]
    move_to(tensor, home)
    home += 1
    assert tensor.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert view.tolist() == [1.0, 2.0, 3.0]  # of the memory that it was
