"""What DDP would let pass in silence, and is told here."""

from __future__ import annotations

import copy

import pytest
import torch

from profiles.errors import ModelError
from tests.engines.parity import local_rows, parallelize
from tests.workers import Pool


def _call_the_model_itself() -> tuple[str, bool]:
    case, _, parallel = parallelize("gpt", "dp_replicate=2")
    tokens, _ = local_rows(parallel, case.batch(4), 4)
    try:
        parallel.module(tokens)
        said = "nothing"
    except ModelError as error:
        said = error.what
    copy.deepcopy(parallel.module)(tokens)  # its own master
    with torch.no_grad():
        unsharded = parallel.module(tokens)
    return said, torch.equal(unsharded, parallel(tokens))


@pytest.mark.dist
def test_training_the_users_own_module_is_refused_as_it_would_exchange_nothing(pool: Pool) -> None:
    for said, looks_the_same in pool.run(_call_the_model_itself, world_size=2):
        assert said == "the model itself was called: its backward would not exchange gradients"
        assert looks_the_same  # without gradients there is nothing to exchange
