"""Staleness and losses of updates, counted as they happen. No torch here."""

from __future__ import annotations

from collections import Counter

from pydantic import Field

from profiles.record import Record


class UpdateReport(Record):
    """Counts of the gradients that a rank sent, or that a server received.

    Attributes:
        staleness: counts of updates by staleness. With servers: updates by others between the
            parameters that a gradient was computed at and its own. Replicas that update on
            their own: their steps since the last average, which the others do not know.
        dropped: gradients that arrived after their step had finished.
        skipped: steps that were over before this rank began them.
        sent_bytes, received_bytes: of messages between workers and servers, or of tensors that
            replicas average.
        gone: ranks that were lost during the training.
    """

    staleness: dict[int, int] = Field(default_factory=dict)
    dropped: int = 0
    skipped: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    gone: tuple[int, ...] = ()

    @property
    def updates(self) -> int:
        """Gradients that changed parameters."""
        return sum(self.staleness.values())

    @property
    def mean_staleness(self) -> float:
        """0 where there was no update."""
        whole = sum(staleness * count for staleness, count in self.staleness.items())
        return whole / self.updates if self.updates else 0.0

    @property
    def most_staleness(self) -> int:
        return max(self.staleness, default=0)

    def __str__(self) -> str:
        words = [
            f"{self.updates} updates, {self.mean_staleness:.2g} stale on the average,"
            f" {self.most_staleness} at most"
        ]
        words += [f"{self.dropped} dropped"] * bool(self.dropped)
        words += [f"{self.skipped} steps skipped"] * bool(self.skipped)
        words += [f"ranks gone: {', '.join(map(str, self.gone))}"] * bool(self.gone)
        return "; ".join(words)


class Tally:
    """Counters of a report."""

    def __init__(self) -> None:
        self.staleness: Counter[int] = Counter()
        self.dropped = 0
        self.skipped = 0
        self.gone: list[int] = []

    def report(self, *, sent_bytes: int, received_bytes: int) -> UpdateReport:
        return UpdateReport(
            staleness=dict(sorted(self.staleness.items())),
            dropped=self.dropped,
            skipped=self.skipped,
            sent_bytes=sent_bytes,
            received_bytes=received_bytes,
            gone=tuple(self.gone),
        )
