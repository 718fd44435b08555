"""Which layers of a model to split, and how: proposed from its wiring, and proved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from engines.tensor.layers import can_split, features, is_plain
from engines.tensor.proof import prove
from engines.tensor.shipped import shipped_styles
from engines.tensor.specimen import Specimen, kinds_of, specimen_of
from engines.tensor.styles import Kind, Style, as_pairs, without_numbers
from engines.tensor.ties import split_differently
from engines.tensor.variants import Styles, sequence_variants, variants
from engines.tensor.wiring import Pair, wiring_of
from profiles.batch import Batch
from profiles.errors import ModelError, PlanError
from profiles.flow import GLUE, LOSS, Flow
from profiles.model import SMALLEST_SHARD_FRACTION, ModelProfile
from profiles.record import Record


class Unpaired(Record):
    """A layer that is not half of a pair: what became of it and why.

    Attributes:
        layer: its path; `*` for any number.
        style: "gather", say, or "whole" where every rank keeps all of it.
    """

    layer: str
    style: str
    why: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.style}, {self.why}"


class Proposal(Record):
    """A split of a model over the tp axis.

    Attributes:
        styles: for `Plan.tensor_styles`.
        notes: the layers that could not be split between column and row.
    """

    size: int
    styles: tuple[tuple[str, str], ...]
    notes: tuple[Unpaired, ...] = ()


def propose_styles(
    model: nn.Module,
    sample: Batch,
    *,
    size: int,
    profile: ModelProfile,
    has_target: bool = False,
    by_tokens: bool = False,
) -> Proposal:
    """How to split `model` over `size` ranks. Nothing of the model is changed.

    Pairs of column-wise and row-wise layers, fused ones too, are tried on a copy of one unit of
    each kind (see `proof`); the plan that the model brings along goes first. A layer of some size
    that is in no proved pair is split with gathered output. Embeddings and the head are split by
    the vocabulary.

    Args:
        sample: one local batch; the model runs over it once, on fake tensors if it can.
        profile: of the model, for its units.
        has_target: the last entry of the sample is a target, not an argument.
        by_tokens: split norms, dropout and residual sums by tokens too (sequence parallelism), in
            the blocks where that is proved: less memory for as much traffic and a half. Sequences
            must then have an equal share for every rank.

    Raises:
        PlanError: there is nothing that could be split.
    """
    units = [unit.name for unit in profile.units if unit.name not in (GLUE, LOSS)]
    shipped = shipped_styles(model)
    weights = [m.get_parameter("weight").numel() for m in model.modules() if can_split(m)]
    smallest = SMALLEST_SHARD_FRACTION * max(weights, default=0)
    found: Styles = {}
    why: dict[str, str] = {}
    running: list[str] = []
    for kind in kinds_of(model, sample, units, has_target=has_target):
        first = kind.paths[0]
        unit = model.get_submodule(first)
        trial: _Layer | _Trial | _Whole
        if is_plain(unit):
            trial = _Layer(unit, size=size, smallest=smallest)
        else:
            own = {inner: shipped[path] for path, inner in _within(first, shipped)}
            try:
                trial = _Trial(specimen_of(model, kind), size=size, smallest=smallest)
                trial.run(own, by_tokens=by_tokens)
            except ModelError as error:
                trial = _Whole(unit, error.what)
        for path in kind.paths:
            running.append(path)
            found.update({_joined(path, inner): style for inner, style in trial.styles.items()})
            why.update({_joined(path, inner): reason for inner, reason in trial.why.items()})
    _leave_logits_split(model, found, profile.flow)
    _leave_ties_whole(model, found, why, profile.flow, running=running)
    if not found:
        raise PlanError(
            f"{profile.name} has no layer that tensor parallelism could split over {size} ranks",
            where="\n".join(f"{path}: {reason}" for path, reason in list(why.items())[:3]),
            hints=["use data parallelism (dp_replicate, dp_shard) or a pipeline (pp)"],
        )
    names = [path for path, _ in model.named_modules()]
    notes = {
        Unpaired(layer=without_numbers(path), style=_said(found.get(path)), why=reason): None
        for path, reason in why.items()
    }
    return Proposal(size=size, styles=as_pairs(found, names), notes=tuple(notes))


class _Layer:
    """A unit that is a layer by itself; `styles` and `why` as for `_Trial`."""

    def __init__(self, layer: nn.Module, *, size: int, smallest: float) -> None:
        small = _too_small(layer, size=size, smallest=smallest)
        self.styles: Styles = {} if small else {"": (_alone(layer),)}
        self.why: dict[str, str] = {"": small} if small else {}


class _Whole:
    """A unit that cannot be tried; `styles` and `why` as for `_Trial`."""

    def __init__(self, unit: nn.Module, reason: str) -> None:
        self.styles: Styles = {}
        self.why = {path: reason for path, module in unit.named_modules() if can_split(module)}


class _Trial:
    """The styles of one kind of unit, found one after another; each is proved with those before.

    Attributes:
        styles: what is proved, by paths within the unit.
        why: layers outside pairs, and what kept them from it.
    """

    def __init__(self, specimen: Specimen, *, size: int, smallest: float) -> None:
        self.wiring = wiring_of(specimen)
        self.styles: Styles = {}
        self.why: dict[str, str] = {}
        self._specimen = specimen
        self._size = size
        self._smallest = smallest

    def run(self, shipped: Mapping[str, Style], *, by_tokens: bool) -> None:
        """All attempts, in turn; `shipped`: the model's own styles, by paths within the unit."""
        self.take_all(shipped)
        for pair in self.wiring.pairs:
            self.take_pair(pair)
        self.gather_others()
        if by_tokens:
            self.split_tokens()

    def take_all(self, styles: Mapping[str, Style]) -> None:
        """All of `styles` or, if that is not right, nothing."""
        called = {path: (style,) for path, style in styles.items() if path in self.wiring.layers}
        if called:
            self._try(called)

    def take_pair(self, pair: Pair) -> None:
        """The pair in the first way that is right."""
        layers = (*pair.columns, *pair.rows)
        if any(path in self.styles for path in layers):
            return
        reasons = []
        for variant in variants(pair, self._specimen.unit, size=self._size):
            reason = self._try(variant)
            if not reason:
                return
            reasons.append(reason)
        self.why.update(dict.fromkeys(layers, reasons[0]))

    def gather_others(self) -> None:
        """Every other layer by its output features, where that saves memory worth its traffic."""
        for path in self.wiring.layers:
            if path in self.styles:
                continue
            layer = self._specimen.unit.get_submodule(path)
            reason = _too_small(layer, size=self._size, smallest=self._smallest)
            if not reason:
                style = _alone(layer)
                alone = "in no pair of layers" if style.kind is Kind.GATHER and path else ""
                reason = self._try({path: (style,)}) or self.why.get(path, alone)
            if reason:
                self.why[path] = reason

    def split_tokens(self) -> None:
        """Tokens too, if all layers of the unit are in pairs."""
        kinds = {style.kind for found in self.styles.values() for style in found}
        if not {Kind.COLUMN, Kind.ROW} <= kinds or kinds & {Kind.GATHER, Kind.VOCAB}:
            return
        pairs = [pair for pair in self.wiring.pairs if pair.columns[0] in self.styles]
        reason = ""
        for choice in sequence_variants(pairs, self.styles):
            reason = self._try(choice)
            if not reason:
                return
        self.why[""] = f"its tokens are not split: {reason}"

    def _try(self, styles: Mapping[str, tuple[Style, ...]]) -> str:
        """Take `styles` if they are right; why not, else."""
        together = {**self.styles, **styles}
        verdict = prove(self._specimen, together, size=self._size)
        if not verdict.why_not:
            self.styles = together
        return verdict.why_not


