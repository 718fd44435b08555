"""Steps worked out by hand, and whole models against every allocation that capture saw of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache
from statistics import median

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from advisor.inputs.bundled.gpt import GPT, GPTConfig, loss
from advisor.inputs.bundled.resnet import ResNet
from profiles.allocator.step_replay import (
    Pass,
    Replayed,
    Resident,
    StepAllocator,
    UnitMemory,
    replay_stages,
)
from profiles.allocator.unit_memory import parameter_tensors, saved_sizes, scaled
from profiles.capture.batch.call import Batch
from profiles.capture.capture import capture
from profiles.capture.subject import TracedModel
from profiles.capture.trace_step import trace_step
from profiles.model.profile import ModelProfile, Numerics
from profiles.trace.timeline import Timeline
from profiles.units import MIB

ADAM = Resident(state_copies=(1, 1), step_copies=1)
PAIR = UnitMemory(
    parameters=(20 * MIB,),
    gradients=(20 * MIB,),
    saved=(40 * MIB,),
    forward_bytes=40 * MIB,
    count=2,
)


def replay(units: Sequence[UnitMemory], standing: Resident) -> Replayed:
    """A microbatch through one stage, and back."""
    return replay_stages([units], standing, order=(Pass(True, 0, 0), Pass(False, 0, 0)))


def replay_timeline(
    timeline: Timeline,
    *,
    gradients: Collection[int],
    parameters: Sequence[float],
    standing: Resident,
) -> Replayed:
    """The same from every allocation that capture saw.

    Args:
        gradients: those of the timeline's allocations that are gradients of parameters.
    """
    device = StepAllocator()

    def pass_through() -> list[int]:
        live: dict[int, int] = {}
        copied: list[int] = []  # into their buckets
        for number, nbytes in timeline.allocations():
            if nbytes is None:
                if number not in gradients:
                    device.give([live.pop(number)])
                continue
            device.give(copied)
            address = device.allocator.allocate(nbytes)
            if number in gradients and standing.buckets:
                copied.append(address)
            else:
                live[number] = address
        device.give([*copied, *(live.pop(number) for number in [*live] if number not in gradients)])
        return list(live.values())

    return device.train(parameters, standing, pass_through)


def test_optimizer_states_fragment_segments_of_the_first_step() -> None:
    # First step: 40 MiB of parameters, 80 kept, 20 for the second unit's gradient: 140 in segments
    # of 20, 20, 40, 40, 20. The other gradient and both states go into the two of 40, so that the
    # second step finds no 40 in one piece: two more. Beside 40 parameters and 40 states live at
    # most 80 kept and the first gradient.
    replayed = replay([PAIR], Resident(state_copies=(1,)))
    assert replayed == Replayed(allocated_bytes=180 * MIB, reserved_bytes=220 * MIB)


def test_buckets_of_gradients_stay_allocated() -> None:
    # 40 of parameters, 40 of buckets, 80 kept, and a gradient of 20 on its way to its bucket.
    replayed = replay([PAIR], Resident(buckets=(40 * MIB,)))
    assert replayed.allocated_bytes == replayed.reserved_bytes == 180 * MIB


def test_recomputed_activations_are_allocated_once() -> None:
    units = [replace(PAIR, saved=(10 * MIB,), again=(40 * MIB,), forward_bytes=50 * MIB)]
    # The first unit's backward: 40 of parameters, 10 kept, 40 made again, and, when those went, its
    # gradient beside the other's. The second unit's: 40, twice 10, 40.
    assert replay(units, Resident()).allocated_bytes == 110 * MIB


def test_gathered_parameters_are_allocated_while_a_unit_runs() -> None:
    unit = replace(PAIR, gathered=(100 * MIB,))
    # As without, and 100 of the unit in work, the last one's backward, and of the next one.
    assert replay([unit], Resident()).allocated_bytes == (40 + 80 + 20 + 2 * 100) * MIB


def test_inputs_of_reduce_scatter_stay_until_the_next_one() -> None:
    unit = replace(
        PAIR,
        parameters=(10 * MIB,),
        gradients=(10 * MIB,),
        whole_gradients=(20 * MIB,),
        reduced=(20 * MIB,),
    )
    # The first unit's reduction: 20 of parameters, the last one's shard of 10, what is reduced and
    # the gradient that it is a copy of. The second step finds as much.
    assert (
        replay([replace(unit, saved=(), forward_bytes=0)], Resident()).allocated_bytes == 70 * MIB
    )


def test_microbatches_of_a_stage_add_to_one_gradient() -> None:
    order = [Pass(True, 0, n) for n in range(3)] + [Pass(False, 0, n) for n in range(3)]
    one = replace(PAIR, count=1)
    # 20 of parameters, three times 40 kept, and the gradient that is made while the first goes.
    replayed = replay_stages([[one]], Resident(), order=order)
    assert replayed.allocated_bytes == (20 + 3 * 40 + 20) * MIB


def test_a_timeline_is_replayed_allocation_by_allocation() -> None:
    line = Timeline()
    activation = line.make(40 * MIB)
    temporary = line.make(60 * MIB)
    line.release(temporary)
    gradient = line.make(50 * MIB)
    line.release(activation)
    # Segments of 50, 20 for the 2 of the batch, 40 and 60. The gradient goes into that of the
    # temporary; when the second step begins it is let go, and the temporary fits there again.
    replayed = replay_timeline(
        line,
        gradients={gradient},
        parameters=[50 * MIB],
        standing=Resident(always=(2 * MIB,)),
    )
    assert replayed == Replayed(allocated_bytes=152 * MIB, reserved_bytes=170 * MIB)


def test_tensors_keep_their_proportions() -> None:
    assert scaled((30.0, 10.0), 20.0) == (15.0, 5.0)
    assert scaled((), 20.0) == (20.0,)
    assert scaled((), 0.0) == ()


class TwoLayers(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def test_tensors_of_two_layers() -> None:
    samples, width = 2048, 1024
    model = nn.Sequential(TwoLayers(width), TwoLayers(width))
    unit = capture(model, torch.empty(samples, width, device="meta")).units[0]
    # The input of GELU, and its output; the batch is not the unit's.
    assert saved_sizes(unit.cost(Numerics.AS_BUILT), samples) == (4 * samples * width * 4,) * 2
    assert parameter_tensors(unit) == (4 * width * width * 4,) * 2


# Models whose tensors are large, by what is known of them: the profile, and all allocations.


def _gpt(samples: int) -> tuple[nn.Module, Batch, Callable[..., torch.Tensor]]:
    config = GPTConfig(vocab_size=32000, context=512, num_layers=8, num_heads=12, width=768)
    with torch.device("meta"):
        return GPT(config), (torch.zeros(samples, 512, dtype=torch.long),) * 2, loss


def _resnet(samples: int) -> tuple[nn.Module, Batch, Callable[..., torch.Tensor]]:
    with torch.device("meta"):
        images = torch.empty(samples, 3, 224, 224), torch.zeros(samples, dtype=torch.long)
        return ResNet(50), images, F.cross_entropy


def _mlp(samples: int) -> tuple[nn.Module, Batch, Callable[..., torch.Tensor]]:
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(3000, 3000), nn.ReLU()) for _ in range(10)]
        return nn.Sequential(*layers), (torch.empty(samples, 3000),) * 2, F.mse_loss


MODELS = {"gpt": _gpt, "resnet50": _resnet, "mlp": _mlp}
CASES = [
    *(("gpt", samples) for samples in (1, 4, 16)),
    *(("resnet50", samples) for samples in (8, 64)),
    *(("mlp", samples) for samples in (1000, 10000)),
]


@cache
def _profile(name: str) -> ModelProfile:
    model, sample, loss_fn = MODELS[name](4)
    return capture(model, sample, loss_fn=loss_fn)


def _both(name: str, samples: int, standing: Resident) -> tuple[Replayed, Replayed]:
    """From every allocation, and from the profile."""
    model, sample, loss_fn = MODELS[name](samples)
    seen = trace_step(TracedModel(model, sample, loss_fn), Numerics.AS_BUILT)
    sizes = [float(parameter.nbytes) for parameter in model.parameters()]
    exact = replay_timeline(
        seen.timeline, gradients=seen.gradients, parameters=sizes, standing=standing
    )
    units = []
    for unit in _profile(name).units:
        cost = unit.cost(Numerics.AS_BUILT)
        parameters = parameter_tensors(unit)
        units.append(
            UnitMemory(
                parameters=parameters,
                gradients=parameters,
                saved=saved_sizes(cost, samples),
                forward_bytes=cost.forward_transient_bytes.at(samples),
                backward_bytes=cost.backward_transient_bytes.at(samples),
            )
        )
    return exact, replay(units, standing)


@pytest.mark.parametrize("has_buckets", [False, True])
def test_reserved_bytes_follow_from_a_profile(has_buckets: bool) -> None:
    errors = {}
    for name, samples in CASES:
        buckets = -(-_profile(name).gradient_bytes // (25 * MIB)) * (25 * MIB,)
        standing = replace(ADAM, buckets=buckets if has_buckets else ())
        exact, estimate = _both(name, samples, standing)
        assert estimate.allocated_bytes == pytest.approx(exact.allocated_bytes, rel=0.05)
        errors[name, samples] = abs(estimate.ratio / exact.ratio - 1)
    assert median(errors.values()) < 0.03, errors
    assert max(errors.values()) < 0.12, errors
