"""torch.compile, block by block: equal blocks are compiled once."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Container, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn

from engines.blocks.forward_state import ForwardState
from engines.blocks.recompute import holds_state
from engines.plan import Plan, Recompute
from profiles.capture.batch.call import Batch, call_model
from profiles.capture.batch.tree import map_batch
from profiles.capture.fakes.known_values import known_values
from profiles.capture.fakes.mode import FakeRunMode
from profiles.capture.fakes.tensors import stand_ins
from profiles.capture.frames import summary
from profiles.errors import PlanError
from profiles.model.profile import ModelProfile

log = logging.getLogger(__name__)


def require_compilable(
    model: nn.Module, plan: Plan, *, profile: ModelProfile, device: torch.device
) -> None:
    """Refuse what legality cannot see: missing compilers, and buffers that recompute would change.

    Raises:
        PlanError: on a CPU torch writes C++ and there is no compiler for it, or a block that is to
            run twice has statistics that must be counted once.
    """
    if not plan.compile:
        return
    compilers = (os.environ.get("CXX", ""), "g++", "clang++")  # those that torch's inductor tries
    if device.type == "cpu" and not any(map(shutil.which, compilers)):
        raise PlanError(
            "compile=true needs a C++ compiler on a CPU, none is on the PATH",
            where=f"looked for {', '.join(filter(None, compilers))}",
            hints=["install g++, name one in CXX, or set compile=false"],
        )
    if plan.recompute is Recompute.NONE:
        return
    for unit in profile.blocks():
        if holds_state(model.get_submodule(unit.name)):
            raise _changes_twice(f"`{unit.name}` has buffers that its forward might change", plan)


def require_unchanged(
    model: nn.Module, sample: Batch | None, plan: Plan, *, profile: ModelProfile, has_target: bool
) -> None:
    """Refuse blocks that are to run twice, compiled, and that change numbers, tensors or items of
    their own, as a forward on stand-ins shows.

    Raises:
        PlanError: a block does.
    """
    if sample is None or not plan.compile or plan.recompute is Recompute.NONE:
        return
    blocks = [unit.name for unit in profile.blocks()]
    for copies in (False, True):  # fakes do not do where code needs values that nobody knows
        try:
            changes = _changes(model, blocks, sample, has_target=has_target, copies=copies)
        except Exception as error:  # of the user's code
            log.info("what compiled blocks change is not seen: %s", summary(error))
            continue
        for block, names in changes.items():
            raise _changes_twice(f"the forward of `{block}` changes {', '.join(names[:3])}", plan)
        return


def _changes(
    model: nn.Module, blocks: Iterable[str], sample: Batch, *, has_target: bool, copies: bool
) -> dict[str, list[str]]:
    changes: dict[str, list[str]] = {}
    running: list[tuple[ForwardState, AbstractContextManager[None]]] = []

    def before(block: nn.Module, *_: object) -> None:
        state = ForwardState(list(block.modules()))
        running.append((state, state.first()))
        running[-1][1].__enter__()

    def after(name: str, *_: object) -> None:
        state, run = running.pop()
        run.__exit__(None, None, None)
        if state.changed:
            changes.setdefault(name, [f"`{changed}`" for changed in state.changed])

    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        stand_ins([model], copies=copies) as fakes,
    ):
        batch = map_batch(lambda tensor: fakes.of(tensor.detach()), sample)
        for name in blocks:
            block = model.get_submodule(name)
            block.register_forward_pre_hook(before)
            block.register_forward_hook(partial(after, name))
        known = (
            nullcontext() if copies else FakeRunMode(known_values(fakes, sample, batch)).on(batch)
        )
        with known:
            call_model(model, batch, has_target=has_target)
    return changes


def _changes_twice(what: str, plan: Plan) -> PlanError:
    return PlanError(
        f"{what}: torch.compile cannot follow how recompute keeps that from changing twice",
        where=f"plan: {plan}",
        hints=["set recompute=none, or compile=false"],
    )


def compile_blocks(
    model: nn.Module, *, profile: ModelProfile, local: Container[str] | None = None
) -> None:
    """Let every block be compiled at its first call, in place; names and classes stay.

    `local`: first names of the parameters of this rank's stages, in a pipeline; blocks of other
    ranks are left alone.
    """
    from profiles.torch_compat.compiled_state import KEEPS_STATE  # inductor takes long to import

    names = {parameter: name for name, parameter in model.named_parameters()}
    for unit in profile.blocks():
        block = model.get_submodule(unit.name)
        if local is None or all(names[parameter] in local for parameter in block.parameters()):
            block.compile(options=KEEPS_STATE)
