"""Weights of microbatches in the loss of a step: their losses are means of unequally much."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from engines.data.hidden_outputs import every_tensor_in
from profiles.capture.batch.call import Batch


class WeightedBatch:
    """A rank's part of a batch in microbatches, whose weights follow from the counts of all ranks.

    Attributes:
        pieces: of this rank's rows. In a pipeline `weights` adds spare ones, for what others have.
        waited_s: for the counts, since the forward began.
    """

    def __init__(
        self, pieces: list[Batch], weigh: Callable[[], tuple[list[Batch], list[float]]]
    ) -> None:
        self.pieces = pieces
        self._weigh = weigh
        self._weights: list[float] | None = None
        self.waited_s = 0.0

    @property
    def weights(self) -> list[float]:
        """The weight of each mean loss. Waits for the counts of all ranks.

        Raises:
            BatchError: another rank could not use its part of the batch.
            RankMismatchError: the first batches of ranks differ in structure.
        """
        if self._weights is None:
            began = time.perf_counter()
            spare, self._weights = self._weigh()
            self.pieces += spare
            self.waited_s = time.perf_counter() - began
        return self._weights

    def weight(self, index: int, scale: float = 1.0) -> float:
        """That of one of them, in losses that are multiplied by `scale`."""
        return self.weights[index] * scale


def weighted(loss: Tensor, weight: float) -> Tensor:
    """The loss times its weight in the global mean, 0-d and in fp32 or more; 0 without weight, also
    where it is NaN."""
    loss = loss if loss.dim() == 0 else loss.reshape(())
    loss = loss.float() if loss.itemsize < 4 else loss
    if weight == 1:  # of equal parts
        return loss
    if weight > 0:
        return loss * weight
    return loss.masked_fill(torch.ones_like(loss, dtype=torch.bool), 0.0)


def silence(output: object, weight: float) -> None:
    """Let no gradient into the output of a microbatch without weight: its mean over nothing may be
    0 / 0, whose gradient is no number even where the loss is multiplied by 0."""
    for tensor in every_tensor_in(output) if weight == 0 else ():
        if tensor.requires_grad and type(tensor) is Tensor:
            tensor.register_hook(torch.zeros_like)
