"""Demands of each unit of a model on a device at one microbatch size, as plain floats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from advisor.cost.load.axes import EXPERTS_PER_TOKEN, over_experts
from advisor.cost.load.run_loads import RunLoad, element_bytes, run_loads, split_head, styled_units
from advisor.cost.load.runs import runs_of
from advisor.cost.load.tensor import split_loss, token_share
from advisor.cost.load.unit_load import UnitLoad, with_glue, with_whole
from advisor.cost.load.work import over_expert_ranks
from profiles.model.layers import LayerCost
from profiles.model.profile import GLUE, LOSS, ModelProfile, Numerics
from profiles.model.source import CaptureSource
from profiles.model.work import ProductKind
from profiles.workload.optimizer_states import FP32_BYTES
from profiles.workload.stack import TORCH, Loss, Stack

# Share of a float32 parameter (4 bytes) in its bfloat16 copy (2 bytes).
BF16_SHARE = 2 / 4
# Activations are counted operation by operation, which excludes kernels' scratch memory; published
# peaks of one configuration scatter by less than 0.1 %, so the range is this model's error, not
# noise. Assumed until our own runs bound it.
ACTIVATION_ERROR = 0.08
# From the shapes of parameters alone: see `tests/profiles/capture/test_ladder.py` for how far off.
GUESS_ERROR = 3.0


def activation_error(model: ModelProfile) -> float:
    """Half-width of the range of activations and temporaries, as a fraction."""
    is_guess = model.source is CaptureSource.PARAMETERS
    return GUESS_ERROR if is_guess else ACTIVATION_ERROR


@dataclass(frozen=True)
class Loads:
    """Units in call order, and sums over them.

    Equal neighbors are one `UnitLoad` in `runs`. `entries` are the same with both ends of a long
    run separated: quantities change linearly along a run, so its moments lie between those of its
    first two units and of its last two.

    Attributes:
        compute_share: share of a parameter's bytes in its copy for compute: 1/2 if an fp32 model
            runs in bf16, else 1.
        pieces: if these are a part of other loads, (index of the run, number of its units).
        activation_error: see `activation_error`.
        charges_kernels: cycles of an accelerator's kernels are counted.
    """

    runs: tuple[UnitLoad, ...]
    samples: int
    compute_share: float
    buffer_bytes: float
    names: tuple[str, ...] = ()
    pieces: tuple[tuple[int, int], ...] = ()
    activation_error: float = ACTIVATION_ERROR
    charges_kernels: bool = False

    @cached_property
    def entries(self) -> tuple[UnitLoad, ...]:
        entries: list[UnitLoad] = []
        place = 0
        for run in self.runs:
            for count in ends_of(run.count):
                entries.append(replace(run, name=self.names[place], count=count))
                place += count
        return tuple(entries)

    @property
    def units(self) -> Iterator[UnitLoad]:
        """Yield every unit."""
        names = iter(self.names)
        for run in self.runs:
            for _ in range(run.count):
                yield replace(run, name=next(names), count=1)

    @cached_property
    def separate(self) -> tuple[UnitLoad, ...]:
        return tuple(unit for unit in self.runs if unit.is_separate)

    @cached_property
    def parameter_bytes(self) -> float:
        return sum(run.parameter_bytes * run.count for run in self.runs)

    @cached_property
    def gradient_bytes(self) -> float:
        return sum(run.gradient_bytes * run.count for run in self.runs)

    @cached_property
    def unsharded_bytes(self) -> float:
        return sum(run.unsharded_bytes * run.count for run in self.runs)

    @cached_property
    def whole_bytes(self) -> float:
        return sum(run.whole_bytes * run.count for run in self.runs)

    @cached_property
    def whole_gradient_bytes(self) -> float:
        return sum(run.whole_gradient_bytes * run.count for run in self.runs)

    @cached_property
    def expert_bytes(self) -> float:
        """Bytes of parameters of experts, which differ between ranks."""
        return sum(run.expert_bytes * run.count for run in self.runs)

    @property
    def common_gradient_bytes(self) -> float:
        """Gradients that all replicas add up: without those of experts."""
        return self.gradient_bytes - self.expert_bytes

    @cached_property
    def root_parameter_bytes(self) -> float:
        """Parameter bytes of FSDP's root group: all units without a group of their own."""
        return sum(run.parameter_bytes * run.count for run in self.runs if not run.is_separate)

    @cached_property
    def root_gradient_bytes(self) -> float:
        return sum(run.gradient_bytes * run.count for run in self.runs if not run.is_separate)

    @cached_property
    def tensors(self) -> int:
        """Number of trainable parameters."""
        return sum(run.tensors * run.count for run in self.runs)

    @property
    def common_tensors(self) -> int:
        """`tensors` without experts."""
        return self.tensors - sum(run.expert_tensors * run.count for run in self.runs)

    def part(self, first: int, last: int) -> Loads:
        """Loads of units [first, last)."""
        if (first, last) not in self._parts:
            runs, pieces, place = [], [], 0
            for number, run in enumerate(self.runs):
                count = min(last, place + run.count) - max(first, place)
                if count > 0:
                    runs.append(run if count == run.count else replace(run, count=count))
                    pieces.append((number, count))
                place += run.count
            self._parts[first, last] = Loads(
                runs=tuple(runs),
                samples=self.samples,
                compute_share=self.compute_share,
                buffer_bytes=self.buffer_bytes,
                names=self.names[first:last],
                pieces=tuple(pieces),
                activation_error=self.activation_error,
                charges_kernels=self.charges_kernels,
            )
        return self._parts[first, last]

    def repeating(self, blocks: int | None) -> Loads:
        """Loads of which the first `blocks` blocks alone are recomputed; None: all of them."""
        if blocks is None:
            return self
        if blocks not in self._repeating:
            runs, left = [], blocks
            for run in self.runs:
                again = min(left, run.count) if run.is_block else run.count
                left -= again * run.is_block
                for count, runs_once in ((again, False), (run.count - again, True)):
                    runs += [replace(run, count=count, runs_once=runs_once)] if count else []
            self._repeating[blocks] = replace(self, runs=tuple(runs))
        return self._repeating[blocks]

    @cached_property
    def _repeating(self) -> dict[int, Loads]:
        return {}

    @cached_property
    def _parts(self) -> dict[tuple[int, int], Loads]:
        return {}


