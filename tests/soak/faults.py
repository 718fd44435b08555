"""Faults that one rank of a training may have, each at a moment that it notes."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

import engines.state.checkpoint.save as saving
from engines.parallel import ParallelModel
from tests.soak.training import BATCH, LENGTH, global_batches

FAULTY = 1
"""The rank."""
AFTER = 12
"""Steps before the fault: ranks know by then how long one takes, and the loader is in a pass."""
TOO_LONG, LONGER = 20, LENGTH + 4
"""Tokens: the model has places for 16."""


def note(folder: Path) -> None:
    """Write down the time: the fault is now."""
    (folder / "fault").write_text(str(time.monotonic()))


def happened_at(folder: Path) -> float:
    """The time of the fault, by a clock that all processes of a machine share."""
    return float((folder / "fault").read_text())


class FaultPlace:
    """Place of a fault: the rank's model, and the batch of its next step."""

    def __init__(self, parallel: ParallelModel, folder: Path) -> None:
        self.batch: Any = None
        self._folder = folder
        # The modules of other stages are not called here.
        stepped = {id(p) for group in parallel.optimizer.param_groups for p in group["params"]}
        own = [
            module
            for module in parallel.module.modules()
            if any(id(parameter) in stepped for parameter in module.parameters(recurse=False))
        ]
        self._last = own[-1]

    def note(self) -> None:
        note(self._folder)

    def in_forward(self, fault: Callable[[], None]) -> None:
        """Let it happen in the next forward."""

        def hook(module: nn.Module, args: object) -> None:
            time.sleep(1.0)  # gloo sums the rows of the batch beside the forward
            self.note()
            fault()

        self._last.register_forward_pre_hook(hook)

    def lengthen(self, tokens: int) -> None:
        """Replace the batch by one of other lengths."""
        self.note()
        self.batch = tuple(part.new_ones(len(part), tokens) for part in self.batch)


def _signals(number: signal.Signals) -> Callable[[FaultPlace], None]:
    return lambda place: place.in_forward(lambda: os.kill(os.getpid(), number))


def _raises(place: FaultPlace) -> None:
    def fail() -> NoReturn:
        raise ValueError("of the user's model")

    place.in_forward(fail)


def _exits(place: FaultPlace) -> None:
    place.note()
    os._exit(0)  # as a library of the user's may: nothing is said


def _full_disk(place: FaultPlace) -> None:
    def no_room(*_: object) -> NoReturn:
        place.note()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    saving.write_shard = no_room  # type: ignore[assignment]


class LostWorker(Dataset[Any]):
    """Rows whose loading worker ends in the middle of its first pass."""

    def __init__(self, rows: Dataset[Any], folder: Path) -> None:
        self._rows, self._folder, self._left = rows, folder, 17

    def __len__(self) -> int:
        return len(self._rows)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        self._left -= 1
        if not self._left and get_worker_info() is not None:
            note(self._folder)
            os._exit(1)
        return self._rows[index]


def batches_of(fault: str, rank: int, folder: Path) -> DataLoader[Any]:
    """Global batches; for the loss of a worker they are loaded by one."""
    loader = global_batches()
    if fault != "worker":
        return loader
    rows = LostWorker(loader.dataset, folder) if rank == FAULTY else loader.dataset
    return DataLoader(rows, batch_size=BATCH, shuffle=True, num_workers=1)


FAULTS: dict[str, Callable[[FaultPlace], None]] = {
    "stopped": _signals(signal.SIGSTOP),
    "killed": _signals(signal.SIGKILL),
    "exits": _exits,
    "raises": _raises,
    "full disk": _full_disk,
    "other shape": lambda place: place.lengthen(TOO_LONG),
    "other length": lambda place: place.lengthen(LONGER),
    "worker": lambda place: None,
}
"""By name, after step `AFTER`; a worker is lost in its own time. The model does not take a batch of
another shape."""
RAISING = ("raises", "full disk", "other shape")
"""Those where the rank itself gets an error."""
SHARED_BATCHES = ("tp2", "pp2")
"""Plans whose ranks share a batch; under others rows of one rank may be longer."""


def faults_of(name: str) -> list[str]:
    """The faults under a plan of `PLANS`."""
    return [fault for fault in FAULTS if fault != "other length" or name in SHARED_BATCHES]
