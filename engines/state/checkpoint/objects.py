"""Objects beside model and optimizer whose states a checkpoint holds: loaders, schedulers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from engines.state.checkpoint.agreement import Peers, all_peers_succeed
from profiles.errors import FileError


class Stateful(Protocol):
    """An object whose state a checkpoint can hold, as torch's schedulers are."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


@contextmanager
def with_states(
    objects: Mapping[str, tuple[Stateful, dict[str, Any]]], *, peers: Peers, folder: object
) -> Iterator[None]:
    """Load states into objects around the body; if either fails, load the old ones again.

    An object takes what it likes, so it is asked before a weight is touched. Tensors that
    `state_dict` gives out without a copy, and that are filled in place, are not brought back.

    Args:
        objects: by name, each with its state in the checkpoint at `folder`.
        peers: all of them agree; where one rank's object refuses, all ranks raise.

    Raises:
        FileError: an object refuses its state; it is named.
    """
    before = [(value, value.state_dict()) for value, _ in objects.values()]
    try:
        with all_peers_succeed(peers, f"loading `{folder}`"):
            for name, (value, state) in objects.items():
                try:
                    value.load_state_dict(state)
                except Exception as error:
                    raise FileError(
                        f"`{name}` refuses its state in `{folder}`:"
                        f" {type(error).__name__}: {error}",
                        hints=["it was saved by another class or version, or the file was changed"],
                    ) from error
        yield
    except BaseException:
        for value, state in before:
            with suppress(Exception):
                value.load_state_dict(state)
        raise
