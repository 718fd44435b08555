"""One bit that flips in the parameters of one rank is found, and no healthy training is stopped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engines.data.replica_checksums import checksums
from engines.parallel import ParallelModel
from engines.plan import Plan
from profiles.errors import InputError, RankMismatchError
from tests.engines.cases import CASES
from tests.engines.parity import HSDP, alone, local_rows, parallelize
from tests.workers import Pool

ROWS = 8
NAME = "blocks.1.mlp.0.weight"
PIPELINE = "pp=2 dp_replicate=2 schedule=1f1b microbatches=2 stages=blocks.1"


def _flip_bit(tensor: Tensor, *, element: int, bit: int) -> None:
    """Flip one bit of a tensor's memory."""
    size = tensor.element_size()
    octets = tensor.detach().view(-1)[element : element + 1].view(torch.uint8)
    assert 0 <= bit < 8 * size
    octets[bit // 8] ^= 1 << (bit % 8)


def _step(parallel: ParallelModel) -> None:
    parallel.train_step(local_rows(parallel, CASES["gpt"].batch(ROWS), ROWS))


def _flipped(parallel: ParallelModel, rank: int) -> None:
    if dist.get_rank() == rank:
        parameter = parallel.module.get_parameter(NAME)
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        _flip_bit(local, element=7, bit=0)  # the last digit


def _found_at(plan: str, rank: int, every: int) -> tuple[int, str]:
    """The step that is refused, and the error, where a bit flips after the first one."""
    _, _, parallel = parallelize("gpt", plan, check_replicas_every=every)
    _step(parallel)
    _flipped(parallel, rank)
    for _ in range(5):
        try:
            _step(parallel)
        except RankMismatchError as error:
            assert parallel.full_gradients() == {}
            return parallel.step, error.what
    return parallel.step, "no error"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("plan", "rank", "said"),
    [
        ("dp_replicate=3", 1, r"ranks 0, 2 have checksum \w{16}, rank 1 has checksum \w{16}"),
        (HSDP, 3, r"rank 1 has checksum \w{16}, rank 3 has checksum \w{16}"),
        (PIPELINE, 2, r"rank 2 has checksum \w{16}, rank 3 has checksum \w{16}"),
    ],
)
def test_a_flipped_bit_is_found_and_the_ranks_and_the_parameter_are_named(
    pool: Pool, plan: str, rank: int, said: str
) -> None:
    size = Plan.parse(plan).world_size
    for step, text in pool.run(_found_at, plan, rank, 2, world_size=size, timeout_s=40):
        assert step == 2
        assert re.fullmatch(f"replicas have come apart: `{NAME}`: {said}", text)


@pytest.mark.dist
def test_without_comparisons_nobody_notices(pool: Pool) -> None:
    assert pool.run(_found_at, "dp_replicate=2", 1, 0, world_size=2) == [(6, "no error")] * 2


def _saved(folder: str) -> tuple[str, list[str]]:
    _, _, parallel = parallelize("gpt", "dp_replicate=2")
    _step(parallel)
    _flipped(parallel, 1)
    try:
        parallel.save(folder)
    except RankMismatchError as error:
        return error.what, [path.name for path in Path(folder).glob("*")]
    return "no error", []


@pytest.mark.dist
def test_replicas_that_differ_are_not_saved(pool: Pool, tmp_path: Path) -> None:
    for text, files in pool.run(_saved, str(tmp_path), world_size=2):
        assert text.startswith(f"replicas have come apart: `{NAME}`: rank 0 has checksum")
        assert files == []


def _healthy(plan: str, case: str) -> int:
    _, _, parallel = parallelize(case, plan, check_replicas_every=1, max_grad_norm=0.5)
    batch = local_rows(parallel, CASES[case].batch(ROWS), ROWS)
    for _ in range(4):
        parallel.train_step(batch)
    return parallel.step


@pytest.mark.dist
@pytest.mark.parametrize(
    ("plan", "case"),
    [
        ("dp_replicate=4", "tied-frozen-unused"),
        ("dp_replicate=4 precision=bf16", "gpt"),
        ("dp_replicate=4", "resnet-batch-norm"),
        (f"{HSDP} accumulation=2", "gpt"),
        (PIPELINE, "tied-frozen-unused"),
        ("dp_replicate=4 updates=local sync_every=3", "gpt"),
    ],
)
def test_healthy_replicas_are_the_same_after_every_step(pool: Pool, plan: str, case: str) -> None:
    assert pool.run(_healthy, plan, case, world_size=4, timeout_s=40) == [4] * 4


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8]
)
def test_every_single_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(5, 3).mul(10).to(dtype)
    before = checksums([tensor], torch.device("cpu"))
    for element in (0, 7, 14):
        for bit in range(8 * tensor.element_size()):
            _flip_bit(tensor, element=element, bit=bit)
            assert not torch.equal(checksums([tensor], torch.device("cpu")), before)
            _flip_bit(tensor, element=element, bit=bit)
    assert torch.equal(checksums([tensor], torch.device("cpu")), before)


def test_a_checksum_is_that_of_the_values_wherever_they_lie() -> None:
    image = torch.randn(2, 3, 4, 5)
    lying = image.to(memory_format=torch.channels_last)
    several = checksums([image, lying, torch.view_as_complex(torch.randn(3, 2))], image.device)
    assert several[0] == several[1]
    assert several.dtype == torch.int64


def test_a_number_of_steps_below_zero_is_refused() -> None:
    with pytest.raises(InputError, match="compared every -1 steps"):
        alone("gpt", check_replicas_every=-1)
