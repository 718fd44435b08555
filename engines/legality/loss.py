"""Rules of the loss that is computed a chunk of the tokens at a time. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from engines.legality.problem import Problem
from engines.plan import Plan
from engines.tensor.styles import matches
from profiles.machine.cluster import ClusterProfile
from profiles.model.layers import LayerKind
from profiles.model.profile import ModelProfile
from profiles.workload.losses import head_of


def chunked_loss(plan: Plan, model: ModelProfile, cluster: ClusterProfile) -> Iterator[Problem]:
    """Chunks need a linear head right before the loss, split over its vocabulary if at all."""
    if plan.loss_chunks == 1:
        return
    asked, head = f"loss_chunks={plan.loss_chunks}", head_of(model.units)
    if head is None:
        yield Problem(
            rule="chunks-without-head",
            what=f"{asked} computes the loss together with the layer that makes its logits:"
            f" {model.name} has none right before its loss",
            hint="leave loss_chunks out",
        )
        return
    if head.layer.kind is not LayerKind.LINEAR:
        yield Problem(
            rule="chunks-of-head",
            what=f"{asked} computes the product of an nn.Linear, `{head.name}` is"
            f" {head.layer.kind}",
            hint="leave loss_chunks out",
        )
    if model.logits_read_by:
        yield Problem(
            rule="chunks-of-read-logits",
            what=f"{asked} never makes the whole logits of `{head.name}`, which"
            f" `{model.logits_read_by}` reads",
            hint="compute the loss by F.cross_entropy over (tokens, vocabulary), or leave"
            " loss_chunks out",
        )
    if model.devices:
        yield Problem(
            rule="chunks-by-hand",
            what=f"{asked} needs head and loss on one device, parts of {model.name} are on several",
            hint="leave loss_chunks out",
        )
    styles = [text for pattern, text in plan.tensor_styles if matches(pattern, head.name)]
    if plan.tp > 1 and any(style != "vocab" for style in styles):
        yield Problem(
            rule="chunks-of-gathered-logits",
            what=f"{asked} leaves the logits of `{head.name}` unmade, its tensor style"
            f" `{styles[0]}` puts them together",
            hint="leave loss_chunks out, or give the head the style `vocab`",
        )
