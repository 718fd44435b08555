"""Levers on software and training: what each would do to the plan that was taken, in numbers.

Each is a function from facts to changed facts: of the stack, the optimizer or the model. A few
plans are estimated under it: the one that was taken, the same without recompute or with larger
microbatches, and those it was set against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from advisor.cost import CostModel, Estimate
from advisor.inputs.facts import Facts, captured
from advisor.inputs.stacks import is_of_engines
from advisor.search.ranking import Candidate, weigh
from engines.legality import problems
from engines.plan import Offload, Plan, Recompute
from profiles.record import Record
from profiles.units import format_gib, format_percent, format_seconds
from profiles.workload.lora import takes_lora, with_lora
from profiles.workload.losses import has_loss_after_head
from profiles.workload.stack import Loss, Selective, States

if TYPE_CHECKING:
    from advisor.decide.decision import Decision
    from advisor.inputs.wrapped import Wrapped

RANK = 16
_SHOWN = 0.0005
FP8 = "float8_e4m3fn"
# Beside the plan that was taken, so many of those it was set against.
_OTHERS = 2
# What a report points out: this much less of a step; or of what a device holds, where a step takes
# no more than this longer.
NOTABLE_STEP, NOTABLE_MEMORY, MOST_LONGER = 0.05, 0.15, 0.10


class Gain(Record):
    """What a lever would do.

    Attributes:
        name: of the lever.
        says: what is done, and by what software.
        settings: of a plan that asks our engines for it; empty where it is priced only.
        keeps_training: whether losses are what they were, but for rounding.
        plan, estimate: the plan that was taken, under the lever.
        fits: whether it does.
        best, best_estimate: the fastest that fits of the few plans that were estimated.
    """

    name: str
    says: str
    settings: str = ""
    keeps_training: bool
    plan: Plan
    estimate: Estimate
    fits: bool
    best: Plan | None = None
    best_estimate: Estimate | None = None


@dataclass(frozen=True, slots=True)
class _Lever:
    """Facts that are None: there is nothing of the kind to change."""

    name: str
    says: str
    changed: Callable[[Facts], Facts | None]
    settings: tuple[tuple[str, Any], ...] = ()
    keeps_training: bool = True

    @property
    def is_applied(self) -> bool:
        """Whether our engines do it."""
        return bool(self.settings)


def chunked_loss(facts: Facts) -> Facts | None:
    """Head and loss together, a part of the tokens at a time."""
    if facts.tokens_per_sample is None or not has_loss_after_head(facts.model.units):
        return None
    if facts.stack.loss in (Loss.CHUNKED, Loss.HEAD):
        return None
    return _with_stack(facts, "chunked loss", loss=Loss.CHUNKED)


def fp8_products(facts: Facts) -> Facts | None:
    """Products with weights in 8 bits, and casts before them, where the device has units for
    them."""
    if FP8 not in facts.cluster.device.flop_per_s or facts.stack.product_dtype == FP8:
        return None
    return _with_stack(facts, "fp8 products", product_dtype=FP8)


def cuda_graphs(facts: Facts) -> Facts | None:
    """Launches of a step replayed as one."""
    if facts.cluster.device.kind == "cpu" or facts.stack.cuda_graphs == 1.0:
        return None
    return _with_stack(facts, "CUDA graphs", cuda_graphs=1.0)


def core_recompute(facts: Facts) -> Facts | None:
    """Selective recompute that repeats scores and softmax alone."""
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
    """The optimizer's moments in 16 bits: half the bytes, half of what a step reads and writes of
    them."""
    optimizer, states = facts.workload.optimizer, facts.stack.states
    each = optimizer.state_bytes_per_element
    if facts.model.dtype != "float32" or not optimizer.is_elementwise or not each:
        return None
    halved = {
        "name": f"{optimizer.name}, moments in bf16",
        "state_bytes_per_element": each / 2,
        # Read and written once at least.
        "moved_bytes_per_element": optimizer.moved_bytes_per_element - each,
    }
    workload = facts.workload.model_copy(update={"optimizer": optimizer.model_copy(update=halved)})
    changed = facts.model_copy(update={"workload": workload})
    if states is not None and states.moments is not None:
        moments = States(**{**states.model_dump(), "moments": states.moments / 2})
        return _with_stack(changed, "bf16 moments", states=moments)
    return changed


def lora(facts: Facts, *, is_quantised: bool = False) -> Facts | None:
    """Adapters that learn beside a frozen base in bf16, or in 4 bits."""
    is_bf16 = facts.precision.dtype == "bfloat16"
    if not is_bf16 or facts.stack.states is not None or not takes_lora(facts.model):
        return None
    model = with_lora(facts.model, rank=RANK, is_quantised=is_quantised)
    return facts.model_copy(update={"model": model})


def qlora(facts: Facts) -> Facts | None:
    """The same of a base in 4 bits."""
    return lora(facts, is_quantised=True)


def _as_they_are(facts: Facts) -> Facts | None:
    return facts


LEVERS = (
    _Lever("compile", "torch.compile of every block", _as_they_are, (("compile", True),)),
    _Lever(
        "offload activations",
        "what blocks keep waits in main memory, in place of recompute",
        _as_they_are,
        (("offload", Offload.ACTIVATIONS), ("recompute", Recompute.NONE)),
    ),
    _Lever(
        "chunked loss",
        "logits and their loss an eighth of the tokens at a time (Liger-Kernel, torchtune)",
        chunked_loss,
    ),
    _Lever(
        "recompute of scores",
        "selective recompute of attention's scores alone (Megatron-LM)",
        core_recompute,
    ),
    _Lever("CUDA graphs", "launches replayed, not made anew", cuda_graphs),
    _Lever(
        "fp8 products",
        "products with weights in 8 bits (torchao, Transformer Engine)",
        fp8_products,
        keeps_training=False,
    ),
    _Lever("bf16 moments", "the optimizer's moments in bf16", bf16_moments, keeps_training=False),
    _Lever(
        "LoRA",
        f"adapters of rank {RANK} on every layer of the blocks, the base frozen in bf16",
        lora,
        keeps_training=False,
    ),
    _Lever("QLoRA", "the same, the base in 4 bits", qlora, keeps_training=False),
)


def gains(decision: Decision) -> tuple[Gain, ...]:
    """Every lever that changes something here, in a fixed order.

    One that changes nothing may be one whose kernels the profile does not know.
    """
    facts, own = decision.facts, decision.plan
    if not own.updates_in_step:
        return ()
    costs = CostModel(facts)
    plans = [own, *_variants(own), *_others(decision)]
    found = []
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
        if _is_nothing(taken.estimate, decision.estimate):
            continue
        found.append(
            Gain(
                name=lever.name,
                says=lever.says,
                settings=" ".join(f"{key}={_shown(value)}" for key, value in lever.settings),
                keeps_training=lever.keeps_training,
                plan=taken.plan,
                estimate=taken.estimate,
                fits=taken.fits,
                best=best.plan if best else None,
                best_estimate=best.estimate if best else None,
            )
        )
    return tuple(found)


def _is_nothing(found: Estimate, own: Estimate) -> bool:
    """Whether a report's digits would not show it."""
    step, memory = found.step_s / own.step_s - 1, found.peak_high_bytes / own.peak_high_bytes - 1
    return max(abs(step), abs(memory)) < _SHOWN


