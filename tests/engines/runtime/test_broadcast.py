from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engines.runtime.broadcast import send_from_first, start_broadcast
from tests.workers import Pool


def _mixed() -> list[Tensor]:
    """Sizes that leave what follows on no boundary of a larger dtype, and a tensor with strides."""
    return [
        torch.tensor([True, False, True]),
        torch.tensor([1.5, -2.0, 3.25], dtype=torch.float16),
        torch.tensor([2**53 + 1, -7]),
        torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).T,
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor([1 + 2j], dtype=torch.complex128),
        torch.empty(0),
        torch.tensor([255, 1, 0], dtype=torch.uint8),
    ]


def _sent(small: bool) -> bool:
    wanted = _mixed()
    rank = torch.distributed.get_rank()
    got = wanted if rank == 0 else [torch.zeros_like(tensor) for tensor in wanted]
    device = torch.device("cpu")
    if small:  # a message for each
        for tensor in got:
            send_from_first([tensor], device)
    else:
        send_from_first(got, device)
    return all(torch.equal(*pair) for pair in zip(got, _mixed(), strict=True))


@pytest.mark.dist
@pytest.mark.parametrize("small", [True, False])
def test_tensors_of_all_dtypes_arrive_bit_for_bit_in_one_message(pool: Pool, small: bool) -> None:
    assert pool.run(_sent, small, world_size=2) == [True, True]


def _sent_as_it_was() -> list[float]:
    tensor = torch.tensor([float(torch.distributed.get_rank() + 1)])
    finish = start_broadcast([tensor], torch.device("cpu"), source=1)
    tensor += 10.0
    finish()
    return [float(value) for value in tensor]


@pytest.mark.dist
def test_a_broadcast_has_the_values_of_its_start_and_leaves_the_source_alone(pool: Pool) -> None:
    assert pool.run(_sent_as_it_was, world_size=2) == [[2.0], [12.0]]
