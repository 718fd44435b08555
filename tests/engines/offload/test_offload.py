"""Offloading: the same results, and no more memory than reported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engines.offload.activations import offload_activations
from engines.offload.pool import OffloadPool
from engines.offload.states import OffloadedStates
from engines.plan import Plan
from engines.state.optimizer_parts import why_not_chunked
from profiles.capture.capture import capture
from profiles.errors import InputError, PlanError
from profiles.model.profile import ModelProfile
from profiles.torch_compat import storage_of
from tests.engines.cases import CASES
from tests.engines.data.test_parity import TOLERANCE
from tests.engines.parity import Parity, alone, measure
from tests.profiles.capture.measured import peak_of_a_run
from tests.workers import Pool

CPU = torch.device("cpu")
ADAM = {"lr": 1e-2}


def _trained(plan: str, model: str = "gpt", **options: object) -> tuple[list[float], list[Tensor]]:
    """Losses of three steps, and the parameters after them."""
    torch.manual_seed(0)
    options.setdefault("optimizer", lambda params: torch.optim.AdamW(params, **ADAM))
    module, parallel = alone(model, plan=Plan.parse(plan), **options)
    losses = [parallel.train_step(CASES[model].batch(4)).item() for _ in range(3)]
    return losses, [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("what", ["optimizer", "activations", "optimizer,activations"])
@pytest.mark.parametrize("model", ["gpt", "resnet-group-norm"])
def test_training_is_the_same_to_the_last_digit(
    model: str, what: str, where: str, tmp_path: Path
) -> None:
    losses, parameters = _trained("microbatches=2", model)
    plan = f"microbatches=2 offload={what} offload_to={where}"
    actual, others = _trained(plan, model, offload_folder=tmp_path)
    assert actual == losses
    assert all(torch.equal(one, other) for one, other in zip(parameters, others, strict=True))
    assert os.listdir(tmp_path) == []


class _Wide(nn.Module):
    """A block that keeps one tensor of known size for three operations, and its weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.second = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.exp()
        return self.first(hidden) + self.second(hidden)


def _wide(blocks: int, width: int = 64) -> nn.Sequential:
    return nn.Sequential(*(_Wide(width) for _ in range(blocks)))


def _away(model: nn.Module, batch: Tensor, room: OffloadPool) -> nn.Module:
    profile = capture(model, (batch, batch), loss_fn=_loss)
    assert len(list(profile.blocks())) == len(list(model.children()))
    offload_activations(model, room, profile=profile)
    return model


def _loss(output: Tensor, batch: object) -> Tensor:
    return output.sum()


def test_shared_activation_storage_is_moved_once_and_weights_stay() -> None:
    room, batch = OffloadPool(CPU), torch.ones(32, 64)
    loss = _away(_wide(2), batch, room)(batch).sum()
    assert room.used_bytes == 2 * 32 * 64 * 4  # of each block what `exp` gave, for three operations
    loss.backward()
    assert (room.used_bytes, room.peak_bytes) == (0, 2 * 32 * 64 * 4)


def test_blocks_on_disk_are_not_in_memory(tmp_path: Path) -> None:
    batch, size_bytes = (torch.ones(1024, 64), torch.ones(1024)), 1024 * 64 * 4
    here, there = _wide(8), _wide(8)
    _away(there, batch[0], OffloadPool(CPU, tmp_path))
    peak_of_a_run(there, batch, _loss)  # maps files, which torch's profiler counts as memory
    saved = peak_of_a_run(here, batch, _loss) - peak_of_a_run(there, batch, _loss)
    assert 7 * size_bytes <= saved <= 8 * size_bytes  # of the block in work they are in memory


def test_evaluation_offloads_no_activations() -> None:
    room, batch = OffloadPool(CPU), torch.ones(4, 64)
    with torch.no_grad():
        _away(_wide(2), batch, room)(batch)
    assert room.peak_bytes == 0


