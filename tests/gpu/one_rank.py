"""One rank of a job of 8 to 1,024, alone on the device: its memory is real.

torch's fake process groups start every collective and exchange nothing, so that a rank allocates as
in the real job. Its peak is compared with the estimate, and its parts: model states when the
optimizer steps, what is held when the forward is over, and the rest of the peak.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from advisor.cost import Estimate
from engines.apply import Proofs, apply_plan
from engines.parallel import ParallelModel
from engines.plan import Plan
from engines.runtime.fake_world import fake_world
from engines.tensor.proposal import propose_styles
from profiles.machine.cluster import ClusterProfile
from profiles.machine.clusters import cluster_from_name
from profiles.model.profile import ModelProfile
from tests.contract.watch import gradients, local, optimizer_states
from tests.gpu.case import Case
from tests.gpu.predict import OPTIMIZERS, Predicted, allocated, predicted, reserved
from tests.gpu.results import Row, Unit
from tests.gpu.setting import DeviceMemory, Setting
from tests.gpu.subjects import Subject, captured, fill, filled_in_place, gpt_of

TERMS: dict[str, Callable[[Estimate], float]] = {
    "peak": allocated,
    "reserved": reserved,
    "states": lambda e: e.states_bytes,
    "activations": lambda e: e.memory.activations,
    "rest of the peak": lambda e: (
        allocated(e) - e.memory.parameters - e.memory.optimizer - e.memory.activations
    ),
}
DEVICES_PER_NODE = 8
LENGTH = 2048
SHAPES: dict[str, dict[str, int]] = {
    "gpt-1.3b": {"layers": 24, "heads": 16, "width": 2048},
    "gpt-7b": {"layers": 32, "heads": 32, "width": 4096},
    "gpt-13b": {"layers": 40, "heads": 40, "width": 5120},
    "gpt-70b": {"layers": 80, "heads": 64, "width": 8192},
}
SMALL_SHAPE = {"layers": 2, "heads": 4, "width": 64}
SMALL_LENGTH, SMALL_VOCABULARY = 32, 256
TWIN_HEAD = 8  # width of a head
PLANS: tuple[tuple[str, str, int], ...] = (
    ("gpt-7b", "dp_shard=8 precision=bf16 recompute=full", 4),
    ("gpt-13b", "dp_shard=64 precision=bf16 recompute=full", 4),
    ("gpt-70b", "dp_shard=1024 precision=bf16 recompute=full", 2),
    ("gpt-1.3b", "dp_replicate=8 precision=bf16", 4),
    ("gpt-7b", "dp_replicate=8 zero=1 precision=bf16 recompute=full", 2),
    ("gpt-7b", "dp_replicate=64 zero=2 precision=bf16 recompute=full accumulation=2", 2),
    ("gpt-70b", "tp=8 dp_shard=8 precision=bf16 recompute=full", 2),
    ("gpt-13b", "dp_replicate=16 dp_shard=64 precision=bf16 recompute=selective", 2),
    ("gpt-70b", "tp=8 dp_shard=128 precision=bf16 recompute=full", 2),
    ("gpt-7b", "tp=8 precision=bf16", 4),
    ("gpt-7b", "tp=8 dp_replicate=8 zero=1 precision=bf16 sequence_parallel=true", 4),
    ("gpt-7b", "dp_shard=8 accumulation=2", 1),
    ("gpt-7b", "dp_shard=8 precision=bf16 recompute=full loss_chunks=8", 8),
    ("gpt-7b", "dp_shard=8 precision=bf16 recompute=full offload=states", 4),
)
"""Model, plan and rows of a microbatch; the most telling first."""
SMALL_PLANS = (("gpt, small", "tp=2 dp_replicate=4 zero=1", 2),)


def cases(*, is_small: bool) -> list[Case]:
    plans = SMALL_PLANS if is_small else PLANS
    return [
        Case(
            f"{name}: {settings}",
            functools.partial(_run, name, settings, rows),
            limit_s=90.0,
            is_small=is_small,
        )
        for name, settings, rows in plans
    ]


@dataclass(slots=True)
class Parts:
    """Bytes of a step.

    Attributes:
        states: parameters, gradients and optimizer states when the optimizer steps.
        resident: those of parameters and optimizer states that are on the device.
        at_loss: held on the device when the loss begins.
    """

    states: int = 0
    resident: int = 0
    at_loss: int = 0


def _run(name: str, settings: str, rows: int, setting: Setting) -> Iterator[Row]:
    if setting.is_small:
        subject = gpt_of(**SMALL_SHAPE, length=SMALL_LENGTH, vocabulary=SMALL_VOCABULARY)
    else:
        subject = gpt_of(**SHAPES[name], length=LENGTH)
    profile, module = _profile(setting, subject, name), subject.module()
    plan = Plan.parse(f"{settings} microbatch_size={rows}")
    plan, proofs = _split(plan, SMALL_SHAPE if setting.is_small else SHAPES[name])
    given, sheet = _predictions(setting, plan, profile), cluster_for(setting, plan.world_size)
    setting.release()
    memory, parts = DeviceMemory(setting), Parts()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        parts.at_loss = max(parts.at_loss, memory.now())
        assert subject.loss_fn is not None
        return subject.loss_fn(output, target)

    with fake_world(0, plan.world_size, setting.device) as world, filled_in_place():
        with memory.watched():
            parallel = apply_plan(
                module,
                plan,
                profile=profile,
                cluster=sheet,
                loss_fn=loss_fn,
                optimizer=OPTIMIZERS["adamw"],
                sample=subject.batch(2),
                weights=fill,
                world=world,
                on_nonfinite="ignore",  # what others send is whatever is in the buffers
                check_replicas_every=0,
                proofs=proofs,
            )
            batch = subject.batch(rows * plan.forwards)
            parallel.train_step(batch)  # the optimizer makes its states
        _watch_states(parallel, parts, setting)
        parts.at_loss = 0
        with memory.watched():
            parallel.train_step(batch)
        peak, cached = memory.peak(), memory.reserved_peak()
        del parallel
    del module
    setting.release()
    saved = max(0, parts.at_loss - parts.resident)
    figures: dict[str, int] = {"peak": peak}
    if cached is not None:
        figures["reserved"] = cached
    figures |= {
        "states": parts.states,
        "activations": saved,
        "rest of the peak": max(0, peak - parts.resident - saved),
    }
    notes = {
        "activations": "held when the loss begins, logits and gathered parameters too; predicted:"
        " saved at peak"
    }
    for term, figure in figures.items():
        yield given.row(term, Unit.BYTES, figure, TERMS[term], notes.get(term, ""))


def _profile(setting: Setting, subject: Subject, name: str) -> ModelProfile:
    return captured(subject, name, on_processor=not setting.is_cuda)


def _predictions(setting: Setting, plan: Plan, profile: ModelProfile) -> Predicted:
    sheet = cluster_for(setting, plan.world_size)
    return predicted(plan, profile, (sheet, setting.benched(sheet)))


def predicted_again(setting: Setting) -> dict[str, Callable[[], Predicted]]:
    """Of every case, by its name."""

    def again(name: str, settings: str, rows: int) -> Predicted:
        profile = _profile(setting, gpt_of(**SHAPES[name], length=LENGTH), name)
        plan = Plan.parse(f"{settings} microbatch_size={rows}")
        return _predictions(setting, _split(plan, SHAPES[name])[0], profile)

    return {f"{case[0]}: {case[1]}": functools.partial(again, *case) for case in PLANS}


def _split(plan: Plan, shape: dict[str, int]) -> tuple[Plan, Proofs]:
    """The plan with its layers' splits, and their proof.

    Both are found on a narrow twin, of the same names: a proof computes on values.
    """
    if plan.tp == 1:
        return plan, Proofs()
    narrow = {**shape, "width": TWIN_HEAD * shape["heads"]}
    twin = gpt_of(**narrow, length=SMALL_LENGTH, vocabulary=SMALL_VOCABULARY)
    proposal = propose_styles(
        twin.module(),
        twin.batch(2),
        size=plan.tp,
        profile=captured(twin, "twin"),
        has_target=True,
        by_tokens=plan.sequence_parallel,
    )
    plan = plan.model_copy(update={"tensor_styles": proposal.styles})
    return plan, Proofs(layers=proposal.proof)


def cluster_for(setting: Setting, world: int) -> ClusterProfile:
    """Nodes of eight devices as this one, by its data sheet."""
    device = setting.sheet.device
    nodes, rest = divmod(world, DEVICES_PER_NODE)
    shape = f"{nodes}x{DEVICES_PER_NODE}" if nodes and not rest else f"{world}"
    like = device.name if setting.is_cuda else "H200-SXM"
    named = cluster_from_name(f"{shape}x{like}")
    return named.model_copy(update={"device": device})


def _watch_states(parallel: ParallelModel, parts: Parts, setting: Setting) -> None:
    """Note the bytes of what a rank holds when its optimizer steps."""

    def note(*_: object) -> None:
        resident = list(map(local, parallel.parameters()))
        resident += [tensor for tensor in optimizer_states(parallel) if tensor.dim() > 0]
        parts.states = sum(tensor.nbytes for tensor in (*resident, *gradients(parallel)))
        parts.resident = sum(t.nbytes for t in resident if t.device.type == device_type)

    device_type = setting.device.type
    parallel.optimizer.register_step_pre_hook(note)
