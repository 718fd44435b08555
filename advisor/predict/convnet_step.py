"""Seconds of a convolutional network's step: replicas with buckets, or stages of a pipeline.

one device   every block's products and streams, at least what launching their kernels takes
replicas     + gradients in buckets beside the backward, and what overlap costs both
stages       the blocks cut where the slowest stage is fastest, the schedule played through
all          + the update, kernel by kernel; at least what decoding the images takes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from math import inf

from advisor.cost.collective import collective_s, ways
from advisor.cost.communication import FIRST_BUCKET_BYTES
from advisor.cost.memory import BUCKET_BYTES
from advisor.cost.pipeline import StageTimes, play
from advisor.cost.replay import slowdown
from advisor.predict.convnet_constants import FITTED, ConvnetConstants
from advisor.predict.convnet_time import BlockTime, Numbers, block_time, numbers_of, total
from advisor.predict.recurrent import transformer_xl
from advisor.predict.setup import Setup
from engines.plan import Schedule
from profiles.cluster import Collective
from profiles.convnets.layers import Block, Kind, Network

# Images of 224 x 224 that a node's processors read, decode and crop in a second. Assumed; the
# fastest published runs of the calibration data took 22 thousand, fed by DALI.
INPUT_IMAGES_PER_S = 25e3
_INPUT_PIXELS = 224
# SGD with momentum, tensor by tensor: weight decay, momentum twice, update. Since torch 2.0 (March
# 2023) all tensors of a kind are one kernel (`foreach`).
UPDATE_KERNELS, FOREACH_DEFAULT = 4, 2023.25
# NCCL 2.4 (February 2019) brought trees; before, an all-reduce went round a ring of all ranks.
TREES = 2019.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvnetStep:
    """Seconds of a step by what they go into; they add up to `step_s`.

    Attributes:
        compute_s: one device's, the slowest stage's; `bubble_s` what the others make it wait.
        data_s: gradients, where they are not hidden, and what hiding them costs; `sent_s` all that
            their exchange takes, no part of the sum.
        host_s: waiting for kernels to be launched, or for images.
    """

    compute_s: float
    recompute_s: float
    bubble_s: float
    data_s: float
    update_s: float
    host_s: float
    sent_s: float = 0.0

    @property
    def step_s(self) -> float:
        busy = self.compute_s + self.recompute_s + self.bubble_s
        return busy + self.data_s + self.update_s + self.host_s


def convnet_step(setup: Setup, constants: ConvnetConstants = FITTED) -> ConvnetStep:
    """A step of `setup.network`, or of a model that is a list of layers as one is.

    Raises:
        ValueError: the setup is of another transformer.
    """
    network = layered(setup)
    if network is None:
        raise ValueError("only what is a list of layers is counted here")
    software, samples = setup.software, setup.layout.microbatch
    device = setup.cluster.device
    numbers = numbers_of(device, setup.dtype, fused=software.fused, year=software.year)
    times = _block_times(network, samples, numbers, constants)
    if setup.layout.pp > 1 or software.recompute == "full":
        step = _staged(setup, network, times)
    else:
        step = _replicated(setup, network, times)
    return _with_input(setup, network, step)


@lru_cache(maxsize=256)
def _block_times(
    network: Network, samples: int, numbers: Numbers, constants: ConvnetConstants
) -> tuple[BlockTime, ...]:
    """Of every block; remembered, as runs of one network on one kind of device share them."""
    return tuple(block_time(block, samples, numbers, constants) for block in network.blocks)


def layered(setup: Setup) -> Network | None:
    """What this module counts: networks of convolutions, and Transformer-XL."""
    if setup.network is None and setup.shape is not None and setup.shape.kind == "transformer_xl":
        return transformer_xl(setup.shape)
    return setup.network


def _replicated(setup: Setup, network: Network, times: Sequence[BlockTime]) -> ConvnetStep:
    rounds, whole = setup.layout.accumulation, total(times)
    busy = rounds * (whole.forward_s + whole.backward_s)
    launch_s = setup.cluster.device.launch_s.value
    launching = rounds * (whole.forward_kernels + whole.backward_kernels) * launch_s
    added, sent = _exchanged_s(setup, network.blocks, [time.backward_s for time in times])
    return ConvnetStep(
        compute_s=busy,
        recompute_s=0.0,
        bubble_s=0.0,
        data_s=added,
        update_s=_update_s(setup, network.blocks),
        host_s=max(0.0, launching - busy),
        sent_s=sent,
    )


def _exchanged_s(
    setup: Setup, blocks: Sequence[Block], backward_s: Sequence[float]
) -> tuple[float, float]:
    """What the all-reduces of gradients add to a step, and all that they take.

    Buckets queue behind the backward of what fills them.
    """
    ranks, trees = setup.layout.dp, setup.software.year >= TREES
    if ranks < 2:
        return 0.0, 0.0
    cluster, each = setup.cluster, setup.software.reduce_bytes

    ring, *faster = ways(cluster, Collective.ALL_REDUCE, group_size=ranks)
    known = (ring, *faster) if trees else (ring,)

    def reduced_s(payload: float) -> float:
        return min(way.seconds(payload) for way in known)

    clock = queue = sent = waiting = 0.0
    limit: float = FIRST_BUCKET_BYTES
    for block, seconds in zip(reversed(blocks), reversed(backward_s), strict=True):
        clock += seconds
        waiting += block.parameters * each
        while waiting >= limit:
            # A tensor larger than a bucket goes whole; many small ones fill several.
            bucket = max(limit, max(layer.parameters for layer in block.layers) * each)
            bucket = min(bucket, waiting)
            queue = max(queue, clock) + reduced_s(bucket)
            sent += reduced_s(bucket)
            waiting -= bucket
            limit = BUCKET_BYTES
    if waiting:
        queue = max(queue, clock) + reduced_s(waiting)
        sent += reduced_s(waiting)
    # The buckets are filled and emptied by copies: two passes over gradients.
    copies = 4 * sum(block.parameters for block in blocks) * each
    copied = copies / cluster.device.memory_bandwidth_bytes_per_s.value
    if not setup.software.overlap_reduce:
        return sent + copied, sent
    exposed = max(0.0, queue - clock)
    hidden = max(0.0, sent - exposed)
    slowed = hidden * slowdown(None, computing_s=clock, sent_s=sent).middle
    return exposed + copied + slowed, sent


def _staged(setup: Setup, network: Network, times: Sequence[BlockTime]) -> ConvnetStep:
    """GPipe: forwards, then backwards. Its last microbatch is not computed again (torchgpipe's
    `except_last`, the default), but where there is no other."""
    layout, cluster = setup.layout, setup.cluster
    rounds = layout.accumulation
    again = 0.0
    if setup.software.recompute == "full":
        again = 1.0 if rounds == 1 else (rounds - 1) / rounds
    launch_s = cluster.device.launch_s.value
    bounds = cut([t.forward_s * (1 + again) + t.backward_s for t in times], layout.pp)
    stages = [total(times[low:high]) for low, high in pairwise(bounds)]
    forward = [max(t.forward_s, t.forward_kernels * launch_s) for t in stages]
    repeated = [again * seconds for seconds in forward]
    backward = [max(t.backward_s, t.backward_kernels * launch_s) for t in stages]
    element = 2 if setup.dtype in ("float16", "bfloat16") else 4
    sends = [
        collective_s(
            cluster,
            Collective.SEND_RECV,
            layout.microbatch * network.blocks[bound - 1].output_elements * element,
            group_size=2,
            stride=cluster.world_size // layout.pp,
        )
        for bound in bounds[1:-1]
    ]
    played = play(
        Schedule.GPIPE,
        StageTimes(
            forward_s=tuple(forward),
            backward_s=tuple(b + r for b, r in zip(backward, repeated, strict=True)),
            weight_s=(0.0,) * layout.pp,
            send_s=tuple(sends),
        ),
        ranks=layout.pp,
        microbatches=rounds,
        waits=True,
    )
    slowest = max(range(layout.pp), key=lambda i: forward[i] + backward[i] + repeated[i])
    own = stages[slowest]
    compute = rounds * (own.forward_s + own.backward_s)
    host = rounds * (forward[slowest] + backward[slowest]) - compute
    recompute = rounds * repeated[slowest]
    blocks = network.blocks[bounds[slowest] : bounds[slowest + 1]]
    backward_s = [time.backward_s for time in times[bounds[slowest] : bounds[slowest + 1]]]
    added, sent = _exchanged_s(setup, blocks, backward_s)
    return ConvnetStep(
        compute_s=compute,
        recompute_s=recompute,
        bubble_s=played.wall_s - compute - host - recompute,
        data_s=added,
        update_s=_update_s(setup, blocks),
        host_s=host,
        sent_s=sent,
    )


def cut(seconds: Sequence[float], stages: int) -> list[int]:
    """Borders 0 ... n of `stages` runs of blocks whose slowest one is as fast as can be.

    >>> cut([3, 1, 1, 1, 3], 3)
    [0, 1, 4, 5]
    """
    sums = [0.0, *accumulate(seconds)]
    count = len(seconds)
    stages = min(stages, count)

    @cache
    def best(done: int, left: int) -> tuple[float, int]:
        """The slowest of `left` stages from block `done` on, and where the first of them ends."""
        if left == 1:
            return sums[count] - sums[done], count
        found = (inf, count)
        for end in range(done + 1, count - left + 2):
            slowest = max(sums[end] - sums[done], best(end, left - 1)[0])
            found = min(found, (slowest, end))
        return found

    bounds = [0]
    for left in range(stages, 0, -1):
        bounds.append(best(bounds[-1], left)[1])
    return bounds


def _update_s(setup: Setup, blocks: Sequence[Block]) -> float:
    device = setup.cluster.device
    parameters = sum(block.parameters for block in blocks)
    # Gradient and weight are read and the weight is written; every moment is read and written.
    passes = 3 + 2 * setup.software.moment_bytes / 4
    moved = passes * parameters * 4 / device.memory_bandwidth_bytes_per_s.value
    tensors = sum(
        2 if layer.kind is Kind.NORM else 1
        for block in blocks
        for layer in block.layers
        if layer.parameters
    )
    kernels = UPDATE_KERNELS * (1 if setup.software.year >= FOREACH_DEFAULT else tensors)
    return max(moved, kernels * device.launch_s.value)


def _with_input(setup: Setup, network: Network, step: ConvnetStep) -> ConvnetStep:
    """A step is no shorter than its images take to come in."""
    images = setup.layout.global_batch * (network.pixels / _INPUT_PIXELS) ** 2
    least = images / (INPUT_IMAGES_PER_S * setup.cluster.num_nodes)
    if step.step_s >= least:
        return step
    return replace(step, host_s=step.host_s + least - step.step_s)
