"""Gloo groups get new connections, and whatever holds them goes on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from engines.runtime.failures import close_all_connections
from profiles.torch_compat import register_fake_groups
from profiles.torch_compat.gloo import is_reconnectable, reconnect_groups
from tests.workers import Pool


def _after_reconnections() -> list[tuple[float, float, float]]:
    """Sums over both ranks, in the job's group, in a pair's and by messages, after each time."""
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    seen = []
    for number in range(3):
        close_all_connections()
        with pytest.raises(RuntimeError, match=r"gloo/transport|pair closure"):
            dist.all_reduce(torch.ones(1))
        reconnect_groups(number, timeout_s=30)
        whole, own, sent = torch.ones(1), torch.ones(1), torch.full((1,), float(rank))
        dist.all_reduce(whole)
        dist.all_reduce(own, group=pair)
        if rank == 0:
            dist.recv(sent, src=1, group=pair)
        else:
            dist.send(sent, dst=0, group=pair)
        dist.barrier()
        seen.append((whole.item(), own.item(), sent.item()))
    return seen


@pytest.mark.dist
def test_groups_send_again_after_each_reconnection(pool: Pool) -> None:
    for seen in pool.run(_after_reconnections, world_size=2):
        assert seen == [(2.0, 2.0, 1.0)] * 3


def _ddp_reduces() -> float:
    model = nn.Linear(1, 1, bias=False)
    runner = DistributedDataParallel(model)
    close_all_connections()
    reconnect_groups(1, timeout_s=30)
    runner(torch.full((1, 1), float(dist.get_rank()))).sum().backward()
    assert model.weight.grad is not None
    return float(model.weight.grad)


@pytest.mark.dist
def test_ddp_averages_over_new_connections(pool: Pool) -> None:
    assert pool.run(_ddp_reduces, world_size=2) == [0.5, 0.5]


def _what_is_reconnectable() -> tuple[bool, bool]:
    gloo = is_reconnectable()
    register_fake_groups()
    dist.new_group(list(range(dist.get_world_size())), backend="fake")
    return gloo, is_reconnectable()


@pytest.mark.dist
def test_only_gloo_is_reconnectable(pool: Pool) -> None:
    assert pool.run(_what_is_reconnectable, world_size=2) == [(True, False)] * 2
