"""The TCP connections of this process, as the kernel sees them (Linux: tcp(7), `tcp_info`)."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator

# Offsets in include/uapi/linux/tcp.h of tcpi_bytes_received, tcpi_bytes_sent (which counts what
# was sent twice on a busy machine) and tcpi_bytes_retrans.
_RECEIVED, _SENT, _SENT_AGAIN = 128, 200, 208

Counts = dict[str, tuple[int, int]]
"""By connection: bytes sent and received since it was made."""


def counts() -> Counts:
    """Bytes over every connection so far."""
    results = {}
    for name, connection in _connections():
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        sent, again, received = (
            struct.unpack_from("Q", info, at)[0] for at in (_SENT, _SENT_AGAIN, _RECEIVED)
        )
        results[name] = sent - again, received
    return results


def since(before: Counts) -> tuple[int, int]:
    """Bytes sent and received since then. Connections of earlier jobs may have been closed."""
    sent = received = 0
    for name, (out, into) in counts().items():
        out_before, into_before = before.get(name, (0, 0))
        sent += out - out_before
        received += into - into_before
    return sent, received


def die() -> None:
    """Shut all connections down, as the kernel does when a process ends."""
    for _, connection in _connections():
        with contextlib.suppress(OSError):  # one that listens has no peer, and is left alone
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)


def _connections() -> Iterator[tuple[str, socket.socket]]:
    for name in os.listdir("/proc/self/fd"):
        try:
            inode = os.readlink(f"/proc/self/fd/{name}")
            if not inode.startswith("socket:"):
                continue
            copy = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with copy:
            is_internet = copy.family in (socket.AF_INET, socket.AF_INET6)
            if is_internet and copy.type == socket.SOCK_STREAM:
                yield inode, copy
