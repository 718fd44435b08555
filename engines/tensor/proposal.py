"""Proposal of a tensor-parallel split: made by the rules, proved on the model's modules."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

from torch import nn

from engines.tensor.bias_variants import split_variants
from engines.tensor.layers import can_split, is_plain
from engines.tensor.rules import (
    USED_ELSEWHERE,
    Pair,
    UnitSplit,
    block_names,
    leave_logits_split,
    unit_splits,
)
from engines.tensor.split_proof import SplitProof, require_one_use
from engines.tensor.styles import Kind, Style, as_pairs, without_numbers
from engines.tensor.tie_rules import joined, owner
from engines.tensor.tied_weights import split_differently
from engines.tensor.token_borders import with_borders
from engines.tensor.token_rules import pairs_take_one_tensor
from engines.tensor.unit_copy import UnitCopy, copy_unit, reads_left
from engines.tensor.unit_kinds import UnitKind, unit_kinds
from engines.tensor.unit_proof import CallResult, prove_unit, run_whole
from engines.tensor.variants import Styles, sequence_variants, united
from profiles.capture.batch.call import Batch
from profiles.capture.batch.tree import map_batch
from profiles.capture.fakes.mode import FakeRunMode
from profiles.capture.fakes.tensors import stand_ins
from profiles.errors import BatchError, ModelError, PlanError
from profiles.model.flow import GLUE, LOSS
from profiles.model.profile import ModelProfile
from profiles.model.source import CaptureSource
from profiles.record import Record
from profiles.torch_compat import without_onednn


class Unpaired(Record):
    """A layer outside of a column-row pair: its style and the reason.

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
        proof: that it computes what the whole model computes; None where shapes alone were tried,
            or trials of units contradict each other.
    """

    size: int
    styles: tuple[tuple[str, str], ...]
    notes: tuple[Unpaired, ...] = ()
    proof: SplitProof | None = None


def propose_styles(
    model: nn.Module,
    sample: Batch,
    *,
    size: int,
    profile: ModelProfile,
    has_target: bool = False,
    by_tokens: bool = False,
    shapes_only: bool = False,
) -> Proposal:
    """Propose a split of `model` over `size` ranks. Nothing of the model is changed.

    The split of `engines.tensor.rules` is tried on a copy of one unit of each kind
    (`unit_proof`). A refused pair of layers, or any other large layer, is split with gathered
    output.

    Args:
        sample: one local batch; the model runs over it once, on fake tensors if it can.
        profile: of the model, for its units and their layers.
        has_target: the last entry of the sample is a target, not an argument.
        by_tokens: split norms, dropout and residual sums by tokens too (sequence parallelism), in
            the blocks where that is proved. Sequences must then have an equal share for every rank.
        shapes_only: try units on fake tensors: quick at any size, and shows whether their code runs
            on a share of the features; that it computes the same is not proved. A unit that cannot
            be tried so is split by the rules alone.

    Raises:
        PlanError: no layer can be split, or the model's path is not known.
    """
    if profile.source is CaptureSource.PARAMETERS:
        raise PlanError(
            f"layers are split where it is proved on one path, and that of {profile.name} is not"
            " known",
            hints=["replicate or shard it"],
        )
    rules = unit_splits(profile, size)
    kinds = unit_kinds(model, sample, list(rules), has_target=has_target)
    running = [path for kind in kinds for path in kind.paths]
    first = {parameter: name for name, parameter in model.named_parameters()}
    whole = _in_several_units(model, running)  # what must be, by unit
    known: dict[tuple[str, frozenset[str]], _Trial] = {}
    read = reads_left(profile.flow)
    while True:
        styles: Styles = {}
        why: dict[str, str] = {}
        partial: dict[str, set[str]] = {}
        for path, kind in [(path, alike) for alike in kinds for path in alike.paths]:
            key = kind.paths[0], whole.get(path, frozenset())
            if key not in known:
                trial = _Trial(rules[key[0]], size=size, whole=key[1], read=read)
                tokens = by_tokens and pairs_take_one_tensor(profile, key[0])
                with _on_fakes(model, sample) if shapes_only else nullcontext():
                    trial.run(model, kind, by_tokens=tokens, shapes_only=shapes_only)
                known[key] = trial
            trial, unit = known[key], model.get_submodule(path)
            styles.update({joined(path, inner): style for inner, style in trial.styles.items()})
            why.update({joined(path, inner): reason for inner, reason in trial.why.items()})
            for name in trial.partial:
                partial.setdefault(first[unit.get_parameter(name)], set()).add(path)
        _leave_logits_split(profile, styles)
        before = dict(whole)
        for path in split_differently(model, styles, profile.flow, running=running):
            place = owner(path, running)
            inner = path.removeprefix(place).removeprefix(".")
            whole[place] = whole.get(place, frozenset()) | {inner}
        if whole == before:
            break
    try:
        styles = with_borders(model, sample, styles, size=size, has_target=has_target)
    except BatchError as error:
        plain = propose_styles(
            model,
            sample,
            size=size,
            profile=profile,
            has_target=has_target,
            shapes_only=shapes_only,
        )
        uneven = Unpaired(layer="*", style="tokens whole", why=error.what)
        return plain.model_copy(update={"notes": (*plain.notes, uneven)})
    if not styles:
        raise PlanError(
            f"{profile.name} has no layer that tensor parallelism could split over {size} ranks",
            where="\n".join(f"{path}: {reason}" for path, reason in list(why.items())[:3]),
            hints=["use data parallelism (dp_replicate, dp_shard) or a pipeline (pp)"],
        )
    names = [path for path, _ in model.named_modules()]
    notes = {
        Unpaired(layer=without_numbers(path), style=_written(styles.get(path)), why=reason): None
        for path, reason in why.items()
    }
    proof = None
    if not shapes_only:
        in_order = {path: styles[path] for path in names if path in styles}
        proof = _proof(model, in_order, partial, profile, size=size)
    pairs = as_pairs(styles, names, blocks=block_names(profile))
    return Proposal(size=size, styles=pairs, notes=tuple(notes), proof=proof)


def _proof(
    model: nn.Module,
    styles: Styles,
    partial: Mapping[str, set[str]],
    profile: ModelProfile,
    *,
    size: int,
) -> SplitProof | None:
    """The trials of all units as one proof; None where they contradict each other."""
    called = {call.unit for call in profile.flow.calls} - {GLUE, LOSS}
    try:
        require_one_use(model, partial, profile.flow, running=sorted(called))
    except PlanError:
        return None
    return SplitProof.of(styles, partial, size=size)


@contextmanager
def _on_fakes(model: nn.Module, sample: Batch) -> Iterator[None]:
    """Inside, the model's tensors and new ones are fake."""
    with stand_ins([model]) as fakes:
        fake = map_batch(lambda tensor: fakes.of(tensor.detach()), sample)
        with FakeRunMode().on(fake), without_onednn():
            yield


