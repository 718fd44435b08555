"""`fit`, a whole training in one call, and `until_signal` for loops of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from engines.data.loader import ShardedLoader, length_topic
from engines.parallel.checkpointing import CheckpointMixin, PathLike
from engines.parallel.saved_run import Resume, SavedRun
from engines.runtime.rank_agreement import require_agreement
from profiles.capture.batch.call import Batch
from profiles.errors import InputError
from profiles.record.bounds import is_whole

Reason = Literal["steps", "epochs", "signal"]
OnStep = Callable[[int, Tensor], object]


@dataclass(frozen=True, slots=True)
class FitResult:
    """End of a training.

    Attributes:
        steps: optimizer steps in all, those before a resume included.
        loss: of the last step, over the samples of all ranks; None where no step was left to do.
        saved: folder of the last save; None where none was made.
        reason: it ended: "steps" or "epochs" are done (or the loader is at its end), or a "signal"
            told a rank to end.
    """

    steps: int
    loss: float | None
    saved: Path | None
    reason: Reason


class FitMixin(CheckpointMixin):
    """Trainings that survive their process: a part of ParallelModel."""

    train_step: Callable[[Batch], Tensor]
    shard: Callable[[Iterable[Batch]], ShardedLoader]

    def fit(
        self,
        loader: Iterable[Batch],
        *,
        steps: int | None = None,
        epochs: int | None = None,
        save: PathLike | None = None,
        save_every: int | None = None,
        keep_last: int | None = 3,
        resume: Resume = "latest",
        scheduler: LRScheduler | None = None,
        on_step: OnStep | None = None,
        grace_s: float = 30.0,
    ) -> FitResult:
        """Train on `loader`, from the newest checkpoint in `save` where there is one.

        Started again after whatever ended it, the same script goes on as if nothing had been: same
        weights, optimizer and scheduler, same place in the data, same random numbers.

        SIGTERM and SIGUSR1 at any rank end the training on all ranks after the same step; it saves
        and returns, so that the script can end well. Under plans with servers ranks ask each other
        at saves alone. Handlers from before are called too, and are back when it returns; in a
        thread that is not the main one signals are left alone.

        Args:
            loader: of global batches, or what `shard` made of one.
            steps, epochs: in all, those before a resume included; the first to be reached ends it.
            save: a folder of this run, on a path that all nodes share.
            save_every: steps between saves in the background; the end of the training is saved too.
            keep_last: newest saves to retain; None: all.
            resume: None starts anew; older saves in the folder stay.
            scheduler: stepped after each step that was not left out, saved and resumed; one that a
                factory made (`scheduler=` of `auto_parallelize`) is so without being given here.
            on_step: called after each step with its number and its loss.
            grace_s: that the scheduler leaves from a signal to its kill: the save at the end waits
                that long for other ranks, beyond what the disk takes.

        Raises:
            InputError: there is no end, or the loader yields no batch.
            RankMismatchError: loaders of ranks have different lengths.
            FileError: checkpoints of another model or all damaged, or a save that failed.
        """
        _require_end(steps, epochs)
        if isinstance(scheduler, ReduceLROnPlateau):
            raise InputError(
                "a ReduceLROnPlateau wants a metric at each step",
                where="parallel.fit",
                hints=["step it in `on_step`, and keep it with `parallel.register`"],
            )
        if scheduler is not None and self.scheduler is not None:
            if scheduler is not self.scheduler:
                raise InputError(
                    "there are two schedulers: this one, and the one that steps already",
                    where="parallel.fit",
                    hints=["leave one out; two make one by `ChainedScheduler([...])`"],
                )
            scheduler = None  # it steps with the optimizer
        sharded = loader if isinstance(loader, ShardedLoader) else self.shard(loader)
        if scheduler is not None and all(
            scheduler is not known for known in self._objects.values()
        ):
            self.register(scheduler=scheduler)
        require_agreement([length_topic([sharded])], self._job)
        run = self.until_signal(
            save, save_every=save_every, keep_last=keep_last, resume=resume, grace_s=grace_s
        )
        losses: list[Tensor] = []

        def stepped(loss: Tensor) -> bool:
            losses[:] = [loss]
            if scheduler is not None and not self._finite.is_last_skipped:
                scheduler.step()
            if on_step is not None:
                on_step(self.step, loss)
            return run()

        with run:
            reason = self._train(sharded, stepped, steps, epochs)
        loss = losses[0].item() if losses else None
        return FitResult(self.step, loss, run.saved, reason)

    def until_signal(
        self,
        folder: PathLike | None,
        *,
        save_every: int | None = None,
        keep_last: int | None = 3,
        resume: Resume = "latest",
        grace_s: float = 30.0,
    ) -> SavedRun:
        """`fit` for a loop of one's own: a context that resumes, saves, and says when to end.

            loader = parallel.shard(loader)
            with parallel.until_signal("runs/gpt", save_every=1000) as stop:
                for batch in loader:
                    ...  # forward, backward, and one step of `parallel.optimizer`
                    if stop():
                        break

        All ranks call it after each step; arguments are those of `fit`. Schedulers are kept with
        `parallel.register(scheduler=scheduler)` before it is entered.
        """
        return SavedRun(
            self,
            folder,
            save_every=save_every,
            keep_last=keep_last,
            resume=resume,
            grace_s=grace_s,
        )

    def _train(
        self,
        loader: ShardedLoader,
        stepped: Callable[[Tensor], bool],
        steps: int | None,
        epochs: int | None,
    ) -> Reason:
        """Train until an end is reached; `stepped` takes each loss, True says to leave."""
        if steps is not None and self.step >= steps:
            return "steps"
        first, is_empty = self.step, False
        while epochs is None or loader.epoch < epochs:
            before = self.step
            for batch in loader:
                if stepped(self.train_step(batch)):
                    return "signal"
                if steps is not None and self.step >= steps:
                    return "steps"
            # One empty pass is the end of a resumed one, two are a loader that is at its end.
            if is_empty and self.step == before:
                if self.step == first:
                    raise InputError("the loader yields no batch", where="parallel.fit")
                break
            is_empty = self.step == before
        return "epochs"


def _require_end(steps: int | None, epochs: int | None) -> None:
    for name, number in (("steps", steps), ("epochs", epochs)):
        if number is not None and not is_whole(number, least=1):  # nan would never be reached
            raise InputError(
                f"`{name}={number}` wants one or more, a whole number", where="parallel.fit"
            )
    if steps is None and epochs is None:
        raise InputError(
            "this training has no end",
            where="parallel.fit",
            hints=["give `steps=` or `epochs=`"],
        )
