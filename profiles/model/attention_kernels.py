"""Arguments that CUDA's kernels of attention take, by the release of torch: of models as they are
captured, and of closed forms, which do without torch."""

from __future__ import annotations

import functools
from importlib import metadata


@functools.cache
def is_torch_at_least(major: int, minor: int) -> bool:
    """True if the installed torch is of this release or a later one, or none is installed."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return True
    own_major, own_minor = (int(number) for number in version.split(".")[:2])
    return (own_major, own_minor) >= (major, minor)


# Memory-efficient attention, the kernel for fp32, takes fewer heads of keys than of queries from
# torch 2.14 on (pytorch pull request 191085); before, such calls are written out.
FP32_TAKES_GROUPS = is_torch_at_least(2, 14)