def ends_of(count: int) -> tuple[int, ...]:
    """Number of units for each entry of a run: both its ends are separate.

    >>> ends_of(2), ends_of(9)
    ((1, 1), (1, 1, 5, 1, 1))
    """
    return (1, 1, count - 4, 1, 1) if count > 5 else (1,) * count


def combined(parts: Sequence[Loads]) -> Loads:
    """Concatenate parts of the same loads."""
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[0],
        runs=tuple(run for part in parts for run in part.runs),
        names=tuple(name for part in parts for name in part.names),
        pieces=tuple(piece for part in parts for piece in part.pieces),
    )


def loads_of(
    model: ModelProfile,
    *,
    numerics: Numerics,
    samples: int,
    tp: int = 1,
    styles: Iterable[tuple[str, str]] = (),
    cp: int = 1,
    ep: int = 1,
    is_sharded: bool = False,
    expert_shards: int = 0,
    keeps_whole: bool = False,
    of_runs: Sequence[RunLoad] | None = None,
    stack: Stack = TORCH,
) -> Loads:
    """Load of every unit of `model` on one rank, at a microbatch of `samples` under `numerics`.

    Args:
        tp, styles: tensor-parallel degree, and styles as in `Plan.tensor_styles`.
        cp: ranks that split the tokens of a sample: each has 1/cp of amounts per sample.
        ep: ranks that split the experts of a block.
        is_sharded: whether FSDP2 shards parameters other than experts; only for ep.
        expert_shards: number of ranks over which it shards everything, including experts; 0 if
            experts are unsharded.
        keeps_whole: whether FSDP2 shards what can be sharded, and leaves the rest whole.
        of_runs: loads of the model's runs before their experts are split, if known.
        stack: whose implementation of tensor parallelism it is.
    """
    if of_runs is None:
        styled = styled_units(model, numerics=numerics, styles=styles if tp > 1 else ())
        of_runs = run_loads(
            model,
            numerics=numerics,
            samples=samples,
            tp=tp,
            cp=cp,
            runs=runs_of(model),
            styled=styled,
            stack=stack,
        )
    head = split_head(of_runs, numerics) if tp > 1 else None
    loads = []
    for run, unit, place, load, code in of_runs:
        if ep > 1:
            load = over_experts(
                load,
                unit,
                ep=ep,
                per_token=model.experts_per_token,
                is_sharded=is_sharded,
                shards=expert_shards,
                element_bytes=element_bytes(model, numerics),
                is_torch=stack.states is None,
                routed=_routed(model, samples / cp * token_share(place, tp)),
            )
            load = _over_expert_ranks(load, ep)
        if keeps_whole and run.unit.whole_bytes:
            load = with_whole(load, run.unit)
        if head is not None and run.unit.name == _loss_unit(model):
            load = _with_split_loss(load, head, model, numerics, samples / cp, tp=tp, stack=stack)
        loads.append(load if code is None else with_glue(load, code))
    return Loads(
        runs=tuple(loads),
        samples=samples,
        compute_share=1.0 if numerics is Numerics.AS_BUILT else BF16_SHARE,
        buffer_bytes=model.buffer_bytes,
        names=tuple(unit.name for unit in model.units),
        activation_error=activation_error(model),
        charges_kernels=model.on_processor is False,
    )


