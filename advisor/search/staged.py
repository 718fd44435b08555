"""Lower bounds for models in stages, wherever the borders are.

Stages are unequal, and nobody knows yet how. But p ranks share the model: the busiest has no less
than a p-th of it, and no less than the blocks that are left for it when all others have as few as
whole numbers allow.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from advisor.cost.buffers import KEEPS_PARAMETERS
from advisor.cost.memory import upper_end, workspace_bytes
from advisor.cost.round_shares import RoundShares, round_shares
from advisor.cost.stage_memory import READ_OUT_BUFFERS, message_bytes, read_out_bytes
from advisor.search.columns import Columns, unique
from advisor.search.space import KINDS, SCHEDULES, Floats, Integers
from engines.plan import Plan, Schedule

_NAIVE = SCHEDULES.index(Schedule.NAIVE)
_GPIPE = SCHEDULES.index(Schedule.GPIPE)
_ONE_F_ONE_B = SCHEDULES.index(Schedule.ONE_F_ONE_B)


def staged_step_s(columns: Columns) -> Floats:
    """Rounds of the pipeline, what is exchanged when they are over, and the update."""
    space, overlaps = columns.space, columns.costs.overlaps
    pp, is_naive = space.pp, space.schedule == _NAIVE
    in_round = np.where(is_naive, 1, space.microbatches)
    rounds = np.where(is_naive, space.forwards, space.accumulation)
    gather, root = columns.gather_s()
    every = columns.gathers * columns.is_sharded
    there = columns.of(lambda g: g.forward_s + g.exchanged_s[0])
    back = columns.of(lambda g: g.busy_s - g.forward_s + g.exchanged_s[1])
    late = (1 - every) * (root + np.maximum(0.0, gather - there if overlaps else gather))
    there = _beside(there, every * gather, overlaps) + every * root
    back = _beside(back, every * gather, overlaps)

    one_round = _round_s(columns, there, back, in_round)
    reduce, root_reduce = columns.reduce_s()
    between, root_between = columns.replicate_s()
    meeting = columns.reduces * (reduce + root_reduce)
    last = reduce + root_reduce + between + root_between
    if columns.costs.stack.states is not None:
        late = 0.0 * late  # all ranks gather at once, beside computing
    if columns.costs.stack.states is not None and columns.costs.stack.overlap_gradients:
        # A last backward may hide all but what replicas of shards exchange after it.
        meeting, last = 0.0 * meeting, (between + root_between) * columns.is_sharded
    # A rank that is done early may exchange early; on average they work a p-th of everything.
    working = in_round * (there + back) / pp
    further = np.maximum(one_round, working + meeting / pp)
    wall = late + (rounds - 1) * further + np.maximum(one_round, working + last / pp)
    return np.asarray(wall + columns.optimizer_s() / pp)


def _beside(computing: Floats, sent: Floats, overlaps: bool) -> Floats:
    return np.maximum(computing, sent) if overlaps else computing + sent


def _round_s(columns: Columns, there: Floats, back: Floats, microbatches: Integers) -> Floats:
    """One round: see the functions below for each schedule."""
    space = columns.space
    pp, schedule = space.pp, space.schedule
    least = columns.send_s(lambda g: g.least_sent_bytes)
    most = columns.send_s(lambda g: g.most_sent_bytes)
    through = there + back
    sends = 2 * (pp - 1) * least
    blocks = -(-columns.of(lambda g: g.blocks) // pp)
    forward = np.maximum(there / pp, blocks * columns.of(lambda g: g.block_s[0]))
    backward = np.maximum(back / pp, blocks * columns.of(lambda g: g.block_s[1]))
    slowest = np.maximum(through / pp, blocks * columns.of(lambda g: sum(g.block_s)))

    in_turn = through + sends
    # All forwards pass the slowest stage one after the other, and so do all backwards.
    gpipe = through + sends + (microbatches - 1) * (forward + backward)
    busy = microbatches * slowest
    share = columns.of(lambda g: g.forward_share)
    plain = columns.gathers * columns.is_sharded == 0
    both = most + least
    sent = np.divide(most, both, out=np.full(len(most), 0.5), where=both > 0)
    alternating = busy.copy()
    rows = np.flatnonzero(plain & (schedule == _ONE_F_ONE_B))
    for parted, forwards in ((through, share), (through + sends, np.maximum(share, sent))):
        found = _one_f_one_b_s(parted[rows], forwards[rows], pp[rows], microbatches[rows])
        alternating[rows] = np.maximum(alternating[rows], found)
    return np.select(
        [schedule == _NAIVE, schedule == _GPIPE, schedule == _ONE_F_ONE_B],
        [in_turn, gpipe, alternating],
        default=busy,
    )


def _one_f_one_b_s(through: Floats, share: Floats, pp: Integers, microbatches: Integers) -> Floats:
    """1F1B takes at least this long, however `through` is parted among the stages.

    Stage s works t_s a microbatch, at most `share` of it forward. Before its first forward the
    microbatch passes all stages before s, and after its last backward the gradient does. Between
    its first forward and first backward it passes all stages behind s, in which time s does p - s -
    1 further forwards at most. So the round takes W >= t + (m - 1 - (p - 1 - s) share) t_s for
    every s, t being the sum of all t_s; with that, t = sum t_s <= (W - t) sum 1 / (...).
    """
    shares, which = np.unique(share, return_inverse=True)
    keys, back = unique(np.stack([pp, microbatches, which]).astype(np.int64))
    pp, microbatches, share = keys[0], keys[1], shares[keys[2]]
    total = np.zeros(len(pp))
    for ahead in range(int(pp.max(initial=0))):
        others = microbatches - 1 - ahead * share
        room = np.divide(1.0, others, out=np.full(len(pp), np.inf), where=others > 0)
        total += np.where(ahead < pp, room, 0.0)
    return np.asarray(through + through / total[back])


def staged_peak_bytes(columns: Columns) -> Floats:
    """The upper end of a backward's beginning on the fullest rank."""
    space, facts, stack = columns.space, columns.costs.facts, columns.costs.stack
    device, pp = facts.cluster.device, space.pp
    each = _shares(columns)
    states = columns.states_bytes() * each.optimizer
    of_model = columns.of(lambda g: g.loads.parameter_bytes) * each.of_parameters + states
    of_model += columns.of(lambda g: g.loads.gradient_bytes) * each.gradients
    of_model += columns.of(lambda g: g.loads.root_parameter_bytes) * each.root
    if stack.holds_outputs:
        buffers = np.minimum(READ_OUT_BUFFERS, space.microbatches)
        buffers = buffers * (space.schedule == _ONE_F_ONE_B)
        of_model += buffers * columns.of(lambda g: read_out_bytes(g.loads))

    blocks, is_even = columns.of(lambda g: g.blocks), facts.workload.optimizer.is_elementwise
    of_block = columns.of(lambda g: g.block_bytes[0]) * each.of_parameters
    of_block += columns.of(lambda g: g.block_bytes[1]) * each.gradients
    of_block += states * columns.of(lambda g: g.block_part) * is_even
    kept = columns.of(lambda g: g.block_kept_bytes)
    held = np.maximum(of_model / pp, _fullest_of_blocks(columns, blocks, of_block, kept))

    in_round = np.where(space.schedule == _NAIVE, 1, space.microbatches)
    messages = np.full(len(space), message_bytes(stack) + workspace_bytes(device, stack))
    if stack.states is None:
        borders = in_round * (2 * space.per_rank - 1)
        messages += borders * columns.of(lambda g: g.least_held_bytes)
    batch = facts.model.batch_bytes
    local = batch.fixed + batch.per_sample * space.microbatch_size * space.forwards
    return upper_end(held + messages + local + facts.model.buffer_bytes, device)


