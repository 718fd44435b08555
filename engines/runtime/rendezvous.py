"""The store of one attempt of a job, which its launcher may start again.

torchrun's agents lend their own store to the ranks, and it outlives them: ranks of a new attempt
would read addresses, failures and turns that those of the last one left there. So the ranks of an
attempt agree on a name that nobody had before, and all that they say goes under it.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from profiles.errors import RankError

_POLL_S = 0.01


def attempt_store(*, timeout_s: float) -> tuple[dist.Store, int, int]:
    """The store in which the ranks of this attempt meet, this rank and their number.

    Raises:
        RankError: names the ranks that did not come in time.
        DistError: the store did not answer in time.
    """
    timeout = timedelta(seconds=timeout_s)
    server = _loopback_server()  # lives on in the store that is made on its port
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    del server
    store.set_timeout(timeout)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.PrefixStore(agreed_name(store, rank, size, timeout_s=timeout_s), store)
    return dist.PrefixStore("default_pg", store), rank, size


def _loopback_server() -> dist.Store | None:
    """The server of rank 0 where the ranks meet on a loopback address, listening there alone.

    torch's own listens on all interfaces, and does what anybody says who reaches it. None on other
    ranks, where the launcher has a server, and where one is there already.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if os.environ.get("RANK") != "0" or is_agents or not _is_loopback(host) or not port.isdecimal():
        return None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, int(port)))
            listener.listen()
        except (OSError, OverflowError):
            return None
        return dist.TCPStore(
            host,
            int(port),
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def agreed_name(store: dist.Store, rank: int, size: int, *, timeout_s: float) -> str:
    """A name of this attempt, the same on its ranks, in a store that has words of earlier ones.

    The number of restarts would not do: each node counts its own. Every rank brings a fresh name;
    the first answers each name that it reads with its own, and is done when all have said that they
    got it. Names of earlier attempts are answered in vain.

    Raises:
        RankError: on the first rank, names those that did not come in time; on others, the first.
    """
    own = secrets.token_hex(8)
    if rank:
        store.set(f"advisor/join/{rank}", own)
        answer = f"advisor/attempt/{own}"
        try:
            store.wait([answer], timedelta(seconds=timeout_s))
        except dist.DistStoreError:
            raise RankError(
                f"rank 0 did not come within {timeout_s:.0f} s",
                where=f"rank {rank} of {size}, joining the job",
                hints=["look at the output of rank 0: it failed or never started"],
            ) from None
        name = store.get(answer).decode()
        store.set(f"advisor/joined/{name}/{rank}", "")
        return name
    deadline = time.monotonic() + timeout_s
    missing, answered = set(range(1, size)), set[bytes]()
    while missing:
        for other in sorted(missing):
            if store.check([f"advisor/joined/{own}/{other}"]):
                missing.remove(other)
            elif store.check([f"advisor/join/{other}"]):
                asked = store.get(f"advisor/join/{other}")
                if asked not in answered:
                    answered.add(asked)
                    store.set(f"advisor/attempt/{asked.decode()}", own)
        if missing and time.monotonic() > deadline:
            absent = ", ".join(map(str, sorted(missing)))
            raise RankError(
                f"of {size} ranks these did not come within {timeout_s:.0f} s: {absent}",
                where=f"rank 0 of {size}, joining the job",
                hints=["look at the output of the missing ranks: they failed or never started"],
            )
        time.sleep(_POLL_S)
    return own
