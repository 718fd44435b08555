"""Sums over a model's units, cached for all plans of the same facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from advisor.cost import anchored
from advisor.cost.calibration import CALIBRATION, Calibration
from advisor.cost.communication.exposed import reduced_share
from advisor.cost.communication.small_collectives import experts_s, summed_s
from advisor.cost.compute.unit_times import (
    Busy,
    Computing,
    RunPasses,
    UnitTime,
    added_s,
    block_times,
    passes_of,
    with_measured,
    with_recompute,
)
from advisor.cost.ledger import AlgorithmCache, Ledger
from advisor.cost.load.loads import Loads, loads_of
from advisor.cost.load.local_units import local_units
from advisor.cost.load.run_loads import RunLoad, run_loads, styled_units
from advisor.cost.load.runs import UnitRun, runs_of
from advisor.cost.load.tensor import Styled, hands_on, token_share
from advisor.cost.load.unit_load import UnitLoad
from advisor.cost.load.work import convention
from advisor.cost.memory.peak import added_share, shard_degree
from advisor.cost.stages.stage import StageCost
from advisor.cost.stages.stage_borders import WHOLE, HandedOn, StageBorders
from advisor.cost.stages.stage_memory import StageMemory, holds_outputs
from advisor.inputs.facts import Facts
from advisor.inputs.stacks import convolves_in_tf32
from engines.legality import numerics, scales_loss
from engines.plan import Aggregation, Compression, Plan
from engines.tensor.rules import proposed_styles
from engines.tensor.token_rules import split_tokens
from profiles.allocator.host_memory import load_memory
from profiles.model.profile import Numerics, UnitProfile
from profiles.workload.optimizers import Upkeep, upkeep


class CostContext:
    """Facts, and cached sums over a model's units that the terms of time and memory need."""

    def __init__(self, facts: Facts, calibration: Calibration = CALIBRATION) -> None:
        self.facts = facts
        self.stack = facts.stack
        self.calibration = calibration
        self.runs: tuple[UnitRun, ...] = runs_of(facts.model)
        self.stages = StageBorders(facts.model, facts.cluster)
        self._algorithms: AlgorithmCache = {}
        self._loads: dict[tuple[object, ...], Loads] = {}
        self._of_runs: dict[tuple[object, ...], tuple[RunLoad, ...]] = {}
        self._stages: dict[tuple[object, ...], dict[object, StageCost]] = {}
        self._chunks: dict[tuple[object, ...], dict[object, StageMemory]] = {}
        self._passes: dict[tuple[object, ...], RunPasses] = {}
        self._computing: dict[tuple[object, ...], dict[tuple[object, ...], Computing]] = {}
        self._units: dict[tuple[object, ...], tuple[UnitProfile, ...]] = {}
        self._shares: dict[object, HandedOn] = {}
        self._styled: dict[tuple[Numerics, tuple[tuple[str, str], ...]], list[Styled]] = {}
        self._updates: dict[tuple[object, ...], Upkeep] = {}
        self._styles: dict[tuple[int, bool], tuple[tuple[str, str], ...]] = {}
        self._load_bytes: float | None = None
        self._flop: dict[tuple[Numerics, int], float] = {}
        self._numerics: dict[tuple[object, bool], Numerics] = {}

    @property
    def overlaps(self) -> bool:
        """Return True if communication overlaps with compute.

        On CPUs gloo's threads share the cores with compute, so nothing is hidden. (Measured with 2
        ranks on 2 cores: while both run, compute takes 1.8 times as long and sending 2.0 times. A
        second of overlap then adds 0.9 s, nearly as much as no overlap.)
        """
        return self.facts.cluster.device.kind != "cpu"

    def hides_gradients(self, plan: Plan) -> bool:
        """Return True if replicas exchange gradients beside the backward.

        On CPUs DDP alone does: gloo's all-reduces run in threads, and where the link is slow they
        wait for it more than they compute, which a bench tells (`ClusterProfile.overlap`). FSDP2's
        collectives block there, and so do sums that the engine makes of messages.
        """
        by_ddp = plan.is_replicated and plan.aggregation is Aggregation.BACKEND
        is_async = by_ddp and plan.compression is not Compression.POWERSGD
        return self.overlaps or (is_async and self.facts.cluster.overlap is not None)

    @property
    def load_bytes(self) -> float:
        """Main memory of one rank while the model is loaded."""
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
        """Bytes sent between replicas per byte of gradient as built."""
        return reduced_share(self.stack)

    def flop(self, plan: Plan, samples: int) -> float:
        """Model FLOP of one forward and backward of all units, without recompute, as MFU counts
        them: attention as three times two products, without masking or kernel repeats (PaLM,
        arXiv:2204.02311, appendix B)."""
        kind = self.numerics(plan)
        if (kind, samples) not in self._flop:
            self._flop[kind, samples] = sum(
                run.count
                * (run.unit.flop(samples, kind) + samples * convention(run.unit.cost(kind)))
                for run in self.runs
            )
        return self._flop[kind, samples]

    def ledger(self) -> Ledger:
        """Create an empty ledger for this cluster."""
        return Ledger(self.facts.cluster, self._algorithms, self.calibration)

    def dtype(self, plan: Plan) -> str:
        """Dtype of products with weights."""
        if self.stack.product_dtype is not None:
            return self.stack.product_dtype
        is_built = self.numerics(plan) is Numerics.AS_BUILT
        return self.facts.model.dtype if is_built else plan.precision.dtype

    def peak_dtype(self, plan: Plan) -> str:
        """Dtype whose peak MFU is a share of: that of products, or of convolutions where these run
        in TF32 and those in fp32."""
        dtype, device = self.dtype(plan), self.facts.cluster.device
        is_rounded = dtype == "float32" and convolves_in_tf32(self.stack, device)
        return "tfloat32" if is_rounded and self.facts.model.has_convolutions else dtype

    def batch_bytes(self, plan: Plan) -> float:
        """Bytes of a rank's part of a step's batch."""
        assert plan.microbatch_size is not None
        local = plan.microbatch_size * plan.forwards
        return self.facts.model.batch_bytes.at(local / plan.cp)

    def loads(self, plan: Plan, samples: int | None = None) -> Loads:
        """All units on one rank of the tp axis; at the plan's microbatch by default."""
        kind = self.numerics(plan)
        samples = samples or plan.microbatch_size
        assert samples is not None
        styles = self.styles(plan)
        # Stacks with states of their own shard experts as `cost.states` says.
        is_torch = self.stack.states is None
        is_sharded = plan.ep > 1 and plan.data_parallel.is_sharded and is_torch
        expert_shards = shard_degree(plan) if plan.shards_experts and is_torch else 0
        keeps_whole = self._whole_shards(plan) > 0
        split = plan.tp, styles, plan.cp, plan.ep
        key = (kind, samples, *split, is_sharded, expert_shards, keeps_whole)
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
                keeps_whole=keeps_whole,
                of_runs=self._run_loads(plan, samples),
                stack=self.stack,
            )
            self._loads[key] = anchored.loads(counted, self.facts.cluster)
        return self._loads[key]

    def own_loads(
        self, plan: Plan, first: int = 0, last: int | None = None, *, samples: int | None = None
    ) -> Loads:
        """Units [first, last) as a stage of `plan`, all by default: with the blocks of it that are
        recomputed."""
        loads = self.loads(plan, samples)
        last = len(loads.names) if last is None else last
        part = loads if last - first == len(loads.names) else loads.part(first, last)
        return part.repeating(plan.recompute_blocks)

    def _run_loads(self, plan: Plan, samples: int) -> tuple[RunLoad, ...]:
        """Loads before experts are split, cached for all degrees of ep and ways to shard."""
        key = self.numerics(plan), samples, plan.tp, self.styles(plan), plan.cp
        if key not in self._of_runs:
            self._of_runs[key] = run_loads(
                self.facts.model,
                numerics=key[0],
                samples=samples,
                tp=plan.tp,
                cp=plan.cp,
                runs=self.runs,
                styled=self._styled_units(plan),
                stack=self.stack,
            )
        return self._of_runs[key]

    def stages_of(self, plan: Plan) -> dict[object, StageCost]:
        """Cache of stages, shared by plans with the same stage costs."""
        key = (*self._microbatch_of(plan), plan.dp_replicate, plan.dp_shard, plan.offload)
        return self._stages.setdefault(key, {})

    def chunks_of(self, plan: Plan) -> dict[object, StageMemory]:
        """Cache of stages' memory, shared by plans of more degrees than `stages_of`."""
        experts = plan.shards_experts and shard_degree(plan)
        return self._chunks.setdefault((*self._microbatch_of(plan), experts), {})

    def _microbatch_of(self, plan: Plan) -> tuple[object, ...]:
        """Settings that a stage's memory for one microbatch depends on."""
        return (
            self.numerics(plan),
            plan.microbatch_size,
            plan.tp,
            self.styles(plan),
            plan.cp,
            plan.ep,
            plan.data_parallel,
            plan.recompute,
            plan.recompute_blocks,
            holds_outputs(plan, self.stack),
        )

    def _styled_units(self, plan: Plan) -> list[Styled]:
        """Styles of each unit, cached for all microbatches."""
        kind, styles = self.numerics(plan), self.styles(plan)
        if (kind, styles) not in self._styled:
            self._styled[kind, styles] = styled_units(
                self.facts.model, numerics=kind, styles=styles
            )
        return self._styled[kind, styles]

    def styles(self, plan: Plan) -> tuple[tuple[str, str], ...]:
        """Styles of split layers; proposed from the profile if the plan has none."""
        if plan.tp == 1 or plan.tensor_styles:
            return plan.tensor_styles if plan.tp > 1 else ()
        key = plan.tp, plan.sequence_parallel
        if key not in self._styles:
            styles = proposed_styles(self.facts.model, plan.tp)
            if plan.sequence_parallel:
                styles = split_tokens(self.facts.model, styles, plan.tp)
            self._styles[key] = styles
        return self._styles[key]

    def shares(self, plan: Plan) -> HandedOn:
        """Blocks that hand on a rank's share of the tokens, unless the stack scatters whatever
        stages send."""
        if plan.tp == 1 or self.stack.sequence_parallel or self.stack.states:
            return WHOLE
        key = plan.tp, self.numerics(plan), self.styles(plan)
        if key not in self._shares:
            styled = zip(self.facts.model.units, self._styled_units(plan), strict=True)
            shares = {u.name: token_share(own, plan.tp) for u, own in styled if hands_on(own)}
            self._shares[key] = HandedOn(frozenset(shares), max(shares.values(), default=1.0))
        return self._shares[key]

    def computing(self, plan: Plan, loads: Loads, *, is_stage: bool = False) -> Computing:
        """Compute times: measured on this device if the model has some, else the roofline's.

        Args:
            loads: all units of the plan, or some neighbours of them.
            is_stage: True if these are a stage's (see `in_sequence`).
        """
        # Loads take long to hash: they are, once.
        alike = (loads.runs, loads.names[:1], self.dtype(plan), plan.data_parallel.is_sharded)
        known = self._computing.setdefault(alike, {})
        key = plan.recompute, added_share(plan), is_stage
        if key not in known:
            known[key] = self._timed(plan, loads, is_stage)
        return known[key]

    def _timed(self, plan: Plan, loads: Loads, is_stage: bool) -> Computing:
        model, cluster = self.facts.model, self.facts.cluster
        device, dtype = cluster.device, self.dtype(plan)

        def timed(some: Loads, *, is_sharded: bool = False) -> tuple[UnitTime, ...]:
            key = some.runs, dtype, is_sharded
            passes = self._passes.get(key)
            if passes is None:
                passes = self._passes[key] = passes_of(
                    some,
                    device=device,
                    dtype=dtype,
                    stack=self.stack,
                    calibration=self.calibration,
                    is_sharded=is_sharded,
                )
            return with_recompute(passes, plan.recompute, self.stack, is_stage=is_stage)

        has_hooks = self.stack.states is None and plan.data_parallel.is_sharded
        times = timed(loads, is_sharded=has_hooks)
        error = anchored.compute_error(cluster, dtype)
        is_split = plan.tp * plan.cp * plan.ep > 1  # what was measured are whole units
        kind = self.numerics(plan)
        measured = None
        # 16 bits are timed in bf16, and no products are in 8.
        if not (is_split or scales_loss(plan, model) or self.stack.casts_apart):
            measured = block_times(model, cluster, kind, samples=loads.samples)
        added = added_s(loads, times, share=added_share(plan), device=device)
        if self.stack.accumulates_in_product:
            added = Busy(0.0, 0.0, 0.0)
        if measured is None:
            return Computing(times, error, added=added)
        start = next(n for n, unit in enumerate(model.units) if unit.name == loads.names[0])
        end = start + len(loads.names)
        then = self.own_loads(plan, start, end, samples=measured.samples)
        at_measured = timed(then)
        return with_measured(
            times, loads, measured=measured, at_measured=at_measured, error=error, added=added
        )

    def update(
        self, plan: Plan, first: int, last: int, copies: Sequence[UnitProfile] = ()
    ) -> Upkeep:
        """Upkeep of one rank's parameters of units [first, last), and of `copies`."""
        return self.update_of(plan, [(first, last)], copies)

    def update_of(
        self, plan: Plan, parts: Sequence[tuple[int, int]], copies: Sequence[UnitProfile] = ()
    ) -> Upkeep:
        """Upkeep of several stages' parameters."""
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
            scales_loss(plan, self.facts.model),
        )
        if key not in self._updates:
            if by_name and (plan.tp * plan.ep > 1 or self._whole_shards(plan)):
                whole = self.facts.model.units
                optimizer = optimizer.of_parts(
                    {
                        unit.name: (float(part.gradient_bytes), float(unit.gradient_bytes))
                        for unit, part in zip(whole, self._local(plan), strict=True)
                    }
                )
            counted = upkeep(optimizer, [*own, *copies], shards=shard_degree(plan))
            if scales_loss(plan, self.facts.model):
                # Divided by the loss scale, gradients are read and written once more.
                local = self._local(plan)
                stepped = [*(u for first, last in parts for u in local[first:last]), *copies]
                divided = 2 * sum(unit.gradient_bytes for unit in stepped) / shard_degree(plan)
                counted = replace(counted, moved_bytes=counted.moved_bytes + divided)
            self._updates[key] = anchored.update(counted, self.facts.cluster)
        return self._updates[key]

    def _held(self, plan: Plan) -> tuple[UnitProfile, ...]:
        """Units by which the optimizer's states are counted: with one tp rank's parameters, unless
        they were measured by name."""
        if self.facts.workload.optimizer.units is not None:
            return self.facts.model.units
        return self._local(plan)

    def _local(self, plan: Plan) -> tuple[UnitProfile, ...]:
        """Every unit with one tp rank's parameters; equal ones share an object."""
        model = self.facts.model
        shards = shard_degree(plan) if plan.ep > 1 else 1
        whole_shards = self._whole_shards(plan)
        key = (plan.tp, self.styles(plan), plan.ep, shards, plan.shards_experts, whole_shards)
        if key not in self._units:
            kind, styled = self.numerics(plan), self._styled_units(plan)
            self._units[key] = local_units(
                plan,
                model,
                self.runs,
                styled,
                numerics=kind,
                shards=shards,
                whole_shards=whole_shards,
                splits_experts=self.stack.splits_experts,
            )
        return self._units[key]

    @cached_property
    def has_whole(self) -> bool:
        """Return True if FSDP2 leaves parameters of the model whole."""
        is_torch = self.stack.states is None
        return is_torch and any(unit.whole_bytes for unit in self.facts.model.units)

    def _whole_shards(self, plan: Plan) -> int:
        """Ranks that shard all but what stays whole; 0 if nothing does, or nothing is sharded."""
        is_sharded = plan.data_parallel.is_sharded
        return shard_degree(plan) if self.has_whole and is_sharded else 0

    def whole_s(self, plan: Plan, units: Sequence[UnitLoad], ledger: Ledger) -> float:
        """Seconds per step to sum gradients of parameters that stay whole where others are
        sharded."""
        return summed_s(
            ledger,
            "gradients of unsharded parameters",
            gradient_bytes=sum(u.count * u.whole_gradient_bytes for u in units),
            tensors=sum(u.count * u.whole_tensors for u in units),
            group_size=plan.data_degree * plan.cp,
            stride=plan.tp,
        )

    def experts_s(self, plan: Plan, units: Sequence[UnitLoad], ledger: Ledger) -> float:
        """Seconds per step to sum gradients of experts among the ranks that hold the same ones."""
        share = 1.0 if plan.data_parallel.is_sharded else self.reduced_share
        return experts_s(plan, units, ledger, reduced_share=share, stack=self.stack)

    def partial_s(self, plan: Plan, units: Sequence[UnitLoad], ledger: Ledger) -> float:
        """Seconds per step to sum gradients of parameters that are replicated over tp."""
        return summed_s(
            ledger,
            "gradients of whole parameters",
            gradient_bytes=sum(
                u.count * (u.partial_gradient_bytes / shard_degree(plan) + u.partial_expert_bytes)
                for u in units
            ),
            tensors=sum(u.partial_tensors * u.count for u in units),
            group_size=plan.tp,
            stride=1,
        )
