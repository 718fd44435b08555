"""Convert a setup to inputs of the cost model: facts and a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from advisor.cost import CALIBRATION, Calibration, CostModel, Estimate
from advisor.inputs.facts import Facts
from advisor.predict.networks import network_case
from advisor.predict.setup import ParallelLayout, Setup
from engines.plan import DataParallel, Plan, Precision, Recompute, Schedule
from profiles.closed_forms.transformer import TransformerShape, transformer_profile
from profiles.model.profile import ModelProfile, Numerics
from profiles.workload.optimizers import OPTIMIZERS, OptimizerProfile
from profiles.workload.stack import Stack
from profiles.workload.under_stack import under_stack
from profiles.workload.workload import Workload

# Megatron pads the vocabulary to a multiple of this for each tensor rank
# (--make-vocab-size-divisible-by).
VOCABULARY_MULTIPLE = 128
# NVIDIA's examples compile LAMB tensor by tensor; it makes both moments, the step and the parameter
# anew (PyTorch/LanguageModeling/Transformer-XL/pytorch/lamb.py, lamb_kernel).
LAMB = OPTIMIZERS["adam"].model_copy(
    update={"name": "lamb", "loop_copies": 4.0, "lingering_copies": 0.0, "list_copies": None}
)
_PADS = ("megatron", "nemo", "megatron-deepspeed")
_RECOMPUTE = {"none": Recompute.NONE, "selective": Recompute.SELECTIVE, "full": Recompute.FULL}
_KINDS = {1: DataParallel.ZERO1, 2: DataParallel.ZERO2}


@dataclass(frozen=True, slots=True)
class Case:
    """Facts and plan of a run; `engines` need not support the plan."""

    facts: Facts
    plan: Plan

    def estimate(self, calibration: Calibration = CALIBRATION) -> Estimate:
        return CostModel(self.facts, calibration).estimate(self.plan)


def case_of(setup: Setup) -> Case:
    """Convert a setup to facts and a plan."""
    if setup.shape is None:
        return _images(setup)
    full = setup.dtype in ("float32", "tfloat32")
    layout, stack = setup.layout, setup.software.stack
    multiple = VOCABULARY_MULTIPLE * layout.tp if setup.software.family in _PADS else 1
    model = _transformer(setup.shape, stack, full=full, multiple=multiple)
    facts = Facts(
        model=model,
        cluster=setup.cluster,
        workload=Workload(
            global_batch_size=layout.global_batch,
            tokens_per_sample=setup.shape.length,
            optimizer=_optimizer(setup),
            precision="fp32" if full else "bf16",
        ),
        stack=stack,
    )
    return Case(facts, plan_of(setup, model, precision=facts.precision))


def _images(setup: Setup) -> Case:
    """Cut pipeline stages by time, or by memory if they would not fit."""
    case = _network(setup, by_memory=False)
    capacity = setup.cluster.device.memory_bytes.value
    if setup.layout.pp == 1 or case.estimate().peak_bytes <= capacity:
        return case
    return _network(setup, by_memory=True)


def _network(setup: Setup, *, by_memory: bool) -> Case:
    case = network_case(setup, by_memory=by_memory)
    plan = Plan(**case.plan)
    facts = Facts(
        model=case.model,
        cluster=setup.cluster,
        workload=Workload(
            global_batch_size=setup.layout.global_batch,
            optimizer=_optimizer(setup),
            precision=plan.precision.value,
        ),
        stack=case.stack,
    )
    return Case(facts, plan)


@lru_cache(maxsize=512)
def _transformer(
    shape: TransformerShape, stack: Stack, *, full: bool, multiple: int
) -> ModelProfile:
    numerics = (Numerics.AS_BUILT,) if full else (Numerics.BF16, Numerics.BF16_AUTOCAST)
    if not full:
        numerics = (Numerics.AS_BUILT, *numerics)
    profile = transformer_profile(
        shape, name=shape.kind, numerics=numerics, vocabulary_multiple=multiple
    )
    return under_stack(profile, stack)


def _optimizer(setup: Setup) -> OptimizerProfile:
    """Return the optimizer with the stack's state dtypes, if it sets them."""
    return LAMB if setup.optimizer == LAMB.name else OPTIMIZERS[setup.optimizer]


