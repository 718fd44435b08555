"""Hooks of a user's own that see a rank's part of a tensor where they would see the whole.

Inside of a pair of column-wise and row-wise layers a rank has its share of the features, and in a
block that is split by tokens its share of those. A hook there that scales element by element is
right; one that takes a norm or a mean, or keeps what it sees, is not, and no proof can tell.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from engines.tensor.styles import LOCAL, Kind, Style, cutting
from engines.tensor.token_rules import SPLIT
from profiles.capture.module.hooks import AROUND_CALLS, own_hooks

Styles = Mapping[str, Sequence[Style]]
_BEFORE, _AFTER = "_forward_pre_hooks", "_forward_hooks"
_WHOLE = {
    Kind.COLUMN: {_BEFORE},
    Kind.HEADS: {_BEFORE},
    Kind.ROW: {_AFTER},
    Kind.GATHER: {_BEFORE},
    Kind.VOCAB: {_BEFORE},
}
"""Hooks of split layers that see whole tensors."""
_GATHERED = (Kind.GATHER, Kind.VOCAB)
"""Layers whose outputs are gathered by a hook: what is registered after it sees them whole."""


def hooked_part(model: nn.Module, styles: Styles) -> str | None:
    """The path of the first module with a hook that sees parts, split by `styles`."""
    hooked = {
        path: names
        for path, module in model.named_modules()
        if (names := {name for name, _ in own_hooks(module)} & {*AROUND_CALLS})
    }
    parts = _Parts(model, styles, is_split=False) if hooked else None
    return next((p for p, names in hooked.items() if parts and names & parts.of(p)), None)


class OwnHooks:
    """Counts the hooks of modules that see parts, and warns once of one that was added.

    Args:
        styles: of split layers.
        of_tokens: sequences are split over the cp axis, so that every module sees parts.
        warns: on this rank.
    """

    def __init__(self, model: nn.Module, styles: Styles, *, of_tokens: bool, warns: bool) -> None:
        parts = _Parts(model, styles, is_split=True) if warns and not of_tokens else None
        self._split = "sequences" if of_tokens else "layers there"
        self._axis = "cp" if of_tokens else "tp"
        self._hooks = [
            (path, getattr(module, name))
            for path, module in (model.named_modules() if warns else ())
            for name in (sorted(parts.of(path)) if parts is not None else AROUND_CALLS)
        ]
        self._counts = self._count()

    def warn(self) -> None:
        """Warn of the first module that has more hooks than at first."""
        pairs = zip(self._hooks, self._counts, self._count(), strict=True)
        path = next((path for (path, _), before, now in pairs if now > before), None)
        if path is None:
            return
        warnings.warn(
            f"`{path}` has a hook that sees this rank's part of a tensor: {self._split} are split"
            f" over the {self._axis} axis. A norm or a mean that it takes, and what it keeps for a"
            " loss, is of the part; changes element by element are right. Register it before the"
            " model is split, so that the split is proved with it",
            stacklevel=5,
        )
        self._hooks, self._counts = [], []

    def _count(self) -> list[int]:
        return [len(hooks) for _, hooks in self._hooks]


class _Parts:
    """Modules of a split model in which a rank has parts of tensors.

    Args:
        is_split: hooks come after those of the split.
    """

    def __init__(self, model: nn.Module, styles: Styles, *, is_split: bool) -> None:
        self._styles = styles
        self._is_split = is_split
        self._embeddings = {p for p, m in model.named_modules() if isinstance(m, nn.Embedding)}
        self._cuts = {path: s.kind for path, each in styles.items() if (s := cutting(each))}
        self._order = {path: number for number, (path, _) in enumerate(model.named_modules())}
        self._bare = {p for p, m in model.named_modules() if next(m.parameters(), None) is None}
        self._columns = [path for path, kind in self._cuts.items() if kind in LOCAL]
        self._rows = [path for path, kind in self._cuts.items() if kind is Kind.ROW]
        self._around: dict[str, list[str]] = {}  # rows by the module around their pair
        for row in self._rows:
            around = next(a for a in _above(row) if self._has(a, self._columns) or not a)
            self._around.setdefault(around, []).append(row)

    def of(self, path: str) -> set[str]:
        """Those of `AROUND_CALLS` whose hooks on the module at `path` see parts."""
        if any(SPLIT in self._styles.get(above, ()) for above in (path, *_above(path))):
            return {*AROUND_CALLS}
        kind = self._cuts.get(path)
        if kind is not None:
            is_gathered = kind in _GATHERED and (self._is_split or path in self._embeddings)
            return {*AROUND_CALLS} - _WHOLE[kind] - ({_AFTER} if is_gathered else set())
        has_columns, has_rows = self._has(path, self._columns), self._has(path, self._rows)
        if has_columns and has_rows:
            return set()
        if has_columns or has_rows:
            return {*AROUND_CALLS} - {_BEFORE if has_columns else _AFTER}
        return {*AROUND_CALLS} if self._is_between(path) else set()

    def _is_between(self, path: str) -> bool:
        """True if the module runs between the layers of a pair, as far as its place tells."""
        for above in _above(path):
            rows = self._around.get(above)
            if rows is None:
                continue
            if path in self._bare:
                return True
            columns = [self._order[p] for p in self._columns if _lies_in(p, above)]
            last = max(self._order[row] for row in rows)
            return min(columns, default=last) < self._order[path] < last
        return False

    def _has(self, path: str, layers: Sequence[str]) -> bool:
        return any(_lies_in(layer, path) for layer in layers)


def _above(path: str) -> Iterator[str]:
    """The modules that it lies in, innermost first."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _lies_in(path: str, above: str) -> bool:
    return not above or path == above or path.startswith(f"{above}.")