def _routed(model: ModelProfile, samples: float) -> float:
    """Copies of tokens on their way to experts; 0 if the tokens of a sample are unknown."""
    tokens = samples * (model.tokens_per_sample or 0)
    return tokens * (model.experts_per_token or EXPERTS_PER_TOKEN)


def _over_expert_ranks(load: UnitLoad, ep: int) -> UnitLoad:
    """Remove weight reads of experts on other ranks."""
    if not any(each.kind is ProductKind.GROUPED for each in load.work.products):
        return load
    work = over_expert_ranks(load.work, ep)
    pairs = list(zip(load.work.products, work.products, strict=True))
    forward = sum(old.forward_bytes - new.forward_bytes for old, new in pairs)
    backward = sum(old.backward_bytes - new.backward_bytes for old, new in pairs)
    return replace(
        load,
        work=work,
        forward_moved_bytes=max(0.0, load.forward_moved_bytes - forward),
        backward_moved_bytes=max(0.0, load.backward_moved_bytes - backward),
    )


def _loss_unit(model: ModelProfile) -> str:
    """Unit that computes the loss: one of its own, or code between units if the model returns its
    loss."""
    names = [unit.name for unit in model.units]
    return LOSS if LOSS in names else GLUE


def _with_split_loss(
    load: UnitLoad,
    head: LayerCost,
    model: ModelProfile,
    numerics: Numerics,
    samples: float,
    *,
    tp: int,
    stack: Stack,
) -> UnitLoad:
    """Loss of split logits: a rank computes its share of the vocabulary."""
    dtype = model.dtype if numerics is Numerics.AS_BUILT else "bfloat16"
    rows = head.output_bytes.at(samples) / (head.outputs * (4 if dtype == "float32" else 2))
    share = 1 / tp
    # The engine saves the exponentials' input, too: selecting a row's class requires its shape, and
    # torch's backward of `gather` saves all of it.
    picked = rows * head.outputs * share * FP32_BYTES * (stack.loss is Loss.MATERIALISED)
    return replace(
        load,
        forward_flop=load.forward_flop * share,
        backward_flop=load.backward_flop * share,
        forward_moved_bytes=load.forward_moved_bytes * share,
        backward_moved_bytes=load.backward_moved_bytes * share,
        forward_cycles=load.forward_cycles * share,
        backward_cycles=load.backward_cycles * share,
        activation_bytes=load.activation_bytes * share + picked,
        selective_bytes=load.selective_bytes * share + picked,
        input_bytes=load.input_bytes * share,
        forward_transient_bytes=load.forward_transient_bytes * share,
        backward_transient_bytes=load.backward_transient_bytes * share,
        exchanges=split_loss(rows),
    )


def describe(name: str) -> str:
    """Name of a unit for sentences."""
    if name == LOSS:
        return "the loss"
    return f"`{name}`" if name else "the model"
