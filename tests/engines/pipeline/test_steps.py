"""A pipeline beyond its gradients: memory, state, evaluation, clipping, failures."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from engines.plan import Plan
from profiles.errors import PlanError, RankError
from tests.engines.cases import CASES
from tests.engines.parity import (
    local_rows,
    parallelize,
    reference_loss,
    relative,
    state_error,
)
from tests.nightly import half
from tests.workers import Pool

TIED = "pp=2 schedule=1f1b microbatches=2 stages=blocks.1"


def held_bytes(name: str, plan: str) -> tuple[int, int, int]:
    """Bytes of the storages of a rank's parameters; of its own ones; of the whole model."""
    _, reference, parallel = parallelize(name, plan)
    storages = {p.untyped_storage() for p in parallel.module.parameters()}
    own = sum(p.nbytes for p in parallel.parameters())
    whole = sum(p.nbytes for p in reference.parameters())
    return sum(storage.nbytes() for storage in storages), own, whole


@pytest.mark.dist
@pytest.mark.parametrize("name", ["gpt", "tied-frozen-unused"])
def test_a_rank_holds_the_parameters_of_its_stage_and_no_others(pool: Pool, name: str) -> None:
    results = pool.run(held_bytes, name, TIED, world_size=2)
    model = CASES[name].build()
    block = sum(p.nbytes for p in model.blocks[0].parameters())  # type: ignore[index, union-attr]
    for allocated, own, whole in results:
        # Each freed parameter keeps one element.
        assert own <= allocated <= own + 4 * len(list(model.parameters()))
        assert allocated <= whole - block
    twice = model.embed.weight.nbytes if name != "gpt" else 0  # type: ignore[union-attr, operator]
    assert sum(own for _, own, _ in results) == results[0][2] + twice


def copies(steps: int) -> torch.Tensor:
    """This rank's copy of the tied weight after some steps."""
    case, _, parallel = parallelize("tied-frozen-unused", TIED, max_grad_norm=0.5)
    for step in range(steps):
        parallel.train_step(case.batch(4 + 2 * (step % 3)))
    return parallel.module.get_parameter("embed.weight").detach()


@pytest.mark.dist
def test_copies_of_a_tied_weight_are_equal_to_the_bit_after_twenty_steps(pool: Pool) -> None:
    first, second = pool.run(copies, 20, world_size=2)
    assert torch.equal(first, second)


def evaluated(plan: str) -> tuple[float, float, bool]:
    case, reference, parallel = parallelize("gpt", plan)
    batch = case.batch(8)
    for _ in range(2):  # evaluation and training take turns
        wanted = reference_loss(reference, case, batch).detach()
        before = parallel.eval_step(batch)
        loss = parallel.forward_backward(batch)
    untouched = parallel.eval_step(case.batch(12)).requires_grad
    return relative(before, wanted), relative(loss, wanted), untouched


@pytest.mark.dist
@pytest.mark.parametrize(
    "plan", [TIED, "pp=2 schedule=zbv microbatches=4 stages=blocks.0,blocks.1,norm"]
)
def test_evaluation_gives_the_loss_on_every_rank_between_steps(pool: Pool, plan: str) -> None:
    for evaluated_loss, trained_loss, has_gradient in pool.run(evaluated, plan, world_size=2):
        assert max(evaluated_loss, trained_loss) < 1e-5
        assert not has_gradient


def clipped() -> tuple[float, float]:
    """Differences of the norm, and of the parameters after a clipped step."""
    case, reference, parallel = parallelize("tied-frozen-unused", TIED)
    batch = case.batch(4)
    reference_loss(reference, case, batch).backward()
    trainable = [p for p in reference.parameters() if p.requires_grad]
    norm = nn.utils.clip_grad_norm_(trainable, 0.1)
    torch.optim.SGD(trainable, lr=0.05, momentum=0.9).step()
    parallel.forward_backward(batch)
    actual = parallel.clip_grad_norm_(0.1)
    parallel.optimizer.step()
    return relative(actual, norm), state_error(parallel, reference)


@pytest.mark.dist
def test_the_gradient_norm_counts_a_tied_weight_once(pool: Pool) -> None:
    for norm, state in pool.run(clipped, world_size=2):
        assert max(norm, state) < 1e-5


def loaded() -> tuple[float, list[str]]:
    _, _, parallel = parallelize("tied-frozen-unused", TIED)
    other = CASES["tied-frozen-unused"].build()
    dist.broadcast_object_list(states := [other.state_dict()])
    parallel.load_state_dict(states[0])
    got = parallel.state_dict()
    assert list(got) == list(states[0])
    names = [name for name, _ in parallel.named_parameters()]
    return max(relative(got[n].float(), v.float()) for n, v in states[0].items()), names


@pytest.mark.dist
def test_a_whole_state_is_loaded_and_given_back_under_original_names(pool: Pool) -> None:
    (first, names), (second, others) = pool.run(loaded, world_size=2)
    assert first == second == 0
    assert "blocks.0.qkv.weight" in names
    assert "blocks.2.qkv.weight" not in names
    assert set(names) & set(others) == {"embed.weight"}


