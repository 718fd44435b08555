"""Weights in files that other programs know: loaded and written by every rank's part of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from engines.data.finite import FiniteGuard
from engines.data.fsdp import release
from engines.optional.async_updates.exchange import UpdateExchange
from engines.runtime.failures import all_ranks_succeed
from engines.runtime.world import World, rank_error_context, require_same
from engines.state.export import WeightsFolder, bytes_of, forms_of, write_config
from engines.state.layout import Layout
from engines.state.own_writes import OwnWrites
from engines.state.stored import Form
from engines.state.weights import left_out_names, matched, open_files, storable_names

PathLike = str | os.PathLike[str]


class PretrainedMixin:
    """Safetensors files and Hugging Face's folders of them: a part of ParallelModel."""

    module: nn.Module
    _exchange: UpdateExchange
    _finite: FiniteGuard
    _job: World
    _layout: Layout
    _own_writes: OwnWrites

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Around loading parameters, the same on all ranks."""
        with self._exchange.loading():
            yield
        self._own_writes.note()

    @rank_error_context("loading the weights")
    def load_pretrained(self, path: PathLike, *, strict: bool = True, cast: bool = False) -> None:
        """Read weights from safetensors files or a checkpoint, under any plan; all ranks call it.

        A rank reads the slices that it keeps, and has one of them besides its own in main memory.
        Optimizer states, steps and random states stay as they are; `load` reads those too.

        Args:
            path: a safetensors file, the index of several (`model.safetensors.index.json`), the
                folder of either, or what `parallel.save` wrote.
            strict: False leaves parameters without stored values as they are, and ignores tensors
                that the model has not.
            cast: allow dtypes that round, say float32 in the files and bfloat16 here.

        Raises:
            ModelError, FileError: names the tensors that are missing, unexpected, of another shape
                or dtype; or the file that cannot be read (pickles never are). Nothing was changed.
        """
        release(self.module)
        module, layout, timeout_s = self.module, self._layout, self._job.timeout_s
        with all_ranks_succeed("comparing the weights", timeout_s=timeout_s):
            stored = open_files(Path(path))
            called, forms = storable_names(module), self._forms()
            names = matched(
                {name: forms[name] for name in called},
                stored,
                called=called,
                local=[name for name in called if layout.holds(name)],
                left_out=left_out_names(module),
                what=f"`{path}`",
                strict=strict,
                cast=cast,
            )
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        with (
            self._loading(),
            all_ranks_succeed("reading the weights", timeout_s=timeout_s),
            torch.no_grad(),
        ):
            for name, key in names.items():
                for chunk in layout.placed(name, tensors[name]).chunks:
                    stored.read(key, chunk.part, offsets=chunk.offsets)

    @rank_error_context("gathering the weights")
    def save_pretrained(self, path: PathLike, *, max_shard_size: int | str = "5GB") -> Path:
        """Write whole tensors under the model's own names as safetensors; all ranks call it.

        The new folder `path` has `model.safetensors`, or shards and their index, and `config.json`
        where the model has a config of transformers: `from_pretrained(path)` of its class loads it.
        Tensors are gathered and written one by one, tied ones once; the folder gets its name when
        all of it is on the disk.

        Args:
            max_shard_size: of a file, in bytes or as "5GB"; a larger tensor has its own.

        Returns the folder.

        Raises:
            FileError: it exists already, or cannot be written.
            NonFiniteError: a trained parameter is nan or inf; nothing is written.
        """
        folder, max_bytes = Path(os.path.abspath(path)), bytes_of(max_shard_size)
        require_same("folder of weights", f"{folder.name} {folder} {max_bytes}", self._job)
        release(self.module)
        self._exchange.synchronise()
        self._follow_first_replica(every_buffer=True)
        self._finite.require_savable(self._job)
        leads, timeout_s = self._job.rank == 0, self._job.timeout_s
        forms = forms_of(self.module, self._layout)
        writer: WeightsFolder | None = None
        with all_ranks_succeed("opening the folder of weights", timeout_s=timeout_s):
            if leads:
                writer = WeightsFolder(folder, forms, max_bytes=max_bytes)
        wholes = self._wholes(forms)
        try:
            with all_ranks_succeed("writing the weights", timeout_s=timeout_s):
                try:
                    if writer is not None:
                        write_config(self.module, writer.partial)
                        writer.write(wholes)
                finally:
                    for _ in wholes:  # a rank that does not write takes part in gathering
                        pass
                if writer is not None:
                    writer.commit()
        except BaseException:
            if writer is not None:
                writer.abandon()
            raise
        return folder

    def _wholes(self, forms: dict[str, Form]) -> Iterator[tuple[str, Tensor | None]]:
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return self._layout.wholes({name: tensors[name] for name in forms}, forms)

    def _forms(self) -> dict[str, Form]:
        """Whole shapes and dtypes of parameters and buffers by first name."""
        tensors = (*self.module.named_parameters(), *self.module.named_buffers())
        return {n: Form(tuple(self._layout.shape(n) or t.shape), t.dtype) for n, t in tensors}

    if TYPE_CHECKING:

        def _follow_first_replica(self, *, every_buffer: bool = False) -> None: ...
