"""The proof of a tensor plan: every unit of a model, split, computes what it computes whole."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import product
from typing import Self

from pydantic import PositiveInt
from torch import nn

from engines.tensor.bias_variants import split_variants
from engines.tensor.layers import can_split, is_plain
from engines.tensor.rules import Pair, pairs_of
from engines.tensor.styles import (
    LAYER_KINDS,
    LOCAL,
    NAMING,
    Kind,
    Style,
    cutting,
    ordered,
    styles_of,
)
from engines.tensor.tie_rules import joined
from engines.tensor.tied_weights import split_differently
from engines.tensor.token_borders import with_borders
from engines.tensor.token_rules import SPLIT
from engines.tensor.unit_copy import UnitCopy, copy_unit, reads_left
from engines.tensor.unit_kinds import unit_kinds
from engines.tensor.unit_proof import Verdict, prove_unit
from engines.tensor.variants import ALONE, Styles, united
from profiles.capture.batch.call import Batch
from profiles.errors import PlanError, a_type
from profiles.model.flow import GLUE, LOSS, Flow
from profiles.model.profile import ModelProfile
from profiles.record import Record


class SplitProof(Record):
    """A split of a model that is proved; a value that ranks may send to each other.

    Attributes:
        size: ranks of the tp axis.
        styles: of every module that is split or counts heads, by its path.
        partial: first names of whole parameters whose gradients are partial sums over the ranks.
    """

    size: PositiveInt
    styles: tuple[tuple[str, tuple[str, ...]], ...]
    partial: tuple[str, ...] = ()

    @classmethod
    def of(cls, styles: Styles, partial: Iterable[str], *, size: int) -> Self:
        written = tuple((path, tuple(map(str, ordered(each)))) for path, each in styles.items())
        return cls(size=size, styles=written, partial=tuple(sorted(partial)))

    @property
    def by_module(self) -> Styles:
        """The styles by module path."""
        return {path: tuple(map(Style.parse, texts)) for path, texts in self.styles}

    @property
    def hand_on_shares(self) -> frozenset[str]:
        """Paths of the blocks that return their rank's share of the tokens."""
        leave = Style(kind=Kind.EXIT)
        return frozenset(
            p for p, each in self.by_module.items() if SPLIT in each and leave not in each
        )

    def covers(self, model: nn.Module, pairs: Sequence[tuple[str, str]], *, size: int) -> bool:
        """True if this is the split of `model` that `pairs` ask for.

        Counts of heads follow from the code of the modules: `pairs` may leave them to the proof.
        """
        wanted = styles_of(pairs, [path for path, _ in model.named_modules()])
        counts = any(style.kind in NAMING for each in wanted.values() for style in each)
        mine = self.by_module if counts else _without_counts(self.by_module)
        return self.size == size and mine == wanted


def prove_split(
    model: nn.Module,
    sample: Batch,
    pairs: Sequence[tuple[str, str]],
    *,
    size: int,
    profile: ModelProfile,
    has_target: bool,
) -> SplitProof:
    """Prove the split of `model` over `size` ranks that `pairs` ask for.

    Where `pairs` name no attributes that count heads or features, those of a unit are searched.

    Args:
        pairs: as `Plan.tensor_styles`.
        sample: as for `propose_styles`.

    Raises:
        PlanError: a layer cannot have its style, or a unit so split would compute something else.
        UnknownNameError: a pattern fits no module, or a style does not exist.
    """
    styles = styles_of(pairs, [path for path, _ in model.named_modules()])
    for path, wanted in styles.items():
        _require_possible(model.get_submodule(path), wanted, path)
    units = [unit.name for unit in profile.units if unit.name not in (GLUE, LOSS)]
    first = {parameter: name for name, parameter in model.named_parameters()}
    _require_borders(styles, with_borders(model, sample, styles, size=size, has_target=has_target))
    left = dict(styles)
    partial: dict[str, set[str]] = {}  # and the units in which they are so
    running: list[str] = []
    read = reads_left(profile.flow)
    for kind in unit_kinds(model, sample, units, has_target=has_target):
        running += kind.paths
        copy: UnitCopy | None = None
        for alike in _by_styles(kind.paths, styles).values():
            inner = _inner(alike[0], styles)
            if not inner:
                continue
            verdict = _of_layer(model.get_submodule(alike[0]), inner)
            if verdict is None:
                copy = copy or copy_unit(model, kind, read=read)
                verdict = prove_unit(copy, _alone(inner, copy.unit), size=size)
                counts: Styles = {}
                if verdict.why_not:
                    counts = _counts(copy, inner, pairs_of(profile, alike[0]), size=size)
                for path, within in product(alike, counts):
                    place = joined(path, within)
                    styles[place] = (*styles.get(place, ()), *counts[within])
                if counts:
                    inner = _inner(alike[0], styles)
                    verdict = prove_unit(copy, _alone(inner, copy.unit), size=size)
            if verdict.why_not:
                raise PlanError(
                    f"`{alike[0]}` split over {size} ranks is not what it is whole:"
                    f" {verdict.why_not}",
                    where="\n".join(f"{p or alike[0]}: {s[0]}" for p, s in inner.items()),
                    hints=["let `propose_styles` find a split that is proved"],
                )
            for path in alike:
                unit = model.get_submodule(path)
                for name in verdict.partial:
                    partial.setdefault(first[unit.get_parameter(name)], set()).add(path)
                left = {p: s for p, s in left.items() if not f"{p}.".startswith(f"{path}.")}
    if left:
        path = next(iter(left))
        raise PlanError(
            f"`{path}` is in no unit that the sample runs through: its split cannot be proved",
            where=f"tensor style {path}:{left[path][0]}",
            hints=["leave it out of `tensor_styles`"],
        )
    wrong = split_differently(model, styles, profile.flow, running=running)
    if wrong:
        raise PlanError(
            f"the weight of `{wrong[0]}` is used in another place that is not split alike",
            where=f"tensor style {wrong[0]}:{styles[wrong[0]][0]}",
            hints=["give tied layers the same style, or leave the weight whole"],
        )
    require_one_use(model, partial, profile.flow, running=running)
    return SplitProof.of(styles, partial, size=size)