def _weighed(
    lever: _Lever, facts: Facts, plans: list[Plan], costs: CostModel, decision: Decision
) -> Iterator[Candidate]:
    """The plans that are legal with the lever's settings, other than without them."""
    model = costs if facts is costs.facts else CostModel(facts)
    because = facts.workload.optimizer.whole_because
    seen: set[Plan] = set()
    for each in plans:
        plan = _set(each, lever.settings)
        if plan in seen or (lever.is_applied and plan == each) or not captured(plan, facts.model):
            continue
        seen.add(plan)
        if lever.is_applied and problems(plan, facts.model, facts.cluster, whole_because=because):
            continue
        yield from weigh([plan], model, decision.policy)


def _variants(plan: Plan) -> Iterator[Plan]:
    """What is tried first where memory is free: no recompute, twice the microbatch."""
    wider: dict[str, Any] = {}
    for name in ("accumulation", "microbatches"):
        count = getattr(plan, name)
        if plan.microbatch_size is not None and count % 2 == 0 and not wider:
            wider = {name: count // 2, "microbatch_size": 2 * plan.microbatch_size}
    kept = {"recompute": Recompute.NONE} if plan.recompute is not Recompute.NONE else {}
    for change in (kept, wider, {**kept, **wider}):
        if change:
            yield plan.model_copy(update=change)


def _others(decision: Decision) -> list[Plan]:
    """Of the plans that it was set against the fastest, and those that nearly fit."""
    ordered = sorted(decision.alternatives, key=lambda each: each.step_s or each.peak_high_bytes)
    fitting = [each.plan for each in ordered if each.step_s is not None]
    missing = [each.plan for each in ordered if each.step_s is None]
    return [*fitting[:_OTHERS], *missing[:_OTHERS]]


def _set(plan: Plan, settings: tuple[tuple[str, Any], ...]) -> Plan:
    return plan.model_copy(update=dict(settings)) if settings else plan


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _with_stack(facts: Facts, name: str, **changes: object) -> Facts:
    """Of a changed stack, which has a name of its own: costs are those of its kernels."""
    stack = facts.stack.model_copy(update={"name": f"{facts.stack.name} + {name}", **changes})
    return Facts(model=facts.model, cluster=facts.cluster, workload=facts.workload, stack=stack)


def sentences(decision: Decision) -> Iterator[str]:
    """One for every lever: the plan under it, and whether another one would then be faster."""
    for gain in gains(decision):
        yield sentence(gain, decision)


def sentence(gain: Gain, decision: Decision) -> str:
    """The change in time and memory of the plan that was taken."""
    own, found = decision.estimate, gain.estimate
    how = f"`{gain.settings}`" if gain.settings else "priced only: no engine of ours does it"
    words = (
        f"{gain.name} ({gain.says}): step {_change(found.step_s, own.step_s)} to"
        f" {format_seconds(found.step_s)}, memory"
        f" {_change(found.peak_high_bytes, own.peak_high_bytes)} to at most"
        f" {format_gib(found.peak_high_bytes)}; {how}"
    )
    if not gain.keeps_training:
        words += "; the training is another"
    if not gain.fits:
        words += "; this plan does not fit then"
    if gain.best_estimate is not None and gain.best != gain.plan:
        limit = found.step_s * (1 - decision.policy.simplicity_margin)
        if gain.best_estimate.step_s < limit or not gain.fits:
            step = gain.best_estimate.step_s
            words += (
                f"; {gain.best} would then be the faster plan: {format_seconds(step)},"
                f" {_change(step, own.step_s)}"
            )
    return words


def hint(decision: Decision) -> Iterator[str]:
    """What is worth knowing of all levers, in one line."""
    own = decision.estimate
    applied: list[str] = []
    priced: list[str] = []
    for gain in gains(decision):
        step = gain.estimate.step_s / own.step_s - 1
        memory = gain.estimate.peak_high_bytes / own.peak_high_bytes - 1
        saves = memory <= -NOTABLE_MEMORY and step <= MOST_LONGER
        if not gain.fits or not (saves or step <= -NOTABLE_STEP):
            continue
        words = [f"{_change(1 + step, 1)} step"] * (step <= -NOTABLE_STEP)
        words += [f"{_change(1 + memory, 1)} memory"] * saves
        said = f"{gain.name} ({', '.join(words)})"
        (applied if gain.settings else priced).append(
            said.replace(gain.name, f"`{gain.settings}`", 1) if gain.settings else said
        )
    lines = [", ".join(applied)] * bool(applied)
    lines += [f"priced only, no engine of ours does it: {', '.join(priced)}"] * bool(priced)
    if lines:
        more = "`advise explain levers plan.json` says more"
        yield f"levers on this plan: {'; '.join(lines)}. {more}"


def _change(now: float, before: float) -> str:
    share = now / before - 1
    return f"{'+' if share >= 0 else '-'}{format_percent(abs(share))}"


class Levers:
    """All levers of a decision, as text."""

    def __init__(self, decision: Decision) -> None:
        self._decision = decision

    def __str__(self) -> str:
        lines = [f"{self._decision.plan}: {format_seconds(self._decision.estimate.step_s)}"]
        lines += [f"  {line}" for line in sentences(self._decision)]
        return "\n".join(lines)

    def __rich__(self) -> Wrapped:
        from advisor.inputs.wrapped import Wrapped

        return Wrapped(str(self))
