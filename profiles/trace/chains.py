"""Chains of elementwise operations in a run that is followed, and what one kernel for each saves.

A chain is a longest run of operations of one unit without a weight layer, a product, attention or
the border of a norm's module between them. A gate's activation and its product with what another
layer returns are two chains around that layer; one kernel runs both where nothing else reads what
the first hands to the second. One kernel reads what comes from outside, and writes what code
outside reads; what an operation in the middle saved for its backward is made again from that.

Approximate: a chain counts as one kernel, also where a compiler needs two (sums over rows beside
sums over columns), and the kind of a chain is that of its characteristic operation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from profiles.model.work import FusibleKind
from profiles.trace.scopes import Chain, ChainTraffic, LayerSegment, Saving, Savings, Scope

IsKept = Callable[[int], bool]


Access = tuple[int | None, int]
"""A memory that an operation reads or writes, if it is followed, and the bytes."""


class Fusing(NamedTuple):
    """Role of an operation in a chain that one kernel may run.

    Attributes:
        hint: the kind of chain that it is characteristic of.
        is_softmax: over scores, where it lies between two products.
        is_attention: what is done to queries and keys lies before it.
        draws: random numbers.
    """

    is_fusible: bool = True
    hint: FusibleKind | None = None
    is_softmax: bool = False
    is_attention: bool = False
    draws: bool = False


def kind_of_module(name: str) -> FusibleKind | None:
    """Of all that a module runs, by the name of its class."""
    if name.endswith("Norm"):
        return FusibleKind.NORM
    if "Rotary" in name:
        return FusibleKind.ROTARY
    return FusibleKind.ROUTER if name.endswith("Router") else None


class Chains:
    """Follows which chain made and reads which memory."""

    def __init__(self) -> None:
        self._makers: dict[int, ChainTraffic] = {}
        self._all: list[ChainTraffic] = []
        self._last: ChainTraffic | None = None

    def operation(
        self,
        chain: Chain,
        fusing: Fusing,
        reads: Sequence[Access],
        writes: Sequence[Access],
        *,
        is_alive: IsKept | None,
    ) -> None:
        """A kernel was launched in `chain`, or beside it where it cannot be fused.

        `is_alive` is asked in the backward, where memory lives until its last use.
        """
        traffic = None
        if fusing.is_fusible:
            traffic = chain.forward if is_alive is None else chain.backward
        if is_alive is None:
            if fusing.hint is not None:
                chain.hints.add(fusing.hint)
            if fusing.is_attention:
                chain.hints.add(FusibleKind.ROTARY)
            chain.is_scores |= fusing.is_softmax
        if is_alive is not None and self._last is not traffic:
            self.pause(is_alive)
            self._last = traffic
        for memory, _ in reads:
            if memory in self._makers and self._makers[memory] is not traffic:
                self._makers[memory].readers.setdefault(memory, set()).add(traffic)
        if traffic is None:
            return
        if not traffic.kernels:
            self._all.append(traffic)
        traffic.kernels += 1
        made = traffic.made
        for memory, nbytes in reads:
            traffic.moved_bytes += nbytes
            if memory is not None and memory not in made and nbytes:
                traffic.read[memory] = max(nbytes, traffic.read.get(memory, 0))
        sources = {memory for memory, _ in reads if memory is not None}
        for memory, nbytes in writes:
            traffic.moved_bytes += nbytes
            if memory is None:
                continue
            if memory not in made and (memory < 0 or memory in self._makers):
                traffic.written[memory] = max(nbytes, traffic.written.get(memory, 0))
                continue
            self._makers[memory] = traffic
            made[memory] = max(nbytes, made.get(memory, 0))
            traffic.sources.setdefault(memory, set()).update(sources - {memory})
            if fusing.draws:
                traffic.drawn.add(memory)

    def hand_on(self, memories: Iterable[int | None]) -> None:
        """Code outside takes these."""
        for memory in memories:
            if memory in self._makers:
                self._makers[memory].handed_on.add(memory)

    def pause(self, is_alive: IsKept) -> None:
        """Other code runs now in the backward: what is alive is for others."""
        if self._last is not None:
            self._last.handed_on.update(filter(is_alive, self._last.made))
        self._last = None

    def settle_forward(self, is_saved: Callable[[int, Scope], bool], is_kept: IsKept) -> None:
        """The forward is over: what it saves, and what need not be kept.

        Args:
            is_saved: memory is kept, and this scope saved it first.
            is_kept: memory is kept, or there all the time.
        """
        for traffic in self._all:
            chain = traffic.chain
            moved, kernels = self._saved(traffic, skipped=set(), added={})
            chain.saving = Saving(forward_moved_bytes=moved, forward_kernels=kernels)
            if not kernels and not moved:
                continue
            remade = {
                memory
                for memory in traffic.made
                if self._is_inner(traffic, memory)
                and memory not in traffic.drawn
                and is_saved(memory, chain.scope)
            }
            ingredients = _ingredients(traffic, remade)
            gain = sum(traffic.made[memory] for memory in remade)
            gain -= sum(n for memory, n in ingredients.items() if not is_kept(memory))
            if gain > 0:
                chain.remade, chain.ingredients = remade, ingredients
                chain.saving = chain.saving._replace(activation_bytes=gain)
            chain.unmade |= {
                memory
                for memory in traffic.made
                if self._is_inner(traffic, memory)
                and (memory in chain.remade or not is_kept(memory))
            }
        self._all.clear()
        self._last = None

    def settle_backward(self, is_alive: IsKept) -> None:
        """The backward is over, too."""
        self.pause(is_alive)
        remade: dict[Scope, set[int]] = {traffic.chain.scope: set() for traffic in self._all}
        for chain in {maker.chain for maker in self._makers.values()}:
            if chain.scope in remade:
                remade[chain.scope] |= chain.remade
        for traffic in self._all:
            chain = traffic.chain
            moved, kernels = self._saved(
                traffic, skipped=remade[chain.scope], added=chain.ingredients
            )
            chain.saving = chain.saving._replace(
                backward_moved_bytes=moved, backward_kernels=kernels
            )
            chain.unmade |= {m for m in traffic.made if self._is_inner(traffic, m)}
        self._all.clear()

    def _saved(
        self, traffic: ChainTraffic, *, skipped: set[int], added: dict[int, int]
    ) -> tuple[int, int]:
        """Bytes and kernels that one kernel saves.

        Args:
            skipped: memory that is made again, not read.
            added: what is read to that end.
        """
        goes_on = [m for m in traffic.made if self._joined(traffic, m)]
        comes_in = [m for m in traffic.read if self._comes_in(traffic, m)]
        for memory in goes_on:
            for reader in traffic.readers[memory]:
                if reader is not None:
                    reader.chain.hints.add(FusibleKind.GATE)
                    traffic.chain.hints.add(FusibleKind.GATE)
        if traffic.kernels < 2 and not goes_on and not comes_in:
            return 0, 0
        reads = {m: n for m, n in traffic.read.items() if m not in skipped} | {
            m: max(n, traffic.read.get(m, 0)) for m, n in added.items() if m not in traffic.made
        }
        moved = sum(n for m, n in reads.items() if m not in comes_in)
        moved += sum(traffic.written.values())
        moved += sum(n for m, n in traffic.made.items() if not self._is_inner(traffic, m))
        kernels = traffic.kernels - (0 if goes_on else 1)
        return max(0, traffic.moved_bytes - moved), kernels

    def _is_inner(self, traffic: ChainTraffic, memory: int) -> bool:
        """Nothing outside needs what was made."""
        if self._joined(traffic, memory):
            return True
        return memory not in traffic.handed_on and not traffic.readers.get(memory)

    def _joined(self, traffic: ChainTraffic, memory: int) -> bool:
        """Another chain alone reads it, and one kernel can run both."""
        readers = traffic.readers.get(memory, ())
        if len(readers) != 1:
            return False
        (reader,) = readers
        return reader is not None and _can_join(traffic.chain, reader.chain)

    def _comes_in(self, traffic: ChainTraffic, memory: int) -> bool:
        maker = self._makers.get(memory)
        return (
            maker is not None
            and maker.readers.get(memory) == {traffic}
            and _can_join(maker.chain, traffic.chain)
        )


def _can_join(one: Chain, other: Chain) -> bool:
    """Chains of one call whose kinds their operations say: those of a gate."""
    plain = one.kind is None and other.kind is None and not (one.is_scores or other.is_scores)
    gate = FusibleKind.GATE in one.hints or FusibleKind.GATE in other.hints
    return plain and gate and one is not other and one.scope is other.scope


def _ingredients(traffic: ChainTraffic, wanted: set[int]) -> dict[int, int]:
    """Memory that these are made of, from outside or handed on, with its bytes."""
    sizes: dict[int, int] = {}
    left, seen = list(wanted), set(wanted)
    while left:
        for source in traffic.sources[left.pop()]:
            if source in seen:
                continue
            seen.add(source)
            inner = source in traffic.made and source not in traffic.drawn
            if inner and not traffic.readers.get(source) and source not in traffic.handed_on:
                left.append(source)
            else:
                sizes[source] = traffic.made.get(source) or traffic.read.get(source, 0)
    return sizes


def savings(chains: Iterable[Chain], *, is_loss: bool) -> dict[LayerSegment | None, Savings]:
    """Of all chains of a call, by the part that runs them and by kind."""
    by_part: dict[LayerSegment | None, Savings] = {}
    for chain in chains:
        kind = chain.named(is_loss=is_loss)
        if kind is not None and chain.saving != Saving():
            add_savings(by_part.setdefault(chain.part, {}), {kind: chain.saving})
    return by_part


def add_savings(total: Savings, more: Savings) -> None:
    """Put `more` into `total`."""
    for kind, saving in more.items():
        total[kind] = total.get(kind, Saving()).plus(saving)


def layouts(where: Scope | LayerSegment, parts: Collection[LayerSegment] = ()) -> Savings:
    """Bytes and cycles of maps that are laid out anew, less those in `parts` of it."""

    def outside(direction: str, amount: str) -> int:
        whole, *inside = (getattr(getattr(each, direction), amount) for each in (where, *parts))
        return int(whole - sum(inside))

    turned = Saving(
        forward_moved_bytes=outside("forward", "turned_bytes"),
        backward_moved_bytes=outside("backward", "turned_bytes"),
        forward_cycles=outside("forward", "turned_cycles"),
        backward_cycles=outside("backward", "turned_cycles"),
    )
    return {FusibleKind.LAYOUT: turned} if turned != Saving() else {}
