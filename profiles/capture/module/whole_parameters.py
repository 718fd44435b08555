"""Parameters that stay whole on every rank where FSDP2 shards the others.

These cannot be cut: parameters without dimensions (CLIP's scale of logits) or elements (register
tokens of a DINOv3 that has none), those that the forward itself changes (writes to a gathered copy
are lost), those with hooks for their gradients (a gathered copy has none), those of TorchScript,
whose modules take no hooks, and trained ones of another dtype than most of their group, whose
gradients are one message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from profiles.model.profile import ModelProfile, ParameterShape
from profiles.torch_compat import has_gradient_hooks


def whole_parameters(model: nn.Module, profile: ModelProfile) -> set[nn.Parameter]:
    """Parameters of `model`, whose profile it is, that no rank has a shard of."""
    whole = {*_empty(model), *map(model.get_parameter, profile.flow.written), *_scripted(model)}
    whole |= {p for p in model.parameters() if has_gradient_hooks(p)}
    left = set(model.parameters()) - whole
    for unit in (*(unit.name for unit in profile.shard_units() if unit.name), ""):
        group = left & set(model.get_submodule(unit).parameters())
        left -= group
        whole |= _of_other_dtypes(group)
    return whole


def with_whole(
    profile: ModelProfile, whole: set[nn.Parameter], owned: Mapping[str, Sequence[nn.Parameter]]
) -> ModelProfile:
    """`profile` that says which parameters of each unit are among `whole`.

    Args:
        owned: parameters that count as a unit's.
    """
    if not whole:
        return profile
    units = []
    for unit in profile.units:
        own = [p for p in owned.get(unit.name, ()) if p in whole]
        update = {
            "whole_bytes": sum(p.nbytes for p in own),
            "whole_shapes": tuple(shapes_of(p for p in own if p.requires_grad)),
        }
        units.append(unit.model_copy(update=update) if own else unit)
    return profile.model_copy(update={"units": tuple(units)})


def shapes_of(parameters: Iterable[Tensor]) -> Iterator[ParameterShape]:
    """Shapes of these, equal ones together, ascending."""
    counts = Counter((tuple(p.shape), p.element_size()) for p in parameters)
    for (sizes, element_bytes), count in sorted(counts.items()):
        yield ParameterShape(sizes=sizes, element_bytes=element_bytes, count=count)


def _empty(model: nn.Module) -> set[nn.Parameter]:
    return {p for p in model.parameters() if not p.dim() or not p.numel()}


def _scripted(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            yield from module.parameters()


def _of_other_dtypes(group: Iterable[nn.Parameter]) -> set[nn.Parameter]:
    """Those of `group` that learn in another dtype than most of it. What is frozen is gathered with
    the rest, whatever its dtype."""
    learning = [p for p in group if p.requires_grad]
    elements: Counter[torch.dtype] = Counter()
    for parameter in learning:
        elements[parameter.dtype] += parameter.numel()
    # Of equal ones the same on every rank, whatever the order of a set.
    most = max(elements, key=lambda dtype: (elements[dtype], str(dtype)), default=None)
    return {p for p in learning if p.dtype is not most}
