"""Lower bounds with pipeline stages, for any borders.

Borders are not chosen yet, so stages are of unknown size. But p ranks share the model: the busiest
has at least 1/p of it, and at least ceil(blocks / p) blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from advisor.cost.memory.allocator import room_bytes, upper_end, workspace_bytes
from advisor.cost.memory.buffers import KEEPS_PARAMETERS
from advisor.cost.memory.round_shares import RoundShares, round_shares
from advisor.cost.stages.orders import FULL_AFTER, ONE_STAGE, SPLITS_BACKWARD
from advisor.cost.stages.shared_cores import speedup_alone
from advisor.cost.stages.stage_memory import READ_OUT_BUFFERS, message_bytes, read_out_bytes
from advisor.search.columns import ROUNDING, Columns, unique
from advisor.search.space import KINDS, SCHEDULES, Floats, Integers, Space, plan_with
from advisor.search.stage_segments import backward_bytes
from engines.plan import Schedule

_NAIVE = SCHEDULES.index(Schedule.NAIVE)
_GPIPE = SCHEDULES.index(Schedule.GPIPE)
_ONE_F_ONE_B = SCHEDULES.index(Schedule.ONE_F_ONE_B)
_ZERO_BUBBLE = SCHEDULES.index(Schedule.ZERO_BUBBLE)
_INTERLEAVED = SCHEDULES.index(Schedule.INTERLEAVED)
_ZBV = SCHEDULES.index(Schedule.ZBV)
_ONE_STAGE = [SCHEDULES.index(schedule) for schedule in ONE_STAGE]
# The first rank has the first stage, and most microbatches in flight; the last the last.
_IN_ORDER = [_ONE_F_ONE_B, _ZERO_BUBBLE, _INTERLEAVED]
# Of a forward in a stage's seconds; without one, stages begin at once.
_SMALLEST_SHARE = 0.01
_SPLITS = [SCHEDULES.index(schedule) for schedule in SPLITS_BACKWARD]


class StagedTime(NamedTuple):
    """Lower bounds of a step, and of what borders between stages do not change.

    Attributes:
        step_s, fitting_s: of any borders, and of those that fit.
        settling_s: of the average rank's reductions, after a round and after the last.
        besides_s: of late gathers and the update, which all ranks wait for.
    """

    step_s: Floats
    fitting_s: Floats
    settling_s: Floats
    besides_s: Floats


def staged_time(columns: Columns, usable_bytes: float) -> StagedTime:
    """Seconds of the pipeline's rounds, of reductions after each, and of the update."""
    space, overlaps = columns.space, columns.costs.overlaps
    pp, is_naive = space.pp, space.schedule == _NAIVE
    in_round = np.where(is_naive, 1, space.microbatches)
    rounds = np.where(is_naive, space.forwards, space.accumulation)
    gather, root = columns.gather_s()
    every = columns.gathers * columns.is_sharded
    forward = columns.of(lambda g: g.forward_s + g.exchanged_s[0])
    backward = columns.of(lambda g: g.busy_s - g.forward_s + g.exchanged_s[1])
    through = forward + backward
    late = (1 - every) * (root + np.maximum(0.0, gather - forward if overlaps else gather))
    forward = _overlapped(forward, every * gather, overlaps) + every * root
    backward = _overlapped(backward, every * gather, overlaps)

    alone = speedup_alone(columns.costs.facts.cluster)
    reduce, root_reduce = columns.reduce_s()
    between, root_between = columns.replicate_s()
    each_round = columns.reduces * (reduce + root_reduce)
    last = reduce + root_reduce + between + root_between
    if columns.costs.stack.states is not None:
        late = 0.0 * late  # all ranks gather at once, overlapped with compute
    if columns.costs.stack.states is not None and columns.costs.stack.overlap_gradients:
        # The last backward may hide all but the all-reduces between replicas of shards.
        each_round, last = 0.0 * each_round, (between + root_between) * columns.is_sharded
    besides = late + columns.optimizer_s() / pp

    def step_s(busiest: Floats) -> Floats:
        """Of borders that leave so many blocks to the busiest rank."""
        one_round, working = _round_s(columns, forward, backward, through, in_round, busiest)
        if alone > 1:
            # A rank is faster while those that share its cores wait, but the cores do all of the
            # work.
            working = working / alone
            one_round = np.maximum(one_round / alone, in_round * (forward + backward) / pp)
        # A rank that is done early may reduce early: on average ranks have 1/p of the reductions.
        further = np.maximum(one_round, working + each_round / pp)
        wall = (rounds - 1) * further + np.maximum(one_round, working + last / pp)
        return np.asarray(wall + besides)

    even, fitting = busiest_blocks(columns, usable_bytes)
    settling = ((rounds - 1) * each_round + last) / pp
    none_fit = np.isinf(fitting)
    fitting_s = np.where(none_fit, np.inf, step_s(np.where(none_fit, even, fitting)))
    return StagedTime(step_s(even), fitting_s, settling, besides)


