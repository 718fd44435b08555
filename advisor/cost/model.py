"""The cost model: sums that plans share are made once, for any plan of the same facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy

from advisor.cost import anchored
from advisor.cost.assemble import assemble
from advisor.cost.breakdown import Estimate
from advisor.cost.by_hand import crossed_s
from advisor.cost.calibration import CALIBRATION, Calibration
from advisor.cost.communication import (
    exchange,
    waiting_bytes,
)
from advisor.cost.compression import sent
from advisor.cost.compute import (
    Busy,
    Computing,
    UnitTime,
    added_s,
    block_times,
    busy_s,
    optimizer_s,
    unit_times,
    with_measured,
)
from advisor.cost.held_units import held_units
from advisor.cost.in_turn import in_turn, reduced_share
from advisor.cost.ledger import Ledger, Wires
from advisor.cost.loads import Loads, UnitLoad, loads_of, styled_units
from advisor.cost.memory import added_share, peak, shard_degree
from advisor.cost.offload import filed_s, moved_s
from advisor.cost.replay import replay
from advisor.cost.runs import Run, runs_of
from advisor.cost.small_collectives import apart_s, summed_s
from advisor.cost.stage_memory import holds_outputs
from advisor.cost.staged import Stage, staged
from advisor.cost.stages import Stages
from advisor.cost.tensor import Styled
from advisor.cost.threads import threaded
from advisor.cost.updates import updated
from advisor.cost.work import convention
from advisor.inputs.facts import Facts
from engines.legality import numerics
from engines.plan import DataParallel, Plan
from engines.tensor.rules import proposed_styles
from profiles.allocator.host_memory import load_memory
from profiles.errors import PlanError
from profiles.model.profile import Numerics, UnitProfile
from profiles.workload.optimizers import Upkeep, upkeep
from profiles.workload.stack import compiled


class CostModel:
    """`estimate` for many plans of the same facts."""

    def __init__(self, facts: Facts, calibration: Calibration = CALIBRATION) -> None:
        self.facts = facts
        self.stack = facts.stack
        self.calibration = calibration
        self.runs: tuple[Run, ...] = runs_of(facts.model)
        self.stages = Stages(facts.model, facts.cluster)
        self._wires: Wires = {}
        # A plan says all of its batch, and its cost does not ask how much memory there is.
        self._estimates: dict[Plan, Estimate] = {}
        self._loads: dict[tuple[object, ...], Loads] = {}
        self._stages: dict[tuple[object, ...], dict[object, Stage]] = {}
        self._computing: dict[tuple[object, ...], Computing] = {}
        self._units: dict[tuple[object, ...], tuple[UnitProfile, ...]] = {}
        self._styled: dict[tuple[Numerics, tuple[tuple[str, str], ...]], list[Styled]] = {}
        self._updates: dict[tuple[object, ...], Upkeep] = {}
        self._styles: dict[int, tuple[tuple[str, str], ...]] = {}
        self._load_bytes: float | None = None
        self._flop: dict[tuple[Numerics, int], float] = {}
        self._compiled: CostModel | None = None
        self._numerics: dict[tuple[object, bool], Numerics] = {}

    def is_beside(self, facts: Facts) -> bool:
        """Whether only links, memory or batch of `facts` differ from these."""
        mine, other = self.facts, facts
        device = other.cluster.device.model_copy(
            update={"memory_bytes": mine.cluster.device.memory_bytes}
        )
        batch = {"global_batch_size": mine.workload.global_batch_size}
        return (
            mine.model is other.model
            and mine.stack == other.stack
            and mine.cluster.world_size == other.cluster.world_size
            and mine.cluster.devices_per_node == other.cluster.devices_per_node
            and mine.cluster.device == device
            and mine.cluster.learned == other.cluster.learned
            and mine.workload == other.workload.model_copy(update=batch)
        )

    def beside(self, facts: Facts) -> CostModel:
        """The costs of facts that differ: those that are `is_beside` with the sums that were made
        for these."""
        if not self.is_beside(facts):
            return CostModel(facts)
        mine, found = self.facts.cluster, copy(self)
        found.facts, found._compiled = facts, None
        if mine != facts.cluster.model_copy(update={"device": mine.device}):
            found._wires, found._estimates, found._stages = {}, {}, {}
        return found

    def compiled(self) -> CostModel:
        """The costs of the same facts with compiled blocks."""
        if self.stack.compiled:
            return self
        if self._compiled is None:
            facts = self.facts
            self._compiled = CostModel(
                Facts(
                    model=facts.model,
                    cluster=facts.cluster,
                    workload=facts.workload,
                    stack=compiled(facts.stack),
                ),
                self.calibration,
            )
        return self._compiled

    def estimate(self, plan: Plan) -> Estimate:
        """See `advisor.cost.estimate`."""
        if plan.compile and not self.stack.compiled:
            return self.compiled().estimate(plan)
        if plan not in self._estimates:
            self._estimates[plan] = self._estimate(plan)
        return self._estimates[plan]

    def _estimate(self, plan: Plan) -> Estimate:
        if plan.microbatch_size is None:
            raise PlanError(
                "the plan leaves microbatch_size open, so it has no cost", where=f"plan: {plan}"
            )
        if plan.pp > 1:
            return staged(self, plan)
        if plan.data_parallel is DataParallel.THREADS:
            return threaded(self, plan)
        return self._whole(plan) if plan.updates_in_step else updated(self, plan)

    def _whole(self, plan: Plan) -> Estimate:
        """Of a plan whose ranks have all units."""
        model, cluster = self.facts.model, self.facts.cluster
        device = cluster.device
        loads, ledger = self.loads(plan), self.ledger()
        update = self.update(plan, 0, len(model.units))
        replicas = sent(plan, model.units, gradient_bytes=loads.gradient_bytes, device=device)
        memory = peak(
            plan,
            loads,
            update=update,
            device=device,
            batch_bytes=self.batch_bytes(plan),
            exchange_bytes=replicas.kept_bytes + waiting_bytes(plan, cluster, replicas),
            stack=self.stack,
            calibration=self.calibration,
        )
        computing = self.computing(plan, loads)
        exchanged = exchange(
            plan,
            loads,
            ledger,
            has_host=device.kind != "cpu",
            sent=replicas,
            reduced_share=self.reduced_share,
            stack=self.stack,
        )
        exchanged, waited_s = in_turn(self.stack, plan, exchanged, computing)
        apart = waited_s + apart_s(plan, model, ledger) + self.partial_s(plan, loads.runs, ledger)
        apart += moved_s(plan, loads, update, ledger, cluster=cluster)
        shards = {"degree": shard_degree(plan), "rounds": plan.forwards}
        apart += filed_s(plan, [loads], update, ledger, **shards, cluster=cluster)
        apart += crossed_s(plan, model, self.numerics(plan), ledger)
        overlaps = self.overlaps
        played = replay(plan, computing.times, exchanged, overlaps=overlaps)
        busy = busy_s(computing, plan.forwards)
        added = (plan.forwards - 1) * computing.added.total
        exposed = max(0.0, played.wall_s + added - busy.total) + apart
        sending_s = played.sent_s + apart
        return self.assemble(
            plan,
            memory=memory,
            busy=busy,
            update_s=optimizer_s(plan, update, device=device, ranks=cluster.devices_per_node),
            exposed_s=exposed,
            overlapped_s=max(0.0, sending_s - exposed) if overlaps else 0.0,
            sent_s=sending_s,
            idle_s=0.0,
            computing=computing,
            ledger=ledger,
        )

    assemble = assemble

    @property
    def overlaps(self) -> bool:
        """Whether exchanges go on beside computing.

        gloo's threads share the cores with the computing: on processors nothing is hidden. (What
        they were measured to inflict on each other, 2 ranks on 2 cores: computing takes 1.8 times
        as long and sending 2.0 times. A second of overlap then adds 0.9, as good as all of it.)
        """
        return self.facts.cluster.device.kind != "cpu"

    @property
    def load_bytes(self) -> float:
        """Main memory that one rank takes while the model is loaded."""
        if self._load_bytes is None:
            self._load_bytes = load_memory(self.facts.model, ranks_per_node=1).per_rank_bytes
        return self._load_bytes

    def numerics(self, plan: Plan) -> Numerics:
        """See `engines.legality.numerics`."""
        key = plan.precision, plan.data_parallel.is_sharded
        if key not in self._numerics:
            self._numerics[key] = numerics(plan, self.facts.model)
        return self._numerics[key]

    @property
    def reduced_share(self) -> float:
        """Of a gradient as built, what goes between replicas."""
        return reduced_share(self.stack)

    def flop(self, plan: Plan, samples: int) -> float:
        """Model FLOP of one forward and backward of all units, without recompute, as MFU counts
        them: attention as three times two products, whatever its mask hides or its kernel repeats
        (PaLM, arXiv:2204.02311, appendix B)."""
        kind = self.numerics(plan)
        if (kind, samples) not in self._flop:
            found = (
                run.count
                * (run.unit.flop(samples, kind) + samples * convention(run.unit.cost(kind)))
                for run in self.runs
            )
            self._flop[kind, samples] = sum(found)
        return self._flop[kind, samples]

    def ledger(self) -> Ledger:
        """An empty one for this cluster."""
        return Ledger(self.facts.cluster, self._wires, self.calibration)

    def dtype(self, plan: Plan) -> str:
        """In which matrices are multiplied by weights."""
        if self.stack.product_dtype is not None:
            return self.stack.product_dtype
        is_built = self.numerics(plan) is Numerics.AS_BUILT
        return self.facts.model.dtype if is_built else "bfloat16"

    def batch_bytes(self, plan: Plan) -> float:
        """A rank's part of the batch of a step."""
        assert plan.microbatch_size is not None
        local = plan.microbatch_size * plan.forwards
        return self.facts.model.batch_bytes.at(local / plan.cp)

    def loads(self, plan: Plan, samples: int | None = None) -> Loads:
        """All units on one rank of the tp axis; at the plan's microbatch unless said."""
        kind = self.numerics(plan)
        samples = samples or plan.microbatch_size
        assert samples is not None
        styles = self.styles(plan)
        # Stacks with states of their own shard experts as `cost.states` says.
        is_torch = self.stack.states is None
        is_sharded = plan.ep > 1 and plan.data_parallel.is_sharded and is_torch
        expert_shards = shard_degree(plan) if plan.shards_experts and is_torch else 0
        key = (kind, samples, plan.tp, styles, plan.cp, plan.ep, is_sharded, expert_shards)
        if key not in self._loads:
            counted = loads_of(
                self.facts.model,
                numerics=kind,
                samples=samples,
                tp=plan.tp,
                styles=styles,
                cp=plan.cp,
                ep=plan.ep,
                is_sharded=is_sharded,
                expert_shards=expert_shards,
                runs=self.runs,
                styled=self._styled_units(plan),
                stack=self.stack,
            )
            self._loads[key] = anchored.loads(counted, self.facts.cluster)
        return self._loads[key]

    def stages_of(self, plan: Plan) -> dict[object, Stage]:
        """Stages that were worked out, of plans that one microbatch cannot tell from this one."""
        key = (
            self.numerics(plan),
            plan.microbatch_size,
            plan.tp,
            self.styles(plan),
            plan.cp,
            plan.ep,
            plan.data_parallel,
            plan.dp_replicate,
            plan.dp_shard,
            plan.recompute,
            plan.offload,
            holds_outputs(plan, self.stack),
        )
        return self._stages.setdefault(key, {})

    def _styled_units(self, plan: Plan) -> list[Styled]:
        """What is done to each unit, looked up once for all microbatches."""
        kind, styles = self.numerics(plan), self.styles(plan)
        if (kind, styles) not in self._styled:
            self._styled[kind, styles] = styled_units(
                self.facts.model, numerics=kind, styles=styles
            )
        return self._styled[kind, styles]

    def styles(self, plan: Plan) -> tuple[tuple[str, str], ...]:
        """How layers are split; as proposed from the profile where the plan leaves it open."""
        if plan.tp == 1 or plan.tensor_styles:
            return plan.tensor_styles if plan.tp > 1 else ()
        if plan.tp not in self._styles:
            self._styles[plan.tp] = proposed_styles(self.facts.model, plan.tp)
        return self._styles[plan.tp]

    def computing(self, plan: Plan, loads: Loads) -> Computing:
        """Measured times of this device where the model carries some, else the roofline's.

        `loads` are all units of the plan, or some neighbours of them.
        """
        share = added_share(plan)
        key = (loads.runs, loads.names[:1], plan.recompute, self.dtype(plan), share)
        if key not in self._computing:
            self._computing[key] = self._timed(plan, loads)
        return self._computing[key]

    def _timed(self, plan: Plan, loads: Loads) -> Computing:
        model, cluster = self.facts.model, self.facts.cluster
        device, dtype = cluster.device, self.dtype(plan)

        def timed(some: Loads) -> tuple[UnitTime, ...]:
            return unit_times(
                some,
                recompute=plan.recompute,
                device=device,
                dtype=dtype,
                stack=self.stack,
                calibration=self.calibration,
            )

        times = timed(loads)
        error = anchored.compute_error(cluster, dtype)
        is_split = plan.tp * plan.cp * plan.ep > 1  # what was measured are whole units
        kind = self.numerics(plan)
        measured = None if is_split else block_times(model, cluster, kind, samples=loads.samples)
        added = added_s(loads, times, share=added_share(plan), device=device)
        if self.stack.accumulates_in_product:
            added = Busy(0.0, 0.0, 0.0)
        if measured is None:
            return Computing(times, error, added=added)
        start = next(n for n, unit in enumerate(model.units) if unit.name == loads.names[0])
        then = self.loads(plan, measured.samples).part(start, start + len(loads.names))
        at_measured = timed(then)
        return with_measured(
            times, loads, measured=measured, at_measured=at_measured, error=error, added=added
        )

    def update(
        self, plan: Plan, first: int, last: int, copies: Sequence[UnitProfile] = ()
    ) -> Upkeep:
        """Of the parameters of units [first, last) that one rank holds, and of `copies`."""
        return self.update_of(plan, [(first, last)], copies)

    def update_of(
        self, plan: Plan, parts: Sequence[tuple[int, int]], copies: Sequence[UnitProfile] = ()
    ) -> Upkeep:
        """The same of several stages."""
        optimizer = self.facts.workload.optimizer
        units = self._held(plan)
        own = [unit for first, last in parts for unit in units[first:last]]
        by_name = optimizer.units is not None
        counts = Counter(unit.name if by_name else id(unit) for unit in own)
        key = (
            tuple(counts.items()),
            tuple(unit.name for unit in copies),
            plan.tp,
            self.styles(plan),
            plan.ep,
            plan.shards_experts,
            shard_degree(plan),
        )
        if key not in self._updates:
            counted = upkeep(optimizer, [*own, *copies], shards=shard_degree(plan))
            self._updates[key] = anchored.update(counted, self.facts.cluster)
        return self._updates[key]

    def _held(self, plan: Plan) -> tuple[UnitProfile, ...]:
        """Every unit with the parameters that one rank of the tp axis has; equal ones are one
        object, unless the optimizer knows them by their names."""
        model = self.facts.model
        if self.facts.workload.optimizer.units is not None:
            return model.units
        shards = shard_degree(plan) if plan.ep > 1 else 1
        key = (plan.tp, self.styles(plan), plan.ep, shards, plan.shards_experts)
        if key not in self._units:
            kind, styled = self.numerics(plan), self._styled_units(plan)
            self._units[key] = held_units(
                plan,
                model,
                self.runs,
                styled,
                numerics=kind,
                shards=shards,
                splits_experts=self.stack.splits_experts,
            )
        return self._units[key]

    def partial_s(self, plan: Plan, units: Sequence[UnitLoad], ledger: Ledger) -> float:
        """Seconds of a step to sum the gradients of parameters that the tp axis holds whole."""
        return summed_s(
            ledger,
            "gradients of whole parameters",
            gradient_bytes=sum(u.partial_gradient_bytes * u.count for u in units)
            / shard_degree(plan),
            tensors=sum(u.partial_tensors * u.count for u in units),
            group_size=plan.tp,
            stride=1,
        )
