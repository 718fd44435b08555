"""Pipelines with data axes train like one process, in every kind and precision."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from engines.plan import Plan
from profiles.errors import ModelError
from tests.engines.cases import CASES, Case
from tests.engines.parity import (
    gradient_error,
    local_rows,
    measure,
    parallelize,
    reference_loss,
    relative,
    sgd,
    spread,
    state_error,
)
from tests.nightly import nightly
from tests.workers import Pool

TOLERANCE = 1e-5
"""Relative, fp32: summing in another order costs a few units of 6e-8."""

DDP = "pp=2 dp_replicate=2 schedule=1f1b microbatches=2 stages=blocks.1"
ZERO1 = "pp=2 dp_replicate=2 zero=1 schedule=1f1b microbatches=2 stages=blocks.1"
STYLES = (
    "tensor_styles=embed:vocab,head:vocab,blocks.*.mlp.0:column,blocks.*.mlp.2:row,"
    "blocks.*.qkv:gather"
)
THREE_AXES = (
    f"pp=2 dp_replicate=2 tp=2 zero=1 schedule=1f1b microbatches=2 stages=blocks.1 {STYLES}"
)
ZERO3 = "pp=2 dp_shard=2 schedule=1f1b microbatches=2 stages=blocks.1"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tied-frozen-unused", f"{DDP} accumulation=2"),
        (
            "tied-frozen-unused",
            "pp=2 dp_shard=2 schedule=zbv microbatches=2 stages=blocks.0,blocks.1,norm",
        ),
        *nightly(
            (
                "gpt",
                "pp=2 dp_replicate=2 schedule=zbv microbatches=2 stages=blocks.0,blocks.1,norm",
            ),
            ("tied-frozen-unused", f"{ZERO1} accumulation=2 recompute=full"),
            (
                "tied-frozen-unused",
                "pp=2 dp_replicate=2 zero=2 schedule=interleaved microbatches=2 accumulation=2"
                " stages=blocks.0,blocks.1,norm",
            ),
            ("gpt", f"{ZERO3} recompute=full offload=states"),
        ),
    ],
)
def test_a_pipeline_with_data_axes_trains_like_one_process(
    pool: Pool, name: str, text: str
) -> None:
    check(pool, name, text)


@pytest.fixture(scope="module")
def eight() -> Iterator[Pool]:
    ranks = Pool(8)
    yield ranks
    ranks.close()


@pytest.mark.dist
def test_a_pipeline_of_shard_groups_and_replicas_of_them(eight: Pool) -> None:
    hsdp = "pp=2 dp_replicate=2 dp_shard=2 schedule=1f1b microbatches=2 accumulation=2"
    check(eight, "tied-frozen-unused", f"{hsdp} stages=blocks.1")


@pytest.mark.dist
@pytest.mark.parametrize(
    "text",
    [
        "dp_shard=2 tp=2 recompute=full",
        *nightly("dp_replicate=2 tp=2", "pp=2 tp=2 schedule=1f1b microbatches=2 stages=blocks.1"),
    ],
)
def test_split_layers_in_replicas_shards_and_stages_train_like_one_process(
    pool: Pool, text: str
) -> None:
    check(pool, "tied-frozen-unused", f"{text} {STYLES}")


@pytest.mark.dist
@pytest.mark.parametrize("stages", ["blocks.1", "norm"])
def test_a_border_within_or_after_what_the_author_checkpoints(pool: Pool, stages: str) -> None:
    check(pool, "checkpointed", f"pp=2 schedule=1f1b microbatches=2 stages={stages}")


@pytest.mark.dist
def test_logits_split_over_the_vocabulary_cross_to_the_loss(pool: Pool) -> None:
    styles = "tensor_styles=embed:vocab,early:vocab,head:vocab"
    check(pool, "exits", f"pp=2 tp=2 schedule=1f1b microbatches=2 stages=blocks.1 {styles}")


@pytest.mark.dist
def test_stages_of_split_layers_with_sharded_optimizer_states(eight: Pool) -> None:
    check(eight, "tied-frozen-unused", THREE_AXES)


def check(pool: Pool, name: str, text: str) -> None:
    plan = Plan.parse(text)
    rows = plan.forwards * plan.data_degree
    results = pool.run(measure, name, text, rows, 3, rows, world_size=plan.world_size)
    for parity in results:
        assert parity.loss <= TOLERANCE, parity
        assert parity.gradient <= TOLERANCE, parity
        assert parity.parameter_after_steps <= TOLERANCE, parity


def clipped(text: str) -> tuple[float, float, float]:
    """Differences of the norm, of the parameters after a clipped step, and of an evaluation."""
    case, reference, parallel = parallelize("tied-frozen-unused", text)
    batch = case.batch(8)
    reference_loss(reference, case, batch).backward()
    trainable = [p for p in reference.parameters() if p.requires_grad]
    norm = nn.utils.clip_grad_norm_(trainable, 0.1)
    sgd(trainable).step()
    mine = local_rows(parallel, batch, 8)
    parallel.forward_backward(mine)
    actual = parallel.clip_grad_norm_(0.1)
    parallel.optimizer.step()
    evaluated = parallel.eval_step(mine)
    after = reference_loss(reference, case, batch).detach()
    return relative(actual, norm), state_error(parallel, reference), relative(evaluated, after)


@pytest.mark.dist
@pytest.mark.parametrize("text", [f"dp_shard=2 tp=2 {STYLES}", *nightly(DDP, ZERO3)])
def test_the_gradient_norm_counts_every_element_once(pool: Pool, text: str) -> None:
    for errors in pool.run(clipped, text, world_size=4):
        assert max(errors) < TOLERANCE


def in_bf16(text: str) -> tuple[float, float, float]:
    """Differences from one process in the same precision: of the loss, the gradients, and of the
    gradients of fp32 from those."""
    case, reference, parallel = parallelize("gpt", f"{text} precision=bf16")
    batch = case.batch(8)
    exact = copy.deepcopy(reference)
    reference_loss(exact, case, batch).backward()
    expected = _low_precision(reference, case, parallel.plan)
    loss = parallel.forward_backward(local_rows(parallel, batch, 8))
    noise = max(
        relative(p.grad, q.grad)
        for p, q in zip(reference.parameters(), exact.parameters(), strict=True)
        if p.grad is not None and q.grad is not None
    )
    return relative(loss, expected), gradient_error(parallel, reference), noise


def _low_precision(model: nn.Module, case: Case, plan: Plan) -> torch.Tensor:
    """The loss of one process, with its gradients on the parameters of `model`."""
    inputs, targets = case.batch(8)
    assert case.loss_fn is not None
    if not plan.data_parallel.is_sharded:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(inputs)
        loss = case.loss_fn(output.float(), targets)
        loss.backward()
        return loss.detach()
    low = copy.deepcopy(model).bfloat16()
    loss = case.loss_fn(low(inputs).float(), targets)
    loss.backward()
    for parameter, cast in zip(model.parameters(), low.parameters(), strict=True):
        parameter.grad = None if cast.grad is None else cast.grad.float()
    return loss.detach()


@pytest.mark.dist
@pytest.mark.parametrize("text", [ZERO3, *nightly(DDP, ZERO1)])
def test_bf16_in_a_pipeline_is_bf16_on_one_process(pool: Pool, text: str) -> None:
    for loss, gradient, noise in pool.run(in_bf16, text, world_size=4):
        # Microbatches are summed in fp32, in one process a matmul sums them: bf16 has 8 bits.
        assert loss < 2**-8
        assert gradient < 2**-5
        assert noise > 2**-10  # and it is bf16 indeed


def moved(folder: str, text: str, how: str) -> dict[str, torch.Tensor]:
    """States after two steps that are saved, or after a third one on top of what is loaded."""
    adam = {"optimizer": lambda params: torch.optim.Adam(params, lr=1e-3, eps=1e-3)}
    case, _, parallel = parallelize("tied-frozen-unused", text, **adam)
    if how == "load":
        parallel.load(folder)
    for step in range(2 if how == "save" else 1):
        batch = case.batch(8 + 4 * step)
        parallel.train_step(local_rows(parallel, batch, 8 + 4 * step))
    if how == "save":
        parallel.save(folder)
    return {name: value.clone() for name, value in parallel.state_dict().items()}


def _after_three_steps() -> dict[str, torch.Tensor]:
    case = CASES["tied-frozen-unused"]
    torch.manual_seed(1)
    model = case.build()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trainable, lr=1e-3, eps=1e-3)
    for rows in (8, 12, 8):
        optimizer.zero_grad()
        reference_loss(model, case, case.batch(rows)).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.dist
@pytest.mark.parametrize(
    ("before", "after"),
    [(ZERO3, DDP), *nightly((ZERO1, "dp_replicate=2"), ("dp_replicate=2", ZERO1))],
)
def test_a_saved_hybrid_resumes_under_another_plan(
    pool: Pool, tmp_path: Path, before: str, after: str
) -> None:
    check_moved(pool, tmp_path, before, after)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("before", "after"), [(THREE_AXES, "dp_replicate=2"), *nightly(("dp_replicate=2", THREE_AXES))]
)
def test_a_hybrid_of_three_axes_resumes_under_another_plan(
    eight: Pool, tmp_path: Path, before: str, after: str
) -> None:
    check_moved(eight, tmp_path, before, after)


def check_moved(pool: Pool, tmp_path: Path, before: str, after: str) -> None:
    folder = str(tmp_path / "checkpoint")
    pool.run(moved, folder, before, "save", world_size=Plan.parse(before).world_size)
    results = pool.run(moved, folder, after, "load", world_size=Plan.parse(after).world_size)
    wanted = _after_three_steps()
    for state in results:
        assert list(state) == list(wanted)
        assert max(relative(state[n], value) for n, value in wanted.items()) < TOLERANCE


class HeadNorms(nn.Module):
    """Attention with a norm for each head, as Qwen3 has it: the norm is whole, its heads are not.

    What it returns last is never used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.heads, self.norm = 4, nn.LayerNorm(4)
        self.never = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def parts(layer: nn.Module) -> torch.Tensor:
            return layer(x).view(*x.shape[:2], -1, 4).transpose(1, 2)

        query, key = self.norm(parts(self.query)), self.norm(parts(self.key))
        mixed = nn.functional.scaled_dot_product_attention(query, key, parts(self.value))
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.attend, self.leave = nn.Linear(6, 16), HeadNorms(), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.leave(self.attend(self.enter(x)).mean(1))
        return out


