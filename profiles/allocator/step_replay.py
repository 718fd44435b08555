"""One training step, replayed in the caching allocator from what its units are known to allocate.

The order of single operations is not kept in a profile. What is: the tensors that a unit keeps for
its backward, and the highest moments of its forward and of its backward. Temporaries are taken to
be as large as the tensors beside which they are made, and as many as those moments have room for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from profiles.allocator.caching_allocator import SMALL_BYTES, CachingAllocator

# The first step makes the optimizer's states among what it cached, and the second finds them there.
# Of 352 replays of six steps (20 models, every allocation) 6 reserved more after the second,
# by 0.1 to 13.5 %.
STEPS = 2
# Where tensors are small and the moment is high, temporaries are larger than they.
MOST_TEMPORARIES = 8


@dataclass(frozen=True, slots=True)
class UnitMemory:
    """Allocations of one unit on one rank, in bytes.

    Attributes:
        parameters: each tensor, there all the time.
        gradients: each tensor, made in its backward and there until the next step begins.
        whole_gradients: what the backward makes where `gradients` are the shards of it, which a
            reduction leaves.
        reduced: the inputs of that reduction, there until the next one begins.
        saved: each tensor from its forward to its backward, in the order in which they are made.
        again: each tensor that is let go after the forward and made again for the backward.
        forward_bytes: highest moment of its forward above what was there, `saved` and `again`
            included.
        backward_bytes: the same of its backward, gradients of parameters not counted.
        gathered: whole parameters, there while it runs and the unit before it.
        count: equal units one after another.
    """

    parameters: tuple[float, ...] = ()
    gradients: tuple[float, ...] = ()
    whole_gradients: tuple[float, ...] = ()
    reduced: tuple[float, ...] = ()
    saved: tuple[float, ...] = ()
    again: tuple[float, ...] = ()
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    gathered: tuple[float, ...] = ()
    count: int = 1


@dataclass(frozen=True, slots=True)
class Replayed:
    """Highest bytes of a replay. A block counts whole, as in `torch.cuda.memory_allocated`."""

    allocated_bytes: int
    reserved_bytes: int

    @property
    def ratio(self) -> float:
        return self.reserved_bytes / self.allocated_bytes if self.allocated_bytes else 1.0


class Pass(NamedTuple):
    """A microbatch goes through a stage, or its gradient does."""

    is_forward: bool
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Resident:
    """Allocations of a rank outside the forward and backward of its units.

    Attributes:
        always: there all the time beside parameters: buffers, the batch.
        state_copies: states of the optimizer, each so many times as large as its parameter.
        step_copies: temporaries of the optimizer's step, of all parameters together.
        buckets: DDP's: gradients live in these all the time, and what a backward makes is copied
            there.
    """

    always: tuple[float, ...] = ()
    state_copies: tuple[float, ...] = ()
    step_copies: float = 0.0
    buckets: tuple[float, ...] = ()


def replay_stages(
    stages: Sequence[Sequence[UnitMemory]], standing: Resident, *, order: Sequence[Pass]
) -> Replayed:
    """Highest allocated and reserved bytes of training on a rank with these stages.

    Units of a stage are in the order of the forward; microbatches pass in `order`.

    Gradients of a stage's second microbatch are added to those of the first: they are there while
    their unit runs.
    """
    device = StepAllocator()
    every = [[unit for unit in units for _ in range(unit.count)] for units in stages]
    # Microbatches before the last add up their gradients outside the buckets.
    several = len({each.microbatch for each in order}) > 1

    def pass_through() -> list[int]:
        saved: dict[tuple[int, int], list[list[int]]] = {}
        gradients: dict[int, list[int]] = {}
        for each in order:
            units = every[each.stage]
            if each.is_forward:
                saved[each.stage, each.microbatch] = device.forwards(units)
                continue
            made = device.backwards(
                units,
                saved.pop((each.stage, each.microbatch)),
                keeps=each.stage not in gradients and (several or not standing.buckets),
            )
            gradients.setdefault(each.stage, made)
        return [address for made in gradients.values() for address in made]

    parameters = [n for units in every for unit in units for n in unit.parameters]
    return device.train(parameters, standing, pass_through)


class StepAllocator:
    """The allocator of one device, asked in the order of a training step."""

    def __init__(self) -> None:
        self.allocator = CachingAllocator()
        self.reduced: list[int] = []  # what the last reduction was given

    def take_all(self, sizes: Iterable[float]) -> list[int]:
        allocate = self.allocator.allocate
        return [allocate(int(nbytes)) for nbytes in sizes]

    def train(
        self,
        parameters: Sequence[float],
        standing: Resident,
        pass_through: Callable[[], list[int]],
    ) -> Replayed:
        """Several steps of a forward and backward that leave these addresses of gradients."""
        self.take_all((*parameters, *standing.always, *standing.buckets))
        gradients: list[int] = []
        for step in range(STEPS):
            self.give(gradients)
            gradients = pass_through()
            self.give(self.reduced)
            if step == 0:
                self.take_all(n * copies for n in parameters for copies in standing.state_copies)
            self.give(self.take_all(nbytes * standing.step_copies for nbytes in parameters))
        return Replayed(self.allocator.peak_allocated_bytes, self.allocator.reserved_bytes)

    def give(self, addresses: list[int]) -> None:
        for address in addresses:
            self.allocator.free(address)
        addresses.clear()

    def forwards(self, units: Sequence[UnitMemory]) -> list[list[int]]:
        """Addresses of what each unit keeps."""
        saved = []
        for unit, gathered in self._gathering(units):
            saved.append(self.forward(unit))
            self.give(gathered)
        return saved

    def backwards(
        self, units: Sequence[UnitMemory], saved: list[list[int]], *, keeps: bool
    ) -> list[int]:
        """Addresses of the gradients that stay; `keeps` False: they go where others are."""
        gradients: list[int] = []
        for unit, gathered in self._gathering(units[::-1]):
            made = self.backward(unit, saved.pop())
            self.give(gathered)
            if unit.whole_gradients:
                self.give(self.reduced)
                self.reduced = self.take_all(unit.reduced)
                self.give(made)
                made = self.take_all(unit.gradients)
            if keeps:
                gradients += made
            else:
                self.give(made)
        return gradients

    def _gathering(self, units: Sequence[UnitMemory]) -> Iterator[tuple[UnitMemory, list[int]]]:
        """Every unit with its whole parameters, after those of the next one came."""
        ahead = self.take_all(units[0].gathered) if units else []
        for number, unit in enumerate(units):
            gathered = ahead
            if number + 1 < len(units):
                ahead = self.take_all(units[number + 1].gathered)
            yield unit, gathered

    def forward(self, unit: UnitMemory) -> list[int]:
        """Addresses of what is kept."""
        made = self._tensors(unit, (*unit.saved, *unit.again))
        again = made[len(unit.saved) :]
        self.give(again)
        return made[: len(unit.saved)]

    def backward(self, unit: UnitMemory, saved: list[int]) -> list[int]:
        """Addresses of the gradients of its parameters."""
        whole = unit.whole_gradients or unit.gradients
        sizes = (*unit.saved, *unit.again)
        if unit.again:
            saved += self._tensors(unit, unit.again, reserved=sum(unit.saved))
        largest = max(range(len(sizes)), key=sizes.__getitem__, default=0)
        gradients: list[int] = []
        temporaries: list[tuple[int, float]] = []
        taken = 0.0  # by temporaries
        room = unit.backward_bytes
        for number in reversed(range(len(sizes))):
            size = min(sizes[number], room)
            # Of what is kept some was released, which makes room for more temporaries.
            while temporaries and taken + size > room:
                address, nbytes = temporaries.pop(0)
                self.allocator.free(address)
                taken -= nbytes
            more = self._filled(size, size)
            if number == largest:
                more += self._filled(room - taken - size, sizes[number])
            temporaries += more
            taken += sum(nbytes for _, nbytes in more)
            share = (len(sizes) - number) / len(sizes)
            due = whole[len(gradients) : round(share * len(whole))]
            gradients += self.take_all(due)
            self.allocator.free(saved[number])
            room += sizes[number]
        if not sizes:
            temporaries = self._filled(room, room)
            gradients = self.take_all(whole)
        self.give([address for address, _ in temporaries])
        return gradients

    def _tensors(
        self, unit: UnitMemory, sizes: Sequence[float], *, reserved: float = 0.0
    ) -> list[int]:
        """Make these tensors, the largest of them beside as many temporaries as the highest moment
        has room for."""
        room = unit.forward_bytes - sum(sizes) - reserved
        largest = max(range(len(sizes)), key=sizes.__getitem__, default=0)
        made: list[int] = []
        for number, size in enumerate(sizes):
            temporaries = self._filled(room, size) if number == largest else []
            made += self.take_all([size])
            self.give([address for address, _ in temporaries])
        if not sizes:
            self.give([address for address, _ in self._filled(room, room)])
        return made

    def _filled(self, room: float, size: float) -> list[tuple[int, float]]:
        """As many temporaries of `size` as there is room for, the last one smaller."""
        temporaries = []
        size = max(size, room / MOST_TEMPORARIES)
        while room > SMALL_BYTES:
            nbytes = min(size, room)
            temporaries.append((self.allocator.allocate(int(nbytes)), nbytes))
            room -= nbytes
        return temporaries
