"""Main memory that loading a model takes, before its first step."""

from __future__ import annotations

from enum import StrEnum

from profiles.model.profile import ModelProfile, UnitProfile
from profiles.record import Record


class Loading(StrEnum):
    """Ways in which the ranks of a node load their parameters."""

    WHOLE = "whole"  # every rank builds the whole model in main memory
    # As in torchtitan (torchtitan/train.py): parameters are on the meta device until they are
    # sharded (`engines.state.materialise`); then one tensor at a time is whole.
    SHARDS = "shards"  # built deferred: every rank makes its shards, in main memory
    DEVICE = "device"  # built deferred: every rank makes its shards, on its device


class LoadMemory(Record):
    """Bytes of main memory at the fullest moment of loading."""

    per_rank_bytes: float
    per_node_bytes: float


def load_memory(
    model: ModelProfile,
    way: Loading = Loading.WHOLE,
    *,
    ranks_per_node: int,
    shards: int = 1,
) -> LoadMemory:
    """Return the host memory that `ranks_per_node` ranks allocate while they load.

    Args:
        shards: parts into which parameters are divided, by ranks of all axes; buffers are whole
            everywhere.

    >>> from profiles.model.profile import ModelProfile, UnitProfile
    >>> unit = UnitProfile(name="a", kind="Linear", parameter_bytes=80, costs={})
    >>> model = ModelProfile(name="m", units=(unit,), dtype="float32", samples=1)
    >>> [load_memory(model, w, ranks_per_node=4, shards=8).per_node_bytes for w in Loading]
    [320.0, 360.0, 320.0]
    """
    whole = float(model.parameter_bytes)
    largest = max(map(_largest_tensor, model.units), default=0)
    per_rank = {
        Loading.WHOLE: whole,
        Loading.SHARDS: whole / shards + largest,
        Loading.DEVICE: largest,
    }[way] + model.buffer_bytes
    return LoadMemory(per_rank_bytes=per_rank, per_node_bytes=per_rank * ranks_per_node)


def _largest_tensor(unit: UnitProfile) -> int:
    """Of the trainable ones; a unit whose shapes are not known is taken as one tensor."""
    return max((shape.nbytes for shape in unit.shapes), default=unit.parameter_bytes)