ATTENDING = Case(Attending, CASES["lstm"].batch)
SPLIT_HEADS = (
    "tensor_styles=attend.query:column,attend.key:column,attend.value:column,attend.out:row"
)


def classic_loop(text: str) -> tuple[float, float]:
    """Differences of the norm before clipping, and of all parameters after three steps.

    Forwards between a backward and its step, which look at the model, change no gradient.
    """
    reference, parallel = spread(ATTENDING, f"{text} {SPLIT_HEADS}")
    optimizer = sgd([p for p in reference.parameters() if p.requires_grad])
    assert ATTENDING.loss_fn is not None
    errors = []
    for step in range(3):
        batch = ATTENDING.batch(8)
        inputs, targets = local_rows(parallel, batch, 8)
        ATTENDING.loss_fn(parallel(inputs), targets).backward()
        with torch.no_grad():
            parallel(inputs)
        reference_loss(reference, ATTENDING, batch).backward()
        if step:  # the first step has no one who looks at gradients before the optimizer
            wanted = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            errors.append(relative(parallel.clip_grad_norm_(0.1), wanted))
        if parallel.plan.data_degree == 1:  # replicas wait for the backward of such a forward
            parallel(inputs)
        for stepped in (parallel.optimizer, optimizer):
            stepped.step()
            stepped.zero_grad()
    return max(errors), state_error(parallel, reference)


