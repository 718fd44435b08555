"""One reader on many cases: what each came to, its processor time, and its memory."""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from math import inf
from pathlib import Path
from random import Random
from types import FrameType

from pydantic import Field

from profiles.errors import AdvisorError
from profiles.record import Document, Record
from profiles.units import MIB
from tests.fuzz.readers import Reader

REPORT = Path(__file__).parents[1] / "validation" / "fuzz.json"
MOST_BYTES = 500 * MIB
"""Of one case, beyond what the process had."""
ALARM_S = 20
MOST_SHOWN = 25_000
"""Characters of an error."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class Result(Record):
    """Of a reader.

    Attributes:
        accepted, refused: cases that were read, and that our errors refused.
        slowest_s: seconds of the processor that the slowest case took.
        largest_bytes: that a case took at most, beyond what the process had before.
        findings: the others, by what went wrong.
    """

    reader: str
    cases: int
    accepted: int
    refused: int
    slowest_s: float
    largest_bytes: int
    findings: dict[str, int] = Field(default_factory=dict)


class Report(Document):
    """Results of all readers, with the machine."""

    measured_at: str = ""
    machine: str = ""
    python: str = ""
    torch: str = ""
    seed: int = 0
    results: tuple[Result, ...] = ()


class TooLong(BaseException):
    """A case did not end."""


def fuzzed(
    reader: Reader,
    *,
    cases: int,
    seed: int,
    folder: Path,
    keep: Path | None = None,
    seconds: float = inf,
) -> Result:
    """`cases` inputs for `reader`, the same for the same seed.

    Args:
        folder: an empty one, where inputs are written.
        keep: where the first input of each finding is left.
        seconds: after which no further case is begun.
    """
    outcomes: Counter[str] = Counter()
    slowest, largest = 0.0, 0
    _warm_up(reader, folder)
    _reset_peak()
    resident = _memory("VmRSS")
    began = time.monotonic()
    for number in range(1, cases + 1):
        if time.monotonic() - began > seconds:
            break
        random = Random(f"{reader.name} {seed} {number}")
        path = reader.write(folder, random)
        outcome, took = outcome_of(reader, path)
        if outcome == _slow(reader):  # once more: the first call of something may have imported it
            outcome, took = outcome_of(reader, path)
        used = _memory("VmHWM") - resident
        if used > MOST_BYTES and outcome in ("accepted", "refused"):
            outcome = f"memory: {used // (100 * MIB)}00 MiB"
        slowest, largest = max(slowest, took), max(largest, used)
        if keep is not None and outcome not in (*outcomes, "accepted", "refused"):
            _keep(path, keep / f"{reader.name}-{seed}-{number}", outcome)
        outcomes[outcome] += 1
        if used > MOST_BYTES // 10 or number % 200 == 0:
            _reset_peak()
            resident = _memory("VmRSS")
    total = sum(outcomes.values())
    return Result(
        reader=reader.name,
        cases=total,
        accepted=outcomes.pop("accepted", 0),
        refused=outcomes.pop("refused", 0),
        slowest_s=round(slowest, 3),
        largest_bytes=max(0, largest),
        findings=dict(outcomes),
    )


def _warm_up(reader: Reader, folder: Path) -> None:
    """Import what readers import when they are first used."""
    for content in reader.seeds():
        path = folder / reader.file
        path.write_bytes(content)
        outcome_of(reader, path)


def outcome_of(reader: Reader, path: Path) -> tuple[str, float]:
    """ "accepted", "refused" or what went wrong, and seconds of the processor."""
    start = time.process_time()
    try:
        with _alarm(), warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("error", RuntimeWarning)
            wrong = reader.read(path)
        outcome = f"wrong: {wrong}" if isinstance(wrong, str) else "accepted"
    except AdvisorError as error:
        outcome = _of_error(str(error))
    except (Exception, TooLong) as error:
        outcome = _signature(error)
    seconds = time.process_time() - start
    if seconds > reader.most_s and outcome in ("accepted", "refused"):
        outcome = _slow(reader)
    return outcome, seconds


def _slow(reader: Reader) -> str:
    return f"time: more than {reader.most_s:.0f} s"


def _of_error(text: str) -> str:
    if len(text) > MOST_SHOWN:
        return f"an error of more than {MOST_SHOWN} characters: {_plain(text)}"
    if _CONTROL.search(text):
        return f"an error with control characters: {_plain(text)}"
    return "refused"


def _plain(text: str) -> str:
    return re.sub(r"[^ -~]", "?", re.sub(r"\d+", "0", text))[:60]


def _signature(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    root = str(Path(__file__).parents[2])
    own = [f for f in frames if f.filename.startswith(root) and "/tests/" not in f.filename]
    last = own[-1] if own else frames[-1]
    place = f"{last.filename.removeprefix(root).lstrip('/')}:{last.lineno}"
    return f"{type(error).__name__} at {place}: {_plain(str(error))}"


def _keep(path: Path, target: Path, outcome: str) -> None:
    target.mkdir(parents=True, exist_ok=True)
    (target / "outcome").write_text(outcome)
    with contextlib.suppress(OSError):
        if path.is_file():
            content = path.read_bytes()
            (target / f"{hashlib.sha256(content).hexdigest()[:8]}-{path.name}").write_bytes(content)


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        raise TooLong(f"no end within {ALARM_S} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, ALARM_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _memory(name: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    raise LookupError(name)


def _reset_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
