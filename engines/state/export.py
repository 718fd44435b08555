"""Whole tensors as safetensors files in the form of Hugging Face's checkpoints, streamed."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from engines.state.checkpoint.folder import sync_folder
from engines.state.checkpoint.shard_file import ShardWriter
from engines.state.layout import Layout
from engines.state.stored import INDEX, SINGLE, Form
from engines.state.weights import names_of
from profiles.errors import FileError, InputError, ModelError, a_type
from profiles.units import GIB, KIB, MIB

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": KIB, "MIB": MIB, "GIB": GIB}
_METADATA = {"format": "pt"}  # transformers refuses files without it


def bytes_of(size: int | str) -> int:
    """A number of bytes, or a text such as "5GB" or "200MiB".

    Raises:
        InputError: it is neither.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?B)\s*", size.upper())
        if match is not None and float(match[1]) > 0:
            return int(float(match[1]) * _UNITS[match[2]])
    elif type(size) is int and size > 0:
        return size
    raise InputError(
        f"max_shard_size={size!r} is no size of a file", hints=['write a number of bytes or "5GB"']
    )


def forms_of(model: nn.Module, layout: Layout) -> dict[str, Form]:
    """Whole shapes and dtypes of the state dict of a model, each tensor once, by its first name.

    Raises:
        ModelError: the state dict has a value that is no tensor.
    """
    forms = {}
    tensors = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    others = {name for names in names_of(tensors).values() for name in names[1:]}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise ModelError(
                f"`{name}` in the state dict is {a_type(value)}: safetensors files hold"
                " tensors alone",
                hints=["keep it in a buffer, or save a checkpoint: `parallel.save(folder)`"],
            )
        if name not in others:
            forms[name] = Form(tuple(layout.shape(name) or value.shape), value.dtype)
    return forms


def split_into_files(forms: Mapping[str, Form], max_bytes: int) -> dict[str, list[str]]:
    """Names of tensors by file, in their order; a tensor over `max_bytes` has a file of its own."""
    files: list[list[str]] = [[]]
    size = 0
    for name, form in forms.items():
        if files[-1] and size + form.nbytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(name)
        size += form.nbytes
    if len(files) == 1:
        return {SINGLE: files[0]}
    count = len(files)
    return {f"model-{n:05d}-of-{count:05d}.safetensors": f for n, f in enumerate(files, start=1)}


class WeightsFolder:
    """A folder of safetensors files on its way: written aside, and given its name when whole."""

    def __init__(self, path: Path, forms: Mapping[str, Form], *, max_bytes: int) -> None:
        """Raises FileError where `path` exists with something in it, or cannot be written."""
        self._path, self._forms = path, forms
        self._files = split_into_files(forms, max_bytes)
        self._partial = path.parent / f".partial-{path.name}-{secrets.token_hex(4)}"
        require_free(path)
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._partial.mkdir()

    @property
    def partial(self) -> Path:
        """The folder of the files while they are written."""
        return self._partial

    def write(self, tensors: Iterator[tuple[str, Tensor | None]]) -> None:
        """Write all tensors, which come in the order of the forms."""
        with _writing(self._path):
            for file, names in self._files.items():
                forms = {name: (self._forms[name].shape, self._forms[name].dtype) for name in names}
                with ShardWriter(self._partial / file, forms, _METADATA) as writer:
                    for name in names:
                        came, tensor = next(tensors)
                        assert came == name
                        assert tensor is not None
                        writer.write(tensor)
            if len(self._files) > 1:
                self._write_index()

    def commit(self) -> None:
        """Give the folder its name."""
        with _writing(self._path):
            sync_folder(self._partial)
            os.rename(self._partial, self._path)
            sync_folder(self._path.parent)

    def abandon(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self._partial, ignore_errors=True)

    def _write_index(self) -> None:
        index = {
            "metadata": {"total_size": sum(form.nbytes for form in self._forms.values())},
            "weight_map": {name: file for file, names in self._files.items() for name in names},
        }
        (self._partial / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def require_free(path: Path) -> None:
    """Require that nothing would be overwritten.

    Raises:
        FileError: `path` is a file, or a folder with something in it.
    """
    with _writing(path):
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise FileError(
                f"`{path}` exists already: nothing is overwritten", hints=["name a new folder"]
            )


def write_config(model: nn.Module, folder: Path) -> None:
    """Write `config.json` where the model has a config that can do so, as transformers' have."""
    for name in ("config", "generation_config"):
        config = getattr(model, name, None)
        save = getattr(config, "save_pretrained", None)
        if callable(save) and not isinstance(config, type):
            if name == "config":
                vars(config)["architectures"] = [_class_name(model)]
            save(folder)


def _class_name(model: nn.Module) -> str:
    """The name of the class as its author gave it: FSDP2 makes another one of it."""
    kinds = (kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    return next(kinds).__name__


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileError(f"cannot write `{path}`: {error.strerror or error}") from None