@pytest.mark.dist
@pytest.mark.parametrize("text", ["dp_shard=2 tp=2", *nightly("tp=2", "dp_replicate=2 tp=2")])
def test_partial_gradients_are_summed_in_a_classic_loop(pool: Pool, text: str) -> None:
    for errors in pool.run(classic_loop, text, world_size=Plan.parse(text).world_size):
        assert max(errors) < TOLERANCE


class Feed(nn.Module):
    """Dropout between the layers, on parts, and behind them, on the whole."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, width), nn.Linear(width, 16), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.drop(self.down(self.drop(self.up(x).relu())))
        return x + out


class Dropping(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.enter, self.drop = nn.Linear(6, 16), nn.Dropout(0.5)
        self.feed, self.leave = Feed(width), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.leave(self.feed(self.drop(self.enter(x.mean(1)))))
        return out


def dropped(text: str) -> dict[str, torch.Tensor]:
    """Parameters that this rank has whole, after three steps; ranks were seeded differently."""
    case = Case(Dropping, CASES["lstm"].batch)
    _, parallel = spread(case, f"{text} tensor_styles=feed.up:column,feed.down:row")
    torch.manual_seed(parallel.data_rank * 7 + torch.distributed.get_rank())
    for _ in range(3):
        parallel.train_step(local_rows(parallel, case.batch(8), 8))
    parameters = parallel.named_parameters()
    return {name: p.detach().clone() for name, p in parameters if "feed" not in name}


@pytest.mark.dist
@pytest.mark.parametrize(
    "text",
    ["dp_replicate=2 tp=2", "pp=2 tp=2 schedule=1f1b microbatches=2 stages=feed"],
)
def test_tp_replicated_parameters_stay_equal_under_dropout(pool: Pool, text: str) -> None:
    results = pool.run(dropped, text, world_size=4)
    for one, other in (results[:2], results[2:]):
        assert one.keys() == other.keys()
        assert one
        assert all(torch.equal(one[name], other[name]) for name in one)


def uneven() -> tuple[str, int, float]:
    """The loss of a step in train mode, its gradients, and the loss without dropout."""
    case = Case(lambda: Dropping(33), CASES["lstm"].batch)
    reference, parallel = spread(case, "tp=2 tensor_styles=feed.up:column,feed.down:row")
    with pytest.raises(ModelError) as caught:
        parallel.train_step(case.batch(8))
    left = sum(p.grad is not None for p in parallel.parameters())
    for model in (parallel, reference):
        model.eval()
    wanted = reference_loss(reference, case, case.batch(8)).detach()
    return str(caught.value), left, relative(parallel.train_step(case.batch(8)), wanted)


@pytest.mark.dist
def test_dropout_on_uneven_parts_raises_an_error(pool: Pool) -> None:
    for text, left, error in pool.run(uneven, world_size=2):
        assert "dropout within a layer that has no equal parts for 2 ranks" in text
        assert left == 0
        assert error < TOLERANCE
