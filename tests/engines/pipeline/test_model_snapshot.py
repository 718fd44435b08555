"""Recordings are made of the model as it was given, whatever was made of it since."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from engines.blocks.recompute import recompute_blocks, recomputed
from engines.pipeline.model_snapshot import ModelSnapshot
from engines.pipeline.recording import Recording, record
from engines.plan import Plan, Recompute
from profiles.model.profile import Numerics
from tests.engines.cases import CASES, profile_of
from tests.engines.parity import parallelize
from tests.workers import Pool


def shapes(recording: Recording) -> list[object]:
    return [leaf for call in recording.calls for leaf in call.leaves]


@pytest.mark.parametrize("name", ["gpt", "lstm", "tied-frozen-unused"])
def test_a_changed_model_is_recorded_as_it_was(name: str) -> None:
    case = CASES[name]
    model = case.build()
    profile, batch = profile_of(case, model), case.batch(6)
    wanted = record(model, profile.flow, batch, has_target=True)
    skeleton = ModelSnapshot(model)
    plan = Plan(recompute=Recompute.FULL)
    recompute_blocks(model, recomputed(plan, profile), plan)
    for parameter in model.parameters():
        parameter.data = parameter.data.flatten()[:1]  # as little of it as a rank may keep
    model.register_forward_pre_hook(lambda module, args: pytest.fail("a hook of today ran"))
    changed = dict(vars(model))
    with skeleton.in_place():
        assert all(parameter.is_meta for parameter in model.parameters())
        actual = record(model, profile.flow, batch, has_target=True)
    assert shapes(actual) == shapes(wanted)
    assert vars(model) == changed
    assert all(parameter.numel() == 1 for parameter in model.parameters())


def test_a_snapshot_keeps_ties_and_takes_the_current_mode() -> None:
    model = CASES["tied-frozen-unused"].build()
    skeleton = ModelSnapshot(model)
    model.eval()
    names = list(dict(model.named_parameters()))
    with skeleton.in_place():
        assert model.head.weight is model.embed.weight  # type: ignore[union-attr]
        assert list(dict(model.named_parameters())) == names
        assert not any(module.training for module in model.modules())


def test_values_across_a_cut_are_recorded_in_their_compute_dtype() -> None:
    case = CASES["gpt"]
    model = case.build()
    profile = profile_of(case, model)
    block = profile.flow.first_call("blocks.0")
    assert block is not None
    results = {
        numerics: record(
            model, profile.flow, case.batch(2), has_target=True, numerics=numerics, cast=cast
        )
        .made((block, 0))
        .dtype
        for numerics, cast in (
            (Numerics.AS_BUILT, ()),
            (Numerics.BF16_AUTOCAST, ()),
            (Numerics.BF16, ("blocks.0",)),
        )
    }
    assert results == {
        Numerics.AS_BUILT: torch.float32,
        Numerics.BF16_AUTOCAST: torch.float32,  # the residual sum of fp32 and bf16
        Numerics.BF16: torch.bfloat16,
    }


def new_shapes() -> tuple[bool, list[float]]:
    """Losses of batches of a new length each, and evaluation between, on shards."""
    plan = "pp=2 dp_shard=2 schedule=1f1b microbatches=2 stages=blocks.1"
    case, reference, parallel = parallelize("gpt", plan)
    ids = case.batch(4)[0]  # type: ignore[index]
    errors = []
    for length in (12, 7):
        batch = ids[:, : length - 1], ids[:, 1:length]
        wanted = nn.functional.cross_entropy(reference(batch[0]).flatten(0, 1), batch[1].flatten())
        mine = tuple(tensor[2 * parallel.data_rank :][:2] for tensor in batch)
        for step in (parallel.eval_step, parallel.forward_backward):
            errors.append((step(mine) - wanted).abs().item())
    return isinstance(parallel.module, FSDPModule), errors


@pytest.mark.dist
def test_new_shapes_are_recorded_after_the_model_was_sharded(pool: Pool) -> None:
    for is_sharded, errors in pool.run(new_shapes, world_size=4):
        assert is_sharded
        assert max(errors) < 1e-5
