"""The rendezvous store's connections, which torch keeps to itself."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Any, cast

import torch.distributed as dist


def hang_up(store: dist.Store) -> None:
    """Close this process's connections to a TCP store, so that calls which wait for it fail.

    torch bounds how long the store waits for a key, not how long a call waits for the store: one
    whose process is stopped is waited for without an end.
    """
    port = cast(Any, getattr(store, "_underlying_non_prefix_store", store)).port
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as line:
                if line.getpeername()[1:2] == (port,):
                    line.shutdown(socket.SHUT_RDWR)
