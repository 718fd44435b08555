"""Lower bounds of memory for stacks that keep model states of their own.

What `advisor.cost.states` says a rank holds between steps, beside the activations that
`advisor.cost.memory` and `stage_memory` count when a backward begins.
"""

from __future__ import annotations

import numpy as np

from advisor.cost.memory import ALLOCATOR_SLACK, UNITS_WHEN_AHEAD
from advisor.cost.offload import is_elsewhere
from advisor.cost.states import zero_level_of
from advisor.search.columns import Columns, Floats
from advisor.search.space import KINDS
from advisor.search.staged import fullest_of_blocks
from engines.plan import DataParallel
from profiles.optimizer_laws import FP32_BYTES
from profiles.stack import Stack, States

_LEVELS = np.array([zero_level_of(kind) for kind in KINDS])
_THREADS = KINDS.index(DataParallel.THREADS)


def state_shares(
    states: States,
    kind: DataParallel,
    degree: float,
    *,
    has_weights: bool = True,
    has_optimizer: bool = True,
) -> float:
    """Bytes on a rank of every byte of fp32 parameters, beside moments that the optimizer says.

    Args:
        degree: over how many ranks states are sharded.
        has_weights, has_optimizer: whether these are on the device.
    """
    level = zero_level_of(kind)
    of_optimizer = states.master + (states.moments or 0.0)
    held = states.gradient / (degree if level >= 2 else 1)
    held += has_weights * states.weight / (degree if level >= 3 else 1)
    held += has_optimizer * of_optimizer / (degree if level >= 1 else 1)
    return held / FP32_BYTES


def message_bytes(stack: Stack) -> float:
    """Buffers for gradients on their way, of a stack with states of its own."""
    return (stack.bucket_bytes or 0.0) if stack.states is not None else 0.0


def own_whole_peak_bytes(columns: Columns) -> Floats:
    """The upper end of the fullest backward that begins, of a model in one piece."""
    space, stack = columns.space, columns.costs.stack
    is_sharded = _LEVELS[space.kind] == 3
    held = _of_parameters(columns) * columns.of(lambda g: g.loads.parameter_bytes)
    held = held + _moments_bytes(columns)
    made = not stack.accumulates_in_product
    working = np.where(
        is_sharded,
        columns.of(lambda g: g.fullest_own_bytes(makes=made, gathers=True)),
        columns.of(lambda g: g.fullest_own_bytes(makes=made, gathers=False)),
    )
    if space.offload.activations and _is_elsewhere(columns):
        working = 0.0 * working  # as `whole_peak_bytes` has it
    ahead = UNITS_WHEN_AHEAD * is_sharded * columns.of(lambda g: g.largest_copy_bytes)
    local = space.microbatch_size * space.forwards / space.cp
    found = _upper_end(columns, held + working + ahead, local)
    # Threads keep the states of torch whatever else the stack does.
    return np.where(space.kind == _THREADS, 0.0, found)


def own_staged_peak_bytes(columns: Columns) -> Floats:
    """The upper end of a backward's beginning on the fullest rank of a pipeline: `staged` says how
    blocks are shared out among ranks."""
    space, pp = columns.space, columns.space.pp
    each, moments = _of_parameters(columns), _moments_bytes(columns)
    root = columns.of(lambda g: g.loads.root_parameter_bytes * g.loads.compute_share)
    of_model = each * columns.of(lambda g: g.loads.parameter_bytes) + moments
    of_model = of_model + root * (_LEVELS[space.kind] == 3)
    of_block = each * columns.of(lambda g: g.block_bytes[0])
    is_elementwise = columns.costs.facts.workload.optimizer.is_elementwise
    of_block = of_block + moments * columns.of(lambda g: g.block_part) * is_elementwise
    kept = columns.of(lambda g: g.block_kept_bytes)
    blocks = columns.of(lambda g: g.blocks)
    held = np.maximum(of_model / pp, fullest_of_blocks(columns, blocks, of_block, kept))
    return _upper_end(columns, held, (space.microbatch_size * space.forwards).astype(np.float64))


def _upper_end(columns: Columns, held: Floats, local: Floats) -> Floats:
    """With what all ranks hold alike; `local` samples are a rank's part of the batch."""
    facts = columns.costs.facts
    batch = facts.model.batch_bytes
    held = held + batch.fixed + batch.per_sample * local + facts.model.buffer_bytes
    held = held + message_bytes(columns.costs.stack)
    context = facts.cluster.device.context_bytes.high
    return np.asarray(held * (1 + ALLOCATOR_SLACK) + context)


def _of_parameters(columns: Columns) -> Floats:
    """`state_shares` of every row."""
    states = columns.costs.stack.states
    assert states is not None
    here = {"has_weights": _has_weights(columns), "has_optimizer": _has_optimizer(columns)}
    return columns.each(
        [columns.space.kind, columns.shards],
        lambda kind, degree: state_shares(states, KINDS[kind], degree, **here),
    )


def _moments_bytes(columns: Columns) -> Floats:
    """What the optimizer says that it keeps, where the stack does not say it."""
    states = columns.costs.stack.states
    assert states is not None
    return columns.states_bytes() * (_has_optimizer(columns) and states.moments is None)


def _has_weights(columns: Columns) -> bool:
    return not (columns.space.offload.states and _is_elsewhere(columns))


def _has_optimizer(columns: Columns) -> bool:
    leaves = columns.space.offload.optimizer and _is_elsewhere(columns)
    return _has_weights(columns) and not leaves


def _is_elsewhere(columns: Columns) -> bool:
    return is_elsewhere(columns.costs.facts.cluster.device, to_disk=columns.space.is_to_disk)