def _overlapped(computing: Floats, sent: Floats, overlaps: bool) -> Floats:
    return np.maximum(computing, sent) if overlaps else computing + sent


def _round_s(
    columns: Columns,
    forward: Floats,
    backward: Floats,
    alone_s: Floats,
    microbatches: Integers,
    blocks: Floats,
) -> tuple[Floats, Floats]:
    """Seconds of one round, by schedule, and until the average rank is done.

    `forward` and `backward` are of the whole model, `alone_s` both without gathers, `blocks`
    the busiest rank's.
    """
    space = columns.space
    pp, schedule = space.pp, space.schedule
    is_one_each, splits = np.isin(schedule, _ONE_STAGE), np.isin(schedule, _SPLITS)
    least = columns.send_s(lambda g: g.least_sent_bytes)
    most = columns.send_s(lambda g: g.most_sent_bytes, leaves_node=True)
    borders = pp * space.per_rank - 1 - (schedule == _ZBV)
    sends = 2 * borders * least
    # Where ranks are idle while they receive, transfers are as good as work.
    waits = is_one_each | (not columns.costs.overlaps)
    through, passed = forward + backward, forward + backward + waits * sends
    slowest_forward = np.maximum(
        (forward + waits * sends / 2) / pp, blocks * columns.of(lambda g: g.block_s[0])
    )
    slowest_backward = np.maximum(
        (backward + waits * sends / 2) / pp, blocks * columns.of(lambda g: g.block_s[1])
    )
    slowest = np.maximum(passed / pp, blocks * columns.of(lambda g: sum(g.block_s)))
    # Rank r begins after r transfers, the last of which is counted above if it is waited for.
    begun = (pp - 1) * (pp / 2 - waits) / pp * least
    working = microbatches * passed / pp + begun

    naive = through + sends
    # All forwards pass the slowest stage one after the other, and so do all backwards.
    gpipe = through + sends + (microbatches - 1) * (slowest_forward + slowest_backward)
    busy = microbatches * slowest
    most_share, longer = columns.of(lambda g: g.forward_shares[1]), columns.of(lambda g: g.longer_s)
    both = most + least
    sent = np.divide(most, both, out=np.full(len(most), 0.5), where=both > 0)
    one_f_one_b = busy.copy()
    rows = np.flatnonzero(schedule == _ONE_F_ONE_B)
    for total, share in ((alone_s, most_share), (alone_s + sends, np.maximum(most_share, sent))):
        bound = one_f_one_b_s(total[rows], share[rows], longer[rows], pp[rows], microbatches[rows])
        one_f_one_b[rows] = np.maximum(one_f_one_b[rows], bound)
    least_share = columns.of(lambda g: g.forward_shares[0])
    filled = filled_s(alone_s, least_share, columns.of(lambda g: g.shorter_s), pp, microbatches)
    # Unless weight gradients come later, r transfers follow the end of rank r; and the first
    # microbatch passes all stages forward and backward.
    ended = np.where(splits, 0.0, (pp - 1) / 2 * least)
    first = forward + np.where(splits, 0.0, backward) + sends
    several = np.maximum(busy, np.maximum(working + ended, first))
    one_round = np.select(
        [
            schedule == _NAIVE,
            schedule == _GPIPE,
            schedule == _ONE_F_ONE_B,
            schedule == _ZERO_BUBBLE,
        ],
        [naive, gpipe, one_f_one_b, np.maximum(several, filled * (space.per_rank == 1))],
        default=several,
    )
    return one_round, working