def test_a_saved_activation_keeps_its_value_when_its_tensor_is_changed_later() -> None:
    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            doubled = x * 1.0
            squares = doubled * doubled  # keeps it with what is in it now
            doubled.mul_(2.0)
            return squares + doubled * doubled

    room, batch = OffloadPool(CPU), torch.full((2, 2), 3.0, requires_grad=True)
    model = nn.Sequential(Doubled(), Doubled())
    model[0].register_parameter("unused", nn.Parameter(torch.ones(1)))
    offload_activations(model, room, profile=_profile_of_two(model))
    model[0](batch).sum().backward()
    assert batch.grad is not None
    assert torch.equal(batch.grad, torch.full((2, 2), (1 + 4) * 2 * 3.0))  # of x^2 + (2x)^2


def _profile_of_two(model: nn.Module) -> ModelProfile:
    profile = capture(_wide(2), (torch.ones(4, 64), torch.ones(4)), loss_fn=_loss)
    assert [unit.name for unit in profile.blocks()] == ["0", "1"]
    return profile


def test_adam_moments_are_on_disk_and_step_counters_are_not(tmp_path: Path) -> None:
    model = nn.Linear(32, 16)
    optimizer, room = torch.optim.AdamW(model.parameters(), **ADAM), OffloadPool(CPU, tmp_path)
    OffloadedStates(optimizer, room, chunk_bytes=0)
    for _ in range(2):
        model(torch.ones(4, 32)).sum().backward()
        optimizer.step()
    assert room.used_bytes == 2 * 4 * (32 * 16 + 16)
    for state in optimizer.state.values():
        assert {key: _is_file(value) for key, value in state.items()} == {
            "step": False,
            "exp_avg": True,
            "exp_avg_sq": True,
        }


def _is_file(tensor: Tensor) -> bool:
    storage = storage_of(tensor)
    assert storage is not None
    return storage.filename is not None


def test_loaded_optimizer_states_are_offloaded_again(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    OffloadedStates(optimizer, OffloadPool(CPU, tmp_path))
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    before = {k: v.clone() for k, v in optimizer.state[model.weight].items()}
    optimizer.load_state_dict(torch.optim.AdamW(model.parameters(), **ADAM).state_dict())
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: before}})
    state = optimizer.state[model.weight]
    assert _is_file(state["exp_avg"])
    assert torch.equal(state["exp_avg"], before["exp_avg"])


def test_learning_rate_schedulers_work_across_offloading(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]
    OffloadedStates(optimizer, OffloadPool(CPU, tmp_path))
    schedulers.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1))
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    for scheduler in schedulers:
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_a_step_in_chunks_is_one_for_what_counts_steps(tmp_path: Path) -> None:
    model, called = nn.Linear(8, 8), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    OffloadedStates(optimizer, OffloadPool(CPU, tmp_path), chunk_bytes=0)
    before = model.weight.detach().clone()

    def note(*_: object) -> None:
        called.append(torch.equal(model.weight, before))

    optimizer.register_step_pre_hook(note)
    optimizer.register_step_post_hook(note)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    assert called == [True, False]


