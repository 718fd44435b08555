"""The fitted constants of the time of transformers: few, physical, the same for every row.

Fitted on published runs by `python -m tests.scorecard.fit`, which prints this table's values.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What cannot be read off a data sheet.

    Attributes:
        volta, turing, ampere, hopper, blackwell: share of the published best matmul rate that products
            sustain inside a step, by generation: power and clocks.
        tail: part of a round of tiles that a product loses at its end.
        memory: share of the achievable memory bandwidth that elementwise kernels reach.
        flash: rate of attention without kept scores, as a share of the matmul rate.
        older_kernels: rate of attention written for Ampere's instructions on later devices.
        unaligned: rate of products whose sizes are no multiples of 64, as a share of others'.
        narrow: rate of fp8 products, as a share of what their larger peak promises.
        expert: rate of grouped products of experts, as a share of others'.
        tensor_overlap: hidden part of tensor-parallel exchanges where they are overlapped.
        data_overlap: hidden part of data-parallel exchanges where they are overlapped.
        inside, between: rate of collectives in a step, as a share of their best, in a node and
            between nodes.
        tokens: rate of the exchange of tokens with experts, as a share of the links'.
        launch_s: of one kernel by the host, framework and library included.
        older_host: how much longer hosts of the time of A100 and before take.
        graphs: share of the launches that are left where layers run as recorded graphs.
    """

    volta: float = 0.8
    turing: float = 0.6
    ampere: float = 0.85
    hopper: float = 0.8
    blackwell: float = 0.75
    tail: float = 0.5
    memory: float = 0.9
    flash: float = 0.65
    older_kernels: float = 0.6
    unaligned: float = 0.75
    narrow: float = 0.85
    expert: float = 0.8
    tensor_overlap: float = 0.6
    data_overlap: float = 0.85
    inside: float = 0.85
    between: float = 0.7
    tokens: float = 0.6
    launch_s: float = 6e-5
    older_host: float = 1.6
    graphs: float = 0.4


CONSTANTS = Constants()
