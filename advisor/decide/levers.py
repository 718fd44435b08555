"""Levers on software and training: the predicted effect of each on the plan taken.

Each is a function from facts to changed facts: of the stack, the optimizer or the model. A few
plans are estimated with it: the plan taken, the same without recompute or with larger microbatches,
and its alternatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from advisor.cost import CostModel, Estimate
from advisor.decide import loss_chunks
from advisor.inputs.facts import Facts, captured
from advisor.inputs.stacks import is_of_engines
from advisor.inputs.wrapped import ShownAsText
from advisor.search.ranking import Candidate, weigh
from engines.legality import problems
from engines.plan import Offload, PartialPlan, Plan, Precision, Recompute
from profiles.record import Record
from profiles.units import format_gib, format_percent, format_seconds
from profiles.workload.lora import takes_lora, with_lora
from profiles.workload.optimizers import OPTIMIZERS
from profiles.workload.pure_bf16 import in_bf16
from profiles.workload.stack import LOSS_CHUNKS, Selective, States
from profiles.workload.under_stack import in_channels_last

if TYPE_CHECKING:
    from advisor.decide.decision import Decision

RANK = 16
_NOT_OURS = "our engines do not implement it"
_AT_BEST = "at best "
# Smallest relative difference that a report shows.
_SHOWN = 0.0005
# Alternatives that fit, and that do not, to estimate besides the plan taken.
_OTHERS = 2
# A report points out levers that shorten the step by this share; or that save this share of memory
# and lengthen the step by at most that much.
NOTABLE_STEP, NOTABLE_MEMORY, MOST_LONGER = 0.05, 0.15, 0.10


class Gain(Record):
    """Predicted effect of a lever.

    Attributes:
        name: of the lever.
        says: description of the lever, and the software that has it.
        settings: of a plan that applies it in our engines.
        code: of the user's that applies it; priced only without either.
        is_at_best: some of it is priced by a bound.
        keeps_training: losses stay the same but for rounding.
        plan, estimate: the plan taken, with the lever.
        fits: that plan fits.
        best, best_estimate: the fastest plan that fits of the few that were estimated.
    """

    name: str
    says: str
    settings: str = ""
    code: str = ""
    is_at_best: bool = False
    keeps_training: bool
    plan: Plan
    estimate: Estimate
    fits: bool
    best: Plan | None = None
    best_estimate: Estimate | None = None


@dataclass(frozen=True, slots=True)
class _Lever:
    """Lever; `changed` returns None if it does not apply to some facts."""

    name: str
    says: str
    changed: Callable[[Facts], Facts | None]
    settings: tuple[tuple[str, Any], ...] = ()
    code: str = ""
    is_at_best: bool = False
    keeps_training: bool = True

    @property
    def is_applied(self) -> bool:
        """True if our engines implement it."""
        return bool(self.settings)


def chunked_loss(facts: Facts) -> Facts | None:
    """Compute head and loss together, a part of the tokens at a time."""
    return facts if loss_chunks.is_open(facts, PartialPlan()) else None


def eight_bits(facts: Facts) -> Facts | None:
    """Multiply linear layers in fp8, if the device has units for it."""
    return facts if Precision.FP8.product_dtype in facts.cluster.device.flop_per_s else None


def fp8_products(facts: Facts) -> Facts | None:
    """Multiply all weights in fp8, with casts before, under a stack that our engines are not."""
    dtype = Precision.FP8.product_dtype
    if is_of_engines(facts.stack) or facts.stack.product_dtype == dtype:
        return None
    return _with_stack(facts, "fp8 products", product_dtype=dtype) if eight_bits(facts) else None


def cuda_graphs(facts: Facts) -> Facts | None:
    """Replay the launches of a step as one."""
    if facts.cluster.device.kind == "cpu" or facts.stack.cuda_graphs == 1.0:
        return None
    return _with_stack(facts, "CUDA graphs", cuda_graphs=1.0)


def channels_last(facts: Facts) -> Facts | None:
    """Keep maps as matrix units take them, where they are laid out anew around convolutions."""
    model = in_channels_last(facts.model) if facts.cluster.device.kind != "cpu" else None
    return None if model is None else facts.rebuilt(model=model)


def core_recompute(facts: Facts) -> Facts | None:
    """Recompute only scores and softmax."""
    kernel = facts.stack.attention
    costs = [cost for unit in facts.model.blocks() for cost in unit.costs.values()]
    calls = [call for cost in costs for call in cost.attention]
    calls += [c for cost in costs for layer in cost.layers for c in layer.after.attention]
    if facts.stack.selective is Selective.CORE:
        return None
    if not any((kernel or call.kernel).keeps_scores for call in calls):
        return None
    return _with_stack(facts, "recompute of scores", selective=Selective.CORE)


def bf16_moments(facts: Facts) -> Facts | None:
    """Store the optimizer's moments in bf16: half the bytes, to hold and to read and write."""
    optimizer, states = facts.workload.optimizer, facts.stack.states
    each = optimizer.state_bytes_per_element
    if facts.model.dtype != "float32" or not optimizer.is_elementwise or not each:
        return None
    halved = {
        "name": f"{optimizer.name}, moments in bf16",
        "state_bytes_per_element": each / 2,
        # Each is read and written at least once.
        "moved_bytes_per_element": optimizer.moved_bytes_per_element - each,
    }
    workload = facts.workload.model_copy(update={"optimizer": optimizer.model_copy(update=halved)})
    changed = facts.model_copy(update={"workload": workload})
    if states is not None and states.moments is not None:
        moments = States(**{**states.model_dump(), "moments": states.moments / 2})
        return _with_stack(changed, "bf16 moments", states=moments)
    return changed


