"""Targets in lists, a rank's part of which has fewer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.data.loss_parts import seen_on
from profiles.capture.capture import capture
from tests.engines.data.test_loss_parts import (
    CLASSES,
    ROWS,
    WIDTH,
)


class Boxes(nn.Module):
    """A class for each of the boxes of an image; images have lists of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def boxes(rows: int) -> tuple[Tensor, list[dict[str, Tensor]]]:
    made = torch.Generator().manual_seed(rows)
    counts = [1 + row % 3 for row in range(rows)]
    targets = [{"labels": torch.randint(0, CLASSES, (n,), generator=made)} for n in counts]
    return torch.randn(rows, WIDTH, generator=made), targets


def over_boxes(logits: Tensor, targets: list[dict[str, Tensor]]) -> Tensor:
    """A mean over all boxes and one over images: no rule makes them up together."""
    each = [
        F.cross_entropy(row.expand(len(t["labels"]), -1), t["labels"], reduction="sum")
        for row, t in zip(logits, targets, strict=True)
    ]
    of_boxes = sum(each) / sum(len(t["labels"]) for t in targets)
    of_images = torch.stack(
        [
            F.cross_entropy(row[None], t["labels"][:1])
            for row, t in zip(logits, targets, strict=True)
        ]
    )
    return of_boxes + of_images.mean()


def test_targets_of_which_a_part_has_fewer_are_no_error() -> None:
    torch.manual_seed(0)
    model, sample = Boxes(), boxes(ROWS)
    profile = capture(model, sample, loss_fn=over_boxes)
    shown = seen_on(model, sample, over_boxes, profile=profile, said=None)
    assert "no mean of these over rows" in shown.doubt
