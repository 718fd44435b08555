"""Real text that every Python has: the language reference behind `help()`, as bytes."""

from __future__ import annotations

import pydoc_data.topics
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

HELD_OUT_FRACTION = 0.1  # enough for a held-out loss of a few thousand windows, and 90 % to learn


class Text(NamedTuple):
    """Bytes to learn from, and bytes that are only looked at to see what was learnt."""

    train: bytes
    held_out: bytes


def reference_text(*, held_out_fraction: float = HELD_OUT_FRACTION) -> Text:
    """The topics of `pydoc_data` in alphabetical order, the last part held out.

    Topics quote each other at length ("compound" holds all of "for", "if", "while"). Each paragraph
    is kept once, where it first appears, so that nothing held out was trained on.
    """
    topics: dict[str, str] = pydoc_data.topics.topics
    paragraphs: dict[str, str] = {}
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            paragraphs.setdefault(" ".join(paragraph.split()), paragraph)
    kept = list(paragraphs.values())
    train = kept[: round(len(kept) * (1 - held_out_fraction))]
    return Text("\n\n".join(train).encode(), "\n\n".join(kept[len(train) :]).encode())


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive windows of a text: (tokens, next tokens), each int64 of shape (length,).

    >>> windows = ByteWindows(b"abcde", length=2)
    >>> len(windows), [part.tolist() for part in windows[1]]
    (2, [[99, 100], [100, 101]])
    """

    def __init__(self, text: bytes, *, length: int) -> None:
        self.length = length
        # bytearray: torch warns about a tensor over memory that must not be written, as `bytes` is.
        self.ids = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.ids) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.length
        window = self.ids[start : start + self.length + 1].long()
        return window[:-1], window[1:]