def pure_bf16(facts: Facts) -> Facts | None:
    """Build the model in bf16, and keep what its sums lose: no copies in fp32."""
    is_adam = facts.workload.optimizer.name in ("adam", "adamw")
    model = in_bf16(facts.model) if is_adam and facts.precision.dtype == "bfloat16" else None
    if model is None or not is_of_engines(facts.stack):
        return None
    optimizer = OPTIMIZERS["adamw-compensated"]
    workload = facts.workload.model_copy(update={"optimizer": optimizer})
    return facts.rebuilt(model=model, workload=workload)


def lora(facts: Facts, *, is_quantised: bool = False) -> Facts | None:
    """Train adapters on a frozen base in bf16, or in 4 bits."""
    is_bf16 = facts.precision.dtype == "bfloat16"
    if not is_bf16 or facts.stack.states is not None or not takes_lora(facts.model):
        return None
    model = with_lora(facts.model, rank=RANK, is_quantised=is_quantised)
    return facts.model_copy(update={"model": model})


def qlora(facts: Facts) -> Facts | None:
    """Train adapters on a frozen base in 4 bits."""
    return lora(facts, is_quantised=True)


def _unchanged(facts: Facts) -> Facts | None:
    return facts


LEVERS = (
    _Lever("compile", "torch.compile of every block", _unchanged, (("compile", True),)),
    _Lever(
        "offload activations",
        "activations of blocks in main memory, in place of recompute",
        _unchanged,
        (("offload", Offload.ACTIVATIONS), ("recompute", Recompute.NONE)),
    ),
    _Lever(
        "chunked loss",
        "logits and loss for an eighth of the tokens at a time",
        chunked_loss,
        (("loss_chunks", LOSS_CHUNKS),),
    ),
    _Lever(
        "recompute of scores",
        "selective recompute of only attention's scores (Megatron-LM)",
        core_recompute,
    ),
    _Lever(
        "channels last",
        "the channels of a position side by side, of images too; batch norms by their bytes alone",
        channels_last,
        code="model.to(memory_format=torch.channels_last)",
        is_at_best=True,  # no norm of maps that lie so was timed
    ),
    _Lever("CUDA graphs", "recorded launches, replayed", cuda_graphs),
    _Lever(
        "fp8",
        "products of linear layers in fp8 by torchao, blocks compiled",
        eight_bits,
        (("precision", Precision.FP8), ("compile", True)),
        keeps_training=False,
    ),
    _Lever(
        "fp8 products",
        "products with weights in fp8 (Transformer Engine)",
        fp8_products,
        keeps_training=False,
    ),
    _Lever("bf16 moments", "the optimizer's moments in bf16", bf16_moments, keeps_training=False),
    _Lever(
        "pure bf16",
        "parameters, gradients and states in bf16, sums compensated",
        pure_bf16,
        code='model.bfloat16(), optimizer="adamw-compensated"',
        keeps_training=False,
    ),
    _Lever(
        "LoRA",
        f"adapters of rank {RANK} on every layer of the blocks, the base frozen in bf16",
        lora,
        keeps_training=False,
    ),
    _Lever("QLoRA", "the same, the base in 4 bits", qlora, keeps_training=False),
)


