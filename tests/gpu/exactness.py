"""Loss, gradients and updates under a plan on the device, beside plain torch on the CPU.

One process here, two in `tests.gpu.ranks`. Bounds are those by which `advise verify` judges
(`engines.parallel.parity.TOLERANCES`): fp32 with TF32 off, and wider in bf16, fp16 and fp8.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec

import torch
from torch import Tensor

from advisor.inputs.bundled.gpt import GPT, GPTConfig, loss
from engines.apply import apply_plan
from engines.parallel import ParallelModel
from engines.parallel.parity import TOLERANCES, largest_difference
from engines.plan import OffloadTo, Plan, Precision
from engines.runtime.world import World
from engines.tensor.proposal import propose_styles
from profiles.capture.batch.call import Batch
from profiles.capture.capture import capture
from profiles.model.profile import Numerics
from tests.engines.cases import CASES, Case, cpu_ranks
from tests.engines.parity import local_rows, reference_loss, sgd
from tests.gpu import case
from tests.gpu.results import Row, Unit
from tests.gpu.setting import LeftOutError, Setting

ROWS, STEPS = 8, 3
_CONFIG = GPTConfig(vocab_size=512, context=64, num_layers=3, num_heads=4, width=256)
# The same on a CPU in a moment.
_SMALL_CONFIG = GPTConfig(vocab_size=64, context=8, num_layers=2, num_heads=2, width=16)


def _tokens(config: GPTConfig, rows: int) -> Batch:
    draw = torch.Generator().manual_seed(rows)
    ids = torch.randint(config.vocab_size, (rows, config.context + 1), generator=draw)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _gpt(config: GPTConfig) -> Case:
    return Case(lambda: GPT(config), functools.partial(_tokens, config), loss)


MODELS = {**CASES, "gpt": _gpt(_CONFIG), "gpt, small": _gpt(_SMALL_CONFIG)}
PLANS: tuple[tuple[str, str], ...] = (
    ("gpt", ""),
    ("gpt", "accumulation=2"),
    ("gpt", "recompute=full"),
    ("gpt", "recompute=selective accumulation=2"),
    ("gpt", "loss_chunks=4"),
    ("gpt", "precision=bf16"),
    ("gpt", "precision=bf16 recompute=full loss_chunks=4"),
    ("gpt", "precision=fp16"),
    ("gpt", "precision=fp8"),
    ("gpt", "precision=fp8 compile=true recompute=full"),
    ("gpt", "zero=3 precision=fp8"),
    ("gpt", "zero=3 precision=fp16"),
    ("gpt", "offload=optimizer"),
    ("gpt", "offload=activations"),
    ("gpt", "offload=optimizer,activations accumulation=2"),
    ("gpt", "offload=optimizer,activations offload_to=disk"),
    ("gpt", "zero=3"),
    ("gpt", "zero=3 accumulation=2 recompute=full"),
    ("gpt", "zero=3 precision=bf16"),
    ("gpt", "zero=3 offload=states"),
    ("gpt", "zero=3 offload=states precision=bf16 accumulation=2"),
    ("gpt", "zero=3 offload=states offload_to=disk"),
    ("gpt", "zero=1 accumulation=2"),
    ("gpt", "zero=2 accumulation=2"),
    ("gpt", "compile=true"),
    ("gpt", "compile=true recompute=full precision=bf16"),
    ("resnet-batch-norm", ""),  # in two parts its statistics are others
    ("resnet-group-norm", "recompute=full"),
    ("lstm", ""),
    ("loss-inside", "precision=bf16"),
    ("tied-frozen-unused", "zero=3"),
)
SMALL_PLANS = (("gpt, small", "zero=3 accumulation=2 loss_chunks=2"),)


def cases(*, is_small: bool) -> list[case.Case]:
    return [
        case.Case(
            f"{name}: {settings or 'fp32'}",
            functools.partial(_run, name, settings),
            limit_s=120.0,  # a compiler
            is_small=is_small,
        )
        for name, settings in (SMALL_PLANS if is_small else PLANS)
    ]


def _run(name: str, settings: str, setting: Setting) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        yield from compared(name, settings, setting.device, folder=folder)


def compared(
    name: str, settings: str, device: torch.device, *, folder: str | None = None
) -> list[Row]:
    """The errors of this rank; all ranks of the plan call it.

    Args:
        folder: for what a plan keeps on disk.
    """
    subject, plan = MODELS[name], Plan.parse(settings)
    if plan.precision is Precision.FP8 and find_spec("torchao") is None:
        raise LeftOutError("torchao is not installed")
    torch.manual_seed(1)
    reference = subject.build()
    model = copy.deepcopy(reference)
    sample = subject.batch(2)
    numerics = tuple(Numerics) if plan.precision is not Precision.FP32 else (Numerics.AS_BUILT,)
    profile = capture(model, sample, loss_fn=subject.loss_fn, numerics=numerics)
    if plan.tp > 1:
        proposal = propose_styles(
            model,
            sample,
            size=plan.tp,
            profile=profile,
            has_target=subject.loss_fn is not None,
            by_tokens=plan.sequence_parallel,
        )
        plan = plan.model_copy(update={"tensor_styles": proposal.styles})
    parallel = apply_plan(
        model,
        plan,
        profile=profile,
        cluster=cpu_ranks(plan.world_size),
        loss_fn=subject.loss_fn,
        optimizer=sgd,
        sample=sample,
        world=World(0, 1, device, timeout_s=60.0) if plan.world_size == 1 else None,
        offload_folder=folder if plan.offload_to is OffloadTo.DISK else None,
    )
    if parallel.loss_scaler.is_on:
        parallel.loss_scaler.scale = 256.0  # nothing overflows, and no step is left out
    bound = TOLERANCES[getattr(torch, plan.precision.product_dtype)].value
    own = [p for p in reference.parameters() if p.requires_grad]
    optimizer = sgd(own)
    rows = []

    def error(term: str, got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
        worst = largest_difference(got, wanted)
        value = worst.value if worst.value == worst.value else float("inf")
        rows.append(
            Row(
                term=term,
                unit=Unit.ERROR,
                measured=min(value, 1e30),
                limit=bound,
                note=f"`{worst.name}`" if worst.name else "",
            )
        )

    batch = subject.batch(ROWS)
    expected = reference_loss(reference, subject, batch)
    expected.backward()  # type: ignore[no-untyped-call]
    got = parallel.forward_backward(_part(parallel, batch))
    error("loss", {"": got.detach().cpu()}, {"": expected.detach()})
    wanted = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    error("gradients", {n: g.cpu() for n, g in parallel.full_gradients().items()}, wanted)
    parallel.optimizer.zero_grad()
    for _ in range(STEPS):
        parallel.train_step(_part(parallel, batch))
        optimizer.zero_grad()
        reference_loss(reference, subject, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    after = {n: t.cpu() for n, t in parallel.state_dict().items() if t.is_floating_point()}
    states = {n: t for n, t in reference.state_dict().items() if t.is_floating_point()}
    error(f"parameters after {STEPS} steps", after, states)
    return rows


def _part(parallel: ParallelModel, batch: Batch) -> Batch:
    return local_rows(parallel, batch, ROWS)
