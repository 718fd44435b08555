"""Adapters on a frozen base, and parts that learn in another dtype, beside one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from engines.plan import Plan
from tests.engines.cases import Case, TinyGPT, token_loss
from tests.engines.parity import gradient_error, local_rows, reference_loss, spread
from tests.nightly import nightly
from tests.workers import Pool

TOLERANCE = 1e-5


class LoRALinear(nn.Module):
    """A frozen layer and two narrow ones beside it in a dtype of their own (arXiv:2106.09685)."""

    def __init__(self, base: nn.Linear, *, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        aside = self.up(self.down(x.to(self.down.weight.dtype)))
        out: Tensor = self.base(x) + aside.to(x.dtype)
        return out


def adapted(base: torch.dtype, adapters: torch.dtype) -> TinyGPT:
    model = TinyGPT().to(base).requires_grad_(False)
    for block in model.blocks:
        block.qkv = LoRALinear(block.qkv, rank=4, dtype=adapters)
        block.out = LoRALinear(block.out, rank=4, dtype=adapters)
    return model


class MixedNorms(TinyGPT):
    """Its norms learn in fp64, all else in fp32."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.double()
                module.register_forward_pre_hook(lambda module, args: args[0].double())
                module.register_forward_hook(lambda module, args, output: output.float())


class Read(TinyGPT):
    """Blocks read parameters in fp64 that no module of their own computes with: of a list, and a
    layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            width = block.qkv.in_features
            block.shifts = nn.ParameterList([nn.Parameter(torch.ones(width, dtype=torch.float64))])
            block.lent = nn.Linear(width, 1, bias=False, dtype=torch.float64)
            block.register_forward_hook(_shifted)


def _shifted(block: nn.Module, args: object, output: Tensor) -> Tensor:
    shift = block.shifts[0] * block.lent.weight[0]  # type: ignore[index, union-attr]
    shifted: Tensor = output + shift.float()
    return shifted


def tokens(rows: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 61, (rows, 13), generator=torch.Generator().manual_seed(rows))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def in_fp32(logits: Tensor, target: Tensor) -> Tensor:
    return token_loss(logits.float(), target)


# fp64 beside fp32 rounds no more than fp32 alone, so that differences are those of the plan.
CASES = {
    "adapters in fp64": Case(lambda: adapted(torch.float32, torch.float64), tokens, token_loss),
    "norms in fp64": Case(MixedNorms, tokens, token_loss),
    "read in fp64": Case(Read, tokens, token_loss),
    "base in bf16": Case(lambda: adapted(torch.bfloat16, torch.float32), tokens, in_fp32),
}


def trained(name: str, plan: str) -> tuple[float, float, set[str]]:
    """Differences of loss and gradients after a step, and dtypes of trained shards."""
    case = CASES[name]
    reference, parallel = spread(case, plan)
    batch = case.batch(4)
    for _ in range(2):  # with the first step's update
        expected = reference_loss(reference, case, batch)
        expected.backward()
        loss = parallel.forward_backward(local_rows(parallel, batch, 4))
        error = gradient_error(parallel, reference)
        parallel.optimizer.step()
        torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.05).step()
        parallel.optimizer.zero_grad()
        reference.zero_grad()
    dtypes = {str(p.dtype) for p in parallel.module.parameters() if p.requires_grad}
    return abs(loss.item() - expected.item()) / expected.item(), error, dtypes


PLANS = [
    ("adapters in fp64", "dp_shard=2"),
    ("adapters in fp64", "dp_replicate=2 zero=1 accumulation=2"),
    ("norms in fp64", "dp_shard=2"),
    ("read in fp64", "dp_shard=2"),
    *nightly(
        ("adapters in fp64", "dp_replicate=2"),
        ("adapters in fp64", "dp_replicate=2 zero=2"),
        ("adapters in fp64", "dp_shard=2 recompute=full"),
        ("adapters in fp64", "dp_replicate=2 dp_shard=2"),
        ("adapters in fp64", "pp=2 schedule=1f1b microbatches=2 stages=blocks.1"),
        ("adapters in fp64", "pp=2 dp_shard=2 schedule=gpipe microbatches=2 stages=blocks.1"),
        ("norms in fp64", "dp_replicate=2 zero=2 accumulation=2"),
        ("norms in fp64", "dp_shard=2 recompute=full"),
    ),
]


@pytest.mark.dist
@pytest.mark.parametrize(("name", "plan"), PLANS)
def test_parts_of_two_dtypes_train_as_one_process(pool: Pool, name: str, plan: str) -> None:
    for loss, gradient, dtypes in pool.run(
        trained, name, plan, world_size=Plan.parse(plan).world_size
    ):
        assert loss < TOLERANCE
        assert gradient < TOLERANCE
        assert "torch.float64" in dtypes


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_shard=2 precision=bf16"])
def test_adapters_in_fp32_learn_on_a_sharded_base_in_bf16(pool: Pool, plan: str) -> None:
    for loss, gradient, dtypes in pool.run(trained, "base in bf16", plan, world_size=2):
        assert loss < 0.01
        assert gradient < 0.05
        assert dtypes == {"torch.float32"}