class _ByAll(torch.optim.SGD):
    """Divides every gradient by the largest of all."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        largest = max(gradient.abs().max() for gradient in gradients)
        for gradient in gradients:
            gradient /= largest
        return super().step(closure)


def test_an_optimizer_that_looks_at_all_parameters_is_refused() -> None:
    with pytest.raises(PlanError, match="_ByAll looks at all parameters at a time") as refused:
        _trained("offload=optimizer", optimizer=lambda p: _ByAll(p, lr=0.1))
    assert refused.value.hints


@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor, torch.optim.Muon]
)
def test_usual_optimizers_go_parameter_by_parameter(kind: type[torch.optim.Optimizer]) -> None:
    assert why_not_chunked(lambda params: kind(params, lr=0.1)) == ""  # type: ignore[call-arg]


def test_offload_to_disk_needs_a_folder(tmp_path: Path) -> None:
    plan = "offload=activations offload_to=disk"
    with pytest.raises(InputError, match="no folder is named"):
        _trained(plan)
    with pytest.raises(InputError, match="no folder that can be written to"):
        _trained(plan, offload_folder=tmp_path / "missing")


def test_a_full_disk_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InputError, match=r"no room for .* No space left on device"):
        _trained("offload=activations offload_to=disk", offload_folder=tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_activation_offload_lowers_the_peak_of_a_gpu() -> None:
    """Activations but of the block in work; states but of a chunk of parameters."""
    device = torch.device("cuda")

    def peak_bytes(*, away: bool) -> int:
        model = _wide(8, width=1024).to(device)
        batch = torch.ones(16384, 1024, device=device)
        if away:
            offload_activations(model, OffloadPool(device), profile=_profile_of_eight())
        torch.cuda.reset_peak_memory_stats()
        model(batch).sum().backward()
        return torch.cuda.max_memory_allocated()

    whole, less = peak_bytes(away=False), peak_bytes(away=True)
    assert whole - less >= 6 * 16384 * 1024 * 4


def _profile_of_eight() -> ModelProfile:
    return capture(_wide(8), (torch.ones(4, 64), torch.ones(4)), loss_fn=_loss)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_steps_with_optimizer_states_in_host_memory() -> None:
    device = torch.device("cuda")
    torch.manual_seed(0)
    here = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8))).to(device)
    there = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8))).to(device)
    there.load_state_dict(here.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), **ADAM) for m in (here, there)]
    room = OffloadPool(device)
    OffloadedStates(optimizers[1], room)
    peaks = []
    for model, optimizer in zip((here, there), optimizers, strict=True):
        for _ in range(3):
            model(torch.ones(4, 2048, device=device)).sum().backward()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            optimizer.step()
            optimizer.zero_grad()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert room.used_bytes == 8 * 2 * 2048 * 2048 * 4
    assert all(s["exp_avg"].device.type == "cpu" for s in optimizers[1].state.values())
    for one, other in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    # Two parameters of 16 MiB at a time: their states, and as much for the step itself.
    assert peaks[1] <= 2 * 3 * 2 * 2048 * 2048 * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_expandable_segments_avoid_fragmentation() -> None:
    """Tensors that grow by turns leave holes that none of the next ones fits into."""
    script = (
        "import torch\n"
        "for size in range(40, 140):\n"
        "    kept = [torch.empty(size << 20, dtype=torch.uint8, device='cuda') for _ in range(3)]\n"
        "    del kept[1]\n"
        "print(torch.cuda.max_memory_reserved() / torch.cuda.max_memory_allocated())\n"
    )

    def reserved_share(settings: str) -> float:
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings}
        run = subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return float(run.stdout)

    usual = reserved_share("expandable_segments:False")
    expandable = reserved_share("expandable_segments:True")
    assert usual > 1.1
    assert expandable < usual


@pytest.mark.dist
@pytest.mark.parametrize(
    "plan",
    [
        "dp_replicate=2 offload=optimizer",
        "dp_replicate=2 accumulation=2 offload=optimizer,activations",
        "dp_shard=2 offload=states,activations",
        "dp_replicate=2 zero=1 accumulation=2 offload=activations",
        "tp=2 offload=optimizer,activations tensor_styles=blocks.*.mlp.0:column,blocks.*.mlp.2:row",
    ],
)
def test_two_ranks_train_like_one_process(pool: Pool, plan: str) -> None:
    for parity in pool.run(measure, "gpt", plan, world_size=2):
        assert isinstance(parity, Parity)
        assert parity.loss <= TOLERANCE, parity
        assert parity.gradient <= TOLERANCE, parity
        assert parity.parameter_after_steps <= TOLERANCE, parity


def test_offloaded_training_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    plan = Plan.parse("offload=optimizer offload_to=disk")
    options = {"plan": plan, "offload_folder": tmp_path}
    options["optimizer"] = lambda params: torch.optim.AdamW(params, **ADAM)
    case = CASES["gpt"]
    torch.manual_seed(0)
    _, first = alone("gpt", **options)
    first.train_step(case.batch(4))
    first.save(tmp_path / "saved")
    torch.manual_seed(1)
    module, second = alone("gpt", **options)
    second.load(tmp_path / "saved")
    assert all(_is_file(state["exp_avg"]) for state in second.optimizer.state.values())
    losses = [parallel.train_step(case.batch(4)).item() for parallel in (first, second)]
    assert losses[0] == losses[1]
    for name, value in first.state_dict().items():
        assert torch.equal(value, module.state_dict()[name])
