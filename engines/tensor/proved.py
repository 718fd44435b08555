"""A tensor plan for a whole model, proved unit by unit before anything is split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from engines.tensor.layers import can_split
from engines.tensor.proof import prove
from engines.tensor.specimen import specimens
from engines.tensor.styles import LAYER_KINDS, Kind, Style, styles_of
from engines.tensor.ties import split_differently
from engines.tensor.variants import Styles
from profiles.batch import Batch
from profiles.errors import PlanError
from profiles.flow import GLUE, LOSS
from profiles.model import ModelProfile


def proved(
    model: nn.Module,
    sample: Batch,
    pairs: Sequence[tuple[str, str]],
    *,
    size: int,
    profile: ModelProfile,
    has_target: bool,
) -> tuple[Styles, frozenset[str]]:
    """The styles of every module that `pairs` mean, and `TensorSplit.partial` under them.

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
    left = dict(styles)
    partial: set[str] = set()
    running: list[str] = []
    for specimen in specimens(model, sample, units, has_target=has_target):
        running += specimen.paths
        for alike in _by_styles(specimen.paths, styles).values():
            inner = _inner(alike[0], styles)
            if not inner:
                continue
            verdict = prove(specimen, _as_gathered(inner, specimen.unit), size=size)
            if verdict.why_not:
                raise PlanError(
                    f"`{alike[0]}` split over {size} ranks is not what it is whole:"
                    f" {verdict.why_not}",
                    where="\n".join(f"{p or alike[0]}: {s[0]}" for p, s in inner.items()),
                    hints=["let `propose_styles` find a split that is proved"],
                )
            for path in alike:
                unit = model.get_submodule(path)
                partial |= {first[unit.get_parameter(name)] for name in verdict.partial}
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
    return styles, frozenset(partial)


def _require_possible(module: nn.Module, styles: Sequence[Style], path: str) -> None:
    for style in styles:
        kinds: tuple[Kind, ...] = LAYER_KINDS
        if isinstance(module, nn.Embedding):
            kinds = (Kind.VOCAB,)
        elif not isinstance(module, nn.Linear):
            kinds = (Kind.COLUMN, Kind.ROW, Kind.GATHER)
        if style.kind in LAYER_KINDS and not (style.kind in kinds and can_split(module)):
            raise PlanError(
                f"`{path}`, a {type(module).__name__}, cannot be split by `{style}`",
                where=f"tensor style {path}:{style}",
                hints=[
                    "column, row and gather are for linear layers and convolutions, vocab is for"
                    " embeddings and the head"
                ],
            )


def _by_styles(
    paths: Sequence[str], styles: Mapping[str, tuple[Style, ...]]
) -> dict[object, list[str]]:
    """Equal units that are split equally, together."""
    found: dict[object, list[str]] = {}
    for path in paths:
        found.setdefault(tuple(_inner(path, styles).items()), []).append(path)
    return found


def _inner(unit: str, styles: Mapping[str, tuple[Style, ...]]) -> Styles:
    """The styles within a unit, by paths within it."""
    return {
        path.removeprefix(unit).removeprefix("."): found
        for path, found in styles.items()
        if f"{path}.".startswith(f"{unit}.")
    }


def _as_gathered(inner: Styles, unit: nn.Module) -> Styles:
    """What becomes of a head's split logits is no matter of the unit: there they are gathered."""
    return {
        path: (Style(kind=Kind.GATHER),)
        if Style(kind=Kind.VOCAB) in found and isinstance(unit.get_submodule(path), nn.Linear)
        else found
        for path, found in inner.items()
    }