def resumed(name: str, folder: str, before: str, after: str) -> float:
    """Three steps, saved and loaded under another plan after the second, against three at once."""
    adam = {"optimizer": lambda params: torch.optim.Adam(params, lr=1e-3, eps=1e-3)}
    case, reference, first = parallelize(name, before, **adam)
    optimizer = torch.optim.Adam(reference.parameters(), lr=1e-3, eps=1e-3)
    _, _, second = parallelize(name, after, **adam)
    for step, parallel in enumerate((first, first, second)):
        if step == 2:
            first.save(folder)
            second.load(folder)
        batch = case.batch(4)
        parallel.train_step(local_rows(parallel, batch, 4))
        optimizer.zero_grad()
        reference_loss(reference, case, batch).backward()
        optimizer.step()
    return state_error(second, reference)


@pytest.mark.dist
@pytest.mark.parametrize("name", half(["tied-frozen-unused", "gpt"]))
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (TIED, "pp=2 schedule=gpipe microbatches=2 stages=blocks.0"),
        (TIED, "dp_shard=2"),
        ("dp_replicate=2", TIED),
        (TIED, "pp=2 schedule=zbv microbatches=2 stages=blocks.0,blocks.2,head"),
    ],
)
def test_a_saved_pipeline_resumes_under_another_plan(
    pool: Pool, tmp_path: Path, name: str, before: str, after: str
) -> None:
    assert max(pool.run(resumed, name, str(tmp_path / "ckpt"), before, after, world_size=2)) < 1e-5


def called() -> str:
    case, _, parallel = parallelize("gpt", TIED)
    with pytest.raises(PlanError) as caught:
        parallel(case.batch(4)[0])  # type: ignore[index]
    parallel.train_step(case.batch(4))  # nothing is broken
    return str(caught.value)


@pytest.mark.dist
def test_a_call_of_a_pipeline_is_refused_with_what_to_use(pool: Pool) -> None:
    for text in pool.run(called, world_size=2):
        assert "use `train_step(batch)`" in text


def failing(name: str, plan: str, where: str, failed: int) -> tuple[str, float]:
    """The error of this rank when a unit of rank `failed` raises, and after how many seconds.

    The process of the failed rank lives on and keeps what it has.
    """
    case, _, parallel = parallelize(name, plan)
    batch = case.batch(6)
    parallel.train_step(batch)
    unit, _, call = where.rpartition(".")
    fuse = 2  # the second microbatch
    if dist.get_rank() == failed:

        def broken(*arguments: object) -> None:
            nonlocal fuse
            fuse -= 1
            if not fuse:
                raise ValueError("no such luck\nin the second line")

        module = parallel.module.get_submodule(unit)
        if call == "backward":
            next(module.parameters()).register_hook(broken)
        else:
            module.register_forward_pre_hook(broken)
    step = parallel.eval_step if call == "evaluation" else parallel.train_step
    start, text = time.monotonic(), "no error"
    try:
        step(batch)
    except (ValueError, RankError) as error:
        text = f"{type(error).__name__}: {error}"
    took_s = time.monotonic() - start
    time.sleep(0.5)  # the others hear of it while this process holds all its groups
    return text, took_s


THREE = "pp=3 schedule=1f1b microbatches=3 stages=blocks.1,blocks.2"
ROUND = "pp=2 schedule=zbv microbatches=2 stages=blocks.1,blocks.2,norm"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("plan", "where", "failed"),
    [
        (TIED, "blocks.2.forward", 1),
        (TIED, "blocks.0.backward", 0),
        (THREE, "blocks.0.forward", 0),
        (THREE, "blocks.1.backward", 1),
        (THREE, "blocks.2.forward", 2),
        (ROUND, "norm.backward", 0),
        (THREE, "blocks.1.evaluation", 1),
    ],
)
def test_a_stage_that_raises_is_named_on_all_ranks_within_seconds(
    pool: Pool, plan: str, where: str, failed: int
) -> None:
    world_size = Plan.parse(plan).pp
    name = "tied-frozen-unused" if plan == TIED and "forward" in where else "gpt"
    results = pool.run(failing, name, plan, where, failed, world_size=world_size, timeout_s=60)
    for rank, (text, took_s) in enumerate(results):
        assert took_s < 5  # the groups' timeout is 60
        if rank == failed:
            assert text.startswith("ValueError: no such luck")
        else:
            assert text.startswith("RankError: lost contact with another rank while ")
            assert text.splitlines()[0].endswith(
                f": rank {failed} failed: ValueError: no such luck"
            )


def frozen_stage() -> float:
    """A rank whose stage has nothing to train still takes part."""
    from engines.apply import apply_plan
    from tests.engines.cases import cpu_ranks, profile_of

    case = CASES["gpt"]
    torch.manual_seed(1)
    model = case.build()
    model.embed.requires_grad_(False)  # type: ignore[union-attr, operator]
    plan = Plan.parse("pp=2 schedule=1f1b microbatches=2 stages=blocks.0")
    model.position.requires_grad_(False)  # type: ignore[union-attr, operator]
    parallel = apply_plan(
        model, plan, profile=profile_of(case, model), cluster=cpu_ranks(2), loss_fn=case.loss_fn
    )
    before = parallel.eval_step(case.batch(4))
    for _ in range(3):
        parallel.train_step(case.batch(4))
    return (before - parallel.eval_step(case.batch(4))).item()


@pytest.mark.dist
def test_a_stage_with_nothing_to_train_takes_part(pool: Pool) -> None:
    assert min(pool.run(frozen_stage, world_size=2)) > 0
