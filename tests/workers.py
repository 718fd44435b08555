"""A pool of gloo ranks that is kept between tests.

A fresh 4-rank job costs 11-21 s on two cores, nearly all of it `import torch`. Here torch is
imported once, in a process from which the ranks are forked; they stay, and every run makes a fresh
process group of the size it wants among the first ranks.

Every run is bounded. When a rank fails or the time is up, all ranks are killed by pid (a rank that
waits in a collective cannot be asked to stop) and the next run starts new ones.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

GRACE_S = 3.0
"""How long the other ranks may take to report once one has failed."""
IMPORTED = (
    "tests.imports_begin",
    "engines.apply",
    "torch.distributed.pipelining",
    "torch._dynamo",
    "transformers.modeling_utils",
    "advisor.auto.parallelize",
    "profiles.machine.bench",
    "pytest",
    "tests.engines.parity",
    "tests.imports_end",
)
"""By the process that ranks are forked from, if installed. None of it starts a thread: no fork
would have it."""

CAPTURED = "TESTS_CAPTURED"
"""The variable with the folder in which processes of a session share what `tests.captured` takes;
without it each has its own."""
NOT_CONNECTED = "Gloo connectFullMesh failed"


class RankFailure(AssertionError):
    """One or more ranks raised, died or did not finish; the message holds their tracebacks."""


class Pool:
    """`size` processes; `run` uses the first `world_size` of them.

    Args:
        backend: of the groups. With another one than gloo ranks are not forked, as CUDA wants it,
            and warnings are none of its errors.
    """

    def __init__(self, size: int, *, backend: str = "gloo") -> None:
        self.size = size
        self.backend = backend
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        self._stores = itertools.count()
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int,
        timeout_s: float = 60.0,
    ) -> list[Any]:
        """Call `function(*args)` on every rank of a fresh group; results in rank order.

        `function` must be importable by name and arguments picklable.

        Raises:
            RankFailure: with the traceback of every rank that failed, and the ranks that hung.
        """
        assert 1 <= world_size <= self.size
        try:
            return self._run(function, args, world_size, timeout_s)
        except RankFailure as failure:
            # gloo (torch 2.13) may lose a connection while a group is made, about once in 5,000
            # groups of a loaded machine: nothing of the test has been sent yet.
            if NOT_CONNECTED not in str(failure):
                raise
            sys.stderr.write(f"tried again: {failure}\n")
        return self._run(function, args, world_size, timeout_s)

    def _run(
        self, function: Callable[..., Any], args: Sequence[Any], world_size: int, timeout_s: float
    ) -> list[Any]:
        if not self._ranks:
            self._start()
        deadline = time.monotonic() + timeout_s
        # All stores stay as long as the ranks: a group that is collected late opens its file again.
        assert self._folder is not None
        store = f"{self._folder.name}/{next(self._stores)}"
        for rank, (_, pipe) in enumerate(self._ranks[:world_size]):
            pipe.send_bytes(pickle.dumps((function, args, rank, world_size, store, timeout_s)))
        return self._collect(world_size, deadline)

    def _collect(self, world_size: int, deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks[:world_size])}
        while waiting and time.monotonic() < deadline:
            for pipe in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    succeeded, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    succeeded, value = False, "the process died"
                if succeeded:
                    results[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures or waiting:
            self.close()
            hung = [f"rank {rank}: did not finish" for rank in sorted(waiting.values())]
            failed = [f"rank {rank}: {text}" for rank, text in sorted(failures.items())]
            raise RankFailure("\n".join([*failed, *hung]))
        return [results[rank] for rank in range(world_size)]

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("forkserver" if self.backend == "gloo" else "spawn")
        if self.backend == "gloo":
            context.set_forkserver_preload(list(IMPORTED))
        threads = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            for _ in range(self.size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, self.backend), daemon=True)
                process.start()
                theirs.close()
                self._ranks.append((process, ours))
        finally:
            if threads is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = threads

    def close(self) -> None:
        """Kill and reap every rank."""
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
        for process, _ in self._ranks:
            process.join(timeout=10)
        self._ranks.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _serve(pipe: Connection, backend: str) -> None:
    import warnings

    import torch
    import torch.distributed as dist

    from profiles.torch_compat import forget_groups

    torch.set_num_threads(1)
    if backend == "gloo":
        warnings.simplefilter("error")
    # Said on purpose, where a model with batch norms runs in microbatches.
    warnings.filterwarnings("ignore", message=".*is a batch norm: it normalises each")
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        try:
            function, args, rank, world_size, store, timeout_s = pickle.loads(message)
            for name, value in (("RANK", rank), ("WORLD_SIZE", world_size), ("LOCAL_RANK", rank)):
                os.environ[name] = str(value)
            os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
            dist.init_process_group(
                backend,
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
            dist.barrier()  # one that is done at once would leave while others still connect
            torch.manual_seed(0)
            with warnings.catch_warnings():  # what one run ignores is an error of the next again
                answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        finally:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
            forget_groups()
        try:
            pipe.send_bytes(pickle.dumps(answer))
        except (TypeError, AttributeError, pickle.PicklingError):
            pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))


def barrier_then(values: Sequence[Any]) -> Any:
    """The value of this rank, after all ranks arrived: the smallest distributed job."""
    import torch.distributed as dist

    dist.barrier()
    return values[dist.get_rank()]