def gains(decision: Decision) -> tuple[Gain, ...]:
    """Return every lever that has an effect here, in a fixed order.

    A lever may have none because the profile does not know its kernels.
    """
    facts, own = decision.facts, decision.plan
    if not own.updates_in_step:
        return ()
    costs = CostModel(facts)
    plans = [own, *_variants(own), *_others(decision)]
    effective = []
    for lever in LEVERS:
        if lever.is_applied and not is_of_engines(facts.stack):
            continue
        changed = lever.changed(facts)
        if changed is None:
            continue
        weighed = list(_weighed(lever, changed, plans, costs, decision))
        if not weighed or weighed[0].plan != _set(own, lever.settings):
            continue
        best = min(
            (each for each in weighed if each.fits),
            key=lambda each: each.estimate.step_s,
            default=None,
        )
        taken = weighed[0]
        if _is_equal(taken.estimate, decision.estimate):
            continue
        effective.append(
            Gain(
                name=lever.name,
                says=lever.says,
                settings=" ".join(f"{key}={_shown(value)}" for key, value in lever.settings),
                code=lever.code,
                is_at_best=lever.is_at_best,
                keeps_training=lever.keeps_training,
                plan=taken.plan,
                estimate=taken.estimate,
                fits=taken.fits,
                best=best.plan if best else None,
                best_estimate=best.estimate if best else None,
            )
        )
    return tuple(effective)


def _is_equal(one: Estimate, other: Estimate) -> bool:
    """True if a report's digits would not show the difference."""
    step, memory = one.step_s / other.step_s - 1, one.peak_high_bytes / other.peak_high_bytes - 1
    return max(abs(step), abs(memory)) < _SHOWN


def _weighed(
    lever: _Lever, facts: Facts, plans: list[Plan], costs: CostModel, decision: Decision
) -> Iterator[Candidate]:
    """Estimate the plans with the lever's settings that are legal and new."""
    model = costs if facts is costs.facts else CostModel(facts)
    because = facts.workload.optimizer.indivisible
    seen: set[Plan] = set()
    for each in plans:
        plan = _set(each, lever.settings)
        if plan in seen or (lever.is_applied and plan == each) or not captured(plan, facts.model):
            continue
        seen.add(plan)
        if lever.is_applied and problems(plan, facts.model, facts.cluster, indivisible=because):
            continue
        yield from weigh([plan], model, decision.policy)


