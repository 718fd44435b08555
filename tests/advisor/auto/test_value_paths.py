"""Any model that trains in one process trains replicated and sharded, whatever its code looks at.

Stages and splits give the same, or are refused by the line that acts on values.
"""

from __future__ import annotations

import random
import warnings

import pytest
import torch

from advisor import auto_parallelize
from profiles.errors import InputError
from tests.engines.cases import cpu_ranks
from tests.engines.parity import gradient_error, local_rows, reference_loss, relative, state_error
from tests.engines.value_paths import CASES
from tests.nightly import half, nightly
from tests.workers import Pool

DATA = ("dp_replicate=2", "dp_shard=2")
MODEL = ("tp=2", "pp=2 microbatches=2")
ROWS, STEPS = 8, 3
TOLERANCE = 1e-5
# FSDP2 hooks modules and their state dicts; TorchScript's take no hooks.
NEVER_SHARDED = ("scripted-part",)
# Ranks of split layers draw from a generator that they share, and not from that of one process.
OTHER_DRAWS = ("layer-drop",)
REASONS = ("tests/engines/value_paths.py:", "(random)", "not supported on ScriptModules")


def _sgd(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def _difference(name: str, plan: str) -> float | str:
    """The largest difference from one process in losses, in gradients and in the parameters after
    some steps; or the reason why the plan is refused, with the line of code."""
    warnings.simplefilter("ignore")  # of torch, about sparse tensors and TorchScript
    case = CASES[name]
    torch.manual_seed(1)
    reference = case.build()
    torch.manual_seed(1)
    model = case.build()
    try:
        parallel = auto_parallelize(
            model,
            sample=case.batch(ROWS // 2),
            loss_fn=case.loss_fn,
            optimizer=_sgd,
            plan=plan,
            cluster=cpu_ranks(2),
            global_batch_size=ROWS,
            learns=False,
        )
    except InputError as error:
        return error.what
    optimizer = _sgd(list(reference.parameters()))
    worst = 0.0
    for step in range(STEPS):
        batch = case.batch(ROWS)
        optimizer.zero_grad()
        _seed(step)
        wanted = reference_loss(reference, case, batch)
        wanted.backward()
        _seed(step)
        loss = parallel.forward_backward(local_rows(parallel, batch, ROWS))
        worst = max(worst, relative(loss, wanted.detach()), gradient_error(parallel, reference))
        optimizer.step()
        parallel.optimizer.step()
        parallel.optimizer.zero_grad()
    return max(worst, state_error(parallel, reference))


def _seed(number: int) -> None:
    random.seed(number)
    torch.manual_seed(number)


SPLIT = [name for name in CASES if name not in OTHER_DRAWS]


@pytest.mark.dist
@pytest.mark.parametrize("name", half(CASES))
def test_replicas_and_shards_train_as_one_process_does(pool: Pool, name: str) -> None:
    for plan in DATA[: 1 if name in NEVER_SHARDED else None]:
        for difference in pool.run(_difference, name, plan, world_size=2):
            assert isinstance(difference, float), difference
            assert difference < TOLERANCE, plan


@pytest.mark.dist
@pytest.mark.parametrize("name", [*SPLIT[::3], *nightly(*SPLIT[1::3], *SPLIT[2::3])])
def test_stages_and_splits_give_the_same_or_name_the_line(pool: Pool, name: str) -> None:
    for plan in MODEL:
        for difference in pool.run(_difference, name, plan, world_size=2):
            if isinstance(difference, str):
                assert any(words in difference for words in REASONS), difference
            else:
                assert difference < TOLERANCE, plan
