"""Mistakes that DDP would ignore silently, and that are errors here."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engines.data import ddp
from profiles.errors import ModelError
from tests.engines.cases import CASES, Case
from tests.engines.parity import gradient_error, local_rows, parallelize, reference_loss, spread
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


class Depthwise(nn.Module):
    """A convolution whose weight has a dimension of size 1 in the middle, on channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, 64, 1)
        self.mix = nn.Conv2d(64, 64, 7, padding=3, groups=64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x).contiguous(memory_format=torch.channels_last)
        logits: Tensor = self.head(self.mix(x).mean((2, 3)))
        return logits


class NormTwice(nn.Module):
    """A norm inside of a checkpoint of the older kind and outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.head = nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda y: y + self.inner(self.norm(y)), self.norm(x), use_reentrant=True)
        logits: Tensor = self.head(x[:, -1])
        return logits


def _gradients_of(case: Case, plan: str) -> float:
    """Warnings are errors on the ranks."""
    reference, parallel = spread(case, plan)
    batch = case.batch(4)
    for _ in range(2):
        reference.zero_grad()
        parallel.optimizer.zero_grad()
        reference_loss(reference, case, batch).backward()  # type: ignore[no-untyped-call]
        parallel.forward_backward(local_rows(parallel, batch, 4))
    return gradient_error(parallel, reference)


@pytest.mark.dist
def test_strides_of_size_one_dimensions_cause_no_warning(pool: Pool) -> None:
    case = Case(Depthwise, CASES["resnet-group-norm"].batch)
    assert max(pool.run(_gradients_of, case, "dp_replicate=2", world_size=2)) < 1e-5


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2"])
def test_a_norm_inside_of_a_reentrant_checkpoint_and_outside_has_one_gradient(
    pool: Pool, plan: str
) -> None:
    case = Case(NormTwice, CASES["lstm"].batch, F.cross_entropy)
    assert max(pool.run(_gradients_of, case, plan, world_size=2)) < 1e-5


def test_a_made_up_reduction_of_gpu_gradients_says_on_which_gpu_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch refuses results on devices that a future was not made for."""
    made: list[list[torch.device]] = []

    class Future:
        def __init__(self, *, devices: list[torch.device]) -> None:
            made.append(devices)

        def set_result(self, result: object) -> None:
            pass

    monkeypatch.setattr(torch.futures, "Future", Future)
    monkeypatch.setattr(ddp.dist, "all_reduce", lambda *_, **__: None)
    for device in ("cuda:1", "cpu"):
        buffer = SimpleNamespace(device=torch.device(device))
        ddp.all_reduced(None, SimpleNamespace(buffer=lambda buffer=buffer: buffer))
    assert made == [[torch.device("cuda:1")], []]