def one_f_one_b_s(
    through: Floats, share: Floats, longer: Floats, pp: Integers, microbatches: Integers
) -> Floats:
    """Lower bound of a round of 1F1B, however stages divide the time `through` the whole model.

    Stage s takes t_s per microbatch, f_s <= `share` t_s + e_s of it in the forward, where all e_s
    add up to `longer`. Before its first forward the microbatch passes all stages before s, and
    after its last backward the gradient does. Between its first forward and first backward it
    passes all stages after s; meanwhile s runs at most a = min(p - s, m) - 1 further forwards. So
    the round takes W >= t + (m - 1) t_s - a f_s >= t + (m - 1 - a share) t_s - a e_s for every s,
    where t is the sum of all t_s. Hence t = sum t_s <= (W - t) sum 1 / (m - 1 - a share) + the most
    of a / (m - 1 - a share), which is that of the first stage, times `longer`.
    """
    shares, which = np.unique(share, return_inverse=True)
    keys, inverse = unique((pp, microbatches, which))
    pp, microbatches, share = keys[0], keys[1], shares[keys[2]]
    total, first = np.zeros(len(pp)), np.zeros(len(pp))
    for behind in range(int(pp.max(initial=0))):
        ahead = np.minimum(behind, microbatches - 1)
        others = microbatches - 1 - ahead * share
        room = np.divide(1.0, others, out=np.full(len(pp), np.inf), where=others > 0)
        total += np.where(behind < pp, room, 0.0)
        bounded = (behind < pp) & (others > 0)
        first[bounded] = np.maximum(first, ahead / np.where(bounded, others, 1.0))[bounded]
    left = np.maximum(0.0, through - first[inverse] * longer)
    return np.asarray(through + left / total[inverse])


def filled_s(
    through: Floats, share: Floats, shorter: Floats, pp: Integers, microbatches: Integers
) -> Floats:
    """Lower bound of a round that fills the pipeline, with stages as in `one_f_one_b_s`.

    f_s >= `share` t_s - e_s, where all e_s add up to `shorter`. Stage s begins after the forwards
    of those before it, which take F_s >= share T_s - shorter if these take T_s per microbatch, and
    then works m t_s <= W - F_s. So T_(s+1) <= T_s + (W + shorter - share T_s) / m, and t = T_p <=
    (W + shorter) / share (1 - (1 - share / m)^p).
    """
    emptied = 1 - (1 - share / microbatches) ** pp
    rounds = np.divide(share, emptied, out=microbatches / pp, where=share > _SMALLEST_SHARE)
    return np.asarray(through * rounds - shorter)


class StagedBytes(NamedTuple):
    """Bytes of a pipeline's ranks when a backward begins, as far as they do not depend on borders.

    Attributes:
        of_model: of the whole model, on all ranks together.
        of_block: of the smallest block, besides `saved` for each of its microbatches in flight.
        blocks: in the model.
        besides: on every rank; `running` on one with blocks, while the last one's backward begins.
        first, between, last: on a rank with blocks, with `running`: the first rank and the last
            have the units before and after all blocks, those between receive over two borders; of
            schedules in `_IN_ORDER`.
    """

    of_model: Floats
    of_block: Floats
    saved: Floats
    blocks: Floats
    besides: Floats
    running: Floats
    first: Floats
    between: Floats
    last: Floats

    def on(self, rank: int, ranks: int) -> Floats:
        """Bytes besides blocks, and besides what every rank has."""
        return self.first if rank == 0 else self.last if rank == ranks - 1 else self.between


