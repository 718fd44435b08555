"""Pipeline stages in the cost model: units, border traffic, tied copies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from advisor.cost.load.tensor import Styles, cut_share
from advisor.cost.stages.complete import even_cuts, even_stages
from advisor.cost.stages.orders import ONE_STAGE, rank_of
from engines.plan import Plan, Recompute, Schedule
from engines.tensor.styles import cutting
from engines.tensor.token_rules import hidden_value
from profiles.errors import PlanError
from profiles.machine.cluster import ClusterProfile
from profiles.model.affine import Affine
from profiles.model.flow import GLUE, LOSS, Edge, Terms
from profiles.model.profile import ModelProfile, Numerics, UnitProfile


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """A parameter with copies on several ranks of a pipeline.

    Attributes:
        unit: with this parameter alone.
        ranks: coordinates on the pp axis, ascending; the first one's unit counts it.
    """

    unit: UnitProfile
    ranks: tuple[int, ...]


class HandedOn(NamedTuple):
    """Units whose hidden values are, on a rank, a share of the tokens."""

    units: frozenset[str]
    share: float

    def of(self, unit: str) -> float:
        return self.share if unit in self.units else 1.0


WHOLE = HandedOn(frozenset(), 1.0)


class StageBorders:
    """Stage borders of one model; results are cached for other plans."""

    def __init__(self, model: ModelProfile, cluster: ClusterProfile) -> None:
        self._model = model
        self._cluster = cluster
        self._place = {unit.name: place for place, unit in enumerate(model.units)}
        self._can_be_split: dict[tuple[int, int], bool] = {}
        self._even: dict[tuple[int, int], tuple[int, ...]] = {}
        self._retained: dict[tuple[int, int, HandedOn, Numerics], tuple[Affine, Affine]] = {}
        self._crossing: dict[tuple[int, HandedOn, Numerics], tuple[Affine, Affine]] = {}
        self._terms: dict[int, tuple[Terms, ...]] = {}
        flow = model.flow
        # Units that are called again, or that call others.
        trained = {unit.name for unit in model.units if unit.trainable_parameters}
        self._callers = {caller for _, caller in flow.inside}
        self._callers |= trained.intersection(flow.called_again())
        self._edges_to: defaultdict[int, list[Edge]] = defaultdict(list)
        for edge in flow.edges:
            self._edges_to[edge.target].append(edge)
        self._calls_of: defaultdict[str, list[int]] = defaultdict(list)
        for number, call in enumerate(flow.calls):
            self._calls_of[call.unit].append(number)

    def ends(self, plan: Plan) -> tuple[int, ...]:
        """Indices of units at which the stages of `plan` begin and end: 0, ..., all units.

        Raises:
            PlanError: a border is no unit, or borders are not in order.
        """
        if not plan.stages:
            return self._evenly(plan)
        try:
            borders = [self._place[name] for name in plan.stages]
        except KeyError as error:
            raise PlanError(
                f"stage border {error} is not a unit of {self._model.name}", where=f"plan: {plan}"
            ) from None
        ends = (0, *borders, len(self._model.units))
        if any(one >= other for one, other in pairwise(ends)):
            raise PlanError("stage borders are in the order of calls", where=f"plan: {plan}")
        return ends

    def _evenly(self, plan: Plan) -> tuple[int, ...]:
        """Borders as `advisor.cost.stages.complete` sets them; over all units if the dataflow is
        unknown."""
        chunks = 1 if plan.schedule in (*ONE_STAGE, Schedule.ZERO_BUBBLE, None) else 2
        key = plan.pp, chunks
        if key not in self._even:
            model = self._model
            if model.flow.calls:
                cuts = [self._place[name] for name in even_stages(plan, model, self._cluster)]
            else:
                order = [n for n, unit in enumerate(model.units) if unit.name not in (GLUE, LOSS)]
                flop = [model.units[n].flop(model.samples, model.numerics[0]) for n in order]
                starts = even_cuts(flop, list(range(1, len(order))), plan.pp * chunks)
                cuts = [order[n] for n in starts]
            if len(cuts) < plan.pp * chunks - 1:
                raise PlanError(
                    f"{model.name} has no {plan.pp * chunks} stages", where=f"plan: {plan}"
                )
            self._even[key] = (0, *cuts, len(model.units))
        return self._even[key]

    def crossing(
        self, place: int, *, numerics: Numerics, samples: float, shares: HandedOn = WHOLE
    ) -> tuple[float, float]:
        """Bytes of one microbatch across the border before unit `place`: activations, and
        gradients.

        Args:
            shares: units that hand on a rank's share of the tokens.
        """
        model = self._model
        start = model.flow.first_call(model.units[place].name)
        if start is None:
            before = model.units[place - 1]
            sent = before.cost(numerics).output_bytes.at(samples) * shares.of(before.name)
            return sent, sent
        if (place, shares, numerics) not in self._crossing:
            sums = self._crossing_terms(start)
            self._crossing[place, shares, numerics] = self._counted(sums, numerics, shares)
        activations, gradients = self._crossing[place, shares, numerics]
        return activations.at(samples), gradients.at(samples)

    def retained(
        self,
        first: int,
        last: int,
        *,
        numerics: Numerics,
        samples: float,
        shares: HandedOn = WHOLE,
    ) -> tuple[float, float]:
        """Bytes of one microbatch that the stage of units [first, last) receives and is the first
        to take, and those that it made and sends.

        Activations of a unit have what it takes first (see `Storages.saved_bytes`): what a stage
        keeps itself is not counted again for being sent. A value of an earlier stage that it hands
        through stays where it was received.
        """
        units, flow = self._model.units, self._model.flow
        start = flow.first_call(units[first].name) if first else 0
        end = flow.first_call(units[last].name) if last < len(units) else len(flow.calls)
        if start is None or end is None:
            over = [
                self.crossing(place, numerics=numerics, samples=samples, shares=shares)[0]
                if 0 < place < len(units)
                else 0.0
                for place in (first, last)
            ]
            return over[0], over[1]
        known = first, last, shares, numerics
        if known not in self._retained:
            taken = self._first_taken
            arriving, leaving = self._crossing_terms(start), self._crossing_terms(end)
            received = [terms for terms in arriving if start <= taken[terms[-1]] < end]
            made = [terms for terms in leaving if terms[-1][0] >= start]
            # A sum is made for the next stage; what is no sum may be kept here.
            keepers = [
                flow.calls[call].values[value].kept_by if not others else None
                for *others, (call, value) in made
            ]
            sent = [k for k, by in zip(made, keepers, strict=True) if by is None or by >= end]
            self._retained[known] = (
                self._counted(received, numerics, shares)[0],
                self._counted(sent, numerics, shares)[0],
            )
        taken_first, handed_on = self._retained[known]
        return taken_first.at(samples), handed_on.at(samples)

    def _crossing_terms(self, position: int) -> tuple[Terms, ...]:
        if position not in self._terms:
            self._terms[position] = self._model.flow.crossing_terms(position)
        return self._terms[position]

    @cached_property
    def repeated(self) -> tuple[int, ...]:
        """Units that every stage runs again: code between modules, and modules that compute on no
        parameter (rotary tables); none without a flow."""
        model, calls = self._model, self._model.flow.calls
        on_parameters = {
            call.unit for call in calls if any(value.depends_on_parameters for value in call.values)
        } - {GLUE}
        names = [unit.name for unit in model.units]
        return tuple(
            n for n, name in enumerate(names) if calls and name not in {*on_parameters, LOSS}
        )

    @cached_property
    def _first_taken(self) -> dict[tuple[int, int], int]:
        """First call that takes each value."""
        taken: dict[tuple[int, int], int] = {}
        for edge in self._model.flow.edges:
            key = edge.source, edge.value
            taken[key] = min(edge.target, taken.get(key, edge.target))
        return taken

    def _share(self, unit: str, numerics: Numerics) -> float:
        """Bytes that a unit hands on per byte of the model as built: autocast leaves those of its
        sums in fp32, and those of its products in bf16."""
        model = self._model
        if numerics is not Numerics.BF16_AUTOCAST or unit not in self._place:
            is_cast = numerics is Numerics.BF16 and model.dtype == "float32"
            return 1 / 2 if is_cast else 1.0
        costs = model.units[self._place[unit]].costs
        built = costs[Numerics.AS_BUILT].output_bytes.at(1) if Numerics.AS_BUILT in costs else 0.0
        return costs[numerics].output_bytes.at(1) / built if built else 1.0

    def _counted(
        self, sums: Iterable[Terms], numerics: Numerics, shares: HandedOn
    ) -> tuple[Affine, Affine]:
        """Bytes of these tensors: all, and those with a gradient."""
        flow = self._model.flow
        activations, gradients = Affine(), Affine()
        for terms in sums:
            call, number = terms[-1]
            value, unit = flow.calls[call].values[number], flow.calls[call].unit
            nbytes = value.bytes * (shares.of(unit) if number == hidden_value(flow, call) else 1.0)
            nbytes *= max(self._share(flow.calls[made].unit, numerics) for made, _ in terms)
            activations += nbytes
            gradients += nbytes if value.needs_gradient else Affine()
        return activations, gradients

    def ties(self, plan: Plan, ends: Sequence[int]) -> tuple[TiedParameter, ...]:
        """Tied parameters whose copies are on several ranks."""
        ties = []
        for names in self._model.tied:
            homes = [self._home(name) for name in names]
            ranks = {
                rank_of(
                    plan.schedule or Schedule.GPIPE,
                    next(s for s, (_, last) in enumerate(pairwise(ends)) if home < last),
                    ranks=plan.pp,
                    stages=len(ends) - 1,
                )
                for home in homes
            }
            if len(ranks) > 1:
                alone = self._alone(names[0], homes[0], plan)
                ties.append(TiedParameter(alone, tuple(sorted(ranks))))
        return tuple(ties)

    def _home(self, parameter: str) -> int:
        """Index of the unit that holds a parameter."""
        path = parameter
        while path:
            path = path.rpartition(".")[0]
            if path in self._place:
                return self._place[path]
        return self._place.get(GLUE, 0)

    def _alone(self, parameter: str, home: int, plan: Plan) -> UnitProfile:
        """Unit with a rank's part of the parameter alone: its layer's weight, else all parameters
        of its unit."""
        unit = self._model.units[home]
        layers = next(iter(unit.costs.values())).layers
        prefix = f"{unit.name}." if unit.name else ""
        styled = Styles(plan.tensor_styles).of_unit(unit, layers)[1:]
        for layer, place in zip(layers, styled, strict=True):
            if parameter == f"{prefix}{layer.path + '.' if layer.path else ''}weight":
                sizes = {(layer.inputs, layer.outputs), (layer.outputs, layer.inputs)}
                shapes = tuple(s for s in unit.shapes if s.sizes[:2] in sizes)[:1]
                style = cutting(place.styles)
                share = cut_share(layer, style, plan.tp) if style is not None else 1.0
                return unit.model_copy(
                    update={
                        "parameter_bytes": round(layer.weight_bytes * share),
                        "gradient_bytes": round(layer.weight_gradient_bytes * share),
                        "shapes": tuple(s.model_copy(update={"count": 1}) for s in shapes),
                    }
                )
        return unit

    def whole_backwards(self, plan: Plan, ends: Sequence[int]) -> frozenset[int]:
        """Stages whose backward is not split: `engines.pipeline.split_backward` without the
        modules. The first stage runs all of it later, unless FSDP2 shards it."""
        places = list(pairwise(ends))
        if plan.data_parallel.is_sharded:
            return frozenset(range(len(places)))
        whole = {
            stage
            for stage, (first, last) in enumerate(places)
            if stage and not (self._splits(first, last) and not self._recomputes(plan, first, last))
        }
        return frozenset(whole | ({len(places) - 1} if plan.loss_chunks > 1 else set()))

    def _recomputes(self, plan: Plan, first: int, last: int) -> bool:
        units = self._model.units[first:last]
        return plan.recompute is not Recompute.NONE and any(unit.is_block for unit in units)

    def _splits(self, first: int, last: int) -> bool:
        if (first, last) not in self._can_be_split:
            self._can_be_split[first, last] = self._can_split(first, last)
        return self._can_be_split[first, last]

    def _can_split(self, first: int, last: int) -> bool:
        flow, units = self._model.flow, self._model.units
        names = {unit.name: unit for unit in units[first:last]}
        start = flow.first_call(units[first].name)
        if start is None:
            return True  # dataflow between the units is unknown
        for tied in self._model.tied:
            if sum(first <= self._home(name) < last for name in tied) > 1:
                return False  # one weight twice in a stage
        if self._callers & set(names):
            return False
        own = sorted(n for name in names for n in self._calls_of[name] if n >= start)
        inside = set(own)
        sources = {e.source for number in inside for e in self._edges_to[number]}
        if any(flow.calls[source].unit == GLUE for source in sources):
            return False
        keys = (terms[-1] for terms in self._crossing_terms(start))
        fed = {(n, v) for n, v in keys if flow.calls[n].values[v].needs_gradient}
        for number in own:
            call = flow.calls[number]
            if call.parameters and call.unit != GLUE:
                return False
            takes = any((e.source, e.value) in fed for e in self._edges_to[number])
            outputs = [v for v, value in enumerate(call.values) if value.needs_gradient]
            trainable = names[call.unit].trainable_parameters > 0
            if call.unit not in (GLUE, LOSS) and trainable and (not takes or len(outputs) > 1):
                return False
            if takes:
                fed.update((number, value) for value in outputs)
        return True


def require_places(plan: Plan, count: int) -> None:
    """Raises:
    PlanError: `count` stages do not go round the ranks of the pp axis.
    """
    if (
        count < plan.pp
        or count % plan.pp
        or (plan.schedule is Schedule.ZBV and count != 2 * plan.pp)
    ):
        raise PlanError(
            f"{count} stages do not go round {plan.pp} ranks under {plan.schedule}",
            where=f"plan: {plan}",
        )
