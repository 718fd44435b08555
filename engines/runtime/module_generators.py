"""Random generators that a model's modules and their code hold: alike on ranks that compute on the
same values.

One without a seed, or with the rank's, draws other numbers on every rank. The ranks of the tp axis
would scale, drop or choose each by its own, and add up what does not belong together.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from engines.runtime.mesh import Axis
from profiles.capture.fakes.code_states import generators_of
from profiles.errors import RankMismatchError


def share_generators(model: nn.Module, axis: Axis, device: torch.device) -> None:
    """Let the generators begin where those of the axis's first rank are. They stay alike, because
    its ranks, which all call it, run the same forwards.

    Raises:
        RankMismatchError: ranks hold other ones.
    """
    if axis.group is None:
        return
    states = generators_of([model])
    sent = [[(state.kind, state.part) for state in states]]
    dist.broadcast_object_list(sent, group=axis.group, group_src=0, device=device)
    (theirs,) = sent
    differs = torch.tensor(
        float([kind for kind, _ in theirs] != [state.kind for state in states]), device=device
    )
    dist.all_reduce(differs, group=axis.group)
    if differs:
        raise RankMismatchError(
            f"modules of this rank hold {len(states)} random generators, those of the first rank"
            f" of its tp axis {len(theirs)}, or others",
            hints=["build the model alike on all ranks"],
        )
    for state, (_, part) in zip(states, theirs, strict=True):
        state.put(part)