def _shares(columns: Columns) -> _Shares:
    """`round_shares` of every row."""
    space, costs = columns.space, columns.costs
    several = (space.accumulation > 1).astype(np.int64)
    share = columns.of(lambda g: g.loads.compute_share)
    device = costs.facts.cluster.device

    def of(kind: int, degree: int, again: int, halves: int) -> RoundShares:
        plan = Plan.model_construct(
            pp=2,
            data_parallel=KINDS[kind],
            dp_replicate=degree if KINDS[kind] in KEEPS_PARAMETERS else 1,
            dp_shard=1 if KINDS[kind] in KEEPS_PARAMETERS else degree,
            accumulation=1 + again,
            offload=space.offload,
            offload_to=space.offload_to,
        )
        return round_shares(plan, device, compute_share=halves / 2, stack=costs.stack)

    keys = [space.kind, columns.shards, several, (2 * share).astype(np.int64)]
    names = ("of_parameters", "gradients", "optimizer", "root")
    return _Shares(*(columns.each(keys, lambda *key, n=n: getattr(of(*key), n)) for n in names))


class _Shares(NamedTuple):
    """Columns of `RoundShares`."""

    of_parameters: Floats
    gradients: Floats
    optimizer: Floats
    root: Floats


def _fullest_of_blocks(columns: Columns, blocks: Floats, held: Floats, kept: Floats) -> Floats:
    """Of blocks alone, each `held` and `kept` for every microbatch in flight.

    All ranks keep one microbatch (naive), all of a round (GPipe), or 1, 2, ..., p of them at least
    (all others). A rank that keeps k has room for U / (held + k kept) blocks, and together they
    must have room for all: U >= blocks / sum 1 / (held + k kept). The sum is at most its first
    term and an integral.
    """
    space = columns.space
    pp, schedule = space.pp, space.schedule
    most = -(-blocks // pp)
    equal = most * (held + kept * np.where(schedule == _NAIVE, 1, space.microbatches))
    one = np.maximum(held + kept, 1.0)  # a byte, where nothing is held
    grown = np.log((held + pp * kept + 1.0) / one)
    room = 1 / one + np.divide(grown, kept, out=(pp - 1) / one, where=kept > 0)
    is_equal = (schedule == _NAIVE) | (schedule == _GPIPE)
    return np.where(is_equal, equal, np.where(blocks > 0, blocks / room, 0.0))