def staged_bytes(columns: Columns) -> StagedBytes:
    """Sums over the units of each row's microbatch."""
    space, facts, stack = columns.space, columns.costs.facts, columns.costs.stack
    device = facts.cluster.device
    shares = _shares(columns)
    made = shares.gradients * _has_gradients(space)
    states, of_model = _model_bytes(columns, shares)
    if stack.holds_outputs:
        buffers = np.minimum(READ_OUT_BUFFERS, space.microbatches)
        buffers = buffers * (space.schedule == _ONE_F_ONE_B)
        of_model += buffers * columns.of(lambda g: read_out_bytes(g.loads))

    def resident(amounts: Floats) -> Floats:
        """Bytes of a part of the model, in proportion to its `Microbatch.of_units`."""
        parameters, gradients, root, experts = amounts
        whole = parameters * shares.of_parameters + gradients * made
        experts = experts * columns.unsharded_share
        if stack.states is None:
            whole += root * shares.root + 2 * experts
        return np.asarray(whole + states * is_even * (gradients / columns.shards + experts) / own)

    is_even = facts.workload.optimizer.is_elementwise
    own = columns.of(lambda g: g.loads.gradient_bytes) / columns.shards + columns.unsharded_bytes()
    of_block = resident(columns.of_each(lambda g: g.of_block))
    ends = columns.of_each(lambda g: g.of_ends(columns.microbatches.ends))
    first, last = (resident(end[:4]) for end in ends)
    first, last = first + space.pp * ends[0, 4], last + ends[1, 4]

    besides = np.full(len(space), message_bytes(stack) + workspace_bytes(device, stack))
    received = columns.of(lambda g: g.least_received_bytes) * (stack.states is None)
    batch = facts.model.batch_bytes
    besides += batch.fixed + batch.per_sample * space.microbatch_size * space.forwards
    ending, ending_block = _ending_bytes(columns)
    besides += facts.model.buffer_bytes + ending
    running = np.maximum(0.0, ending_block - ending)
    saved = columns.of(lambda g: g.block_saved_bytes)
    blocks = columns.of(lambda g: g.blocks)
    # The units after all blocks are done when a block's backward begins.
    first, between, last = first + running, received + running, np.maximum(last, running)
    return StagedBytes(of_model, of_block, saved, blocks, besides, running, first, between, last)


def _model_bytes(columns: Columns, shares: _Shares) -> tuple[Floats, Floats]:
    """Bytes of optimizer states, and with them of all that does not grow with microbatches."""
    # Which stage has what stays whole is open.
    states = columns.states_bytes() * shares.optimizer * (not columns.costs.has_whole)
    of_model = columns.of(lambda g: g.loads.parameter_bytes) * shares.of_parameters + states
    # The second backward has the gradients of the first.
    has_second = columns.space.forwards > 1
    of_model += columns.of(lambda g: g.loads.gradient_bytes) * shares.gradients * has_second
    of_model += columns.of(lambda g: g.loads.root_parameter_bytes) * shares.root
    of_model += 2 * columns.unsharded_bytes() * (columns.costs.stack.states is None)
    return states, of_model


def average_peak_bytes(columns: Columns) -> Floats:
    """Upper end of the average rank's parameters, gradients and states: a rough bound, equal for
    all rows of the same degrees with one microbatch, with several and with several rounds."""
    _, of_model = _model_bytes(columns, _shares(columns))
    return upper_end(of_model / columns.space.pp, columns.costs.facts.cluster.device)


def staged_peak_bytes(columns: Columns) -> Floats:
    """Upper end of the fullest rank's memory when a backward begins."""
    amounts = staged_bytes(columns)
    of_stages = np.maximum(
        amounts.of_model / columns.space.pp, _fullest_of_blocks(columns, amounts)
    )
    return upper_end(of_stages + amounts.besides, columns.costs.facts.cluster.device)


def busiest_blocks(columns: Columns, usable_bytes: float) -> tuple[Floats, Floats]:
    """Least number of blocks of the busiest rank: for any borders, and for those that fit
    `usable_bytes`; endless if none fit.

    With k microbatches in flight (see `_in_flight`), rank r has room for c_r blocks. The busiest
    has at least those that the ranks before leave to it and those behind: T >= (blocks - c_0 - ...
    - c_(r-1)) / (p - r).
    """
    space, amounts = columns.space, staged_bytes(columns)
    even = np.ceil(amounts.blocks / space.pp)
    least = even.copy()
    in_order = np.isin(space.schedule, _IN_ORDER)
    room = room_bytes(usable_bytes, columns.costs.facts.cluster.device) - amounts.besides
    for ranks in np.unique(space.pp[in_order]).tolist():
        rows = np.flatnonzero((space.pp == ranks) & in_order)
        left, most = amounts.blocks[rows], least[rows]
        for rank in range(ranks):
            most = np.maximum(most, left / (ranks - rank))
            in_flight = _in_flight(space.schedule[rows], space.microbatches[rows], rank, ranks)
            each = np.maximum(amounts.of_block[rows] + in_flight * amounts.saved[rows], 1.0)
            own = np.maximum(room[rows] - amounts.on(rank, ranks)[rows], 0.0)
            left = left - np.floor(own / each * (1 + ROUNDING))
        least[rows] = np.where(left > 0, np.inf, np.ceil(most * (1 - ROUNDING)))
    return even, least


