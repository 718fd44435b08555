"""One rank of a case: bench, decide, the memory and first times of each plan, the finals.

    screening   each plan by itself: built, a step whose tensors are counted, some timed steps
    finals      the fast ones that fit are built again, live side by side, and take turns

The chosen plan's counted step runs under the budget: it fails where it takes more. The chosen plan
is in the finals twice. All that is known is written after each plan, so that ranks that a plan
broke can be started anew, and leave it out.
"""

from __future__ import annotations

import gc
import random
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from advisor.auto.facts_from_module import facts_from_module
from advisor.cost import CostModel
from advisor.decide.choose import choose
from advisor.decide.decide import decide
from advisor.decide.offload import with_disk
from advisor.decide.tree import TreeTrace, in_leaf
from advisor.inputs.facts import Facts
from advisor.search.legal import Styles
from engines.apply import apply_plan
from engines.data.loader import split_rows_evenly
from engines.parallel import ParallelModel
from engines.plan import DataParallel, Plan
from engines.runtime.failures import close_all_connections
from engines.runtime.world import World, join_world, largest_over_ranks, texts_of_ranks
from engines.tensor.proposal import propose_styles
from profiles.capture.batch import Batch
from profiles.capture.batch_rows import split_rows
from profiles.capture.batch_tree import batch_tensors
from profiles.errors import AdvisorError, PlanError, RankError, ShortageError
from profiles.machine.bench import bench
from profiles.machine.cluster import ClusterProfile
from profiles.machine.probe import probe
from profiles.torch_compat import every_group
from tests.contract.watch import LiveBytes, gradients, local, optimizer_states
from tests.regret.cases import CASES, MIB, Case, limited
from tests.regret.models import adam
from tests.regret.picked import MOST, plans_of
from tests.regret.report import Result, Row

BENCH_S = 12.0
PATIENCE_S = 240.0
"""For another rank; the first one decides while the others wait."""
SEED = 18
MOST_STEPS = 6
"""In one go."""
HOPELESS = 3.0
"""A plan whose first step takes so many times the best one's is not timed again."""
FINAL_RATIO = 1.6
"""Plans in the finals are so much slower than the best at most."""
FINAL_STATES_BYTES = 6 * 2**30
"""Of all finalists on all ranks."""
RESTART = 3
"""Exit status of ranks that a plan broke."""

T = TypeVar("T")


@dataclass(frozen=True)
class Effort:
    """Amount of plans and steps to run.

    Attributes:
        seconds: when a share of them is over, the rest of the sample is left out; when they are
            over, the finals end.
        most: plans to run, if what must be run is not more.
        steps_s: of each plan in the screening, and of each turn in the finals; a step at least.
        finalists, rounds: most plans in the finals, and turns of each.
    """

    seconds: float
    most: int = MOST
    steps_s: float = 0.7
    finalists: int = 12
    rounds: int = 4


class Limit(LiveBytes):
    """`LiveBytes` that fails an operation, as torch's CPU allocator does, beyond `limit_bytes`."""

    def __init__(self, before: list[Tensor], limit_bytes: float) -> None:
        super().__init__(before)
        self._limit_bytes = limit_bytes

    def after(self, func: Any, args: tuple[Any, ...], result: object) -> None:
        super().after(func, args, result)
        if self.peak_bytes > self._limit_bytes:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:128] err == 0. DefaultCPUAllocator: can't allocate"
                f" memory: {self.peak_bytes} bytes of {self._limit_bytes:.0f}. Error code 12"
            )


def measure(
    case: Case, path: Path, effort: Effort, *, cluster: ClusterProfile | None = None
) -> int:
    """Run a case on this job's ranks; all of them call it. `path` has the state and the result.

    Args:
        cluster: of this job; None: it is benched.

    Returns:
        The exit status: 0, or `RESTART`.
    """
    world = join_world(timeout_s=PATIENCE_S)
    return _Run(case, path, world, effort).run(cluster)


class _Broken(Exception):
    """A plan failed in a way after which these ranks cannot go on."""


