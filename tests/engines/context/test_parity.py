"""Models whose sequences are shared out over ranks train like one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from engines.apply import apply_plan
from engines.parallel import ParallelModel
from engines.plan import Plan
from profiles.capture.batch.call import Batch
from profiles.capture.capture import capture
from profiles.errors import BatchError
from tests.engines.cases import CASES, cpu_ranks
from tests.engines.parity import (
    gradient_error,
    local_rows,
    measure,
    parallelize,
    reference_loss,
    relative,
    state_error,
)
from tests.workers import Pool

TOLERANCE = 1e-5


@pytest.mark.dist
@pytest.mark.parametrize(
    "plan",
    [
        "cp=2",
        "cp=2 recompute=selective accumulation=2",
        "cp=2 zero=3 recompute=full",
        "dp_replicate=2 cp=2",
        "dp_replicate=2 cp=2 zero=2 accumulation=2",
        "dp_shard=2 cp=2",
    ],
)
def test_shared_sequences_train_like_one_process(pool: Pool, plan: str) -> None:
    """The model counts its tokens itself, and slices a table by their number."""
    for result in pool.run(measure, "gpt", plan, world_size=Plan.parse(plan).world_size):
        assert result.loss < TOLERANCE
        assert result.gradient < TOLERANCE, result.worst_gradient
        assert result.parameter_after_steps < TOLERANCE


def to_largest(parallel: ParallelModel, reference: nn.Module) -> float:
    """Largest gradient difference over the largest gradient: the bias of a key has none but
    rounding."""
    got = parallel.full_gradients()
    wanted = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    assert got.keys() == wanted.keys()
    largest = max(gradient.abs().max().item() for gradient in wanted.values())
    return max((got[n] - wanted[n]).abs().max().item() for n in wanted) / largest


def transformer_error(name: str, plan: str) -> tuple[float, float, float]:
    """Largest relative differences of an unmodified transformers model from one process: loss,
    gradients of `train_step`'s kind, and those of a classic loop."""
    from tests import zoo

    torch.manual_seed(0)
    model: nn.Module = getattr(zoo, name)().eval()
    batch = zoo.TOKENS
    reference = copy.deepcopy(model)
    output = reference(**batch)
    output.loss.backward()
    parsed = Plan.parse(plan)
    parallel = apply_plan(
        model,
        parsed,
        profile=capture(model, batch, name=name),
        cluster=cpu_ranks(parsed.world_size),
        sample=batch,
    )
    rows = local_rows(parallel, batch, 2)
    loss = parallel.forward_backward(rows)
    stepped = to_largest(parallel, reference)
    parallel.zero_grad()
    if parallel.data_world_size > 1:
        return relative(loss, output.loss.detach()), stepped, 0.0
    with torch.no_grad():
        plain = parallel(input_ids=zoo.IDS).logits
    assert relative(plain, output.logits.detach()) < TOLERANCE
    classic = parallel(**batch)
    assert relative(classic.logits, output.logits) < TOLERANCE
    classic.loss.backward()
    return relative(loss, output.loss.detach()), stepped, to_largest(parallel, reference)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("llama", "cp=4"),
        ("llama", "dp_shard=2 cp=2"),
        ("gpt2", "cp=2"),
        ("bert", "cp=2"),
    ],
)
def test_an_unmodified_model_shares_its_sequences(pool: Pool, name: str, plan: str) -> None:
    """Causal and not, grouped heads; labels that are shifted across chunks."""
    pytest.importorskip("transformers")
    results = pool.run(transformer_error, name, plan, world_size=Plan.parse(plan).world_size)
    assert max(map(max, results)) < TOLERANCE


def across_plans(folder: str) -> tuple[float, float]:
    """A checkpoint of cp=2 read by ZeRO-3 over two; losses of an evaluation before and after."""
    case, reference, parallel = parallelize("gpt", "cp=2", max_grad_norm=0.1)
    batch = case.batch(4)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    reference_loss(reference, case, batch).backward()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    optimizer.step()
    parallel.train_step(local_rows(parallel, batch, 4))
    parallel.save(folder)
    _, _, other = parallelize("gpt", "dp_shard=2")
    other.load(folder)
    wanted = reference_loss(reference, case, batch).detach()
    evaluated = relative(parallel.eval_step(local_rows(parallel, batch, 4)), wanted)
    return max(state_error(other, reference), state_error(parallel, reference)), evaluated


@pytest.mark.dist
def test_clipping_evaluation_and_checkpoints_are_those_of_one_process(
    pool: Pool, tmp_path: object
) -> None:
    assert max(map(max, pool.run(across_plans, f"{tmp_path}/saved", world_size=2))) < TOLERANCE


def split_error() -> float:
    from advisor.auto.parallelize import auto_parallelize

    case = CASES["gpt"]
    torch.manual_seed(1)
    reference = case.build()
    model = copy.deepcopy(reference)
    batch = case.batch(4)
    parallel = auto_parallelize(
        model, sample=batch, loss_fn=case.loss_fn, plan="cp=2 tp=2", cluster=cpu_ranks(4),
        learns=False,
    )  # fmt: skip
    reference_loss(reference, case, batch).backward()
    parallel.forward_backward(batch)
    return gradient_error(parallel, reference)


@pytest.mark.dist
def test_context_and_tensor_parallelism_combine(pool: Pool) -> None:
    assert max(pool.run(split_error, world_size=4, timeout_s=120)) < TOLERANCE


def padded() -> list[str]:
    """Errors for a batch with padding, and for one of another length."""
    from tests import zoo

    batch: Batch = {**zoo.TOKENS, "attention_mask": torch.ones_like(zoo.IDS)}
    model = zoo.llama()
    parallel = apply_plan(
        model, Plan.parse("cp=2"), profile=capture(model, batch), cluster=cpu_ranks(2), sample=batch
    )
    hidden = torch.ones_like(zoo.IDS)
    hidden[0, :4] = 0
    said = []
    for other in ({**batch, "attention_mask": hidden}, {k: t[:, :14] for k, t in batch.items()}):
        try:
            parallel.train_step(other)
        except BatchError as error:
            said.append(str(error))
    assert parallel.train_step(batch).isfinite()
    return said


@pytest.mark.dist
def test_a_batch_that_cannot_be_shared_is_refused_on_every_rank_and_the_next_one_runs(
    pool: Pool,
) -> None:
    pytest.importorskip("transformers")
    for mask, length in pool.run(padded, world_size=2):
        assert "hides tokens" in mask
        assert "14 tokens cannot be cut into 4 equal chunks" in length
        assert "12 or 16 tokens" in length
