"""Fixtures for every test: the kept pool of ranks, and no way to the network."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from profiles.lazy import without_collections
from tests.nightly import mark_listed
from tests.workers import CAPTURED, Pool

# Workers of xdist share the cores: threads of torch that wait for one another spin, and take many
# times the time of one. No import above loads torch, which reads this once.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

SHARED = Path(__file__).resolve().parents[2] / "shared"
# No test of what is right may fail because the machine has other work. The same cases are drawn
# each time, so that a change is judged by them; `make nightly` draws others.
settings.register_profile("same cases", deadline=None, derandomize=True)
settings.register_profile("other cases", deadline=None)
settings.load_profile("same cases")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import and collect without searches for garbage, and leave what stays out of all later ones:
    a full one looked at a million objects, every few tests."""
    with without_collections():
        result = yield
    gc.freeze()
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark before pytest leaves out by marks."""
    mark_listed(items, is_whole=config.args == config.getini("testpaths"))


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No bench of a user's is read or written by a test, nor by the processes that it starts; and
    all processes of a session share the profiles of `tests.captured`."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "captured"
    folder.mkdir(exist_ok=True)
    os.environ[CAPTURED] = str(folder)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four gloo ranks, kept for the whole session."""
    ranks = Pool(4)
    yield ranks
    ranks.close()


@pytest.fixture
def shared() -> Path:
    """The folder of published measurements; tests that need it skip in a public clone."""
    if not SHARED.is_dir():
        pytest.skip(f"no published measurements beside the checkout ({SHARED})")
    return SHARED


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be downloaded at run time: only loopback and Unix sockets connect."""
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: object) -> None:
        host = address[0] if isinstance(address, tuple) else ""
        if self.family != socket.AF_UNIX and host not in ("127.0.0.1", "::1", "localhost"):
            raise OSError(f"tests may not reach {host}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_only)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the group of one that a sharded plan made in this process: the next file may start one of
    its own."""
    if nextitem is not None and nextitem.path == item.path:
        return
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