def _counts(copy: UnitCopy, inner: Styles, pairs: Sequence[Pair], *, size: int) -> Styles:
    """The attributes that must count a rank's share of heads or features, and the tensors that have
    a number for every head, where `inner` names none.

    They follow from the code of the modules: a plan that was made from a profile cannot know them.
    """
    if any(style.kind in NAMING for styles in inner.values() for style in styles):
        return {}
    taken: Styles = {}
    counts: Styles = {}
    for pair in pairs:
        layers = {path: style for path, styles in inner.items() if (style := cutting(styles))}
        if not set(pair.layers) <= layers.keys():
            continue
        for variant in split_variants(copy, pair, layers, size=size):
            both = united(taken, variant)
            if not prove_unit(copy, both, size=size).why_not:
                taken = both
                break
    for path, each in taken.items():
        if naming := tuple(style for style in each if style.kind in NAMING):
            counts[path] = naming
    return counts


def _of_layer(unit: nn.Module, inner: Styles) -> Verdict | None:
    """The verdict on a unit that is a layer by itself; None if it needs a proof."""
    if not is_plain(unit):
        return None
    style = cutting(inner.get("", ()))
    if style is not None and style.kind in (*LOCAL, Kind.ROW):
        return Verdict("values between units are whole, and it has no other half in its unit")
    return Verdict() if len(inner) == 1 else None


def require_one_use(
    model: nn.Module,
    partial: Mapping[str, Container[str]],
    flow: Flow,
    *,
    running: Sequence[str],
) -> None:
    """Require that a gradient is a partial sum in all of its places, or whole in all of them.

    Args:
        partial: first names of parameters with partial gradients, and the units where they have.
        running: the units that are called.

    Raises:
        PlanError: a parameter has a partial gradient in one place and a whole one in another.
    """
    for name, units in partial.items():
        parameter = model.get_parameter(name)
        whole = [
            unit
            for unit in running
            if unit not in units
            and any(p is parameter for p in model.get_submodule(unit).parameters())
        ]
        glue = [c.unit for c in flow.calls if c.unit in (GLUE, LOSS) and name in c.parameters]
        if whole or glue:
            raise PlanError(
                f"`{name}` is used by split layers and also in {(whole or glue)[0]}, where nothing"
                " is split: its gradient would be counted twice",
                hints=["leave the layers that use it out of `tensor_styles`"],
            )


def _require_possible(module: nn.Module, styles: Sequence[Style], path: str) -> None:
    for style in styles:
        kinds: tuple[Kind, ...] = LAYER_KINDS
        if isinstance(module, nn.Embedding):
            kinds = (Kind.COLUMN, Kind.VOCAB)
        elif not isinstance(module, nn.Linear):
            kinds = (Kind.COLUMN, Kind.ROW, Kind.GATHER)
        if style.kind in LAYER_KINDS and not (style.kind in kinds and can_split(module)):
            raise PlanError(
                f"`{path}`, {a_type(module)}, cannot be split by `{style}`",
                where=f"tensor style {path}:{style}",
                hints=[
                    "column, row and gather are for linear layers and convolutions, vocab is for"
                    " embeddings and the head, column for tables with a column for every head"
                ],
            )


def _by_styles(
    paths: Sequence[str], styles: Mapping[str, tuple[Style, ...]]
) -> dict[object, list[str]]:
    """Equal units that are split equally, together."""
    alike: dict[object, list[str]] = {}
    for path in paths:
        inner = _inner(path, styles)
        if SPLIT in inner.get("", ()):
            inner[""] = ordered((*inner[""], *ALONE))  # a chain's first and last differ in no more
        alike.setdefault(tuple(inner.items()), []).append(path)
    return alike


def _inner(unit: str, styles: Mapping[str, tuple[Style, ...]]) -> Styles:
    """The styles within a unit, by paths within it."""
    return {
        path.removeprefix(unit).removeprefix("."): each
        for path, each in styles.items()
        if f"{path}.".startswith(f"{unit}.")
    }


def _without_counts(styles: Styles) -> Styles:
    cut = {path: tuple(s for s in each if s.kind not in NAMING) for path, each in styles.items()}
    return {path: each for path, each in cut.items() if each}


def _alone(inner: Styles, unit: nn.Module) -> Styles:
    """The styles of a unit that takes and returns whole tensors.

    What becomes of a head's split logits, or of a block's share of the tokens, is no matter of it.
    """
    alone = {
        path: (Style(kind=Kind.GATHER),)
        if Style(kind=Kind.VOCAB) in each and isinstance(unit.get_submodule(path), nn.Linear)
        else each
        for path, each in inner.items()
    }
    if SPLIT in inner.get("", ()):
        alone[""] = ordered((*inner[""], *ALONE))
    return alone


def _require_borders(given: Styles, proved: Styles) -> None:
    """Require that blocks split and gather sequences where shares do not go on.

    Raises:
        PlanError: they are said to do so in other places.
    """
    for path, styles in proved.items():
        if styles != given[path]:
            raise PlanError(
                f"`{path}` has the styles `{' '.join(map(str, given[path]))}`, and its tokens"
                f" come and go as `{' '.join(map(str, styles))}`",
                where=f"tensor style {path}",
                hints=[
                    "a block needs `entry` where it does not take the hidden values of another one"
                    " as they are, and `exit` where something else takes its own"
                ],
            )
