"""Cluster names: "4x8xH100-SXM-80GB", "2xdgx-h100", or several joined by "+"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from profiles.errors import InputError, UnknownNameError, near_misses
from profiles.machine import catalogue
from profiles.record.bounds import MOST_DEVICES, whole_number

MOST_KINDS = 64
EXAMPLES = 'write "4x8xH100-SXM-80GB" (nodes x devices x accelerator), "2xdgx-h100" or a file'

_NAME = re.compile(r"(?:(-?\d+)\s*x\s*)?(?:(-?\d+)\s*x\s*)?(.+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class NamedNodes:
    """Equal nodes: of so many accelerators, or of a system, which brings its own devices."""

    nodes: int
    devices_per_node: int | None = None
    accelerator: str | None = None
    system: str | None = None


def parts_of_name(text: str) -> tuple[NamedNodes, ...]:
    """The kinds of nodes that a name joins with "+", with whole catalogue names.

    Raises:
        UnknownNameError: no such accelerator or system; the near miss is named.
        InputError: a count of 0, or a short name that fits several.
    """
    parts = text.split("+", MOST_KINDS)
    if len(parts) > MOST_KINDS:
        raise InputError(f"a cluster of more than {MOST_KINDS} kinds of nodes", hints=[EXAMPLES])
    return tuple(_part(part, text.strip()) for part in parts)


def _part(part: str, text: str) -> NamedNodes:
    match = _NAME.fullmatch(part.strip())
    if match is None:
        raise InputError("the cluster has no name", hints=[EXAMPLES])
    name = match[3]
    counts = [count for count in match.group(1, 2) if count is not None]
    if any(count.startswith("-") or not count.strip("0") for count in counts):
        raise InputError(f"cluster `{text}` has no devices", hints=[EXAMPLES])
    numbers = [whole_number(count, "nodes or devices", most=MOST_DEVICES) for count in counts]
    system = _system_named(name)
    if system is None:
        nodes, devices = [1, 1, *numbers][-2:]
        accelerator = _accelerator_named(name, text)
        nodes, devices = _by_node(nodes, devices, accelerator, text)
        return NamedNodes(nodes, devices_per_node=devices, accelerator=accelerator)
    if len(numbers) > 1:
        entry = catalogue.systems()[system]
        raise InputError(
            f"cluster `{text}` counts devices, but `{system}` already has {entry.devices}",
            hints=[f"write `{numbers[0]}x{system}` for {numbers[0]} nodes"],
        )
    racks = numbers[0] if numbers else 1
    return NamedNodes(racks * catalogue.systems()[system].nodes_per_domain, system=system)


def _by_node(nodes: int, devices: int, accelerator: str, text: str) -> tuple[int, int]:
    """Nodes, and devices of each: "72" of a kind whose links join nodes of four is 18 of them."""
    usual = catalogue.systems().get(catalogue.accelerators()[accelerator].system or "")
    if usual is None or usual.nodes_per_domain == 1 or devices <= usual.devices:
        return nodes, devices
    if devices % usual.devices:
        raise InputError(
            f"cluster `{text}`: {devices} is not a multiple of {usual.devices} devices per node",
            hints=[f"write `{devices // usual.devices * usual.devices}x{accelerator}`"],
        )
    return nodes * (devices // usual.devices), usual.devices


def _system_named(name: str) -> str | None:
    """Systems are asked for by their whole name, so that "h100" stays an accelerator.

    A cloud's own name is one: "p5.48xlarge" is our "p5-48xlarge".
    """
    for key, entry in catalogue.systems().items():
        if name.lower().replace(".", "-") == key or name.lower() == entry.title.lower():
            return key
    return None


def _accelerator_named(name: str, text: str) -> str:
    try:
        return catalogue.find_name("accelerator", name, catalogue.accelerators())
    except UnknownNameError as error:
        names = [*catalogue.accelerators(), *catalogue.systems()]
        short = {"cpu", *(name.split("-")[0] for name in catalogue.accelerators())}
        if near_misses(name, short):
            # "H1000" is nearer to H100 than to any accelerator's whole name.
            names = sorted({*short, *catalogue.systems()})
        where = f"cluster `{text}`" if text != name else None
        raise UnknownNameError(
            "accelerator", error.name, names, where=where, hints=[EXAMPLES]
        ) from None
