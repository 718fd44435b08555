"""Each private or version-dependent name of torch, doing what we use it for."""

from __future__ import annotations

import gc
import inspect
import json
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from profiles import torch_compat as compat
from profiles.torch_compat.fakes import as_parameter, fake_tensors
from tests.workers import Pool


def test_fake_tensors_have_shapes_and_no_memory(capfd: pytest.CaptureFixture[str]) -> None:
    real = torch.ones(4, 8)
    with fake_tensors():
        huge = torch.empty(2**20, 2**20)
        assert (huge @ huge).shape == (2**20, 2**20)
        assert (real + torch.empty(8)).shape == (4, 8)
        with pytest.raises(RuntimeError):
            torch.empty(2, 3) @ torch.empty(2, 3)
    assert capfd.readouterr().err == ""


def test_real_tensors_are_computed_inside_of_a_fake_run() -> None:
    with fake_tensors(), compat.without_modes():
        assert (torch.arange(3) + 1).tolist() == [1, 2, 3]


def test_a_fake_tensor_is_made_like_a_real_one() -> None:
    """A leaf that gradients reach, as an `nn.Parameter` of torch's factories is."""
    real = nn.Parameter(torch.randn(3, 4).t())
    with fake_tensors() as make:
        fake = as_parameter(make(real, torch.bfloat16), requires_grad=True)
        assert isinstance(fake, nn.Parameter)
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, (1, 4), torch.bfloat16)
        assert fake.device.type == "cpu"
        (fake * 2).sum().backward()
        assert fake.grad is not None
        assert fake.grad.shape == real.shape
    assert real.grad is None


def test_values_of_fake_tensors_are_refused() -> None:
    with fake_tensors():
        for look in (torch.Tensor.item, torch.nonzero, bool):
            with pytest.raises(compat.data_dependent_errors()):
                look(torch.empty(()) if look is not torch.nonzero else torch.empty(3))


def test_operations_without_modes_are_real_under_fake_mode() -> None:
    with fake_tensors():
        with compat.without_modes():
            assert torch.arange(3).sum().item() == 3
        assert compat.is_fake(torch.empty(3))


def test_operators_that_read_values_are_known() -> None:
    aten, mask, numbers = torch.ops.aten, torch.tensor([True]), torch.tensor([0])
    assert compat.reads_values(aten._local_scalar_dense.default, [mask])
    assert compat.reads_values(aten.nonzero.default, [mask])
    assert compat.reads_values(aten.index.Tensor, [mask, [None, mask]])
    assert not compat.reads_values(aten.index.Tensor, [mask, [numbers]])
    assert not compat.reads_values(aten.relu.default, [mask])


def test_constants_may_be_read_under_fake_mode() -> None:
    with fake_tensors():
        assert not torch.tensor(0.5) < 0.1


def test_tensors_are_found_in_trees_and_replaced_there() -> None:
    one, two = torch.ones(1), torch.zeros(1)
    assert [id(t) for t in compat.tensors_in({"a": (one, 3), "b": [two]})] == [id(one), id(two)]
    mapped = compat.map_tensors(torch.neg, {"a": (one, "word")})
    assert mapped["a"][0].item() == -1
    assert mapped["a"][1] == "word"


def test_operators_know_whether_they_write_and_whether_they_view() -> None:
    aten = torch.ops.aten
    assert compat.is_mutable(aten.relu_.default)
    assert not compat.is_mutable(aten.relu.default)
    assert aten.view.default.is_view
    assert not aten.relu.default.is_view
    assert aten.mm.default.overloadpacket is aten.mm


def test_operators_that_this_torch_lacks_are_left_out() -> None:
    assert compat.aten_operators(("mm", "no_such_operator")) == (torch.ops.aten.mm.default,)


