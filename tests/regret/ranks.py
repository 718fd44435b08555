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
from typing import TypeVar

import torch
import torch.distributed as dist

from advisor.cost import CostModel
from engines.plan import Plan
from engines.runtime.failures import close_all_connections
from engines.runtime.world import World, join_world, largest_over_ranks, texts_of_ranks
from profiles.errors import AdvisorError, RankError, ShortageError
from profiles.machine.bench import bench
from profiles.machine.cluster import ClusterProfile
from profiles.machine.probe import probe
from profiles.torch_compat import every_group
from tests.regret.cases import CASES, MIB, Case
from tests.regret.decided import SEED, decided, facts_of, is_in_leaf
from tests.regret.finals import finalists, with_finals
from tests.regret.live import Live
from tests.regret.picked import MOST
from tests.regret.report import Result, Row

BENCH_S = 12.0
PATIENCE_S = 240.0
"""For another rank; the first one decides while the others wait."""
HOPELESS = 3.0
"""A plan whose first step takes so many times the best one's is not timed again."""
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
        live = self._built(plan)
        peak = live.peak_bytes(limit)
        best = min((row.step_s for row in self.result.rows), default=float("inf"))
        seconds = live.steps(min(self._effort.steps_s, HOPELESS * best))
        return self._row(plan, tuple(seconds), peak)

    def _built(self, plan: Plan) -> Live:
        return Live.built(plan, self._case, self._facts, self._world, self._path.parent)

    def _row(self, plan: Plan, seconds: tuple[float, ...], peak_bytes: float) -> Row:
        cost = self._costs.estimate(plan)
        return Row(
            plan=str(plan),
            seconds=seconds,
            peak_bytes=peak_bytes,
            predicted_s=cost.step_s,
            predicted_peak_bytes=cost.peak_bytes,
            predicted_high_bytes=cost.peak_high_bytes,
            in_leaf=is_in_leaf(plan, self.result),
        )

    # Finals

    def _finals(self) -> None:
        live: list[tuple[str, Live]] = []
        for name in finalists(self.result, self._costs, most=self._effort.finalists):
            built = self._attempt(name, lambda name=name: self._warm(name))
            if built is not None:
                live.append((name, built))
        seconds: list[list[float]] = [[] for _ in live]
        order = random.Random(SEED)
        for turn in range(self._effort.rounds):
            if turn and self._is_late(1.0):
                break
            for place in order.sample(range(len(live)), len(live)):
                name, plan = live[place]
                seconds[place] += self._attempt(name, lambda plan=plan: self._turn(plan)) or []
        result = with_finals(self.result, [name for name, _ in live], seconds)
        self._save(rows=result.rows, again=result.again)

    def _warm(self, text: str) -> Live:
        live = self._built(Plan.parse(text))
        live.parallel.train_step(live.batch)
        return live

    def _turn(self, live: Live) -> list[float]:
        """Some steps, after one that brings the plan's tensors back into caches."""
        live.timed()
        return live.steps(self._effort.steps_s)

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