class _Trial:
    """A split of one unit: its styles one after another, each proved with those before.

    Args:
        whole: paths within the unit of what must have no style.

    Attributes:
        styles: what is proved, by paths within the unit.
        why: layers outside pairs, and the reasons.
        partial: parameters, by names within the unit, whose gradients are partial sums.
    """

    partial: frozenset[str] = frozenset()

    def __init__(
        self, rules: UnitSplit, *, size: int, whole: frozenset[str], read: Container[str]
    ) -> None:
        self.styles: Styles = {}
        self.why: dict[str, str] = {}
        self._rules = rules.without(whole)
        self._size = size
        self._whole, self._read = whole, read
        self._copy: UnitCopy | None = None
        self._result: CallResult | None = None

    def run(self, model: nn.Module, kind: UnitKind, *, by_tokens: bool, shapes_only: bool) -> None:
        """Try the split on a copy of the first unit of `kind`."""
        unit = model.get_submodule(kind.paths[0])
        if is_plain(unit):
            self._take_rules()
            return
        try:
            self._copy = copy_unit(model, kind, read=self._read)
        except ModelError as error:
            if shapes_only:
                self._take_rules()
            else:
                layers = [path for path, module in unit.named_modules() if can_split(module)]
                self.why = dict.fromkeys(layers, error.what)
            return
        self._run(self._copy, by_tokens=by_tokens)
        self._copy = self._result = None  # one at a time: they may be large

    def _take_rules(self) -> None:
        """Take the styles of the rules, untried."""
        styles, self.why = self._rules.with_pairs(self._rules.pairs)
        self.styles = {path: (style,) for path, style in styles.items()}

    def _run(self, copy: UnitCopy, *, by_tokens: bool) -> None:
        """Try pairs, then layers, then tokens."""
        pairs = [pair for pair in self._rules.pairs if self._take_pair(copy, pair)]
        refused = dict(self.why)
        styles, self.why = self._rules.with_pairs(pairs)
        self.why |= refused
        left: Styles = {path: (s,) for path, s in styles.items() if path not in self.styles}
        if len(left) > 1 and not self._try(copy, left):  # most often right, and one trial for all
            left = {}
        for path, style in left.items():
            if reason := self._try(copy, {path: style}):
                self.why[path] = reason
        if by_tokens:
            self._split_tokens(copy, pairs)

    def _take_pair(self, copy: UnitCopy, pair: Pair) -> bool:
        """Take the first variant of the pair that is right."""
        reasons = []
        for variant in split_variants(copy, pair, self._rules.styles, size=self._size):
            reason = self._try(copy, variant)
            if not reason:
                return True
            reasons.append(reason)
        self.why.update(dict.fromkeys(pair.layers, reasons[0]))
        return False

    def _split_tokens(self, copy: UnitCopy, pairs: Sequence[Pair]) -> None:
        """Split tokens too, if all layers of the unit are in pairs."""
        kinds = {style.kind for each in self.styles.values() for style in each}
        if not {Kind.COLUMN, Kind.ROW} <= kinds or kinds & {Kind.GATHER, Kind.VOCAB}:
            return
        reason = ""
        for choice in sequence_variants(pairs, self.styles):
            reason = self._try(copy, choice)
            if not reason:
                return
        self.why[""] = f"its tokens are not split: {reason}"

    def _try(self, copy: UnitCopy, styles: Mapping[str, tuple[Style, ...]]) -> str:
        """Take `styles` if they are right; else returns the reason."""
        if self._whole & styles.keys():
            return USED_ELSEWHERE
        combined = united(self.styles, dict(styles))
        self._result = self._result or run_whole(copy)
        verdict = prove_unit(copy, combined, size=self._size, whole=self._result)
        if not verdict.why_not:
            self.styles, self.partial = combined, verdict.partial
        return verdict.why_not


def _in_several_units(model: nn.Module, units: Sequence[str]) -> dict[str, frozenset[str]]:
    """The layers of each unit that have another path too, in another unit: one split for all."""
    paths: dict[int, dict[str, tuple[str, str]]] = {}
    for unit in units:
        for inner, module in model.get_submodule(unit).named_modules():
            if can_split(module):
                paths.setdefault(id(module), {})[joined(unit, inner)] = unit, inner
    shared: dict[str, frozenset[str]] = {}
    for places in paths.values():
        for unit, inner in places.values() if len(places) > 1 else ():
            shared[unit] = shared.get(unit, frozenset()) | {inner}
    return shared


def _leave_logits_split(profile: ModelProfile, styles: Styles) -> None:
    alone = {path: each[0] for path, each in styles.items() if len(each) == 1}
    before = dict(alone)
    leave_logits_split(profile, alone)
    styles.update({path: (style,) for path, style in alone.items() if before[path] != style})


def _written(styles: Sequence[Style] | None) -> str:
    return str(styles[0]) if styles else "whole"