class _Run:
    """State of one rank."""

    def __init__(self, case: Case, path: Path, world: World, effort: Effort) -> None:
        self._case, self._path, self._world, self._effort = case, path, world, effort
        self._began = time.monotonic()

    def run(self, cluster: ClusterProfile | None) -> int:
        self._begin(cluster)
        try:
            self._screen()
            self._finals()
        except _Broken as error:
            self._say(f"ranks are started anew: {error}")
            return RESTART
        self._save(measured_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"))
        return 0

    # Deciding

    def _begin(self, cluster: ClusterProfile | None) -> None:
        text = self._of_first(lambda: self._path.read_text() if self._path.exists() else "")
        if not text:
            machines = cluster or bench(probe(), budget_s=BENCH_S)
            text = self._of_first(lambda: self._decided(machines).to_json())
        self.result = Result.from_json(text)
        self._facts = facts_of(self._case, self.result.cluster)
        self._costs = CostModel(self._facts)
        self._began = time.monotonic()
        row = f"{len(self.result.plans)} of {self.result.legal} plans, leaf {self.result.leaf}"
        self._say(f"{row}: {self.result.plans[0]}")

    def _decided(self, machines: ClusterProfile) -> Result:
        return decided(self._case, machines, most=self._effort.most)

    # Screening

    def _screen(self) -> None:
        known = {row.plan for row in self.result.rows} | self.result.refused.keys()
        for number, text in enumerate(self.result.plans):
            if text in known or (number and self._is_late(0.6)):
                continue
            began = time.monotonic()
            row = self._attempt(text, lambda text=text: self._screened(text))
            if row is not None:
                self._save(rows=(*self.result.rows, row))
                took = time.monotonic() - began
                memory = f"{row.peak_bytes / MIB:6.1f} MiB ({row.predicted_peak_bytes / MIB:.1f})"
                times = f"{row.step_s:7.3f} s ({row.predicted_s:.3f})"
                self._say(f"{number:>3} {times} {memory} {_short(text)}, run in {took:.1f} s")
            self._drop_groups()

    def _screened(self, text: str) -> Row:
        plan = Plan.parse(text)
        limit = self.result.limit_bytes if text == self.result.plans[0] else float("inf")
        parallel, batch = self._built(plan)
        peak = self._peak_bytes(parallel, batch, limit)
        best = min((row.step_s for row in self.result.rows), default=float("inf"))
        seconds = self._steps(parallel, batch, enough_s=HOPELESS * best)
        return self._row(plan, tuple(seconds), peak)

    def _built(self, plan: Plan) -> tuple[ParallelModel, Batch]:
        """The model under a plan, and this rank's part of the batch."""
        subject, facts = self._case.subject, self._facts
        torch.manual_seed(1)
        parallel = apply_plan(
            subject.build(),
            plan,
            profile=facts.model,
            cluster=facts.cluster,
            loss_fn=subject.loss_fn,
            optimizer=adam,
            sample=_sample(self._case),
            world=self._world,
            offload_folder=self._path.parent,
        )
        replicas = parallel.data_world_size
        parts = split_rows(
            subject.batch(self._case.rows), split_rows_evenly(self._case.rows, replicas)
        )
        return parallel, parts[parallel.data_rank]

    def _peak_bytes(self, parallel: ParallelModel, batch: Batch, limit: float) -> float:
        """Most bytes of tensors on any rank in a step, after one that makes lasting ones."""
        plan, reduced = parallel.plan, []
        hook = parallel.optimizer.register_step_pre_hook(
            lambda *_: reduced.extend(gradients(parallel))
        )
        parallel.train_step(batch)
        hook.remove()
        # DDP's buckets are made in C++; gradients are views of them, and they stay between steps.
        buckets = reduced if plan.data_parallel is DataParallel.REPLICATE else []
        lasting = [*parallel.parameters(), *parallel.module.buffers()]
        watched = Limit(
            [
                *map(local, lasting),
                *optimizer_states(parallel),
                *buckets,
                *batch_tensors(batch),
            ],
            limit,
        )
        del buckets, lasting
        reduced.clear()
        with watched:
            parallel.train_step(batch)
        return largest_over_ranks([float(watched.peak_bytes)], self._world)[0]

    def _steps(
        self, parallel: ParallelModel, batch: Batch, *, enough_s: float = float("inf")
    ) -> list[float]:
        """Seconds of some steps; of one, if it takes `enough_s`."""
        seconds = [self._timed(parallel, batch)]
        most_s = min(self._effort.steps_s, enough_s)
        while len(seconds) < MOST_STEPS and sum(seconds) < most_s:
            seconds.append(self._timed(parallel, batch))
        return seconds

    def _timed(self, parallel: ParallelModel, batch: Batch) -> float:
        """Seconds of a step on the slowest rank; all begin it at once."""
        began = time.perf_counter()
        parallel.train_step(batch)
        return largest_over_ranks([time.perf_counter() - began], self._world)[0]

    def _row(self, plan: Plan, seconds: tuple[float, ...], peak_bytes: float) -> Row:
        cost = self._costs.estimate(plan)
        return Row(
            plan=str(plan),
            seconds=seconds,
            peak_bytes=peak_bytes,
            predicted_s=cost.step_s,
            predicted_peak_bytes=cost.peak_bytes,
            predicted_high_bytes=cost.peak_high_bytes,
            in_leaf=self._in_leaf(plan),
        )

    # Finals

    def _finals(self) -> None:
        names = self._finalists()
        live: list[tuple[str, ParallelModel, Batch]] = []
        for name in names:
            built = self._attempt(name, lambda name=name: self._warm(name))
            if built is not None:
                live.append((name, *built))
        seconds: dict[int, list[float]] = {place: [] for place in range(len(live))}
        order = random.Random(SEED)
        for turn in range(self._effort.rounds):
            if turn and self._is_late(1.0):
                break
            for place in order.sample(range(len(live)), len(live)):
                name, parallel, batch = live[place]
                took = self._attempt(name, lambda p=parallel, b=batch: self._turn(p, b))
                seconds[place] += took or []
        self._keep(live, seconds)

    def _finalists(self) -> list[str]:
        """The chosen plan, the fastest that fit, and the chosen one again."""
        result = self.result
        fitting = [row for row in result.rows if row.peak_bytes <= result.limit_bytes]
        fitting.sort(key=lambda row: row.step_s)
        if not fitting or result.chosen is None or result.failed_for_memory:
            return []
        chosen = result.chosen.plan
        names, nbytes = [chosen], 2 * self._states_bytes(chosen)
        for row in fitting:
            nbytes += self._states_bytes(row.plan)
            is_slow = row.step_s > FINAL_RATIO * fitting[0].step_s
            if row.plan == chosen or is_slow:
                continue
            if len(names) == self._effort.finalists or nbytes > FINAL_STATES_BYTES:
                break
            names.append(row.plan)
        return [*names, chosen]

    def _states_bytes(self, text: str) -> float:
        return self._costs.estimate(Plan.parse(text)).states_bytes * self._world.size

    def _warm(self, text: str) -> tuple[ParallelModel, Batch]:
        parallel, batch = self._built(Plan.parse(text))
        parallel.train_step(batch)
        return parallel, batch

    def _turn(self, parallel: ParallelModel, batch: Batch) -> list[float]:
        """Some steps, after one that brings the plan's tensors back into caches."""
        self._timed(parallel, batch)
        return self._steps(parallel, batch)

    def _keep(
        self, live: list[tuple[str, ParallelModel, Batch]], seconds: dict[int, list[float]]
    ) -> None:
        if not live:
            return
        again = len(live) - 1
        final = {name: seconds[place] for place, (name, *_) in enumerate(live) if place != again}
        rows = [
            row.model_copy(update={"seconds": tuple(final[row.plan]), "is_final": True})
            if final.get(row.plan)
            else row
            for row in self.result.rows
        ]
        self._save(rows=tuple(rows), again=tuple(seconds[again]))

    # Failing, saying, saving

    def _of_first(self, text: Callable[[], str]) -> str:
        """The text of rank 0."""
        return texts_of_ranks("case", text() if self._world.rank == 0 else "", self._world)[0]

    def _attempt(self, text: str, doing: Callable[[], T]) -> T | None:
        """The value of `doing`; None where all ranks refuse alike.

        Raises:
            _Broken: on all ranks, where some rank failed in another way; the plan is left out then.
        """
        value, trouble = None, ""
        try:
            value = doing()
        except (RankError, ShortageError) as error:
            trouble = f"broke: {type(error).__name__}: {error}"
        except AdvisorError as error:
            trouble = f"refused: {type(error).__name__}: {error.what}"
        except Exception as error:
            trouble = f"broke: {type(error).__name__}: {error}"
        if trouble.startswith("broke"):
            with suppress(RuntimeError):
                close_all_connections()
        troubles = [t for t in texts_of_ranks("outcome", trouble, self._world) if t]
        if not troubles:
            return value
        worst = min(troubles, key=lambda t: ("ShortageError" not in t, "RankError" in t, t))
        is_refused = len(troubles) == self._world.size and all(
            t.startswith("refused") for t in troubles
        )
        failed = "ShortageError" in worst and text == self.result.plans[0]
        self._save(
            refused={**self.result.refused, text: worst},
            rows=tuple(row for row in self.result.rows if row.plan != text),
            failed_for_memory=self.result.failed_for_memory or failed,
        )
        self._say(f"    {worst.splitlines()[0][:150]}: {_short(text)}")
        if not is_refused:
            texts_of_ranks("end", "", self._world)  # rank 0 has saved it
            raise _Broken(worst.splitlines()[0])
        return None

    def _drop_groups(self) -> None:
        """End the groups of a plan that is done; the job's own stays."""
        gc.collect()
        for group in every_group():
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)

    def _in_leaf(self, plan: Plan) -> bool:
        trace = TreeTrace(
            steps=(),
            leaf=self.result.leaf,
            advice="",
            families=self.result.families,
            not_weighed=(),
            devices_per_node=self.result.cluster.devices_per_node,
        )
        return in_leaf(plan, trace)

    def _is_late(self, share: float) -> bool:
        """True on all ranks if this share of the time is over on one of them."""
        passed = time.monotonic() - self._began
        return largest_over_ranks([passed], self._world)[0] > share * self._effort.seconds

    def _say(self, text: str) -> None:
        """Add a line to the log that the launcher follows."""
        if self._world.rank == 0:
            with self._path.with_suffix(".log").open("a") as log:
                log.write(f"  {text}\n")

    def _save(self, **update: object) -> None:
        took = time.monotonic() - self._began
        self.result = self.result.model_copy(update={**update, "took_s": round(took, 1)})
        if self._world.rank == 0:
            self.result.save(self._path)


