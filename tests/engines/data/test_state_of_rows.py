"""State that a forward changes: counts that it acts on, and buffers that it changes by its rows
(codebooks, queues, means)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from engines.data.loss_parts import seen_on
from profiles.capture.capture import capture
from tests.engines.data.test_loss_parts import (
    ROWS,
    WIDTH,
    Tagger,
    batch,
    over_a_mask,
    seen,
    warnings_of,
)
from tests.workers import Pool


class Codes(Tagger):
    """Counts its calls, and keeps a mean over all that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("mean").lerp_(x.mean((0, 1)), 0.1)
        self.get_buffer("calls").add_(1)
        return super().forward(x)


def test_buffers_that_depend_on_the_rows_are_seen_and_counts_are_none() -> None:
    torch.manual_seed(0)
    model, sample = Codes(), batch(ROWS)
    profile = capture(model, sample, loss_fn=over_a_mask)
    shown = seen_on(model, sample, over_a_mask, profile=profile, said=None)
    assert shown.state_of_rows == "the forward changes `mean` by the rows that it sees"
    assert not shown.state  # no loss depends on it
    assert not seen(over_a_mask).state_of_rows


@pytest.mark.dist
def test_buffers_that_replicas_change_by_their_own_rows_are_warned_of(pool: Pool) -> None:
    for plan, count in (("dp_shard=2", 2), ("dp_replicate=2 accumulation=2", 4)):
        first, second = pool.run(warnings_of, plan, Codes, over_a_mask, world_size=2)
        assert len(first) == 1
        assert "changes `mean` by the rows that it sees" in first[0]
        assert f"Each of the {count} parts of a global batch" in first[0]
        assert not second


class Attribute(Tagger):
    """Keeps its mean in a plain attribute, and leaves its last input behind."""

    last: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean((0, 1))
        self.last = x
        return super().forward(x)


@pytest.mark.dist
def test_attributes_that_replicas_change_by_their_own_rows_are_warned_of(pool: Pool) -> None:
    first, second = pool.run(warnings_of, "dp_shard=2", Attribute, over_a_mask, world_size=2)
    assert len(first) == 1
    assert "the forward changes `mean` by the rows that it sees" in first[0]
    assert not second


class Counting(Tagger):
    """Keeps a count in a buffer and one in an attribute, and acts on it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        return super().forward(x) * self.calls


def test_the_model_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    model, sample = Counting(), batch(ROWS)
    profile = capture(model, sample, loss_fn=over_a_mask)
    state = torch.get_rng_state()
    assert not seen_on(model, sample, over_a_mask, profile=profile, said=None).doubt
    assert model.calls == 0
    assert model.seen == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_what_a_forward_changes_for_the_next_one_is_seen() -> None:
    """`Counting` multiplies by the number of its calls."""
    torch.manual_seed(0)
    model, sample = Counting(), batch(ROWS)
    profile = capture(model, sample, loss_fn=over_a_mask)
    x, target = sample
    logits = Tagger.forward(model, x)
    first, second = (over_a_mask(logits * n, target).item() for n in (1, 2))
    state = seen_on(model, sample, over_a_mask, profile=profile, said=None).state
    assert f"the loss of the sample is {first:.6g}, and {second:.6g} when" in state
    assert "it changes `seen`" in state
    assert not seen(over_a_mask).state


class Taught(nn.Module):
    """A student, and a frozen teacher that begins as its copy and follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Tagger()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
            for own, other in pairs:
                own.lerp_(other, 0.1)
        out: Tensor = self.student(x) + self.teacher(x)
        return out


def test_a_copy_that_follows_what_it_still_equals_is_seen() -> None:
    torch.manual_seed(0)
    model, sample = Taught(), batch(ROWS)
    profile = capture(model, sample, loss_fn=over_a_mask)
    rule = seen_on(model, sample, over_a_mask, profile=profile, said=None)
    assert "it changes `teacher." in rule.state
    assert not rule.doubt


@pytest.mark.dist
def test_state_that_each_microbatch_moves_is_warned_of(pool: Pool) -> None:
    given = Counting, over_a_mask
    first, _ = pool.run(warnings_of, "dp_replicate=2 accumulation=2", *given, world_size=2)
    assert len(first) == 1
    assert "Each of the 2 microbatches of a step does so" in first[0]
    assert pool.run(warnings_of, "dp_replicate=2", *given, world_size=2) == [[], []]
