"""Results of the cases: a file that is written as they run, so that a stopped run goes on."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from profiles.machine.cluster import ClusterProfile
from profiles.record import Document, Record

RESULTS = Path(__file__).resolve().parents[1] / "validation" / "gpu.json"
UNSEEN = RESULTS.with_name("gpu_h100.json")
"""Of a device and of models that nothing was calibrated on, with the predictions made before."""


class Outcome(StrEnum):
    """The end of a case."""

    MEASURED = "measured"
    DIFFERED = "differed"  # ran, and a row is beyond its limit
    FAILED = "failed"  # raised, died, or took too long
    LEFT_OUT = "left out"  # something that it needs is not there


class Unit(StrEnum):
    """Of a row's numbers."""

    SECONDS = "s"
    BYTES = "bytes"
    BYTES_PER_S = "bytes/s"
    FLOP_PER_S = "FLOP/s"
    ERROR = "error"  # relative; there is a limit
    RATIO = "ratio"  # over a base, which is measured beside it


class Row(Record):
    """One measured thing.

    Attributes:
        term: of the case, as "step" or "allocated".
        from_sheet, from_bench: as predicted from the data sheet of the device, and from its bench;
            None where nothing predicts it.
        limit: the largest value that is right; None where none is stated.
        note: about this row.
    """

    term: str
    unit: Unit
    measured: float
    from_sheet: float | None = None
    from_bench: float | None = None
    limit: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Measured over predicted, by the bench where there is one."""
        predicted = self.from_sheet if self.from_bench is None else self.from_bench
        return self.measured / predicted if predicted else None

    @property
    def is_beyond(self) -> bool:
        return self.limit is not None and not self.measured <= self.limit


class CaseResult(Record):
    """One case.

    Attributes:
        seconds: that it took, with all that it built.
        text: why it failed or was left out.
        launch_s: of a kernel on the host that ran it, where that is not the one of the bench: the
            same device is lent with other hosts.
    """

    part: str
    name: str
    outcome: Outcome
    rows: tuple[Row, ...] = ()
    seconds: float = 0.0
    text: str = ""
    launch_s: float | None = None


class Results(Document):
    """Cases in the order of their parts.

    Attributes:
        device: as its driver names it.
        torch: its version.
        bench: the machine as it was timed; None until it was.
        is_small: run at small size, to try the logic.
    """

    device: str
    torch: str
    bench: ClusterProfile | None = None
    is_small: bool = False
    cases: tuple[CaseResult, ...] = ()

    def with_case(self, case: CaseResult) -> Results:
        """This case in the place of an older one, else behind those of its part."""
        by_place = {(c.part, c.name): c for c in self.cases} | {(case.part, case.name): case}
        cases = sorted(by_place.values(), key=lambda c: c.part)
        return self.model_copy(update={"cases": tuple(cases)})

    def with_bench(self, bench: ClusterProfile) -> Results:
        """As timed now; cases keep the launches of the bench that they were measured with."""
        cases = self.cases
        if self.bench is not None:
            before = self.bench.device.launch_s.value
            cases = tuple(
                case if case.launch_s else case.model_copy(update={"launch_s": before})
                for case in cases
            )
        return self.model_copy(update={"bench": bench, "cases": cases})

    def done(self) -> set[tuple[str, str]]:
        """Places of the cases that need not be run again."""
        return {(c.part, c.name) for c in self.cases if c.outcome is Outcome.MEASURED}

    def of_part(self, part: str) -> tuple[CaseResult, ...]:
        return tuple(case for case in self.cases if case.part == part)
