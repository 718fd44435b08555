"""Borders between blocks that are split by tokens: where shares go on, and where they do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from engines.state.token_shares import require_tokens
from engines.tensor.sequence_parallel import hidden_values
from engines.tensor.styles import Kind, Style, ordered
from engines.tensor.token_rules import SPLIT
from engines.tensor.variants import Styles
from profiles.capture.batch.call import Batch, call_model
from profiles.capture.batch.tree import map_batch
from profiles.capture.fakes.mode import FakeRunMode
from profiles.capture.fakes.tensors import stand_ins
from profiles.torch_compat import Operator, flatten, storage_of, tensors_in, without_onednn


def with_borders(
    model: nn.Module, sample: Batch, styles: Styles, *, size: int, has_target: bool
) -> Styles:
    """`styles` with `ENTRY` for the blocks of `SEQUENCE` that take whole sequences, and `EXIT` for
    those that return them; the model runs once, on fake tensors.

    To split over `size` ranks what was gathered is to leave it as it is, and so are the gradients.
    Thus a block hands on its share where nothing takes its hidden values but further blocks, as
    theirs, and each is called once. Where the forward depends on values, all blocks have both.

    Raises:
        BatchError: a sequence of the sample has no token for every rank.
    """
    blocks = [path for path, each in styles.items() if SPLIT in each]
    if not blocks:
        return styles
    borders = _borders(model, sample, blocks, size=size, has_target=has_target)
    inside = {path: tuple(s for s in styles[path] if s.kind not in _BORDERS) for path in blocks}
    return styles | {path: ordered((*inside[path], *borders[path])) for path in blocks}


_BORDERS = (Kind.ENTRY, Kind.EXIT)


def _borders(
    model: nn.Module, sample: Batch, blocks: Sequence[str], *, size: int, has_target: bool
) -> Styles:
    follow = _Follow(blocks)
    try:
        with (
            follow.calls(model),
            torch.inference_mode(False),
            torch.enable_grad(),
            stand_ins([model]) as fakes,
        ):
            fake = map_batch(lambda tensor: fakes.of(tensor.detach()), sample)
            with follow.on(fake), without_onednn():
                output = call_model(model, fake, has_target=has_target)
            follow.take(tensors_in(output))
    except Exception:  # of the user's code, where fake tensors do not follow it
        return {path: tuple(Style(kind=kind) for kind in _BORDERS) for path in blocks}
    for hidden in follow.hidden:
        require_tokens(hidden, size)
    return follow.borders()


class _Follow(FakeRunMode):
    """Notes what takes the hidden values of `blocks`."""

    def __init__(self, blocks: Collection[str]) -> None:
        super().__init__()
        self._blocks = blocks
        self._within = 0
        self.hidden: list[Tensor] = []  # values that blocks take
        self._calls: Counter[str] = Counter()
        self._made: dict[int, tuple[str, Tensor]] = {}  # by storage
        self._from: dict[str, str] = {}  # block: the one whose hidden values it takes
        self._taken: set[str] = set()  # blocks whose hidden values something else takes too

    def note(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: object
    ) -> None:
        if not self._within:
            self.take(tensors_in((args, kwargs)))

    def take(self, tensors: Collection[Tensor]) -> None:
        """Note that other code than a block takes `tensors`."""
        for tensor in tensors:
            made = self._made.get(id(storage_of(tensor)))
            if made is not None:
                self._taken.add(made[0])

    @contextmanager
    def calls(self, model: nn.Module) -> Iterator[None]:
        """Inside, calls of the blocks are noted."""
        hooks = []
        try:
            for path in self._blocks:
                block = model.get_submodule(path)
                hooks.append(block.register_forward_pre_hook(self._enter(path), with_kwargs=True))
                hooks.append(block.register_forward_hook(self._leave(path)))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, path: str) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._calls[path] += 1
            leaves, _ = flatten((args, kwargs))
            hidden = None if self._within else hidden_values(leaves)
            if hidden is not None:
                number, values = hidden
                self.hidden.append(values)
                source = self._made.get(id(storage_of(values)))
                if source is not None and source[1] is values:
                    self._from[path] = source[0]
                    del leaves[number]
            self.take([leaf for leaf in leaves if isinstance(leaf, Tensor)])
            self._within += 1

        return enter

    def _leave(self, path: str) -> Any:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._within -= 1
            leaves, _ = flatten(output)
            hidden = hidden_values(leaves)
            if hidden is not None and not self._within:
                self._made[id(storage_of(hidden[1]))] = path, hidden[1]

        return leave

    def borders(self) -> Styles:
        once = {path for path in self._blocks if self._calls[path] == 1}
        taken = self._taken | {a for b, a in self._from.items() if b not in once}
        hands_on = {a for a in self._from.values() if a in once and a not in taken}
        return {
            path: (
                *([] if self._from.get(path) in hands_on else [Style(kind=Kind.ENTRY)]),
                *([] if path in hands_on else [Style(kind=Kind.EXIT)]),
            )
            for path in self._blocks
        }
