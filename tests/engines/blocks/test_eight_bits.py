"""`precision=fp8` beside torchao's own conversion of the same model in one process."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from advisor import auto_parallelize
from advisor.cost.load.casts import EAGER, cast_count, cast_elements
from advisor.cost.load.work import ProductLoad
from engines.blocks import eight_bits
from engines.parallel import ParallelModel
from engines.plan import Plan
from profiles.capture.batch.call import Batch
from profiles.errors import PlanError
from profiles.model.work import ProductKind
from tests.engines.cases import Case, TinyGPT, cpu_ranks, token_loss
from tests.engines.parity import gradient_error, local_rows, reference_loss, relative, sgd
from tests.workers import Pool

pytest.importorskip("torchao", reason="pip install 'parallel-advisor[fp8]'")
ROWS = 8


def _equal_rows(rows: int) -> Batch:
    """The same sequence again and again: all ranks cast with the scales of the whole batch."""
    ids = torch.randint(61, (1, 13), generator=torch.Generator().manual_seed(5)).expand(rows, -1)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _equal_points(rows: int) -> Batch:
    point = torch.randn(1, 128, generator=torch.Generator().manual_seed(5)).expand(rows, -1)
    return point.contiguous(), torch.zeros(rows, dtype=torch.long)


class Wide(nn.Module):
    """A column and a row, as a block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


GPT = Case(lambda: TinyGPT(width=64), _equal_rows, token_loss)
BLOCKS = Case(lambda: nn.Sequential(*(Wide() for _ in range(3)), nn.Linear(128, 9)), _equal_points)


def by_torchao(model: nn.Module) -> nn.Module:
    """All but the head, as torchao converts it; inputs are cast as autocast does, on CUDA alone
    there."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(
        model,
        config=Float8LinearConfig(emulate=True),
        module_filter_fn=lambda layer, _: layer.out_features >= 64,
    )
    for module in model.modules():
        if type(module).__name__ == "Float8Linear":
            module.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
    return model


def planned(case: Case, model: nn.Module, plan: str) -> ParallelModel:
    return auto_parallelize(
        copy.deepcopy(model),
        sample=case.batch(4),
        loss_fn=case.loss_fn,
        optimizer=sgd,
        plan=plan or None,
        precision="fp8",
        cluster=cpu_ranks(Plan.parse(plan).world_size),
        global_batch_size=ROWS,
        learns=False,
    )


def backward(model: nn.Module, case: Case) -> float:
    with torch.autocast("cpu", torch.bfloat16):
        loss = reference_loss(model, case, case.batch(ROWS))
    loss.backward()
    return loss.item()


def differences(case: Case, plan: str) -> tuple[float, float, float]:
    """Gradients beside torchao's, beside bf16's; losses beside torchao's in three steps."""
    torch.manual_seed(1)
    plain = case.build()
    parallel, reference = planned(case, plain, plan), by_torchao(copy.deepcopy(plain))
    own = local_rows(parallel, case.batch(ROWS), ROWS)
    parallel.forward_backward(own)
    backward(plain, case)
    backward(reference, case)
    first = gradient_error(parallel, reference), gradient_error(parallel, plain)
    optimizer, losses = sgd(list(reference.parameters())), []
    parallel.optimizer.zero_grad()
    for _ in range(3):
        optimizer.zero_grad()
        losses.append((backward(reference, case), parallel.train_step(own).item()))
        optimizer.step()
    return *first, max(abs(ours / theirs - 1) for theirs, ours in losses)


@pytest.mark.parametrize("plan", ["", "recompute=full", "recompute=selective"])
def test_on_one_device_it_is_torchaos(plan: str) -> None:
    gradient, beside_bf16, loss = differences(GPT, plan)
    assert gradient < 1e-6
    assert beside_bf16 > 0.01
    assert loss < 1e-6


@pytest.mark.slow
@pytest.mark.nightly
def test_compiled_blocks_multiply_in_8_bits() -> None:
    """Rounded to 16 bits in other places, as a compiler does: a rounding to 8 bits may differ."""
    gradient, beside_bf16, loss = differences(GPT, "compile=true")
    assert gradient < 0.2
    assert beside_bf16 > 0.01
    assert loss < 0.01


@pytest.mark.dist
@pytest.mark.parametrize(
    "plan",
    [
        "dp_replicate=2",
        "pp=2 microbatches=2 schedule=1f1b",
        "pp=2 microbatches=4 schedule=zbv stages=blocks.0,blocks.1,blocks.2",
    ],
)
def test_ranks_train_like_one_process(pool: Pool, plan: str) -> None:
    for gradient, beside_bf16, loss in pool.run(_of_gpt, plan, world_size=2):
        assert gradient < 1e-2
        assert beside_bf16 > 0.05
        assert loss < 1e-5


def _of_gpt(plan: str) -> tuple[float, float, float]:
    return differences(GPT, plan)


@pytest.mark.dist
def test_sharded_it_is_fsdp_of_torchaos(pool: Pool) -> None:
    """Parameters are gathered in 16 bits, and cast to 8 from those."""
    assert max(pool.run(_beside_fsdp, world_size=2)) < 1e-6


