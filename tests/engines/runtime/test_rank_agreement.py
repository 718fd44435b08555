"""Ranks that were given different things to train are told apart before they exchange a tensor."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from engines.apply import apply_plan, topics
from engines.plan import Plan
from engines.runtime.fake_world import fake_world
from engines.runtime.rank_agreement import Topic, require_agreement
from engines.runtime.world import World, join_world
from profiles.errors import AdvisorError, RankMismatchError
from profiles.model.profile import ModelProfile
from tests.engines.cases import CASES, TiedFrozenGPT, TinyGPT, cpu_ranks, profile_of, token_loss
from tests.engines.parity import HSDP, local_rows, parallelize, sgd
from tests.workers import Pool

ODD = 3
"""The rank that is given something else."""
BOUND_S = 5.0  # of each error, on a machine with other work


def doubled_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return 2 * token_loss(logits, targets)


def _adamw(parameters: list[nn.Parameter], **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **settings)


def _in_groups(parameters: list[nn.Parameter], *, first: int) -> torch.optim.Optimizer:
    groups = [{"params": parameters[:first]}, {"params": parameters[first:]}]
    return torch.optim.SGD(groups, lr=0.1)


class Reordered(TinyGPT):
    """The same parameters, registered in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = self._modules.pop("norm"), self._modules.pop("head")  # type: ignore[assignment]
        self._modules["blocks"] = self._modules.pop("blocks")


class Frozen(TinyGPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)


