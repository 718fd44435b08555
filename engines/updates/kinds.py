"""When parameters are updated: a setting of plans."""

from __future__ import annotations

from enum import StrEnum


class Updates(StrEnum):
    """When parameters are updated, and by whose gradients.

    With `servers` the first ranks hold the parameters and step them, the others work. Without, each
    rank is a replica.
    """

    SYNCHRONOUS = "synchronous"  # every step, by the mean of all replicas' gradients
    ASYNCHRONOUS = "asynchronous"  # servers step by each worker's gradient as it comes
    LOCAL = "local"  # each replica by its own; every `sync_every` steps parameters are averaged
    DILOCO = "diloco"  # the same, and what they moved by is the gradient of an outer optimizer

    @property
    def is_periodic(self) -> bool:
        """Whether replicas go apart, and meet every `sync_every` steps."""
        return self in (Updates.LOCAL, Updates.DILOCO)
