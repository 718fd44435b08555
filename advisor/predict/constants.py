"""The fitted constants of the time of transformers: few, physical, the same for every row.

Fitted on published runs by `python -m tests.scorecard.fit`, which prints this table's values.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What cannot be read off a data sheet.

    Attributes:
        volta, turing, ampere, hopper, blackwell: share of the published best matmul rate that
            products sustain inside a step, by generation: power and clocks.
        tail: part of a round of tiles that a product loses at its end.
        memory: share of the achievable memory bandwidth that elementwise kernels reach.
        scan_bytes: traffic of a state-space layer's kernels for an element of its width, forward.
        flash: rate of attention without kept scores, as a share of the matmul rate.
        older_kernels: rate of attention written for Ampere's instructions on later devices.
        unaligned: rate of products whose sizes are no multiples of 64, as a share of others'.
        narrow: rate of fp8 products, as a share of what their larger peak promises.
        expert: rate of grouped products of experts, as a share of others'.
        tensor_overlap: hidden part of tensor-parallel exchanges where they are overlapped.
        data_overlap: hidden part of data-parallel exchanges where they are overlapped.
        inside, rails, shared: rate of collectives in a step, as a share of their best: in a node,
            between nodes with a network card for each device, and where devices share cards.
        launch_s: of one kernel by the host, framework and library included.
        older_host: how much longer the hosts of A100 and older devices take.
    """

    volta: float = 1.03
    turing: float = 0.807
    ampere: float = 0.954
    hopper: float = 0.858
    blackwell: float = 1.01
    tail: float = 0.0722
    memory: float = 0.71
    scan_bytes: float = 112
    flash: float = 0.39
    older_kernels: float = 0.666
    unaligned: float = 0.581
    narrow: float = 0.911
    expert: float = 0.586
    tensor_overlap: float = 0.857
    data_overlap: float = 0.645
    inside: float = 0.646
    rails: float = 0.62
    shared: float = 0.292
    launch_s: float = 6.69e-05
    older_host: float = 1.2


CONSTANTS = Constants()