def _alone(layer: nn.Module) -> Style:
    """How a layer is split that is in no pair."""
    return Style(kind=Kind.VOCAB if isinstance(layer, nn.Embedding) else Kind.GATHER)


def _too_small(layer: nn.Module, *, size: int, smallest: float) -> str:
    """Why it is not worth the traffic, or cannot be; empty if it is."""
    inputs, outputs = features(layer)
    cut = inputs if isinstance(layer, nn.Embedding) else outputs
    if layer.get_parameter("weight").numel() < smallest:
        return f"a small layer ({inputs} x {outputs})"
    return f"{cut} features for {size} ranks" if cut < size else ""


def _leave_logits_split(model: nn.Module, found: Styles, flow: Flow) -> None:
    """The head of a language model keeps its logits split, if only the loss takes them."""
    rows = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    called = [call.unit for call in flow.calls]
    for number, unit in enumerate(called):
        if found.get(unit) != (Style(kind=Kind.GATHER),) or called.count(unit) > 1:
            continue
        layer = model.get_submodule(unit)
        takers = {called[edge.target] for edge in flow.edges if edge.source == number}
        if isinstance(layer, nn.Linear) and layer.out_features in rows and takers <= {LOSS}:
            found[unit] = (Style(kind=Kind.VOCAB),)


def _leave_ties_whole(
    model: nn.Module, found: Styles, why: dict[str, str], flow: Flow, *, running: Sequence[str]
) -> None:
    """A weight that several places use stays whole, unless all of them split it alike."""
    while wrong := split_differently(model, found, flow, running=running):
        for path in wrong:
            found.pop(path, None)
            why[path] = "its weight is used in another way too"


def _within(unit: str, paths: Iterable[str]) -> list[tuple[str, str]]:
    """The full and the inner paths of those that lie in `unit`, or are it."""
    return [
        (path, path.removeprefix(unit).removeprefix("."))
        for path in paths
        if f"{path}.".startswith(f"{unit}.")
    ]


def _joined(path: str, inner: str) -> str:
    return ".".join(part for part in (path, inner) if part)


def _said(styles: Sequence[Style] | None) -> str:
    return str(styles[0]) if styles else "whole"
