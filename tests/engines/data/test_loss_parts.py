"""Losses of parts of a batch, weighed by the rule that a sample showed, make up the batch's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.data.loss_parts import seen_on
from engines.data.loss_rule import LossParts, weight_of
from profiles.capture.batch.call import call_model, loss_of
from profiles.capture.batch.rows import split_rows
from profiles.capture.capture import capture
from profiles.errors import BatchError, RankError
from tests.engines.cases import Case
from tests.engines.parity import gradient_error, local_rows, reference_loss, relative, spread
from tests.workers import Pool

ROWS, TOKENS, WIDTH, CLASSES = 8, 6, 5, 7


class Tagger(nn.Module):
    """A class for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.inner(x)))
        return out


def batch(rows: int, *, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Rows with more padding the later they come."""
    made = torch.Generator().manual_seed(seed)
    labels = torch.randint(1, CLASSES, (rows, TOKENS), generator=made)
    lengths = 1 + (torch.arange(rows) * TOKENS // rows + seed) % TOKENS
    mask = torch.arange(TOKENS) < lengths[:, None]
    target = {"labels": labels.where(mask, -100), "mask": mask.float(), "lengths": lengths}
    target["weights"] = torch.rand(rows, generator=made)
    return torch.randn(rows, TOKENS, WIDTH, generator=made), target


def losses(logits: Tensor, target: dict[str, Tensor]) -> Tensor:
    """Of each token, 0 where it is padding."""
    labels = target["labels"].clamp(min=0).flatten()
    each = F.cross_entropy(logits.flatten(0, 1), labels, reduction="none")
    return each.view(target["labels"].shape) * target["mask"]


def by_rows(logits: Tensor, target: dict[str, Tensor]) -> Tensor:
    return (losses(logits, target).sum(1) / target["lengths"]).mean()


def over_a_mask(logits: Tensor, target: dict[str, Tensor]) -> Tensor:
    return losses(logits, target).sum() / target["mask"].sum()


def over_lengths(logits: Tensor, target: dict[str, Tensor]) -> Tensor:
    return losses(logits, target).sum() / target["lengths"].sum()


def over_labels(logits: Tensor, target: dict[str, Tensor]) -> Tensor:
    is_counted = target["labels"] != -100
    return F.cross_entropy(logits[is_counted], target["labels"][is_counted], label_smoothing=0.1)


def weights_of_classes(logits: Tensor, target: dict[str, Tensor]) -> Tensor:
    weights = torch.arange(1.0, CLASSES + 1)
    return F.cross_entropy(logits.flatten(0, 1), target["labels"].flatten(), weight=weights)


def sum_of_all(logits: Tensor, target: dict[str, Tensor]) -> Tensor:
    return losses(logits, target).sum()


def negatives_of_the_batch(logits: Tensor, target: dict[str, Tensor]) -> Tensor:
    rows = F.normalize(logits.mean(1), dim=-1)
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


Loss = Callable[[Tensor, dict[str, Tensor]], Tensor]
RULED: list[Loss] = [
    by_rows,
    over_a_mask,
    over_lengths,
    over_labels,
    weights_of_classes,
    sum_of_all,
]


def seen(loss_fn: Loss, **options: Any) -> LossParts:
    torch.manual_seed(0)
    model, sample = Tagger(), options.pop("sample", batch(ROWS))
    profile = capture(model, sample, loss_fn=loss_fn)
    options.setdefault("said", None)
    return seen_on(model, sample, loss_fn, profile=profile, **options)


def test_a_generator_that_the_model_holds_hides_the_rule_as_the_global_one_does() -> None:
    class Noisy(Tagger):
        def __init__(self) -> None:
            super().__init__()
            self.noise = torch.Generator().manual_seed(0)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = super().forward(x)
            return logits + torch.randn(logits.shape, generator=self.noise)

    model, sample = Noisy(), batch(ROWS)
    profile = capture(model, sample, loss_fn=by_rows)
    rule = seen_on(model, sample, by_rows, profile=profile, said=None)
    assert (rule.doubt, rule.state) == ("", "")


@pytest.mark.parametrize("loss_fn", RULED)
def test_another_batch_follows_the_rule_that_the_sample_showed(loss_fn: Loss) -> None:
    torch.manual_seed(0)
    model, sample = Tagger(), batch(ROWS)
    profile = capture(model, sample, loss_fn=loss_fn)
    rule = seen_on(model, sample, loss_fn, profile=profile, said=None)
    assert not rule.doubt
    other = batch(11, seed=3)
    sizes = [2, 6, 3]
    parts = split_rows(other, sizes)
    each = [loss_of(call_model(model, p, has_target=True), p, loss_fn) for p in parts]
    weight = weight_of(rule.terms or profile.loss_terms)
    counts = [float(weight(p)) if weight else rows for p, rows in zip(parts, sizes, strict=True)]
    total = sum(loss * count for loss, count in zip(each, counts, strict=True))
    made = sum(each) if rule.is_sum else total / sum(counts)
    whole = loss_of(call_model(model, other, has_target=True), other, loss_fn)
    assert relative(torch.as_tensor(made), whole) < 1e-5


def full(rows: int, *, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """As `batch`, without padding."""
    x, _ = batch(rows, seed=seed)
    labels = torch.randint(1, CLASSES, (rows, TOKENS), generator=torch.Generator().manual_seed(5))
    lengths = torch.full((rows,), TOKENS)
    target = {"labels": labels, "mask": torch.ones(rows, TOKENS), "lengths": lengths}
    return x, {**target, "weights": torch.ones(rows)}


def over_positive_labels(logits: Tensor, target: dict[str, Tensor]) -> Tensor:
    is_counted = target["labels"] > 0
    return F.cross_entropy(logits[is_counted], target["labels"][is_counted])


def over_none_negative(logits: Tensor, target: dict[str, Tensor]) -> Tensor:
    """Padding is -1, of which the loss says no more than that it is negative."""
    labels = target["labels"].clamp(min=-1)
    each = F.cross_entropy(
        logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none"
    ).view_as(labels)
    return each[labels >= 0].sum() / (labels >= 0).sum()


def of_weighted_rows(logits: Tensor, target: dict[str, Tensor]) -> Tensor:
    weights = target["weights"]
    return (losses(logits, target).sum(1) * weights).sum() / weights.sum()


def over_numbers(logits: Tensor, target: dict[str, Tensor]) -> Tensor:
    """Padding is nan in the mask."""
    is_counted = ~torch.where(target["mask"] == 0, torch.nan, target["mask"]).isnan()
    each = F.cross_entropy(
        logits.flatten(0, 1), target["labels"].clamp(min=0).flatten(), reduction="none"
    )
    return each[is_counted.flatten()].sum() / is_counted.sum()


def of_two_terms(logits: Tensor, target: dict[str, Tensor]) -> Tensor:
    return over_a_mask(logits, target) + logits.square().mean()


@pytest.mark.parametrize(
    "loss_fn",
    [
        by_rows,
        over_a_mask,
        over_lengths,
        over_labels,
        over_positive_labels,
        over_none_negative,
        of_weighted_rows,
        over_numbers,
    ],
)
def test_a_sample_without_padding_shows_what_holds_with_it(loss_fn: Loss) -> None:
    torch.manual_seed(0)
    model, sample = Tagger(), full(ROWS)
    rule = seen_on(
        model, sample, loss_fn, profile=capture(model, sample, loss_fn=loss_fn), said=None
    )
    other, sizes = batch(ROWS, seed=3), [2, 6]
    if loss_fn is over_none_negative:
        other[1]["labels"].clamp_(min=-1)
    assert not rule.doubt_of(other)
    weight = weight_of(rule.terms)
    made = torch.zeros(())
    counts = 0.0
    for part, rows in zip(split_rows(other, sizes), sizes, strict=True):
        count = float(weight(part)) if weight else rows
        made += loss_of(call_model(model, part, has_target=True), part, loss_fn) * count
        counts += count
    whole = loss_of(call_model(model, other, has_target=True), other, loss_fn)
    assert relative(made / counts, whole) < 1e-5


def test_values_with_which_no_rule_holds_are_doubted_alone() -> None:
    rule = seen(of_two_terms, sample=full(ROWS))
    assert not rule.doubt_of(full(ROWS, seed=2))
    assert "with 0 in `element 1.mask` the loss" in rule.doubt_of(batch(ROWS))


def some_classes_count(logits: Tensor, target: dict[str, Tensor]) -> Tensor:
    labels = target["labels"]
    return F.cross_entropy(
        logits.flatten(0, 1), torch.where(labels % 3 == 0, -100, labels).flatten()
    )


def test_rows_that_have_as_many_targets_by_chance_show_no_rule() -> None:
    """Each row of the sample has five that count; those of a batch have not."""
    inputs, target = batch(2)
    target = {"labels": torch.tensor([[1, 2, 3, 4, 5, 1], [2, 1, 6, 5, 4, 2]])}
    rule = seen(some_classes_count, sample=(inputs, target))
    other = inputs, {"labels": target["labels"].flip(0) // 2 + 1}
    assert "with the same values in ascending order" in rule.doubt_of(other)


def test_rows_that_act_on_each_other_are_said_with_both_losses() -> None:
    rule = seen(negatives_of_the_batch)
    torch.manual_seed(0)
    x, target = batch(ROWS)
    loss = negatives_of_the_batch(Tagger()(x), target).item()
    assert f"the loss of the sample is {loss:.6g}, the losses of 3 and 5 of 8" in rule.doubt
    assert not rule.is_sum
    assert rule.terms is None


def test_a_weight_that_does_not_fit_the_loss_is_said() -> None:
    assert not seen(over_a_mask, said=lambda part: part[1]["mask"].sum()).doubt
    assert "of 3 and 5 of 8 rows" in seen(over_a_mask, said=lambda part: len(part[0])).doubt


def test_nothing_is_said_of_what_cannot_be_seen() -> None:
    torch.manual_seed(0)
    model, sample = Tagger(), batch(ROWS)
    profile = capture(model, sample, loss_fn=by_rows)

    def drawn(logits: Tensor, target: dict[str, Tensor]) -> Tensor:
        return by_rows(logits + torch.randn(()), target)

    nothing = LossParts()
    one = batch(1)
    assert seen_on(model, sample, drawn, profile=profile, said=None) == nothing
    assert seen_on(model, one, negatives_of_the_batch, profile=profile, said=None) == nothing
    low = Tagger().bfloat16()
    assert seen_on(low, sample, negatives_of_the_batch, profile=profile, said=None) == nothing


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x + 0.1 * torch.randn_like(x),
    "uniform": lambda x: x * torch.rand(x.shape[:1])[:, None, None],
    "in place": lambda x: x + torch.empty_like(x).normal_(1.0, 0.1),
    "of tensors": lambda x: torch.distributions.Normal(x, 0.1).rsample(),
    "of a step": lambda x: x * torch.randint(1, 5, (len(x),))[:, None, None],
    "dropout": lambda x: F.dropout(x, 0.2, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x, dim=-1),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_numbers_that_are_drawn_in_an_evaluation_too_hide_no_rule(
    draw: Callable[[Tensor], Tensor],
) -> None:
    rule = seen(lambda logits, target: over_a_mask(draw(logits), target))
    assert rule == seen(over_a_mask)
    assert rule != LossParts()


class Bags(nn.Module):
    """Values of all rows in one tensor, and where each row begins."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(9, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(values, offsets))
        return out


class Graph(nn.Module):
    """Rows are the nodes of one graph, which edges go between."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        y = self.inner(x)
        return torch.zeros_like(y).index_add(0, edges[1], y[edges[0]])


def test_a_sample_of_which_few_rows_alone_do_not_run_is_refused() -> None:
    nodes, edges = torch.randn(24, WIDTH), torch.stack([torch.arange(24), torch.arange(24).flip(0)])
    sample = nodes, edges, torch.arange(24) % CLASSES
    profile = capture(Graph(), sample, loss_fn=F.cross_entropy)
    rule = seen_on(Graph(), sample, F.cross_entropy, profile=profile, said=None)
    assert rule.refusal.startswith("the model does not run on 8 of 24 rows of the sample: Index")


def _bags(rows: int) -> tuple[Tensor, ...]:
    return torch.arange(2 * rows) % 9, torch.arange(0, 2 * rows, 2), torch.arange(rows) % CLASSES


def drift(loss_fn: Loss, plan: str) -> tuple[float, float]:
    """Differences of loss and gradient from one process over batches with other padding."""
    case = Case(Tagger, batch, loss_fn)  # type: ignore[arg-type]
    reference, parallel = spread(case, plan, rows=ROWS)
    global_batch = batch(ROWS, seed=2)
    wanted = reference_loss(reference, case, global_batch)
    wanted.backward()  # type: ignore[no-untyped-call]
    loss = parallel.forward_backward(local_rows(parallel, global_batch, ROWS))
    return relative(loss, wanted.detach()), gradient_error(parallel, reference)


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_replicate=2 accumulation=2", "dp_shard=2"])
@pytest.mark.parametrize("loss_fn", [over_a_mask, weights_of_classes, sum_of_all])
def test_replicas_train_like_one_process_on_uneven_parts(
    pool: Pool, loss_fn: Loss, plan: str
) -> None:
    for errors in pool.run(drift, loss_fn, plan, world_size=2):
        assert max(errors) < 1e-5


def warnings_of(plan: str, build: type[nn.Module], loss_fn: Loss) -> list[str]:
    """Warnings on this rank where the plan is applied."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("engines.data.coupled_rows")
    logger.addHandler(handler)
    try:
        spread(Case(build, batch, loss_fn), plan, rows=ROWS)  # type: ignore[arg-type]
    finally:
        logger.removeHandler(handler)
    return records


@pytest.mark.dist
def test_a_loss_that_no_cut_makes_up_is_warned_of_where_batches_are_cut(pool: Pool) -> None:
    given = "dp_replicate=2", Tagger, negatives_of_the_batch
    first, second = pool.run(warnings_of, *given, world_size=2)
    assert len(first) == 1
    assert "trains on the loss of its own rows" in first[0]
    assert not second


def coupled(plan: str, **options: Any) -> str:
    case = Case(Tagger, batch, negatives_of_the_batch)  # type: ignore[arg-type]
    try:
        spread(case, plan, rows=ROWS, **options)
    except (BatchError, RankError) as error:
        return error.what
    return ""


@pytest.mark.dist
def test_rows_of_one_rank_that_act_on_each_other_stay_in_one_piece(pool: Pool) -> None:
    for text in pool.run(coupled, "dp_replicate=2 accumulation=2", world_size=2):
        assert "a step in 2 microbatches is not that of the whole batch" in text


def coupled_on_purpose() -> str:
    return coupled("dp_replicate=2 accumulation=2", loss_weight=lambda part: len(part[0]))


@pytest.mark.dist
def test_a_microbatch_trains_on_its_own_loss_where_its_weight_is_given(pool: Pool) -> None:
    assert pool.run(coupled_on_purpose, world_size=2) == ["", ""]


def late_padding() -> tuple[float, str]:
    """Drift on a batch without padding, and what is said of one with it."""
    case = Case(Tagger, full, of_two_terms)  # type: ignore[arg-type]
    reference, parallel = spread(case, "dp_replicate=2 accumulation=2", rows=ROWS)
    whole = full(ROWS, seed=2)
    wanted = reference_loss(reference, case, whole).detach()
    drift = relative(parallel.forward_backward(local_rows(parallel, whole, ROWS)), wanted)
    try:
        parallel.forward_backward(local_rows(parallel, batch(ROWS, seed=2), ROWS))
    except BatchError as error:
        return drift, error.what
    return drift, ""


@pytest.mark.dist
def test_a_batch_whose_values_leave_no_rule_is_refused(pool: Pool) -> None:
    for drift, text in pool.run(late_padding, world_size=2):
        assert drift < 1e-5
        assert "with 0 in `element 1.mask` the loss of the sample is" in text


def refusal(plan: str) -> str:
    try:
        spread(Case(Bags, _bags, F.cross_entropy), plan, rows=6)
    except (BatchError, RankError) as error:
        return error.what
    return ""


@pytest.mark.dist
def test_rows_that_cannot_be_cut_are_refused_before_the_first_step(pool: Pool) -> None:
    for text in pool.run(refusal, "dp_replicate=2", world_size=2):
        assert "does not run on 2 or 4 of 6 rows of the sample: RuntimeError: offsets[0]" in text


def bags_by_rank() -> str:
    """Of a sample as large as a rank's part, what a loader of global batches is told."""
    case = Case(Bags, _bags, F.cross_entropy)
    _, parallel = spread(case, "dp_replicate=2 microbatch_size=6", rows=6)
    try:
        parallel.shard([_bags(12)])
    except BatchError as error:
        return error.what
    return ""


@pytest.mark.dist
def test_rows_that_cannot_be_cut_come_from_a_loader_of_each_rank(pool: Pool) -> None:
    for text in pool.run(bags_by_rank, world_size=2):
        assert "does not run on 2 or 4 of 6 rows of the sample" in text
