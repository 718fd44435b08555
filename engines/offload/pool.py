"""Memory outside the device: main memory, or files that are mapped into it.

Files are mapped by `torch.UntypedStorage.from_file`. Each loses its name before it has a size, so
that its space is freed when the process ends, however it ends. Written pages stay in the page cache
until the kernel writes them to the disk; under pressure it does so first.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import weakref
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from engines.data.replicas import local_part
from engines.plan import OffloadTo, Plan
from engines.runtime.failures import abort_groups
from profiles.errors import InputError

Folder = str | os.PathLike[str]


class Allocation:
    """Some bytes of a pool, freed with the last reference to it."""

    __slots__ = ("__weakref__", "storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage


class OffloadPool:
    """Allocates memory outside `device`, and counts it.

    Attributes:
        is_pinned: page-locked, so that an accelerator copies on its own.
        used_bytes, peak_bytes: allocated now, and at most.
        is_training: a training uses it: the other ranks wait for one that finds no space, so that
            its groups are aborted.
    """

    def __init__(self, device: torch.device, folder: Folder | None = None) -> None:
        self.is_pinned = device.type != "cpu" and folder is None
        self.used_bytes = 0
        self.peak_bytes = 0
        self.is_training = False
        self._folder = Path(folder) if folder is not None else None
        self._free: defaultdict[int, list[torch.UntypedStorage]] = defaultdict(list)
        self._permanent: list[Allocation] = []

    @property
    def is_disk(self) -> bool:
        return self._folder is not None

    def allocate(self, size_bytes: int) -> Allocation:
        """Uninitialised memory of `size_bytes`.

        Raises:
            InputError: the folder's disk has no space for them.
        """
        free = self._free[size_bytes]
        if free:
            storage = free.pop()
        elif self._folder is None:
            made = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self.is_pinned)
            storage = made.untyped_storage()
        else:
            try:
                storage = _mapped(self._folder, size_bytes)
            except InputError as error:
                if self.is_training:
                    abort_groups(error)
                raise
        self.used_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        place = Allocation(storage)
        weakref.finalize(place, self._free_storage, storage).atexit = False
        return place

    def tensor_like(self, tensor: Tensor) -> Tensor:
        """A tensor in this pool, never freed, of the dtype, shape and strides of `tensor`, or of
        this rank's part of it."""
        tensor = local_part(tensor)
        place = self.allocate(tensor.numel() * tensor.element_size())
        dense = torch.empty_like(tensor, device="meta").stride()
        result = torch.empty(0, dtype=tensor.dtype)
        result.set_(place.storage, 0, tensor.shape, dense)
        self._permanent.append(place)
        return result

    def _free_storage(self, storage: torch.UntypedStorage) -> None:
        self.used_bytes -= storage.nbytes()
        if self.is_disk:  # of main memory torch's allocators allocate care
            self._free[storage.nbytes()].append(storage)


def steps_offloaded(plan: Plan) -> bool:
    """True if a rank's pool has optimizer states; those of shards in main memory are FSDP2's."""
    in_files = plan.offload_to is OffloadTo.DISK
    return plan.offload.optimizer or (plan.offload.states and in_files)


def open_pool(plan: Plan, device: torch.device, folder: Folder | None) -> OffloadPool | None:
    """The pool of this rank's states or activations; None if the plan moves neither, or FSDP2 keeps
    them in main memory.

    Raises:
        InputError: the plan says disk and no folder is named, or it cannot be written to.
    """
    if not steps_offloaded(plan) and not plan.offload.activations:
        return None
    if plan.offload_to is OffloadTo.HOST:
        return OffloadPool(device)
    if folder is None:
        raise InputError(
            "offload_to=disk: no folder is named for the files",
            where=f"plan: {plan}",
            hints=["give `offload_folder=...`, a folder on a fast local disk"],
        )
    if sys.platform != "linux":
        raise InputError(
            f"offload_to=disk maps files without names as Linux does, this is {sys.platform}",
            where=f"plan: {plan}",
            hints=["set offload_to=host"],
        )
    try:
        tempfile.TemporaryFile(prefix=_PREFIX, dir=folder).close()
    except OSError as error:
        raise InputError(
            f"`{os.fspath(folder)}` is no folder that can be written to: {error.strerror}",
            where="offload_folder",
            hints=["make it, on a fast local disk", "or keep nothing there: offload_to=host"],
        ) from error
    return OffloadPool(device, folder)


_PREFIX = "offload-"


def _mapped(folder: Path, size_bytes: int) -> torch.UntypedStorage:
    try:
        handle, name = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
    except OSError as error:
        raise _disk_full(folder, size_bytes, error) from error
    try:
        os.unlink(name)
        # Without it a full disk ends the process by a signal.
        os.posix_fallocate(handle, 0, max(size_bytes, 1))
        path = f"/proc/self/fd/{handle}"
        storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=size_bytes)
        assert isinstance(storage, torch.UntypedStorage)  # torch's annotation is of its base
        return storage
    except (OSError, RuntimeError) as error:
        raise _disk_full(folder, size_bytes, error) from error
    finally:
        os.close(handle)


def _disk_full(folder: Path, size_bytes: int, error: OSError | RuntimeError) -> InputError:
    cause = (isinstance(error, OSError) and error.strerror) or str(error).partition("\n")[0]
    try:
        free = f"{shutil.disk_usage(folder).free:,} bytes"
    except OSError:
        free = "nothing"
    return InputError(
        f"no room for a file of {size_bytes:,} bytes in `{folder}`, where {free} are free: {cause}",
        where="offload_folder",
        hints=["name a folder on a larger disk", "or keep less there: offload=none"],
    )
