"""Layout of every tensor of a model under a plan: the one description of whole and parts.

A parameter is held by the stages that use it; the ranks of the tp axis, or the ep axis, may each
have a slice of it; and FSDP2 cuts what is left into shards. `whole` puts it together from the
inside out, `part` cuts it from the outside in. Gradients and optimizer states lie as their
parameters do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from engines.runtime.mesh import Axis, Mesh
from engines.state.shard_spec import PlacedTensor, placed, placed_slice
from engines.state.slices import Slice

MOST_DIMS = 16  # of a buffer


class Stages(Protocol):
    """The layout of stages that lie on different ranks.

    Attributes:
        owners: positions on the pp axis that hold a parameter, ascending, by its first name.
        buffer_owners: the position whose copy of a buffer counts, by any of its names.
    """

    owners: Mapping[str, Sequence[int]]
    buffer_owners: Mapping[str, int]


class LayerSplit(Protocol):
    """The layout of layers that are split over the tp axis.

    Attributes:
        slices: how a split parameter lies, by its first name.
        partial: first names of whole parameters whose gradients are parts of a sum over the axis.
    """

    @property
    def slices(self) -> Mapping[str, Slice]: ...

    @property
    def partial(self) -> frozenset[str]: ...


class ExpertSplit(Protocol):
    """The layout of experts that are sharded over the ep axis.

    Attributes:
        slices: how a parameter of experts lies, by its first name.
    """

    @property
    def slices(self) -> Mapping[str, Slice]: ...


class Layout:
    """The layout of a model; made before a plan changes it, with the whole shapes.

    Tied parameters are known under all of their names.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, *, device: torch.device) -> None:
        first = {parameter: name for name, parameter in model.named_parameters()}
        every = model.named_parameters(remove_duplicate=False)
        self._first = {name: first[parameter] for name, parameter in every}
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        self._mesh = mesh
        self.device = device
        self._stages: Stages | None = None
        self._slices: Mapping[str, Slice] = {}
        self._experts: Mapping[str, Slice] = {}

    def lay_out(
        self, *, stages: Stages | None, split: LayerSplit | None, experts: ExpertSplit | None = None
    ) -> None:
        """Note the splits of the model."""
        self._stages = stages
        self._slices = split.slices if split is not None else {}
        self._experts = experts.slices if experts is not None else {}

    @property
    def has_stages(self) -> bool:
        """True if other ranks hold parameters that this one has not."""
        return self._stages is not None

    @property
    def is_partial(self) -> bool:
        """True if ranks hold other parameters than the model's: those of stages, or slices. Shards
        of FSDP2 have the whole shapes."""
        return self.has_stages or bool(self._slices) or bool(self._experts)

    @property
    def is_uneven(self) -> bool:
        """True if ranks of the tp axis hold parts of different sizes."""
        return any(
            self._shapes[name][cut.dim] // cut.packs % self._mesh.tp.size
            for name, cut in self._slices.items()
        )

    def shape(self, name: str) -> torch.Size | None:
        """The shape of the whole parameter; None if there is no such parameter."""
        return self._shapes.get(self._first.get(name, name))

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of the parameter `name`."""
        return self._dtypes[self._first.get(name, name)]

    def cut_along(self, name: str) -> str:
        """The axis that a parameter is cut over: "tp", "ep", or "" where it is not."""
        cut = self._cut(name)
        return "" if cut is None else "ep" if cut[1] is self._mesh.ep else "tp"

    def holds(self, name: str) -> bool:
        """True if this rank has a part of the parameter `name`; of buffers it has all."""
        if self._stages is None or name not in self._first:
            return True
        return self._mesh.pp.position in self._stages.owners[self._first[name]]

    def owns(self, name: str) -> bool:
        """True if this rank's stage owns the parameter or buffer: its copy counts."""
        return self._source(name) == self._mesh.pp.position

    def counts(self, name: str, tensor: Tensor) -> bool:
        """True if this rank counts its part of a gradient: over all ranks each element once."""
        mesh, cut = self._mesh, self._cut(name)
        is_sharded = isinstance(tensor, DTensor)
        copy = mesh.copy if is_sharded else mesh.replicas.position
        if cut is not None and cut[1] is mesh.ep:
            copy = 0 if is_sharded else mesh.expert_copies.position
        has_own_part = (cut is not None and cut[1] is mesh.tp) or mesh.tp.is_first
        return self.owns(name) and not copy and has_own_part

    def wholes(
        self, tensors: Mapping[str, Tensor | None], names: Iterable[str]
    ) -> Iterator[tuple[str, Tensor | None]]:
        """Every tensor of `names` whole, on every rank; all ranks call it with the same names.

        Args:
            tensors: of this rank, laid out as the parameters or buffers of these names; None where
                it has none, say no gradient.
        """
        names = list(names)
        owned = [self.owns(name) and tensors.get(name) is not None for name in names]
        has = torch.tensor(owned, dtype=torch.float32).to(self.device)
        if self._mesh.pp.group is not None:
            dist.all_reduce(has, group=self._mesh.pp.group)
        for name, there in zip(names, has.tolist(), strict=True):
            yield name, self._whole(name, tensors.get(name)) if there else None

    def part(self, name: str, whole: Tensor, *, like: Tensor) -> Tensor:
        """This rank's part of `whole`, which every rank has; laid out as `like`."""
        cut = self._cut(name)
        if cut is not None:
            how, axis = cut
            whole = how.part(whole, rank=axis.position, size=axis.size)
        if isinstance(like, DTensor):
            mesh, placements = like.device_mesh, like.placements
            whole = whole.detach().to(self.device)
            shard = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            return shard.to(like.device)
        return whole

    def placed(self, name: str, tensor: Tensor) -> PlacedTensor:
        """The chunks of `tensor`, the parameter `name` or a state of it, for saving and loading."""
        cut, shape = self._cut(name), self.shape(name)
        if cut is None or shape is None or tensor.dim() != len(shape):
            return placed(tensor)
        how, axis = cut
        return placed_slice(tensor, how, shape=shape, rank=axis.position, size=axis.size)

    def _whole(self, name: str, tensor: Tensor | None) -> Tensor:
        """Put together on the stage that owns it, then sent to the others."""
        whole: Tensor | None = None
        if self.owns(name):
            assert tensor is not None
            whole = tensor.detach().to(self.device)  # the mesh may not reach the host
            if isinstance(whole, DTensor):
                whole = whole.full_tensor()
            cut = self._cut(name)
            if cut is not None:
                how, along = cut
                whole = how.gather(whole, group=along.group)
            if whole.is_sparse:  # the gradient of an embedding; collectives send dense ones
                whole = whole.to_dense()
            whole = whole.clone(memory_format=torch.contiguous_format)
        axis = self._mesh.pp
        if axis.group is None:
            assert whole is not None
            return whole
        source = axis.ranks[self._source(name)]
        if self._first.get(name, name) not in self._shapes:
            whole = self._of_one_shape(whole, tensor, source)
        if whole is None:
            first = self._first.get(name, name)
            whole = torch.empty(self._shapes[first], dtype=self._dtypes[first], device=self.device)
        dist.broadcast(whole, src=source, group=axis.group)
        return whole

    def _of_one_shape(self, whole: Tensor | None, own: Tensor | None, source: int) -> Tensor:
        """A buffer that has the shape of its owner's: forwards may change it (observers of ranges
        find out how many channels there are)."""
        assert own is not None  # every rank has every buffer
        sizes = torch.full((MOST_DIMS,), -1, device=self.device)
        if whole is not None:
            sizes[: whole.dim()] = torch.tensor(whole.shape)
        dist.broadcast(sizes, src=source, group=self._mesh.pp.group)
        if whole is not None:
            return whole
        shape = [size for size in sizes.tolist() if size >= 0]
        return torch.empty(shape, dtype=own.dtype, device=self.device)

    def _cut(self, name: str) -> tuple[Slice, Axis] | None:
        """The slice of a parameter, and the axis that it is cut over."""
        first = self._first.get(name, name)
        if first in self._experts:
            return self._experts[first], self._mesh.ep
        return (self._slices[first], self._mesh.tp) if first in self._slices else None

    def _source(self, name: str) -> int:
        """Position on the pp axis of the stage that owns a parameter or buffer."""
        if self._stages is None:
            return 0
        first = self._first.get(name)
        if first is None:
            return self._stages.buffer_owners.get(name, 0)
        return self._stages.owners[first][0]
