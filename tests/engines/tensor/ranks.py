"""A split model beside the whole one, on every rank of a job."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from engines.tensor.collectives import GroupCollectives
from engines.tensor.proposal import propose_styles
from engines.tensor.split import split
from engines.tensor.split_proof import prove_split
from profiles.capture.batch.call import Batch, call_model, loss_of
from profiles.capture.capture import capture


@dataclass(frozen=True)
class Parity:
    """Largest differences, relative.

    `share` is this rank's share of the parameters, `by_tokens` the kinds of blocks split by tokens,
    `few_heads` the kinds of layers of which a rank computes one head.
    """

    loss: float
    gradient: float
    worst: str
    share: float
    by_tokens: int
    few_heads: int


def parity(name: str, *, by_tokens: bool = False) -> Parity:
    """An unmodified model of the zoo, split as proposed over all ranks, in eval mode."""
    from tests import zoo

    torch.manual_seed(0)
    build, sample = zoo.ARCHITECTURES[name]
    return split_parity(build(), sample, by_tokens=by_tokens)


def split_parity(model: nn.Module, sample: Batch, *, by_tokens: bool = False) -> Parity:
    """Loss and gradients of `model`, which returns its loss, against a whole copy of it."""
    model.eval()
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False  # type: ignore[union-attr]
    whole = copy.deepcopy(model)
    expected = loss_of(call_model(whole, sample, has_target=False), sample, None)
    expected.backward()
    profile = capture(model, sample, name="model")
    size = dist.get_world_size()
    proposal = propose_styles(model, sample, size=size, profile=profile, by_tokens=by_tokens)
    proof = prove_split(
        model, sample, proposal.styles, size=size, profile=profile, has_target=False
    )
    ranks = GroupCollectives(None)
    before = sum(p.numel() for p in model.parameters())
    cuts = split(model, proof.by_module, ranks)
    parameters = sum(p.numel() for p in model.parameters())
    loss = loss_of(call_model(model, sample, has_target=False), sample, None)
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    wanted = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    assert gradients.keys() == wanted.keys(), gradients.keys() ^ wanted.keys()
    floor = 1e-3 * max(g.abs().max().item() for g in wanted.values())
    errors = {}
    for path, gradient in gradients.items():
        if path in proof.partial:
            dist.all_reduce(gradient)
        if path in cuts:
            gradient = cuts[path].gather(gradient, group=None)
        scale = max(wanted[path].abs().max().item(), floor)
        errors[path] = (gradient - wanted[path]).abs().max().item() / scale
    worst = max(errors, key=lambda path: errors[path])
    return Parity(
        loss=abs(loss.item() - expected.item()) / abs(expected.item()),
        gradient=errors[worst],
        worst=worst,
        share=parameters / before,
        by_tokens=sum(style == "sequence" for _, style in proposal.styles),
        few_heads=sum(style.startswith("heads") for _, style in proposal.styles),
    )
