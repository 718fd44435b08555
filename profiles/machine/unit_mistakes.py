"""Numbers in a cluster file that are likely to mix up bits and bytes, or one way and both.

Only bare numbers are questioned. One that is written as a table with its source is taken as it is:

    bandwidth = { value = "400 GB/s", source = "you" }
"""

from __future__ import annotations

from collections.abc import Mapping

from profiles.errors import UnitError
from profiles.machine import catalogue
from profiles.units import format_bandwidth, format_gib, parse_bandwidth, parse_bytes

# No link gives more than it is rated for. Published bus bandwidths exceed the cards' rate by up to
# 1.22 (487 of 400 GB/s, a tree of two P5 nodes); both directions added up are 2.
BEYOND = 1.5
# Bits for bytes is a factor of 8; what large collectives reach is 0.6 to 1.2 of the printed rate.
BITS_PER_BYTE, NEAR = 8, (0.6, 1.3)
# gloo is software: as fast as the processor, and rated by nobody. Less than bits for bytes.
BEYOND_GLOO = BITS_PER_BYTE / 2

_Table = Mapping[str, object]


def require_likely(data: _Table, *, where: str | None = None) -> None:
    """Refuse numbers that are far beyond what such a link or device has.

    Args:
        data: a cluster file as TOML gives it, its keys and kinds already checked.

    Raises:
        UnitError: with the number that was probably meant.
    """
    whole = {key: value for key, value in data.items() if key != "node"}
    _require(whole, written=whole, path=_at(where, ""))
    nodes = data.get("node")
    for index, node in enumerate(nodes if isinstance(nodes, list) else ()):
        _require(whole | node, written=node, path=_at(where, f"node.{index}."))


def _require(table: _Table, *, written: _Table, path: str) -> None:
    """Question what is `written` here; `table` adds what the file says for all nodes."""
    for tier in ("intra", "inter"):
        if tier in written:
            _require_link(table, tier, f"{path}{tier}.bandwidth")
    if "device" in written:
        _require_device(table, f"{path}device.")


def _require_link(table: _Table, tier: str, where: str) -> None:
    link = table[tier]
    text = link.get("bandwidth") if isinstance(link, dict) else None
    if not isinstance(text, str):
        return
    given = parse_bandwidth(text)
    known = _own_link(table, tier)
    if known is not None:
        whose, rated = known.title, parse_bandwidth(known.nominal)
        if _in_bits(text) and NEAR[0] <= given * BITS_PER_BYTE / rated <= NEAR[1]:
            raise _doubt(text, f"an eighth of what {whose} is rated for", rated, where)
        beyond = BEYOND_GLOO if whose.startswith("gloo") else BEYOND
        whose += " is"
    else:
        beyond = BEYOND
        whose, rated = _fastest(table, tier)
    if given <= beyond * rated:
        return
    times = f"{given / rated:.3g} times what {whose} rated for"
    # A link that is named is used nearly to its rate; what is only possible may be far below it.
    least = NEAR[0] if known is not None else 0.0
    one_way = known is not None and tier == "intra"
    raise _doubt(text, times, rated, where, least=least, both_ways=one_way)


def _own_link(table: _Table, tier: str) -> catalogue.LinkEntry | None:
    """The link that the table names, or that its system or accelerator comes with."""
    link = table[tier]
    given = link if isinstance(link, dict) else {}
    named = given.get("link")
    if named is None and given.get("name") in {e.title for e in catalogue.links().values()}:
        named = given["name"]
    system, accelerator = _system(table), _accelerator(table)
    if named is None and system is not None:
        named = system.intra if tier == "intra" else system.inter
    if named is None and tier == "intra" and accelerator is not None:
        # On PCIe cards there may be bridges; what is soldered to the device is known.
        own = accelerator[1].intra
        named = None if own.startswith("pcie") else own
    return catalogue.link_entry(named) if isinstance(named, str) else None


