"""Rules of plans that need to know the model's code: it must not act on values of tensors.

Data parallelism runs the model's forward as it is, whatever path a batch takes. A pipeline is cut
from the one path that was followed; splits of layers and of sequences are proved on it.
"""

from __future__ import annotations

from collections.abc import Iterator

from engines.legality.problem import Problem
from engines.plan import Plan, Recompute
from engines.tensor.styles import matches
from profiles.machine.cluster import ClusterProfile
from profiles.model.flow import GLUE, LOSS
from profiles.model.profile import ModelProfile
from profiles.model.source import ATTRIBUTE, BACKWARD, RANDOM, CaptureSource, ValueRead

_HINT = "take branches and sizes from shapes, not from values; or replicate or shard it"


def values(plan: Plan, model: ModelProfile, cluster: ClusterProfile) -> Iterator[Problem]:
    """Stages, split layers and split sequences take the same path for every batch."""
    ways = {
        f"pp={plan.pp} cuts stages from one path of the forward": plan.pp > 1,
        f"tp={plan.tp} splits layers where it is proved on one path": plan.tp > 1,
        f"cp={plan.cp} splits sequences where it is proved on one path": plan.cp > 1,
    }
    if model.source is CaptureSource.PARAMETERS:
        reads = [str(read) for read in model.reads]
        because = f": `{reads[0]}` could not be followed" if reads else ""
        for way in (way for way, is_used in ways.items() if is_used):
            yield Problem(
                rule="values-unknown-path",
                what=f"{way}, and that of {model.name} is not known{because}",
                hint=_HINT,
            )
        return
    own = (RANDOM, ATTRIBUTE, BACKWARD)  # a unit may act on them, wherever it runs
    across = [r for r in model.reads if r.operation == BACKWARD and r.unit in (GLUE, LOSS)]
    acting = [read for read in model.reads if read.operation not in own or read.unit == GLUE]
    in_model = [read for read in acting if read.unit != LOSS] or across
    if plan.pp > 1 and in_model:
        yield _problem("values-in-pipeline", in_model[0], f"pp={plan.pp} cuts stages from one path")
    if plan.cp > 1 and acting:
        yield _problem(
            "values-in-context", acting[0], f"cp={plan.cp} gives a rank some of a row's tokens"
        )
    if plan.tp > 1:
        yield from _in_split_layers(plan, model)
        if across:
            what = f"tp={plan.tp} is proved unit by unit, and not for that"
            yield _problem("values-in-split-layers", across[0], what)
    drawn = [r for r in model.reads if r.operation in (RANDOM, ATTRIBUTE)]
    dropped = [read for read in drawn if read.unit != GLUE]
    if plan.recompute is not Recompute.NONE and dropped:
        yield _problem(
            "values-in-recompute",
            dropped[0],
            f"recompute={plan.recompute} runs blocks again, with other draws and counters",
        )


def _in_split_layers(plan: Plan, model: ModelProfile) -> Iterator[Problem]:
    """Units that act on values compute with whole layers."""
    for read in model.reads:
        unit = next((unit for unit in model.units if unit.name == read.unit), None)
        layers = [layer for cost in unit.costs.values() for layer in cost.layers] if unit else []
        paths = (f"{read.unit}.{layer.path}".strip(".") for layer in layers)
        for path in paths:
            if any(matches(pattern, path) for pattern, _ in plan.tensor_styles):
                yield _problem(
                    "values-in-split-layers",
                    read,
                    f"tp={plan.tp} would split `{path}`, in the same unit",
                )
                break
    if not plan.tensor_styles and model.reads:
        yield _problem(
            "values-in-split-layers", model.reads[0], f"tp={plan.tp} finds no other layers to split"
        )


def _problem(rule: str, read: ValueRead, what: str) -> Problem:
    if read.operation == BACKWARD:
        said, hint = "takes a gradient across units", "replicate or shard it"
    else:
        said, hint = "acts on values of tensors", _HINT
    return Problem(rule=rule, what=f"{read} {said}: {what}", hint=hint)