def test_tensors_that_share_memory_have_one_storage_object_until_it_goes() -> None:
    with fake_tensors():
        tensor = torch.empty(4, 4)
        view = tensor.t()
        storage = compat.storage_of(tensor)
        assert storage is compat.storage_of(view)
        key, gone = id(storage), []
        ref = weakref.ref(storage, gone.append)
        del storage, tensor
        assert id(compat.storage_of(view)) == key
        assert not gone
        del view
        gc.collect()
        assert gone == [ref]
    assert compat.storage_of(torch.ones(2, 2).to_sparse()) is None


def test_the_device_of_fake_and_real_tensors() -> None:
    assert compat.device_of(torch.empty(1, device="meta")).type == "meta"
    with fake_tensors():
        assert compat.device_of(torch.empty(1)).type == "cpu"
    assert str(compat.device_query()) == "prim.device.default"


def test_notes_stay_with_an_autograd_node() -> None:
    output = torch.ones(1, requires_grad=True) * 2
    compat.node_notes(output.grad_fn)["place"] = "here"
    gc.collect()
    assert compat.node_notes(output.grad_fn) == {"place": "here"}


def test_onednn_is_switched_off_and_on_again() -> None:
    before = torch._C._get_mkldnn_enabled()
    with compat.without_onednn():
        assert not torch._C._get_mkldnn_enabled()
    assert torch._C._get_mkldnn_enabled() == before


def test_views_through_which_gradients_flow() -> None:
    tensor = torch.ones(4, requires_grad=True) * 2
    assert compat.is_view(tensor[:2])
    assert not compat.is_view(tensor)
    assert not compat.is_view(torch.ones(4)[:2])
    assert not compat.is_view("text")


def test_batch_norms_of_every_dimension() -> None:
    assert all(compat.is_batch_norm(kind(2)) for kind in (nn.BatchNorm1d, nn.BatchNorm3d))
    assert not compat.is_batch_norm(nn.LayerNorm(2))


def test_the_switch_against_buffer_broadcasts_is_one_that_ddp_has() -> None:
    (name,) = compat.without_buffer_sync()
    assert name in inspect.signature(DistributedDataParallel.__init__).parameters


def test_versions_count_writes_in_place() -> None:
    tensor = torch.ones(2)
    before = compat.version_of(tensor)
    tensor.mul_(2)
    assert compat.version_of(tensor) == before + 1


