"""Units of a model: its repeated blocks, and the modules around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from profiles.model.profile import GLUE

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True, slots=True)
class Unit:
    """A module treated as one piece. `is_block`: an element of a list that repeats its class."""

    name: str
    module: nn.Module
    is_block: bool = False


def find_units(model: nn.Module) -> tuple[Unit, ...]:
    """Units in the order of the modules; every module is in one of them or only holds some.

    Lists give their elements, and elements that repeat a class and have children are blocks.
    Modules that hold such lists further down are opened. A block is not, so experts inside it stay
    together; but stages (Swin, ResNet), which hold a list themselves and grow from one to the next,
    are opened too, and so are elements without a forward of their own (lists of attention and MLP):
    nobody calls them. A model without children is one unit with the name "".
    """
    if not any(model.children()):
        return (Unit("", model),)
    return tuple(_units_in(model, "", {id(model)}))


def owners(model: nn.Module, units: tuple[Unit, ...]) -> dict[int, str]:
    """The unit of every module by id; `GLUE` where a module only holds units."""
    by_id: dict[int, str] = {}
    for unit in units:
        for module in unit.module.modules():
            by_id.setdefault(id(module), unit.name)
    for module in model.modules():
        by_id.setdefault(id(module), GLUE)
    return by_id


def _units_in(
    parent: nn.Module,
    prefix: str,
    seen: set[int],
    *,
    in_stage: bool = False,
    also_repeated: frozenset[type[nn.Module]] = frozenset(),
) -> Iterator[Unit]:
    """Units below `parent`; `also_repeated`: classes that lists around it repeat."""
    repeated = _repeated_classes([parent]) if isinstance(parent, _LISTS) else frozenset()
    holds_stages = bool(repeated) and not in_stage and _are_stages(parent)  # stages hold blocks
    opened = filter(_is_uncalled, parent.children())
    within = _repeated_classes(opened) if isinstance(parent, _LISTS) else frozenset()
    repeated |= also_repeated
    for name, child in parent.named_children():
        if id(child) in seen:  # registered in two places: one unit, called from both
            continue
        seen.add(id(child))
        path = f"{prefix}{name}"
        if _is_uncalled(child):
            yield from _units_in(child, f"{path}.", seen, in_stage=in_stage, also_repeated=within)
        elif type(child) in repeated:
            if _is_plain_list(child) and any(map(_is_composite, child.children())):
                yield from _units_in(child, f"{path}.", seen, in_stage=in_stage)
            elif holds_stages and any(map(_repeats_blocks, _own_lists(child))):
                yield from _units_in(child, f"{path}.", seen, in_stage=True)
            else:
                yield Unit(path, child, is_block=True)
        elif _is_plain_list(child) or _holds_blocks(child):
            yield from _units_in(child, f"{path}.", seen, in_stage=in_stage)
        else:
            yield Unit(path, child)


def _is_composite(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _is_uncalled(module: nn.Module) -> bool:
    """True if it holds modules and has no forward of its own: code calls what it holds."""
    has_own = getattr(module.forward, "__func__", None) is not nn.Module.forward
    return _is_composite(module) and not has_own


def _is_plain_list(module: nn.Module) -> bool:
    """A list and nothing more; a subclass may have a forward of its own."""
    return type(module) in _LISTS


def _own_lists(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.children() if isinstance(child, _LISTS)]


def _repeated_classes(modules: Iterable[nn.Module]) -> frozenset[type[nn.Module]]:
    """Classes with two or more elements in all of `modules` that have children."""
    children = (child for module in modules for child in module.children())
    count = Counter(type(child) for child in children if _is_composite(child))
    return frozenset(kind for kind, number in count.items() if number >= 2)


def _repeats_blocks(own: nn.Module) -> bool:
    """True of the list of a stage. A block's list of plain layers, or of short lists of them
    (convolution and norm), is not one."""
    parts = [part for part in own.children() if not _is_layers(part)]
    count = Counter(type(part) for part in parts if _is_composite(part))
    return any(number >= 2 for number in count.values())


def _is_layers(module: nn.Module) -> bool:
    return _is_plain_list(module) and not any(map(_is_composite, module.children()))


def _holds_blocks(module: nn.Module) -> bool:
    return any(isinstance(part, _LISTS) and _repeated_classes([part]) for part in module.modules())


def _are_stages(parent: nn.Module) -> bool:
    """True if the elements of a list differ in width or depth, as stages do and blocks do not.

    A mixture-of-experts block also holds a list of equal modules; its neighbours are like it. Most
    shapes being different tells them apart.
    """
    elements = list(parent.children())
    shapes = {tuple(tuple(p.shape) for p in element.parameters()) for element in elements}
    return 2 * len(shapes) > len(elements)