def _variants(plan: Plan) -> Iterator[Plan]:
    """Yield variants that use free memory: no recompute, twice the microbatch."""
    wider: dict[str, Any] = {}
    for name in ("accumulation", "microbatches"):
        count = getattr(plan, name)
        if plan.microbatch_size is not None and count % 2 == 0 and not wider:
            wider = {name: count // 2, "microbatch_size": 2 * plan.microbatch_size}
    plain: dict[str, Any] = {}
    if plan.recompute is not Recompute.NONE:
        plain = {"recompute": Recompute.NONE, "recompute_blocks": None}
    for change in (plain, wider, {**plain, **wider}):
        if change:
            yield plan.model_copy(update=change)


def _others(decision: Decision) -> list[Plan]:
    """Return the fastest alternatives, and those that nearly fit."""
    ordered = sorted(decision.alternatives, key=lambda each: each.step_s or each.peak_high_bytes)
    fitting = [each.plan for each in ordered if each.step_s is not None]
    missing = [each.plan for each in ordered if each.step_s is None]
    return [*fitting[:_OTHERS], *missing[:_OTHERS]]


def _set(plan: Plan, settings: tuple[tuple[str, Any], ...]) -> Plan:
    return plan.model_copy(update=dict(settings)) if settings else plan


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _with_stack(facts: Facts, name: str, **changes: object) -> Facts:
    """Return facts with a changed stack, under a name of its own."""
    stack = facts.stack.model_copy(update={"name": f"{facts.stack.name} + {name}", **changes})
    return facts.rebuilt(stack=stack)


def sentences(decision: Decision) -> Iterator[str]:
    """Yield a sentence for every lever with an effect."""
    for gain in gains(decision):
        yield sentence(gain, decision)


def sentence(gain: Gain, decision: Decision) -> str:
    """Describe the change in time and memory of the plan taken, and a plan that is then faster."""
    own, then = decision.estimate, gain.estimate
    how = f"`{gain.settings or gain.code}`"
    if not gain.settings and not gain.code:
        how = f"priced only: {_NOT_OURS}"
    words = (
        f"{gain.name} ({gain.says}): {_AT_BEST * gain.is_at_best}step"
        f" {_change(then.step_s, own.step_s)} to {format_seconds(then.step_s)}, memory"
        f" {_change(then.peak_high_bytes, own.peak_high_bytes)} to at most"
        f" {format_gib(then.peak_high_bytes)}; {how}"
    )
    if not gain.keeps_training:
        words += "; this changes the training"
    if not gain.fits:
        words += "; this plan does not fit then"
    if gain.best_estimate is not None and gain.best != gain.plan:
        limit = then.step_s * (1 - decision.policy.simplicity_margin)
        if gain.best_estimate.step_s < limit or not gain.fits:
            step = gain.best_estimate.step_s
            words += (
                f"; {gain.best} would then be the faster plan: {format_seconds(step)},"
                f" {_change(step, own.step_s)}"
            )
    return words


def hint(decision: Decision) -> Iterator[str]:
    """Yield the notable levers in one line."""
    own = decision.estimate
    applied: list[str] = []
    priced: list[str] = []
    every = gains(decision)
    for gain in every:
        if any(_is_part(other, gain) for other in every):
            continue
        step = gain.estimate.step_s / own.step_s - 1
        memory = gain.estimate.peak_high_bytes / own.peak_high_bytes - 1
        saves = memory <= -NOTABLE_MEMORY and step <= MOST_LONGER
        if not gain.fits or not (saves or step <= -NOTABLE_STEP):
            continue
        best = _AT_BEST * gain.is_at_best
        words = [f"{best}{_change(1 + step, 1)} step"] * (step <= -NOTABLE_STEP)
        words += [f"{_change(1 + memory, 1)} memory"] * saves
        if gain.settings or gain.code:
            applied.append(f"`{gain.settings or gain.code}` ({', '.join(words)})")
        else:
            priced.append(f"{gain.name} ({', '.join(words)})")
    lines = [", ".join(applied)] * bool(applied)
    lines += [f"priced only, {_NOT_OURS}: {', '.join(priced)}"] * bool(priced)
    if lines:
        more = "`advise explain levers plan.json` shows all"
        yield f"levers on this plan: {'; '.join(lines)}. {more}"


def _is_part(one: Gain, other: Gain) -> bool:
    """True if one of two levers takes some settings of the other, and makes steps as short."""
    less = set(one.settings.split()) < set(other.settings.split()) if one.settings else False
    return less and one.estimate.step_s <= other.estimate.step_s


def _change(now: float, before: float) -> str:
    share = now / before - 1
    return f"{'+' if share >= 0 else '-'}{format_percent(abs(share))}"


class Levers(ShownAsText):
    """Levers of a decision, as text."""

    def __init__(self, decision: Decision) -> None:
        self._decision = decision

    def __str__(self) -> str:
        lines = [f"{self._decision.plan}: {format_seconds(self._decision.estimate.step_s)}"]
        lines += [f"  {line}" for line in sentences(self._decision)]
        return "\n".join(lines)
