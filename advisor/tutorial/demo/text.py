"""Training text that ships with Python: the language reference of `help()`, as bytes."""

from __future__ import annotations

import pydoc_data.topics
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

HELD_OUT_FRACTION = 0.1  # leaves a few thousand held-out windows and 90 % for training


class Text(NamedTuple):
    """Training bytes and held-out bytes."""

    train: bytes
    held_out: bytes


def reference_text(*, held_out_fraction: float = HELD_OUT_FRACTION) -> Text:
    """Return the topics of `pydoc_data` in alphabetical order, the last part held out.

    Topics quote each other at length ("compound" contains "for", "if", "while"), so paragraphs are
    deduplicated: no held-out paragraph is trained on.
    """
    topics: dict[str, str] = pydoc_data.topics.topics
    paragraphs: dict[str, str] = {}
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            paragraphs.setdefault(" ".join(paragraph.split()), paragraph)
    unique = list(paragraphs.values())
    train = unique[: round(len(unique) * (1 - held_out_fraction))]
    return Text("\n\n".join(train).encode(), "\n\n".join(unique[len(train) :]).encode())


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive windows of a text: (tokens, next tokens), each int64 of shape (length,).

    >>> windows = ByteWindows(b"abcde", length=2)
    >>> len(windows), [part.tolist() for part in windows[1]]
    (2, [[99, 100], [100, 101]])
    """

    def __init__(self, text: bytes, *, length: int) -> None:
        self.length = length
        # A bytearray, since torch warns about tensors over read-only memory such as `bytes`.
        self.ids = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.ids) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.length
        window = self.ids[start : start + self.length + 1].long()
        return window[:-1], window[1:]
