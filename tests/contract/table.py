"""`python -m tests.contract.table`: what every engine sends and holds, beside what it is charged.

    --only NAME    this plan of `tests.contract.hybrids.PLANS` (may be given again); else all

One line for the rank of each stage. The exit status is 1 if a message, or a byte of the model's
states, is not as charged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from tests.contract.hybrids import PLANS, Compared, Subject, compared, subject_of

HEADER = f"{'plan':<28}  ranks   rank  messages   MB sent  charged  states  activations"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.contract.table")
    parser.add_argument("--only", action="append", choices=list(PLANS))
    wrong = 0
    _say(HEADER)
    for name in parser.parse_args(arguments).only or PLANS:
        subject = subject_of(name)
        for result in (compared(subject, rank) for rank in subject.ranks):
            _say(_line(subject, result))
            wrong += any(result.unexplained) or result.states != result.charged_states
    return 1 if wrong else 0


def _line(subject: Subject, actual: Compared) -> str:
    sent = sum(payload * count for (_, payload, _, _), count in actual.called.items())
    return "  ".join(_cells(subject, actual, sent / 1e6))


def _cells(subject: Subject, actual: Compared, sent_mb: float) -> Iterator[str]:
    yield f"{subject.name:<28}"
    yield f"{subject.plan.world_size:>5}"
    yield f"{actual.rank:>5}"
    yield f"{actual.called.total():>8}"
    yield f"{sent_mb:>8.2f}"
    yield "differs" if any(actual.unexplained) else "  equal"
    yield " equal" if actual.states == actual.charged_states else "differ"
    if actual.activations is None:
        yield f"{'-':>11}"
    else:
        yield f"{actual.charged_activations / actual.activations - 1:>+11.2%}"


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
