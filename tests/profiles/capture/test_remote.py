"""Modules that torch.distributed.rpc placed on other processes: named, with what does the same.

No RPC is started: its threads would outlive the test. The objects are bare ones of its classes.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_rpc import PyRRef
from torch.distributed.nn.api.remote_module import RemoteModule

from profiles.capture.capture import capture
from profiles.errors import ModelError


class Recommender(nn.Module):
    """A table on a server, a layer here, as in PyTorch's tutorial on RPC with DDP."""

    def __init__(self, table: object) -> None:
        super().__init__()
        self.table = table
        self.layer = nn.Linear(8, 2)

    def forward(self, ids: Tensor) -> Tensor:
        raise AssertionError("a model of several processes is not run")


def test_a_remote_module_is_named_before_the_model_runs() -> None:
    remote = RemoteModule.__new__(RemoteModule)
    nn.Module.__init__(remote)
    with pytest.raises(ModelError) as caught:
        capture(Recommender(remote), torch.zeros(4, dtype=torch.long))
    assert caught.value.what.startswith("`table` is on another process, by torch.distributed.rpc")
    assert "`tp=2` splits large tables" in caught.value.hints[0]
    assert "servers=1" in caught.value.hints[1]


def test_references_to_remote_values_are_named_too() -> None:
    model = Recommender([PyRRef.__new__(PyRRef)])
    with pytest.raises(ModelError, match="`Recommender` is on another process"):
        capture(model, torch.zeros(4, dtype=torch.long))
