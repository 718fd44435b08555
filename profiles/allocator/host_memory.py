"""Main memory that loading a model takes, before its first step."""

from __future__ import annotations

from enum import StrEnum

from profiles.model.profile import ModelProfile, UnitProfile
from profiles.record import Record


class Loading(StrEnum):
    """Ways in which the ranks of a node load their parameters."""

    WHOLE = "whole"  # every rank builds the whole model in main memory; the engines want that
    FILE = "file"  # every rank builds it, and reads a checkpoint file beside it
    SHARDS = "shards"  # built on the meta device, then every rank is sent its shards


_WHERE_FROM = {
    Loading.WHOLE: "parameters and buffers as built, once a rank",
    # docs.pytorch.org, tutorial "Tips for loading an nn.Module from a checkpoint": the model and
    # the loaded state dict are there at once, unless the file is mapped and its tensors assigned.
    Loading.FILE: "the model, and the state dict that `torch.load` makes",
    # torchtitan (torchtitan/train.py) and accelerate (`cpu_ram_efficient_loading`): parameters are
    # on the meta device until sharded; then one tensor at a time is whole.
    Loading.SHARDS: "the rank's shard and the largest tensor whole",
}


class LoadMemory(Record):
    """Bytes of main memory at the fullest moment of loading, and what they are."""

    per_rank_bytes: float
    per_node_bytes: float
    what: str


def load_memory(
    model: ModelProfile,
    way: Loading = Loading.WHOLE,
    *,
    ranks_per_node: int,
    shards: int = 1,
) -> LoadMemory:
    """Return the host memory that `ranks_per_node` ranks allocate while they load.

    Args:
        shards: ranks over which parameters are divided; buffers are whole everywhere.

    >>> from profiles.model.profile import ModelProfile, UnitProfile
    >>> unit = UnitProfile(name="a", kind="Linear", parameter_bytes=80, costs={})
    >>> model = ModelProfile(name="m", units=(unit,), dtype="float32", samples=1)
    >>> [load_memory(model, w, ranks_per_node=4, shards=8).per_node_bytes for w in Loading]
    [320.0, 640.0, 360.0]
    """
    whole = float(model.parameter_bytes)
    per_rank = {
        Loading.WHOLE: whole,
        Loading.FILE: 2 * whole,
        Loading.SHARDS: whole / shards + max(map(_largest_tensor, model.units), default=0),
    }[way] + model.buffer_bytes
    return LoadMemory(
        per_rank_bytes=per_rank, per_node_bytes=per_rank * ranks_per_node, what=_WHERE_FROM[way]
    )


def _largest_tensor(unit: UnitProfile) -> int:
    """Of the trainable ones; a unit whose shapes are not known is taken as one tensor."""
    return max((shape.nbytes for shape in unit.shapes), default=unit.parameter_bytes)
