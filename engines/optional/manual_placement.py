"""Modules that their authors placed on several devices: they stay there."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from engines.runtime.world import World
from profiles.capture.batch.call import Batch, LossFn
from profiles.capture.batch.tree import map_batch
from profiles.capture.module.manual_placement import devices_of, is_manually_placed
from profiles.model.profile import ModelProfile


def with_devices_of(profile: ModelProfile, model: nn.Module) -> ModelProfile:
    """`profile` with the devices of `model`, which may be others than those it was taken on."""
    if not is_manually_placed(model):
        return profile
    return profile.model_copy(update={"devices": tuple(map(str, devices_of(model)))})


def world_of_parts(model: nn.Module, world: World) -> World:
    """`world` with the device where the batch goes: that of the module's first parameters."""
    return replace(world, device=devices_of(model)[0])


def target_to_output(loss_fn: LossFn | None) -> LossFn | None:
    """`loss_fn` with its target on the device where the module's last part left the output."""
    if loss_fn is None:
        return None

    def with_target(output: object, target: Batch) -> Tensor:
        if isinstance(output, Tensor):
            device = output.device
            target = map_batch(lambda tensor: tensor.to(device), target)
        return loss_fn(output, target)

    return with_target