def _in_flight(
    schedule: Integers, microbatches: Integers, rank: int, ranks: int | Integers
) -> Integers:
    """Microbatches in flight in all stages of a rank at its first backward, at least: one (naive),
    all of a round (GPipe), or one on the last rank and one more on each before it. Interleaved
    stages warm up for twice as long, but for no more than a round."""
    behind = ranks - 1 - rank + 0 * schedule
    return np.select(
        [schedule == _NAIVE, schedule == _GPIPE, schedule == _INTERLEAVED],
        [np.ones_like(schedule), microbatches, np.minimum(ranks, 2 * behind + 1)],
        default=behind + 1,
    )


def _has_gradients(space: Space) -> NDArray[np.bool_]:
    """True where gradients of other microbatches are there while as many as `_in_flight` says are:
    those of an earlier round; those of the first backward where forwards go on after it."""
    schedule, pp = space.schedule, space.pp
    enough = np.select(
        [schedule == _NAIVE, schedule == _GPIPE, schedule == _ONE_F_ONE_B],
        [np.ones_like(pp), space.microbatches, pp],
        default=FULL_AFTER * pp,
    )
    return np.asarray((space.accumulation > 1) | (space.microbatches > enough))


def _shares(columns: Columns) -> _Shares:
    """`round_shares` of every row."""
    space, costs = columns.space, columns.costs
    several = (space.accumulation > 1).astype(np.int64)
    share = columns.of(lambda g: g.loads.compute_share)
    device = costs.facts.cluster.device

    def of(kind: int, degree: int, again: int, halves: int) -> RoundShares:
        plan = plan_with(
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


def _ending_bytes(columns: Columns) -> tuple[Floats, Floats]:
    """Bytes that a unit takes while it runs its backward, besides saved ones: of the last unit of a
    segment, where that is least, since each stage ends with one; and so of a block."""
    last = columns.microbatches.last_units
    least = []
    for microbatch in columns.groups:
        work, copies = backward_bytes(microbatch, columns.costs.stack)
        is_block = np.repeat(microbatch.is_block, microbatch.counts.astype(int))
        least.append(
            [(n[last].min(), n[is_block].min(initial=np.inf)) for n in (work, work + copies)]
        )
    gathers = (columns.gathers * columns.is_sharded).astype(int)
    ending, of_block = np.array(least)[columns.group, gathers].T
    return ending, np.where(np.isinf(of_block), 0.0, of_block)


def _fullest_of_blocks(columns: Columns, amounts: StagedBytes) -> Floats:
    """Lower bound of the fullest rank's bytes of blocks.

    In U bytes a rank with k microbatches in flight (see `_in_flight`) has room for U / (of_block +
    k saved) blocks, and all ranks must have room for all blocks: U >= blocks / sum 1 / (of_block +
    k saved). Where k is the same on all ranks, one has the share of all in whole blocks.
    """
    space, blocks = columns.space, amounts.blocks
    resident, saved = amounts.of_block, amounts.saved
    pp, schedule = space.pp, space.schedule
    in_flight = _in_flight(schedule, space.microbatches, 0, pp)
    equal = -(-blocks // pp) * (resident + in_flight * saved)
    is_equal = np.isin(schedule, (_NAIVE, _GPIPE))
    room = np.ones(len(pp))
    for ranks in np.unique(pp[~is_equal]).tolist():
        rows = np.flatnonzero((pp == ranks) & ~is_equal)
        own, each = resident[rows], saved[rows]
        of_ranks = (
            _in_flight(schedule[rows], space.microbatches[rows], rank, ranks)
            for rank in range(ranks)
        )
        room[rows] = sum(1 / np.maximum(own + n * each, 1.0) for n in of_ranks)  # at least a byte
    of_blocks = np.where(is_equal, equal, blocks / room)
    return np.where(blocks > 0, of_blocks + amounts.running, 0.0)