def decided(case: Case, cluster: ClusterProfile, *, most: int) -> Result:
    """The decision for a case on `cluster`, and the plans to run."""
    roomy = limited(cluster, cluster.device.memory_bytes.value)
    if case.leaf == "offload":
        roomy = with_disk(roomy, Path.cwd())
    nbytes = case.budget.nbytes(facts_of(case, roomy))
    facts = facts_of(case, limited(roomy, nbytes))
    styles = proved_styles(case, facts)
    decision = choose(facts, styles=styles)
    choice = decide(facts, styles=styles, compares=True)
    plans, legal = plans_of(decision, choice, styles=styles, seed=SEED, most=most)
    return Result(
        name=case.name,
        cluster=facts.cluster,
        leaf=decision.trace.leaf,
        families=decision.trace.families,
        dissent=decision.dissent,
        plans=tuple(map(str, plans)),
        legal=legal,
    )


def facts_of(case: Case, cluster: ClusterProfile) -> Facts:
    """The case's training on these machines."""
    subject = case.subject
    torch.manual_seed(1)
    return facts_from_module(
        subject.build(),
        _sample(case),
        loss_fn=subject.loss_fn,
        cluster=cluster,
        global_batch_size=case.rows,
        optimizer=adam,
    )


def _sample(case: Case) -> Batch:
    return case.subject.batch(max(2, case.rows // case.ranks))


def proved_styles(case: Case, facts: Facts) -> Styles:
    """Splits of layers as `auto_parallelize` would prove them, by tp degree."""
    known: dict[int, tuple[tuple[str, str], ...]] = {}

    def styles(tp: int) -> tuple[tuple[str, str], ...]:
        if tp not in known:
            try:
                known[tp] = propose_styles(
                    case.subject.build(),
                    _sample(case),
                    size=tp,
                    profile=facts.model,
                    has_target=case.subject.loss_fn is not None,
                ).styles
            except PlanError:
                known[tp] = ()
        return known[tp]

    return styles


def _short(text: str) -> str:
    """A plan without the list of its split layers."""
    return " ".join(word for word in text.split() if not word.startswith("tensor_styles="))


def main(name: str, path: str, seconds: float, most: int) -> int:
    """One process of a job that `tests.regret.launch` started."""
    import warnings

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        return measure(CASES[name], Path(path), Effort(seconds, most))
    except Exception:
        with Path(path).with_suffix(".error").open("a") as file:
            file.write(traceback.format_exc())
        raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])))