def _fastest(table: _Table, tier: str) -> tuple[str, float]:
    """The fastest link of the catalogue; between nodes as many of its cards as the node has."""
    known = [entry for entry in catalogue.links().values() if entry.scope == tier]
    if tier == "intra":
        entry = max(known, key=lambda entry: parse_bandwidth(entry.nominal))
        return f"the fastest link known, {entry.title}, is", parse_bandwidth(entry.nominal)

    def of_card(entry: catalogue.LinkEntry) -> float:
        return parse_bandwidth(entry.nominal) / (entry.cards or 1)

    entry = max(known, key=of_card)
    cards = table.get("network_cards") or table.get("devices_per_node") or 1
    count = cards if isinstance(cards, int) else 1
    rate = f"{of_card(entry) * BITS_PER_BYTE / 1e9:.0f} Gbit/s"
    if count == 1:
        return f"the fastest network card known, {rate}, is", of_card(entry)
    return f"{count} of the fastest network cards known, {rate} each, are", of_card(entry) * count


def _require_device(table: _Table, path: str) -> None:
    device, entry = table["device"], _accelerator(table)
    if not isinstance(device, dict) or entry is None:
        return
    name, known = entry
    memory, rate = device.get("memory"), device.get("memory_bandwidth")
    if isinstance(memory, str):
        printed = parse_bytes(known.printed_memory)
        times = parse_bytes(memory) / printed
        if times > BEYOND:
            raise UnitError(
                f"`{memory}` is {times:.3g} times what {name} has, {format_gib(printed)}:"
                " device memory is of one device, in bytes",
                where=f"{path}memory",
                hints=[_insist("memory", memory)],
            )
    if isinstance(rate, str):
        given, rated = parse_bandwidth(rate), parse_bandwidth(known.memory_bandwidth)
        whose, where = f"what the memory of {name} is rated for", f"{path}memory_bandwidth"
        if _in_bits(rate) and NEAR[0] <= given * BITS_PER_BYTE / rated <= NEAR[1]:
            raise _doubt(rate, f"an eighth of {whose}", rated, where)
        if given > BEYOND * rated:
            raise _doubt(rate, f"{given / rated:.3g} times {whose}", rated, where)


def _doubt(
    text: str,
    compared: str,
    rated: float,
    where: str,
    *,
    least: float = NEAR[0],
    both_ways: bool = False,
) -> UnitError:
    """The error, with what was probably meant: the same number in the other unit, or half of it."""
    given = parse_bandwidth(text)
    key = where.rsplit(".", 1)[-1]
    hints = []
    if _in_bits(text):
        meant = _spelled(text, "B/s")
        if parse_bandwidth(meant) <= BEYOND * rated:
            hints.append(f"did you mean `{meant}`, in bytes?")
    elif least <= given / BITS_PER_BYTE / rated <= NEAR[1]:
        hints.append(f"did you mean `{_spelled(text, 'bit/s')}`, in bits?")
    if both_ways and NEAR[0] <= given / 2 / rated <= NEAR[1]:
        hints.append(f"rates are of one direction: did you mean `{format_bandwidth(given / 2)}`?")
    return UnitError(
        f"`{text}` is {compared} ({format_bandwidth(rated)})",
        where=where,
        hints=[*hints, _insist(key, text)],
    )


def _insist(key: str, text: str) -> str:
    return f'if it is right, say where it is from: `{key} = {{ value = "{text}", source = "you" }}`'


def _in_bits(text: str) -> bool:
    return text.rstrip().endswith(("bit/s", "bps", "b/s"))


def _spelled(text: str, unit: str) -> str:
    """ "400 GB/s" with another unit after the same number and prefix: "400 Gbit/s"."""
    stripped = text.strip()
    for ending in ("bit/s", "bps", "b/s", "B/s", "Bps"):
        if stripped.endswith(ending):
            return stripped.removesuffix(ending) + unit
    return stripped


def _system(table: _Table) -> catalogue.SystemEntry | None:
    name, titles = table.get("system"), {k: e.title for k, e in catalogue.systems().items()}
    if not isinstance(name, str):
        return None
    return catalogue.systems()[catalogue.find_name("system", name, titles)]


def _accelerator(table: _Table) -> tuple[str, catalogue.AcceleratorEntry] | None:
    name, system = table.get("accelerator"), _system(table)
    if name is None and system is not None:
        name = system.accelerator
    if not isinstance(name, str):
        return None
    full = catalogue.find_name("accelerator", name, catalogue.accelerators())
    return full, catalogue.accelerators()[full]


def _at(where: str | None, path: str) -> str:
    return f"{where}: {path}" if where else path