class _Aliased(compat.TorchDispatchMode):
    """Takes an alias of each new tensor, below autograd."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        made = func(*args, **(kwargs or {}))
        self.alias = compat.alias_of(made)
        return made


def test_an_alias_counts_writes_to_what_it_is_of() -> None:
    with _Aliased() as mode:
        made = torch.ones(2, requires_grad=True) * 2
    alias, before = mode.alias, compat.version_of(mode.alias)
    made.add_(1)
    assert compat.version_of(alias) == before + 1
    assert torch.equal(alias, made)
    assert not alias.requires_grad


def test_the_arguments_that_a_call_writes_into() -> None:
    aten = torch.ops.aten
    one, two = torch.ones(2), torch.ones(2)
    assert compat.tensors_written(aten.add.Tensor, (one, two), {}) == []
    for args, kwargs, written in (
        ((one, two), {}, [one]),
        ((), {"self": two, "other": one}, [two]),
    ):
        actual = compat.tensors_written(aten.add_.Tensor, args, kwargs)
        assert [id(tensor) for tensor in actual] == [id(tensor) for tensor in written]
    lists = compat.tensors_written(aten._foreach_add_.List, ([one, two], [two, one]), {})
    assert [id(tensor) for tensor in lists] == [id(one), id(two)]


def _exchange() -> tuple[list[float], list[float], bytes]:
    rank = float(dist.get_rank())
    gathered, part = torch.empty(4), torch.empty(2)
    compat.all_gather_single(gathered, torch.tensor([rank, 10 + rank]))
    compat.reduce_scatter_single(part, torch.arange(4.0) + 100 * rank)
    store = compat.default_store()
    store.set(f"rank {dist.get_rank()}", "was here")
    return gathered.tolist(), part.tolist(), store.get(f"rank {1 - dist.get_rank()}")


@pytest.mark.dist
def test_ranks_gather_scatter_and_synchronise_through_the_store(pool: Pool) -> None:
    first, second = pool.run(_exchange, world_size=2)
    assert first == ([0, 10, 1, 11], [100, 102], b"was here")  # 0+100, 1+101
    assert second == ([0, 10, 1, 11], [104, 106], b"was here")


def _wait_in_vain() -> float:
    group = dist.new_group([0, 1])
    assert isinstance(group, dist.ProcessGroup)
    compat.bound_waits(group, timedelta(seconds=1))
    if dist.get_rank() == 1:
        dist.barrier()
        return 0.0
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="Timed out waiting 1000ms"):
        dist.all_reduce(torch.ones(1), group=group)
    took_s = time.monotonic() - began
    dist.barrier()
    return took_s


@pytest.mark.dist
def test_waits_of_a_group_are_bounded(pool: Pool) -> None:
    assert 0.9 < pool.run(_wait_in_vain, world_size=2, timeout_s=20)[0] < 5


def test_a_second_connection_sees_the_same_store_and_waits_independently() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5))
    line = compat.second_line(store)
    line.set_timeout(timedelta(milliseconds=50))
    line.set("there", "1")
    assert store.get("there") == b"1"
    with pytest.raises(dist.DistError):
        line.get("nowhere")
    assert store.timeout == timedelta(seconds=5)


def test_a_substituted_call_replaces_hooks_and_forward() -> None:
    layer, ran = nn.Linear(2, 2), []
    layer.register_forward_pre_hook(lambda module, args: ran.append("hook"))
    own = compat.whole_call(layer)
    vars(layer)[compat.CALL] = lambda x: ran.append("instead")
    layer(torch.ones(1, 2))
    assert ran == ["instead"]
    own(torch.ones(1, 2))
    assert ran == ["instead", "hook"]


def _first_rows() -> int:
    mesh = init_device_mesh("cpu", (2,))
    return compat.offsets_of_shard(distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]))[0]


@pytest.mark.dist
def test_a_shard_knows_its_first_row(pool: Pool) -> None:
    assert pool.run(_first_rows, world_size=2) == [0, 3]


def test_nodes_are_numbered_in_the_order_in_which_they_are_made() -> None:
    weight = torch.ones(3, requires_grad=True)
    doubled = weight * 2
    between = compat.next_sequence_number()
    total = doubled.sum()
    assert doubled.grad_fn is not None
    assert total.grad_fn is not None
    first, second = map(compat.sequence_number, (doubled.grad_fn, total.grad_fn))
    assert first < between <= second < compat.next_sequence_number()
    (leaf, _), *_ = doubled.grad_fn.next_functions
    assert leaf is not None
    assert compat.is_leaf_node(leaf)
    assert not compat.is_leaf_node(doubled.grad_fn)


def _messages_of_two_ranks() -> list[object]:
    group, other = dist.group.WORLD, 1 - dist.get_rank()
    assert group is not None
    counts = [compat.messages_of(group)]
    dist.all_reduce(torch.ones(1))
    counts.append(compat.messages_of(group))
    if other:
        dist.send(torch.ones(1), other)
    else:
        dist.recv(torch.ones(1), other)
    counts.append(compat.messages_of(group))
    dist.broadcast(torch.ones(1), 0)
    last = json.loads(compat.recorded_messages())["entries"][-1]
    return [counts[1] - counts[0], counts[2] - counts[1], last["profiling_name"]]


@pytest.mark.dist
def test_messages_of_a_group_are_counted_and_the_last_one_has_a_name(pool: Pool) -> None:
    assert pool.run(_messages_of_two_ranks, world_size=2) == [[1, 1, "gloo:broadcast"]] * 2
