"""Times of units: structure exactly, seconds only against seconds of the same minute."""

from __future__ import annotations

import copy
import queue
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from advisor.inputs.bundled.gpt import GPT, GPTConfig, loss
from profiles.capture.batch.call import Batch, LossFn
from profiles.capture.calls import calls_of
from profiles.capture.capture import capture
from profiles.machine.bench import matmul_rate
from profiles.model.profile import LOSS, ModelProfile, Numerics
from profiles.model.times import BlockTimes
from profiles.timing import stopwatch
from profiles.timing.block_timer import FEWEST
from profiles.timing.stopwatch import recall_or_time, time_blocks
from tests.engines.cases import CASES, TinyResNet

CPU = torch.device("cpu")


def gpt(*, width: int = 32, layers: int = 3, rows: int = 2) -> tuple[nn.Module, Batch]:
    ids = torch.randint(0, 61, (rows, 16))
    shape = GPTConfig(vocab_size=61, context=16, num_layers=layers, num_heads=2, width=width)
    return GPT(shape), (ids, ids)


def timed(
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFn | None,
    *,
    numerics: Numerics = Numerics.AS_BUILT,
    budget_s: float = 0.2,
) -> tuple[ModelProfile, BlockTimes]:
    profile = capture(model, sample, loss_fn=loss_fn, numerics=(numerics,))
    times = time_blocks(
        model,
        sample,
        profile,
        device_name="cpu",
        loss_fn=loss_fn,
        device=CPU,
        numerics=numerics,
        budget_s=budget_s,
    )
    return profile, times


def test_equal_blocks_are_run_once_and_share_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[str] = []
    inner = stopwatch.time_unit

    def watched(subject: object, *rest: object) -> object:
        run.append(type(subject).__name__)
        return inner(subject, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(stopwatch, "time_unit", watched)
    profile, times = timed(*gpt(layers=5), loss)
    assert sorted(run) == ["Block", "Embedding", "Embedding", "LayerNorm", "Linear", "function"]
    assert times.left_out == {}
    blocks = [times.units[f"blocks.{index}"] for index in range(5)]
    assert all(block == blocks[0] for block in blocks)
    assert set(times.units) == {u.name for u in profile.units} - {"(glue)"}
    # Two rows of 16 tokens: 12 matrices of 32 x 32, and attention's two products.
    assert times.units["blocks.0"].forward_flop == 2 * 32 * 12 * 32**2 + 2 * 4 * 16**2 * 32
    assert (times.device, times.samples, times.torch) == ("cpu", 2, torch.__version__)


def test_times_are_medians_of_several_runs_with_their_spread() -> None:
    _, times = timed(*gpt(), loss)
    for unit in times.units.values():
        for timing in (unit.forward, unit.backward):
            assert timing.repeats >= FEWEST
            assert timing.low_s <= timing.median_s <= timing.high_s
        assert unit.forward.median_s > 0
    assert times.units["blocks.0"].backward.median_s > 0
    assert times.units[LOSS].backward.median_s > 0


@pytest.mark.timed
def test_twice_the_width_takes_longer() -> None:
    narrow = timed(*gpt(width=128, layers=2, rows=8), loss)[1].units["blocks.0"]
    wide = timed(*gpt(width=256, layers=2, rows=8), loss)[1].units["blocks.0"]
    # Four times the FLOP; half of that where a disturbance hits the narrow one.
    assert wide.forward.low_s > 1.5 * narrow.forward.low_s
    assert wide.backward.low_s > 1.5 * narrow.backward.low_s


@pytest.mark.timed
def test_no_block_is_faster_than_the_machine_multiplies() -> None:
    profile, times = timed(*gpt(width=256, layers=2, rows=16), loss, budget_s=1.0)
    block = times.units["blocks.0"]
    # Both vary with what else the machine does: the best matmul of several against a median.
    best = max(matmul_rate(CPU, torch.float32) for _ in range(4))
    assert 0.02 * best < block.flop_per_s < 1.2 * best
    assert block.forward_flop + block.backward_flop == profile.units[3].flop(16)


@pytest.mark.timed
def test_the_times_of_units_add_up_to_the_step_of_the_model() -> None:
    model, sample = gpt(width=192, layers=3, rows=8)
    assert isinstance(sample, tuple)

    def step() -> float:
        begin = time.perf_counter()
        loss(model(sample[0]), sample[1]).backward()
        return time.perf_counter() - begin

    step()
    ratios = []
    for _ in range(4):  # in turns, for others use this machine too
        units = timed(model, sample, loss, budget_s=0.5)[1].units.values()
        said = sum(unit.forward.median_s + unit.backward.median_s for unit in units)
        ratios.append(statistics.median(step() for _ in range(5)) / said)
    # Were a part forgotten (the backward is two thirds), or counted twice, none would be near 1.
    assert any(0.75 < ratio < 1.35 for ratio in ratios), ratios


def test_timing_leaves_the_model_unchanged() -> None:
    model = TinyResNet(nn.BatchNorm2d)
    model.add_module("dropout", nn.Dropout(0.5))
    model.stem.eval()
    seen: queue.SimpleQueue[str] = queue.SimpleQueue()  # a list would be put back after the look
    model.stem.register_forward_hook(lambda *_: seen.put("forward"))
    batch = CASES["resnet-batch-norm"].batch(4)
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    profile = capture(model, batch, loss_fn=nn.functional.cross_entropy)
    state = copy.deepcopy(model.state_dict())
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    modes = [module.training for module in model.modules()]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    while not seen.empty():
        seen.get()
    torch.manual_seed(3), random.seed(3)
    expected = torch.rand(1), random.random()
    torch.manual_seed(3), random.seed(3)
    times = time_blocks(
        model,
        batch,
        profile,
        device_name="cpu",
        loss_fn=nn.functional.cross_entropy,
        device=CPU,
        budget_s=0.1,
    )
    assert (torch.rand(1), random.random()) == expected
    assert len(times.units) > 4
    assert seen.qsize() == 1  # once, on stand-ins: never in what is timed
    assert modes == [module.training for module in model.modules()]
    assert hooks == [len(module._forward_hooks) for module in model.modules()]
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(*pair) for pair in zip(after, gradients, strict=True))