def _beside_fsdp() -> float:
    torch.manual_seed(1)
    plain = BLOCKS.build()
    parallel, reference = planned(BLOCKS, plain, "dp_shard=2"), by_torchao(copy.deepcopy(plain))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in reference.children():
        fully_shard(block, mp_policy=policy)
    fully_shard(reference, mp_policy=policy)
    points, classes = local_rows(parallel, BLOCKS.batch(ROWS), ROWS)
    F.cross_entropy(reference(points).float(), classes).backward()
    parallel.forward_backward((points, classes))
    whole = {n: p.grad.full_tensor() for n, p in reference.named_parameters()}  # type: ignore[union-attr]
    got = parallel.full_gradients()
    return max(relative(got[name], whole[name]) for name in whole)


class Halves(nn.Module):
    """A layer as two ranks have it: torchao's, of half of the outputs or of the inputs each."""

    def __init__(self, layer: nn.Linear, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.parts = nn.ModuleList()
        for weight in layer.weight.detach().chunk(2, dim):
            part = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            part.weight = nn.Parameter(weight.clone())
            self.parts.append(part)
        self.bias = nn.Parameter(layer.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.dim == 0:
            outputs = torch.cat([part(x) for part in self.parts], -1)
        else:
            halves = zip(self.parts, x.chunk(2, -1), strict=True)
            outputs = sum(part(half) for part, half in halves)
        return outputs + self.bias.to(outputs.dtype)


@pytest.mark.dist
def test_each_tp_rank_scales_its_part_of_a_layer(pool: Pool) -> None:
    """Losses are those of halves to the bit. Gradients of the split head's inputs are summed in 16
    bits, after which a rounding to 8 may differ."""
    for losses, gradients in pool.run(_beside_halves, world_size=2):
        assert losses["halves"] == losses["ours"] != losses["whole"]
        assert gradients < 0.1


def _beside_halves() -> tuple[dict[str, float], float]:
    torch.manual_seed(1)
    plain = BLOCKS.build()
    halves, whole = copy.deepcopy(plain), by_torchao(copy.deepcopy(plain))
    parallel = planned(BLOCKS, plain, "tp=2")
    for block in list(halves.children())[:3]:
        block.up, block.down = Halves(block.up, 0), Halves(block.down, 1)
    losses = {
        "halves": backward(by_torchao(halves), BLOCKS),
        "whole": backward(whole, BLOCKS),
        "ours": parallel.forward_backward(BLOCKS.batch(ROWS)).item(),
    }
    got, worst = parallel.full_gradients(), 0.0
    for name in ("2.up", "2.down"):  # the last block's
        layer = halves.get_submodule(name)
        assert isinstance(layer, Halves)
        parts = [part.get_parameter("weight").grad for part in layer.parts]
        wanted = torch.cat([part for part in parts if part is not None], layer.dim)
        worst = max(worst, relative(got[f"{name}.weight"], wanted))
    return losses, worst


class _Counted(TorchDispatchMode):
    """Kernels of all calls, and the bytes of their operands and results."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.nbytes = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func is not torch.ops.aten.detach.default:
            tensors = [t for t in tree_leaves((args, result)) if isinstance(t, Tensor)]
            self.kernels += 1
            self.nbytes += sum(t.numel() * t.element_size() for t in tensors if t.numel() > 1)
        return result


def test_casts_are_the_kernels_that_are_priced() -> None:
    """Those of a layer without the products that a plain one has too."""
    plain = nn.Linear(256, 512, bias=False, dtype=torch.bfloat16)
    layer = by_torchao(nn.Sequential(copy.deepcopy(plain)))
    x = torch.randn(1024, 256, dtype=torch.bfloat16, requires_grad=True)
    load = ProductLoad(ProductKind.LINEAR, 1024, 512, 256, 1, 0, 0, 0, 0)
    counts: list[tuple[int, int]] = []
    for module in (plain, layer):
        with _Counted() as forward:
            y = module(x)
        gradient = torch.randn_like(y)
        with _Counted() as backward:
            torch.autograd.grad(y, [x, *module.parameters()], gradient)
        counts += [(forward.kernels, forward.nbytes), (backward.kernels, backward.nbytes)]
    for number, is_forward in enumerate((True, False)):
        (kernels, nbytes), (own_kernels, own_nbytes) = counts[number], counts[2 + number]
        casts = EAGER.kernels * cast_count(load, forward=is_forward)
        assert own_kernels - kernels == casts
        # An emulated product reads factors of two bytes, as a plain one does.
        elements = cast_elements(load, forward=is_forward)
        assert own_nbytes - nbytes == EAGER.moved_bytes * elements


def test_heads_routers_and_narrow_layers_stay_in_16_bits() -> None:
    torch.manual_seed(1)
    model = planned(GPT, GPT.build(), "").unwrap()
    kinds = {n: type(m).__name__ for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert {name for name, kind in kinds.items() if kind == "Linear"} == {"head"}
    narrow = Case(lambda: TinyGPT(width=32), _equal_rows, token_loss)
    with pytest.raises(PlanError, match="a multiple of 16, 64 at least; this model has none"):
        planned(narrow, narrow.build(), "")


def test_without_torchao_the_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight_bits, "find_spec", lambda _: None)
    with pytest.raises(PlanError, match="torchao, which is not installed") as caught:
        planned(GPT, GPT.build(), "")
    assert any("pip install torchao" in hint for hint in caught.value.hints)
    assert importlib.util.find_spec("torchao") is not None
