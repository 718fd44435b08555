"""A training in a folder: resumed from it, saved into it, and ended when a rank is told to."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from engines.runtime.signals import AgreedSignal, EndSignals
from engines.state.checkpoint.agreement import on_first, peers_of
from engines.state.checkpoint.folder import require_retention
from engines.state.checkpoint.load import has_save
from engines.state.checkpoint.save import CheckpointSave
from profiles.errors import InputError
from profiles.record.bounds import is_whole

if TYPE_CHECKING:
    from engines.parallel.checkpointing import CheckpointMixin, PathLike

Resume = Literal["latest"] | None
LEAST_PATIENCE_S = 1.0
"""For other ranks, where a scheduler's grace is used up."""


class SavedRun:
    """The context around a training loop; called after each step, True says to leave the loop.

    A call saves in the background where that is due. When the loop is left, however that came, the
    state is saved once more; after an exception it is not.

    Attributes:
        signal: for which the loop is left; None so far.
        saved: folder of the last complete save of this run; None so far.
    """

    def __init__(
        self,
        parallel: CheckpointMixin,
        folder: PathLike | None,
        *,
        save_every: int | None,
        keep_last: int | None,
        resume: Resume,
        grace_s: float,
    ) -> None:
        """Raises InputError where the arguments contradict each other."""
        if save_every is not None and (folder is None or not is_whole(save_every, least=1)):
            raise InputError(
                f"`save_every={save_every}` "
                + ("wants one step or more" if folder else "names no folder to save in"),
                hints=["write `save_every=1000` and a folder, or leave it out"],
            )
        require_retention(keep_last=keep_last, keep_every=None)
        if resume not in ("latest", None):
            raise InputError(
                f'`resume={resume!r}` is neither "latest" nor None',
                hints=[
                    "load another checkpoint with `parallel.load` first, and give `resume=None`"
                ],
            )
        self.signal: signal.Signals | None = None
        self.saved: Path | None = None
        self._parallel = parallel
        self._folder = None if folder is None else Path(os.path.abspath(folder))
        self._save_every, self._keep_last = save_every, keep_last
        self._resume, self._grace_s = resume, grace_s
        self._signals = EndSignals()
        self._agreed = AgreedSignal(self._signals, parallel._job)
        self._saving: CheckpointSave | None = None
        self._step = self._saved_step = -1

    def __enter__(self) -> SavedRun:
        """Resume from the newest whole checkpoint, if there is one.

        Raises:
            FileError: there are some and none is whole, or they are of another model.
        """
        self._signals.__enter__()
        try:
            parallel, root = self._parallel, self._folder
            if root is not None and self._resume is not None:
                peers = peers_of(parallel._job, None)
                if on_first(peers, lambda: has_save(root)):
                    self._saved_step = parallel.load(root, step="latest")
            self._step = parallel.step
        except BaseException:
            self._signals.__exit__(None, None, None)
            raise
        return self

    def __call__(self) -> bool:
        """Save where that is due; True if this step was the last: a rank was told to end.

        All ranks call it after each step and get the same answer. Without a step since the last
        call, as between microbatches, it does nothing.
        """
        step = self._parallel.step
        if step != self._step:
            self._step = step
            is_due = self._save_every is not None and step % self._save_every == 0
            if self.signal is None:
                self.signal = self._ask(step, is_due=is_due)
            if is_due and self.signal is None:
                self._save(background=True)
        return self.signal is not None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and self._folder is not None:
                if self._parallel.step != self._saved_step:
                    self._save(background=False)
                if self._saving is not None:
                    self.saved = self._saving.wait()
        finally:
            self._signals.__exit__(kind, error, trace)

    def _ask(self, step: int, *, is_due: bool) -> signal.Signals | None:
        """The signal of any rank; ranks that step on their own are asked where they meet anyway."""
        plan = self._parallel.plan
        if plan.servers:
            return self._agreed.ask() if is_due else None
        if plan.sync_every > 1:
            return self._agreed.ask() if step % plan.sync_every == 0 else None
        return self._agreed.after_step()

    def _save(self, *, background: bool) -> None:
        assert self._folder is not None
        patience_s = None
        if self.signal is not None:
            patience_s = max(LEAST_PATIENCE_S, self._grace_s - self._signals.age_s)
        self._saving = self._parallel._start_save(
            self._folder, self._keep_last, None, background=background, timeout_s=patience_s
        )
        self._saved_step = self._parallel.step
