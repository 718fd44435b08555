"""Blocks that would recompute something else are refused before the first step."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, layer_norm

from engines.blocks.trial import BlockTrial, run_twice
from profiles.errors import PlanError
from tests.contract.watch import LiveBytes
from tests.engines.cases import CASES, Case, profile_of
from tests.engines.parity import gradient_error, reference_loss, spread

CALLS = {"all": 0}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 6)

    def scale(self) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.out(x)) * torch.tensor(self.scale())


class OfFile(Block):
    def scale(self) -> float:
        CALLS["all"] += 1
        return float(CALLS["all"])


class OfClass(Block):
    calls = 0

    def scale(self) -> float:
        OfClass.calls += 1
        return float(OfClass.calls)


class OfClosure(Block):
    def __init__(self) -> None:
        super().__init__()
        self.tick = _ticking()

    def scale(self) -> float:
        return self.tick()


class BeforeNorm(OfFile):
    """Gives the same whatever the scale; its gradient is another."""

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(self.out(x) * self.scale(), (6,), eps=1e-12)


class OfIterator(Block):
    def __init__(self) -> None:
        super().__init__()
        self.rates: Iterator[int] = itertools.count(1)

    def scale(self) -> float:
        return float(next(self.rates))


def _ticking() -> Callable[[], float]:
    count = 0.0

    def tick() -> float:
        nonlocal count
        count += 1
        return count

    return tick


class OfItself(Block):
    """Its state is its own, and is put back."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def scale(self) -> float:
        self.calls += 1
        return float(self.calls)


class DrawsOfPython(Block):
    def scale(self) -> float:
        return random.random()


class DrawsOfNumpy(Block):
    def scale(self) -> float:
        return float(np.random.randn())


class Counted(nn.Module):
    """Its blocks repeat; code around them counts in a global."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        CALLS["all"] += 1
        logits: Tensor = self.head(self.blocks(x)) * CALLS["all"]
        return logits


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, 6), torch.randint(0, 3, (rows,))


def _seed() -> None:
    random.seed(1)
    np.random.seed(1)


def _case(kind: type[nn.Module]) -> Case:
    return Case(lambda: nn.Sequential(kind(), kind(), nn.Linear(6, 3)), _batch)


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("kind", [OfFile, OfClass, OfClosure, OfIterator, BeforeNorm])
def test_state_that_no_module_leads_to_is_refused_under_recompute(
    kind: type[nn.Module], recompute: str
) -> None:
    with pytest.raises(PlanError, match="`0` computes something else when it runs again") as error:
        spread(_case(kind), f"recompute={recompute}")
    assert "or recompute=none" in str(error.value)


@pytest.mark.parametrize("kind", [Block, OfItself])
def test_blocks_that_repeat_are_recomputed(kind: type[nn.Module]) -> None:
    case = _case(kind)
    reference, parallel = spread(case, "recompute=full")
    reference_loss(reference, case, case.batch(4)).backward()
    parallel.forward_backward(case.batch(4))
    assert gradient_error(parallel, reference) < 1e-6


@pytest.mark.parametrize(
    ("kind", "draws"), [(Block, False), (DrawsOfPython, True), (DrawsOfNumpy, True)]
)
def test_generators_are_put_back_where_blocks_draw_from_them(
    kind: type[nn.Module], draws: bool
) -> None:
    """To look at Python's and numpy's takes longer than all else around a block."""
    case = _case(kind)
    model, batch = case.build(), case.batch(4)
    trial = run_twice(model, batch, cross_entropy, profile=profile_of(case, model))
    assert trial == BlockTrial(unlike="", draws=draws)
    reference, parallel = spread(case, "recompute=full")
    _seed()
    reference_loss(reference, case, batch).backward()
    _seed()
    parallel.forward_backward(batch)
    assert gradient_error(parallel, reference) < 1e-6


class Rated(Block):
    rate: float | Tensor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.out(x)) * self.rate


class Growing(nn.Module):
    """Raises a number on its block from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Rated() for _ in range(2)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for number in (0.5, 1.5):
            for block in self.blocks:
                assert isinstance(block, Rated)
                block.rate = number
                x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Gated(Growing):
    """Puts on its blocks what it makes of the rows."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            assert isinstance(block, Rated)
            block.rate = x.mean(1, keepdim=True)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class OfFileGated(Gated):
    """The same, by way of a global."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OfRows() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        ROWS["mean"] = x.mean(1, keepdim=True)
        return super().forward(x)


ROWS: dict[str, Tensor] = {}


class OfRows(Rated):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.out(x)) * ROWS["mean"]


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_what_the_model_puts_on_a_block_for_a_call_is_refused_where_it_is_compiled(
    recompute: str,
) -> None:
    """Graphs of torch.compile keep it, but where it leaves a checkpoint to torch itself."""
    with pytest.raises(PlanError, match="compile cannot follow how") as error:
        spread(Case(Growing, _batch), f"recompute={recompute} compile=true")
    assert "set compile=false" in str(error.value)


@pytest.mark.parametrize(
    ("kind", "compiled", "unlike"),
    [(Gated, False, ""), (Gated, True, "blocks.0"), (OfFileGated, False, "blocks.0")],
)
def test_blocks_are_tried_beside_another_microbatch_where_one_overlaps(
    kind: type[nn.Module], compiled: bool, unlike: str
) -> None:
    case = Case(kind, _batch)
    model, profile = case.build(), profile_of(case, case.build())

    def tried(overlaps: bool) -> str:
        rows = case.batch(2)
        return run_twice(
            model, rows, cross_entropy, profile=profile, compiled=compiled, overlaps=overlaps
        ).unlike

    assert (tried(False), tried(True)) == ("", unlike)


def test_a_model_that_cannot_be_tried_may_draw() -> None:
    case = _case(Block)
    model = case.build()
    wrong = (torch.randn(4, 5), torch.zeros(4, dtype=torch.long))
    assert run_twice(model, wrong, cross_entropy, profile=profile_of(case, model)).draws


def test_state_of_code_around_blocks_is_no_reason() -> None:
    spread(Case(Counted, _batch), "recompute=full")


def test_nothing_of_a_trial_lives_on() -> None:
    """Nodes of softmax and of relu save their own outputs."""
    case = CASES["gpt"]
    model, batch = case.build(), case.batch(4)
    profile = profile_of(case, model)
    watched = LiveBytes([*model.parameters(), *model.buffers(), *batch])
    before = watched.now()
    with watched:
        assert not run_twice(model, batch, case.loss_fn, profile=profile).unlike
    gc.collect()
    assert watched.now() == before