class Buffered(TinyGPT):
    """A buffer whose elements share one value, which no rank can be sent."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(value).expand(4))


GIVEN: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "width": (
        {},
        {"model": functools.partial(TinyGPT, width=16)},
        "parameter `position`: ranks 0-2 have (16, 32), rank 3 has (16, 16)",
    ),
    "depth": (
        {},
        {"model": functools.partial(TinyGPT, layers=2)},
        "parameter number 27: ranks 0-2 have `blocks.2.norm1.weight`, rank 3 has `norm.weight`",
    ),
    "order": (
        {},
        {"model": Reordered},
        "parameter number 3: ranks 0-2 have `blocks.0.norm1.weight`, rank 3 has `norm.weight`",
    ),
    "dtype": (
        {},
        {"model": lambda: TinyGPT().to(torch.bfloat16)},
        "parameter `position`: ranks 0-2 have float32, rank 3 has bfloat16",
    ),
    "frozen": (
        {},
        {"model": Frozen},
        "parameter `blocks.1.norm1.weight`: ranks 0-2 have requires_grad, rank 3 has no"
        " requires_grad",
    ),
    "tied": (
        {},
        {"model": TiedFrozenGPT},
        "parameter `position`: ranks 0-2 have requires_grad, rank 3 has no requires_grad",
    ),
    "buffer": (
        {"model": functools.partial(Buffered, 0.5)},
        {"model": TinyGPT},
        "buffer number 1: ranks 0-2 have `scale`, rank 3 has nothing more",
    ),
    "loss": (
        {},
        {"loss_fn": doubled_loss},
        f"loss function name: ranks 0-2 have {token_loss.__module__}.token_loss, rank 3 has"
        f" {__name__}.doubled_loss",
    ),
    "clipping": (
        {"max_grad_norm": 1.0},
        {"max_grad_norm": 2.0},
        "setting `max_grad_norm`: ranks 0-2 have 1.0, rank 3 has 2.0",
    ),
    "learning rate": (
        {"optimizer": functools.partial(_adamw, lr=1e-3)},
        {"optimizer": functools.partial(_adamw, lr=2e-3)},
        "optimizer `lr`: ranks 0-2 have 0.001, rank 3 has 0.002",
    ),
    "optimizer": (
        {"optimizer": functools.partial(_adamw, lr=1e-3)},
        {"optimizer": sgd},
        "optimizer class: ranks 0-2 have torch.optim.adamw.AdamW, rank 3 has torch.optim.sgd.SGD",
    ),
    "scheduler": (
        {},
        {"scheduler": lambda optimizer: ExponentialLR(optimizer, 0.9)},
        "setting `scheduler`: ranks 0-2 have none, rank 3 has one",
    ),
    "groups": (
        {"optimizer": functools.partial(_in_groups, first=2)},
        {"optimizer": functools.partial(_in_groups, first=3)},
        "parameter group 0: ranks 0-2 have 2 parameters, rank 3 has 3 parameters",
    ),
}


def _texts(plan: str, profile: ModelProfile, names: list[str]) -> dict[str, tuple[str, float]]:
    """The error of this rank in each case, and after how long."""
    results = {}
    for name in names:
        usual, odd, _ = GIVEN[name]
        given = {"model": TinyGPT, "loss_fn": token_loss, **usual}
        if dist.get_rank() == ODD:
            given |= odd
        began = time.monotonic()
        try:
            _apply(plan, profile, given)
        except RankMismatchError as error:
            results[name] = error.what, time.monotonic() - began
        else:
            results[name] = "no error", 0.0
    return results


def _apply(plan: str, profile: ModelProfile, given: dict[str, Any]) -> None:
    model: Callable[[], nn.Module] = given.pop("model")
    apply_plan(model(), Plan.parse(plan), profile=profile, cluster=cpu_ranks(4), **given)


@pytest.mark.dist
def test_the_first_thing_that_a_rank_has_otherwise_is_named_on_all_ranks(pool: Pool) -> None:
    profile = profile_of(CASES["gpt"], TinyGPT())
    results = pool.run(_texts, "dp_replicate=4", profile, list(GIVEN), world_size=4, timeout_s=60)
    for texts in results:
        for name, (_, _, wanted) in GIVEN.items():
            text, seconds = texts[name]
            assert text == wanted, name
            assert seconds < BOUND_S


@pytest.mark.dist
def test_stages_and_shards_are_compared_before_they_are_made(pool: Pool) -> None:
    profile = profile_of(CASES["gpt"], TinyGPT())
    names = ["depth", "frozen", "learning rate"]
    for plan in (HSDP, "pp=2 dp_replicate=2 schedule=1f1b stages=blocks.1 microbatches=2"):
        for texts in pool.run(_texts, plan, profile, names, world_size=4, timeout_s=60):
            assert {name: text for name, (text, _) in texts.items()} == {
                name: GIVEN[name][2] for name in names
            }


def _refused(profile: ModelProfile) -> tuple[str, float]:
    """The first rank is given a norm that is none."""
    given = {"max_grad_norm": 1.0 if dist.get_rank() else -1.0, "loss_fn": token_loss}
    began = time.monotonic()
    with pytest.raises(AdvisorError) as caught:
        _apply("dp_replicate=2", profile, {"model": TinyGPT, **given})
    return caught.value.what, time.monotonic() - began


@pytest.mark.dist
def test_a_setting_that_one_rank_refuses_is_said_on_the_others_at_once(pool: Pool) -> None:
    profile = profile_of(CASES["gpt"], TinyGPT())
    (first, _), (other, took_s) = pool.run(_refused, profile, world_size=2, timeout_s=30)
    assert other == f"rank 0 failed: InputError: {first}"
    assert took_s < BOUND_S


def _topics_differ() -> str:
    world = join_world()
    facts = {"a": ["1", "x"], "b": ["2"] if world.rank else ["3"]}
    others = {"c": ["4"] if world.rank != 1 else ["5"]}
    try:
        require_agreement(
            [Topic("letter", facts, "write the same"), Topic("other", others, "no")], world
        )
    except RankMismatchError as error:
        return str(error)
    return "no error"


@pytest.mark.dist
def test_the_first_topic_is_explained_and_the_others_are_listed(pool: Pool) -> None:
    for text in pool.run(_topics_differ, world_size=3):
        assert text == (
            "letter b: rank 0 has 3, ranks 1-2 have 2\n"
            "  they disagree on this too: other\n\n"
            "hint: write the same"
        )


def _parts_differ() -> str:
    """Ranks 0 and 1 have one stage, 2 and 3 another; rank 3 differs from rank 2."""
    world = join_world()
    stage = f"stage {world.rank // 2}"
    counts = ["4", "4", "7", "8"]
    topic = Topic("group", {"0": [f"{counts[world.rank]} parameters"]}, "no", part=stage)
    try:
        require_agreement([topic], world)
    except RankMismatchError as error:
        return error.what
    return "no error"


@pytest.mark.dist
def test_stages_are_compared_with_equal_stages_alone(pool: Pool) -> None:
    texts = pool.run(_parts_differ, world_size=4)
    assert texts == ["group 0: rank 2 has 7 parameters, rank 3 has 8 parameters"] * 4


def _batch_differs() -> list[str]:
    """Errors of a first step whose batches differ in structure on rank 1, and one whose lengths
    differ."""
    texts = []
    for change in (
        lambda tokens, targets: (tokens, targets.to(torch.int32)),
        lambda tokens, targets: (tokens, targets, targets),
        lambda tokens, targets: (tokens[:, :6], targets[:, :6]),
    ):
        case, _, parallel = parallelize("gpt", "dp_replicate=2")
        tokens, targets = local_rows(parallel, case.batch(8), 8)  # type: ignore[misc]
        batch = change(tokens, targets) if dist.get_rank() else (tokens, targets)
        try:
            parallel.train_step(batch)
        except RankMismatchError as error:
            texts.append(error.what)
        else:
            texts.append("no error")
    return texts


@pytest.mark.dist
def test_the_first_batches_must_have_the_same_structure_and_may_differ_in_length(
    pool: Pool,
) -> None:
    for texts in pool.run(_batch_differs, world_size=2):
        assert texts == [
            "element of the batch `element 1`: rank 0 has int64, rank 1 has int32",
            "element of the batch number 3: rank 0 has nothing more, rank 1 has `element 2`",
            "no error",
        ]


def _another_torch() -> str:
    with mock.patch.object(torch, "__version__", f"2.{dist.get_rank() // 2}.0"):
        try:
            require_agreement(
                [Topic("version", topics._versions(), "install the same")], join_world()
            )
        except RankMismatchError as error:
            return error.what
    return "no error"


@pytest.mark.dist
def test_versions_of_the_software_are_compared(pool: Pool) -> None:
    wanted = "version of torch: ranks 0-1 have 2.0.0, ranks 2-3 have 2.1.0"
    assert pool.run(_another_torch, world_size=4) == [wanted] * 4


def _other_threads() -> tuple[list[str], float]:
    """Warnings of each rank, and the loss of a step, where rank 1 has two threads."""
    before, said = torch.get_num_threads(), []
    logger = logging.getLogger("engines.runtime.rank_agreement")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        torch.set_num_threads(1 + dist.get_rank())
        case, _, parallel = parallelize("gpt", "dp_replicate=2")
        loss = parallel.train_step(local_rows(parallel, case.batch(8), 8))
    finally:
        torch.set_num_threads(before)
        logger.removeHandler(handler)
    return said, loss.item()


@pytest.mark.dist
def test_other_numbers_of_threads_are_warned_of_and_trained_with(pool: Pool) -> None:
    (said, loss), other = pool.run(_other_threads, world_size=2)
    assert said == [
        "threads of torch: rank 0 has 1, rank 1 has 2; all ranks wait for the one that computes"
        " with the fewest: set OMP_NUM_THREADS alike"
    ]
    assert other == ([], loss)


def test_values_of_buffers_that_rank_0_can_send_may_differ_others_may_not() -> None:
    same, sent = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    assert sent.running_mean is not None
    sent.running_mean.fill_(3.0)
    assert topics._buffers(same) == topics._buffers(sent)
    assert topics._buffers(Buffered(0.5)) != topics._buffers(Buffered(0.25))
    assert topics._buffers(Buffered(0.5)) == topics._buffers(Buffered(0.5))


def test_a_loss_is_known_by_its_code_and_not_by_its_place() -> None:
    def written(source: str) -> Any:
        names: dict[str, Any] = {}
        exec(source, names)  # noqa: S102 (two lambdas of this test)
        return names["loss"]

    first = written("loss = lambda x, y: (x - y).square().mean() * 0.5")
    moved = written("\n\nloss = lambda x, y: (x - y).square().mean() * 0.5")
    changed = written("loss = lambda x, y: (x - y).square().mean() * 0.25")
    assert topics._code_facts(first) == topics._code_facts(moved)
    assert topics._code_facts(first) != topics._code_facts(changed)
    assert topics._code_facts(functools.partial(first, y=1)) == topics._code_facts(first)
    assert "code" not in topics._code_facts(torch.nn.functional.mse_loss.__class__)
    assert topics._code_facts(nn.CrossEntropyLoss()) == topics._code_facts(nn.CrossEntropyLoss())


def test_one_rank_and_a_fake_world_have_nobody_to_agree_with() -> None:
    topic = Topic("letter", {"a": ["1"]}, "none")
    require_agreement([topic], join_world())
    with fake_world(1, 8, torch.device("cpu")) as world:
        assert isinstance(world, World)
        require_agreement([topic], world)