def test_a_meta_model_is_timed() -> None:
    with torch.device("meta"):
        model, _ = gpt()
    _, times = timed(model, gpt()[1], loss)
    assert times.left_out == {}
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("numerics", [Numerics.BF16, Numerics.BF16_AUTOCAST])
def test_lower_precision_is_timed_as_it_is_run(numerics: Numerics) -> None:
    seen: list[torch.dtype] = []

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            seen.append(self.inner.weight.dtype)
            seen.append(out.dtype)
            return out

    model = nn.Sequential(Looks(), nn.Flatten())
    profile = capture(model, torch.randn(2, 8), numerics=(numerics,))
    seen.clear()
    times = time_blocks(
        model,
        torch.randn(2, 8),
        profile,
        device_name="cpu",
        device=CPU,
        numerics=numerics,
        budget_s=0.01,
    )
    weight = torch.bfloat16 if numerics is Numerics.BF16 else torch.float32
    assert seen[-2:] == [weight, torch.bfloat16]
    assert times.numerics == numerics.value


class Shared(nn.Module):
    """One block, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
        self.head = nn.Linear(256, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.block(x)
        out: Tensor = self.head(x)
        return out


@pytest.mark.timed
def test_a_unit_called_three_times_counts_three_times() -> None:
    profile, times = timed(Shared(), torch.randn(64, 256), None)
    for unit in profile.units:
        if unit.name in times.units:
            timing = times.units[unit.name]
            assert timing.forward_flop + timing.backward_flop == unit.flop(64)
    once = nn.Linear(256, 256)
    begin = [_seconds(lambda: once(torch.randn(64, 256))) for _ in range(20)]
    calls = sum(t.forward.median_s for name, t in times.units.items() if name.startswith("block"))
    assert calls > 3 * min(begin)


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


class Stubborn(nn.Module):
    """Works in its model alone: it looks at a file that is open while the model runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.file = open(__file__, encoding="utf-8")  # noqa: SIM115

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def test_units_that_cannot_run_alone_are_left_out_with_the_reason() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Stubborn())
    _, times = timed(model, torch.randn(2, 4), None)
    model[1].file.close()
    assert set(times.units) == {"0"}
    assert "cannot pickle" in times.left_out["1"]


def test_block_times_are_recalled_by_the_next_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, sample = gpt()
    profile = capture(model, sample, loss_fn=loss)

    def again(profile: ModelProfile = profile, name: str = "cpu") -> BlockTimes:
        return recall_or_time(
            model, sample, profile, device_name=name, loss_fn=loss, device=CPU, budget_s=0.01
        )

    first = again()
    (file,) = (tmp_path / "parallel-advisor").iterdir()
    assert again() == first
    # A saved profile that carries times already is the same model.
    assert again(profile.model_copy(update={"times": (first,)})) == first

    file.write_text("{half of a fi")
    with caplog.at_level("WARNING", logger="profiles.cache"):
        fresh = again()
    assert fresh != first
    assert "not JSON" in caplog.text
    assert BlockTimes.load(file) == fresh

    again(name="another device")
    batch = capture(model, gpt(rows=4)[1], loss_fn=loss)
    again(batch)
    assert len(list(file.parent.iterdir())) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_the_devices_own_clock_is_read() -> None:
    model, sample = gpt(width=256, layers=2, rows=16)
    profile = capture(model, sample, loss_fn=loss)
    device = torch.device("cuda", 0)
    times = time_blocks(
        model, sample, profile, device_name="gpu", loss_fn=loss, device=device, budget_s=1.0
    )
    assert times.left_out == {}
    best = max(matmul_rate(device, torch.float32) for _ in range(3))
    assert 0 < times.units["blocks.0"].flop_per_s < 1.2 * best
    assert next(model.parameters()).device.type == "cpu"


def test_a_model_that_is_one_unit_hands_its_output_to_the_loss() -> None:
    calls, left_out = calls_of(
        nn.Linear(4, 2), (torch.randn(3, 4), torch.zeros(3, 2)), nn.functional.mse_loss
    )
    assert left_out == {}
    (output, _target), _ = calls[LOSS][0].args, calls[LOSS][0].kwargs
    assert output.shape == (3, 2)


def test_a_processor_is_named_as_the_kernel_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R): 8480+\n"
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    assert stopwatch.processor_name(CPU) == "Intel(R) Xeon(R): 8480+"
