"""Memory over time: what is made and released, and the highest moment of each window."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator


class Timeline:
    """Allocations and releases in order, with windows opened and closed between them.

    It is read when all is over, because only then it is known which allocations became gradients
    of parameters and are not to be counted.

    >>> line = Timeline()
    >>> line.open("forward"); first = line.make(100); second = line.make(20); line.release(first)
    >>> line.close("forward"); line.peaks()
    {'forward': 120}
    """

    def __init__(self) -> None:
        self._events: list[tuple[str, Hashable]] = []
        self._bytes: list[int] = []
        self.live_bytes = 0

    def make(self, size_bytes: int) -> int:
        """Note an allocation; the number it is known by."""
        self._bytes.append(size_bytes)
        self.live_bytes += size_bytes
        self._events.append(("make", len(self._bytes) - 1))
        return len(self._bytes) - 1

    @property
    def next_number(self) -> int:
        """Number of the next allocation."""
        return len(self._bytes)

    def release(self, number: int) -> None:
        self.live_bytes -= self._bytes[number]
        self._events.append(("release", number))

    def pass_by(self, size_bytes: int) -> None:
        """Note memory that one operation takes and gives back: it has no number."""
        if size_bytes:
            self._events.append(("pass", size_bytes))

    def open(self, window: Hashable) -> None:
        self._events.append(("open", window))

    def close(self, window: Hashable) -> None:
        self._events.append(("close", window))

    def allocations(self) -> Iterator[tuple[int, int | None]]:
        """Each allocation's number and bytes, and each release's number with None, in order."""
        for kind, what in self._events:
            if kind in ("make", "release"):
                assert isinstance(what, int)
                yield what, self._bytes[what] if kind == "make" else None

    def peaks(self, *, ignored: Collection[int] = ()) -> dict[Hashable, int]:
        """For each window the highest live bytes above those live when it was opened.

        Windows may lie in each other; one that was opened several times has its highest time.
        `ignored` allocations count nowhere.
        """
        live = 0
        highest: dict[Hashable, int] = {}
        began: dict[Hashable, int] = {}
        top: dict[Hashable, int] = {}
        for kind, what in self._events:
            if kind == "open":
                began[what] = top[what] = live
            elif kind == "close":
                highest[what] = max(highest.get(what, 0), top.pop(what) - began.pop(what))
            elif kind == "pass":
                assert isinstance(what, int)
                for window in top:
                    top[window] = max(top[window], live + what)
            elif what not in ignored:
                assert isinstance(what, int)
                live += self._bytes[what] if kind == "make" else -self._bytes[what]
                for window in top:
                    top[window] = max(top[window], live)
        return highest

    def highest(self, *, ignored: Collection[int] = ()) -> int:
        """Most bytes that were live at once."""
        live = highest = 0
        for kind, what in self._events:
            if kind == "pass":
                assert isinstance(what, int)
                highest = max(highest, live + what)
            elif kind in ("make", "release") and what not in ignored:
                assert isinstance(what, int)
                live += self._bytes[what] if kind == "make" else -self._bytes[what]
                highest = max(highest, live)
        return highest
