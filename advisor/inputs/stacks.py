"""Software stacks by name: those that our engines run, and all presets in words."""

from __future__ import annotations

from collections.abc import Iterator

from advisor.inputs.wrapped import ShownAsText
from engines.plan import PartialPlan
from engines.tensor.styles import by_pattern
from profiles.errors import InputError, PlanError, a_type
from profiles.machine.cluster import Device
from profiles.workload.stack import COMPILED, TORCH, Loss, Selective, Stack, stack_named, stacks
from profiles.workload.stack import compiled as compiled

OF_ENGINES = (TORCH.name, COMPILED)
"""Stacks that `engines` run."""
Styles = tuple[tuple[str, str], ...]


def stack_of(wanted: Stack | str | None) -> Stack:
    """Resolve a stack or a preset's name; stock torch for None.

    Raises:
        UnknownNameError: there is no such preset; near misses are named.
        InputError: it is something else.
    """
    if wanted is None or isinstance(wanted, Stack):
        return wanted or TORCH
    if isinstance(wanted, str):
        return stack_named(wanted)
    raise InputError(
        f"stack is {a_type(wanted)}",
        hints=["give a name (`advise explain stacks`), or a Stack"],
    )


def is_preset(stack: Stack) -> bool:
    """Return True if the stack equals its preset, up to the optimizer's moments."""
    known = stacks().get(stack.name)
    if known is not None and known.states is not None and known.states.moments is None:
        known = known.model_copy(update={"states": stack.states})
    return known == stack


def is_of_engines(stack: Stack) -> bool:
    """Return True if our engines can run it: an unchanged preset of theirs."""
    return stack.name in OF_ENGINES and stack == stack_named(stack.name)


def require_of_engines(stack: Stack, *, where: str = "stack") -> None:
    """
    Raises:
        InputError: other software runs this stack.
    """
    if not is_of_engines(stack):
        known = " and ".join(f"`{name}`" for name in OF_ENGINES)
        raise InputError(
            f"our engines run the stacks {known}, `{stack.name}` is other software",
            where=where,
            hints=[
                f'leave `stack` out, or take stack="{COMPILED}"',
                f'`advise(..., stack="{stack.name}")` predicts what it would do',
            ],
        )


def styles_under(stack: Stack, styles: Styles) -> Styles:
    """Apply sequence parallelism between blocks to the styles of split layers, if the stack uses it
    (arXiv:2205.05198)."""
    if not stack.sequence_parallel:
        return styles
    columns = [path for path, style in styles if style.startswith("column") and "*" in path]
    blocks = dict.fromkeys(f"{path.partition('*')[0]}*" for path in columns)
    by_tokens = tuple((block, "sequence") for block in blocks)
    return by_pattern((*styles, *by_tokens, *((path, "joined") for path in columns)))


def convolves_in_tf32(stack: Stack, device: Device) -> bool:
    """Return True if convolutions in fp32 run on the device's units for TF32."""
    return stack.tf32_convolutions and device.kind != "cpu" and device.has_tf32


def with_stack(partial: PartialPlan, stack: Stack) -> PartialPlan:
    """Add the settings that the stack requires of our engines.

    Raises:
        PlanError: `partial` says otherwise.
    """
    if not is_of_engines(stack) or not stack.compiled:
        return partial
    if partial.compile is False:
        raise PlanError(
            f"compile=false is not the stack `{stack.name}`, whose blocks are compiled",
            where="plan: compile=false",
            hints=["leave `compile=false` out, or the stack"],
        )
    return partial.fixing(compile=True)


def changes(stack: Stack) -> Iterator[str]:
    """Describe every difference between a stack and stock torch under our engines."""
    if stack.attention is not None:
        yield f"attention {stack.attention}"
    if stack.compiled:
        yield "compiled blocks"
    if stack.fused:
        yield f"one kernel each for {', '.join(stack.fused)}"
    if stack.loss is not Loss.MATERIALISED:
        yield f"loss {stack.loss}"
    if stack.states is not None:
        states = stack.states
        moments = "" if states.moments is None else f", moments {states.moments:g}"
        yield (
            f"weight {states.weight:g}, gradient {states.gradient:g}, master {states.master:g}"
            f"{moments} bytes a parameter"
        )
    if stack.product_dtype is not None:
        yield f"products in {stack.product_dtype}"
    if stack.reduce_bytes is not None:
        yield f"gradients sent in {stack.reduce_bytes:g} bytes"
    if stack.bucket_bytes is not None:
        yield f"buckets of {stack.bucket_bytes / 1e6:g} MB"
    if stack.gather_bytes is not None:
        yield f"weights gathered {stack.gather_bytes / 1e6:g} MB at a time"
    flags = {
        "pipeline's buffers keep outputs": stack.holds_outputs,
        "fused optimizer": stack.fused_optimizer,
        "CUDA graphs": stack.cuda_graphs > 0,
        "waits for every kernel": stack.blocking_launches,
        "gradients sent after the backward": not stack.overlap_gradients,
        "parameters waited for": not stack.overlap_parameters,
        "sequence parallel": stack.sequence_parallel,
        "inputs gathered twice": not stack.keeps_gathered,
        "gradients added up in products": stack.accumulates_in_product,
        "a token sent once to a node": stack.sends_tokens_once,
        "experts folded over the tp axis": stack.folds_experts,
        "experts split over the tp axis": stack.splits_experts,
        "recompute to the end of a forward": stack.recomputes_whole,
        "recompute of attention's scores alone": stack.selective is Selective.CORE,
    }
    yield from (words for words, is_set in flags.items() if is_set)
    if stack.host_work != 1:
        yield f"{stack.host_work:g} times the host work of a plain module"
    if stack.overlap_tensor:
        yield f"{stack.overlap_tensor:.0%} of tensor-parallel traffic beside products"


def summary(stack: Stack) -> str:
    """Name of a stack and its differences from stock torch.

    >>> summary(stack_named("torch-compiled"))
    'torch-compiled: compiled blocks'
    """
    words = "; ".join(changes(stack))
    return f"{stack.name}: {words}" if words else f"{stack.name}: as our engines run it"


class Presets(ShownAsText):
    """All presets, or one, with the source of each flag."""

    def __init__(self, name: str | None = None) -> None:
        self._shown = [stack_named(name)] if name is not None else list(stacks().values())

    def __str__(self) -> str:
        lines = []
        for stack in self._shown:
            runs = "" if is_of_engines(stack) else " (priced only: other software runs it)"
            lines.append(f"{summary(stack)}{runs}")
            lines += [f"  {flag}: {source}" for flag, source in stack.sources]
        return "\n".join(lines)