def plan_of(setup: Setup, model: ModelProfile, *, precision: Precision) -> Plan:
    """Convert a layout to a plan: degrees, equal stages, and tensor-parallel styles by name."""
    layout = setup.layout
    schedule: Schedule | None = None
    stages: tuple[str, ...] = ()
    if layout.pp > 1:
        schedule = Schedule(layout.schedule)
        stages = tuple(_stages(layout, model))
    return Plan(
        pp=layout.pp,
        tp=layout.tp,
        cp=layout.cp,
        ep=layout.ep,
        **_data_parallel(layout),
        microbatch_size=layout.microbatch,
        microbatches=layout.accumulation if layout.pp > 1 else 1,
        accumulation=1 if layout.pp > 1 else layout.accumulation,
        recompute=_RECOMPUTE[setup.software.recompute],
        precision=precision,
        schedule=schedule,
        stages=stages,
        tensor_styles=tensor_styles(setup) if layout.tp > 1 else (),
    )


def _data_parallel(layout: ParallelLayout) -> dict[str, object]:
    dp = layout.dp
    if layout.zero == 3 and dp * layout.cp > 1:
        inside = max(1, min(dp, layout.shard // layout.cp))
        if dp == 1:
            return {"data_parallel": DataParallel.FULL_SHARD}  # over the ranks of cp
        if inside == 1:
            return {"dp_replicate": dp}
        if inside < dp:
            return {"dp_replicate": dp // inside, "dp_shard": inside}
        return {"dp_shard": dp}
    if layout.zero in _KINDS and dp * layout.cp > 1:
        return {"dp_replicate": dp, "data_parallel": _KINDS[layout.zero]}
    return {"dp_replicate": dp}


def _stages(layout: ParallelLayout, model: ModelProfile) -> list[str]:
    """Return the first unit of stages 1, 2, ...: equal numbers of blocks, with embedding and head
    added to the first and last. If blocks divide only with these two counted, the end stages get
    one block less, possibly none; otherwise the first stages get one more."""
    units = [unit.name for unit in model.units]
    places = [n for n, unit in enumerate(model.units) if unit.is_block]
    blocks = units[places[0] : places[-1] + 2]  # and the head
    chunks = layout.pp * layout.virtual
    count = len(places)
    sizes = [count // chunks + (n < count % chunks) for n in range(chunks)]
    if count % chunks and (count + 2) % chunks == 0:
        each = (count + 2) // chunks
        sizes = [each - (n in (0, chunks - 1)) for n in range(chunks)]
    elif count % chunks:
        # The last stages also hold the head, so the first stages take the remainder.
        sizes = sorted(sizes, reverse=True)
    starts, place = [], 0
    for size in sizes[:-1]:
        place += size
        starts.append(blocks[place])
    return list(dict.fromkeys(starts))


_COLUMN = ("attention.qkv", "attention.queries", "attention.keys", "cross.query",
           "cross.key_value", "mlp.up", "shared.up", "mixer.in")  # fmt: skip
_ROW = ("attention.output", "cross.output", "mlp.down", "shared.down", "mixer.out")


def tensor_styles(setup: Setup) -> tuple[tuple[str, str], ...]:
    """Return tensor-parallel styles of a transformer's layers: Megatron-LM's pairs (1909.08053),
    and sequence-parallel regions between them if the stack has those."""
    by_tokens = setup.software.stack.sequence_parallel
    pairs = [("embedding.words", "vocab"), ("head", "vocab")]
    pairs += [(f"layers.*.{path}", "column") for path in _COLUMN]
    pairs += [(f"layers.*.{path}", "row") for path in _ROW]
    if by_tokens:
        pairs.append(("layers.*", "sequence"))
        pairs += [(f"layers.*.{path}", "joined") for path in _COLUMN]
    return tuple(pairs)


def with_microbatch(setup: Setup, microbatch: int) -> Setup:
    """Return `setup` with another microbatch size."""
    return replace(setup, layout=replace(setup.layout, microbatch=microbatch))
