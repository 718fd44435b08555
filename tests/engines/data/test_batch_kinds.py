"""Batches as people have them train under every plan as in one process."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from advisor import auto_parallelize
from profiles.capture.batch.call import call_model, loss_of
from profiles.errors import AdvisorError, BatchError
from tests.engines.cases import CASES, cpu_ranks
from tests.engines.data.batch_kinds import KINDS, Kind
from tests.engines.parity import relative
from tests.workers import Pool

WHOLE, UNEVEN = (8, 8), (8, 7, 3, 1, 5)
"""Rows of the batches of a training; the sample has four, for each of two ranks."""


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _trained(kind: Kind, plan: str, rows: tuple[int, ...]) -> float:
    """Largest difference of parameters and of the last losses from one process."""
    torch.manual_seed(1)
    reference = kind.build()
    parallel = auto_parallelize(
        copy.deepcopy(reference),
        sample=kind.batch(4),
        loss_fn=kind.loss_fn,
        plan=plan,
        optimizer=sgd,
        cluster=cpu_ranks(dist.get_world_size()),
        learns=False,
        timeout_s=50,
    )
    optimizer = sgd(reference.parameters())
    batches = [kind.batch(count) for count in rows]
    for batch, own in zip(batches, parallel.shard(batches), strict=True):
        seen, loss = parallel.eval_step(own), parallel.train_step(own)
        output = call_model(reference, batch, has_target=kind.loss_fn is not None)
        expected = loss_of(output, batch, kind.loss_fn)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
    got = parallel.state_dict()
    errors = [relative(got[name], value) for name, value in reference.state_dict().items()]
    return max(*errors, relative(loss, expected.detach()), relative(seen, expected.detach()))


def _differences(names: list[str], plan: str, rows: tuple[int, ...]) -> dict[str, float | str]:
    """The difference of each kind, or the reason why it was refused."""
    logging.disable(logging.WARNING)
    differences: dict[str, float | str] = {}
    for name in names:
        try:
            differences[name] = _trained(KINDS[name], plan, rows)
        except AdvisorError as error:
            differences[name] = error.what
    logging.disable(logging.NOTSET)
    return differences


OTHERS = {"nested tensor", "BatchEncoding", "ModelOutput"}
PLANS = ("dp_replicate=2", "dp_shard=2", "tp=2", "pp=2 schedule=1f1b microbatches=2")
TWICE = ("dp_replicate=2 accumulation=2", "dp_shard=2 accumulation=2", "tp=2 accumulation=2")


@pytest.mark.dist
@pytest.mark.parametrize("plan", PLANS)
def test_every_kind_of_batch_trains_as_in_one_process(pool: Pool, plan: str) -> None:
    names = [name for name in KINDS if name not in OTHERS]
    for differences in pool.run(_differences, names, plan, WHOLE, world_size=2, timeout_s=90):
        if "pp" in plan:  # its stages know the sizes of what they get
            refusal = differences.pop("images in a list")
            assert "microbatches differ in their shapes" in str(refusal)
        assert all(isinstance(d, float) and d < 1e-5 for d in differences.values()), differences


def _applied() -> str:
    kind = KINDS["images in a list"]
    try:
        auto_parallelize(
            kind.build(),
            sample=kind.batch(8),
            loss_fn=kind.loss_fn,
            plan="pp=2 schedule=1f1b microbatches=2",
            cluster=cpu_ranks(2),
            learns=False,
        )
    except AdvisorError as error:
        return error.what
    return ""


@pytest.mark.dist
def test_stages_are_refused_before_a_step_where_samples_differ_in_size(pool: Pool) -> None:
    for text in pool.run(_applied, world_size=2):
        assert "microbatches differ in their shapes" in text


@pytest.mark.dist
@pytest.mark.parametrize(
    "plan", [*TWICE, "pp=2 schedule=1f1b microbatches=4", "pp=2 schedule=naive"]
)
def test_uneven_batches_of_every_size_average_truly(pool: Pool, plan: str) -> None:
    names = ["options", "time first", "padded labels"]
    for differences in pool.run(_differences, names, plan, UNEVEN, world_size=2, timeout_s=60):
        assert all(isinstance(d, float) and d < 1e-5 for d in differences.values()), differences


@pytest.mark.dist
def test_stages_with_replicas_take_further_rounds_together(pool: Pool) -> None:
    plan = "pp=2 dp_replicate=2 schedule=gpipe microbatches=2"
    # Of 7 and 5 rows the first replica has one more than its microbatches can share evenly.
    names = ["tuple", "padded labels"]
    rows = (8, 7, 5, 3)
    for differences in pool.run(_differences, names, plan, rows, world_size=4, timeout_s=60):
        assert all(isinstance(d, float) and d < 1e-5 for d in differences.values()), differences


@pytest.mark.dist
@pytest.mark.parametrize("name", ["BatchEncoding", "ModelOutput"])
def test_batches_of_transformers_train_as_they_are(pool: Pool, name: str) -> None:
    pytest.importorskip("transformers")
    for differences in pool.run(_differences, [name], "dp_shard=2", WHOLE, world_size=2):
        assert all(isinstance(d, float) and d < 1e-5 for d in differences.values()), differences


def alone(name: str, **options: Any) -> Any:
    kind = KINDS[name]
    options = {"sample": kind.batch(4), "loss_fn": kind.loss_fn, **options}
    return auto_parallelize(kind.build(), cluster=cpu_ranks(1), learns=False, **options)


def test_a_nested_tensor_is_refused_with_what_to_give_instead() -> None:
    with pytest.raises(AdvisorError, match="`element 0` is a nested tensor") as caught:
        alone("nested tensor")
    assert "a list of tensors, an element a sample" in str(caught.value)


def test_what_has_rows_is_said_where_it_is_not_plain(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    alone("tuple")
    assert not caplog.text
    alone("time first")
    assert "rows: element 1; rows along dimension 1: element 0 (inferred" in caplog.text
    caplog.clear()
    alone("time first", batch_dims=(1, 0))
    assert not caplog.text


def test_a_loader_of_larger_batches_than_planned_is_refused_before_the_first_step() -> None:
    parallel = alone("tuple")
    data = TensorDataset(*KINDS["tuple"].batch(20))
    with pytest.raises(
        BatchError, match="the loader yields 10 rows, the plan's global batch has 4"
    ):
        parallel.shard(DataLoader(data, batch_size=10))
    assert len(list(parallel.shard(DataLoader(data, batch_size=4)))) == 5


def _unsharded(rows: int) -> str:
    """The message of a rank that takes global batches as they come."""
    kind, messages = KINDS["tuple"], list[str]()
    parallel = auto_parallelize(
        kind.build(),
        sample=kind.batch(4),
        loss_fn=kind.loss_fn,
        plan="dp_replicate=2",
        cluster=cpu_ranks(2),
        learns=False,
    )
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("engines.data.microbatches")
    log.addHandler(handler)
    try:
        parallel.train_step(kind.batch(rows))
    except BatchError as error:
        messages.append(str(error))
    finally:
        log.removeHandler(handler)
    return "\n".join(messages)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (4, "all 2 replicas were given the same 4 rows: a loader of global batches goes through"),
        (8, "no loader was given to `parallel.shard`"),
    ],
)
def test_a_loader_that_was_not_sharded_is_named(pool: Pool, rows: int, message: str) -> None:
    first, _ = pool.run(_unsharded, rows, world_size=2)
    assert message in first


def _of_one_script(plan: Any) -> list[float]:
    """Losses of a script that says no batch size: a sample of 8 rows, a loader of 16 on 2 ranks."""
    case = CASES["gpt"]
    torch.manual_seed(0)
    parallel = auto_parallelize(
        case.build(),
        sample=case.batch(8),
        loss_fn=case.loss_fn,
        optimizer="sgd",
        plan=plan,
        cluster=cpu_ranks(2),
        learns=False,
    )
    loader = DataLoader(TensorDataset(*case.batch(40)), batch_size=16, shuffle=True)
    return [parallel.train_step(batch).item() for batch in parallel.shard(loader)]


@pytest.mark.dist
@pytest.mark.parametrize("plan", [{"dp_shard": 2}, "tp=2", "cp=2", "pp=2"])
def test_one_script_trains_alike_under_every_plan(pool: Pool, plan: Any) -> None:
    decided = pool.run(_of_one_script, None, world_size=2)[0]
    assert len(decided) == 3  # the last batch has half of the rows
    for losses in pool.run(_of_one_script, plan, world_size=2):
        assert losses == pytest.approx(decided, rel=1e-5)
