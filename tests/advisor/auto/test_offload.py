"""Offload to a named folder where nothing else fits: decided, applied, trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from advisor import auto_parallelize, memory_report
from advisor.cost.ledger import DISK_WRITE_BYTES_PER_S
from advisor.decide.decision import Decision
from engines.plan import Offload, OffloadTo
from profiles.errors import InputError, NoPlanError
from profiles.machine.cluster import ClusterProfile
from profiles.provenance import Quantity, Source
from profiles.torch_compat import storage_of
from profiles.units import MIB
from tests.contract.watch import local
from tests.engines.cases import CASES, cpu_ranks, token_loss


def _small(memory_bytes: float) -> ClusterProfile:
    """Return a CPU with that much memory in addition to its process."""
    cluster = cpu_ranks(1)
    nothing = Quantity(value=0.0, source=Source.ASSUMED)
    memory = Quantity(value=memory_bytes, source=Source.MEASURED)
    update = {"memory_bytes": memory, "context_bytes": nothing}
    return cluster.model_copy(update={"device": cluster.device.model_copy(update=update)})


def test_a_given_folder_is_used_where_nothing_else_fits(tmp_path: Path) -> None:
    case = CASES["gpt"]
    # Parameters, gradients and Adam's states are 16 bytes a parameter.
    states = 16 * sum(parameter.numel() for parameter in case.build().parameters())
    options = {"sample": case.batch(1), "loss_fn": token_loss, "learns": False}
    cluster = _small(0.9 * states)
    with pytest.raises(NoPlanError) as nothing:
        auto_parallelize(case.build(), cluster=cluster, **options)
    assert any("keep states in files" in hint for hint in nothing.value.hints)
    torch.manual_seed(0)
    parallel = auto_parallelize(case.build(), cluster=cluster, offload_folder=tmp_path, **options)
    decision = parallel.decision
    assert isinstance(decision, Decision)
    assert parallel.plan.offload is not Offload.NONE
    assert parallel.plan.offload_to is OffloadTo.DISK
    assert decision.facts.cluster.disk_write_bytes_per_s == Quantity(
        value=DISK_WRITE_BYTES_PER_S, source=Source.ASSUMED
    )
    losses = [parallel.train_step(case.batch(1)).item() for _ in range(6)]
    assert losses[-1] < losses[0]
    moments = [s["exp_avg"] for s in parallel.optimizer.state.values()]
    assert all(storage_of(local(moment)).filename is not None for moment in moments)  # type: ignore[union-attr]
    assert parallel.memory().ranks[0].offloaded_bytes == pytest.approx(
        decision.estimate.disk_bytes, rel=0.1
    )
    assert "predicted: " in memory_report(parallel)


def test_where_the_model_fits_the_folder_changes_nothing(tmp_path: Path) -> None:
    case = CASES["gpt"]
    options = {"sample": case.batch(1), "loss_fn": token_loss, "learns": False}
    cluster = _small(512 * MIB)
    plain = auto_parallelize(case.build(), cluster=cluster, **options)
    named = auto_parallelize(case.build(), cluster=cluster, offload_folder=tmp_path, **options)
    assert named.plan == plain.plan
    assert named.offload_pool is None


def test_a_plan_that_offloads_to_disk_needs_a_folder() -> None:
    case = CASES["gpt"]
    options = {"sample": case.batch(1), "loss_fn": token_loss, "learns": False}
    with pytest.raises(InputError, match="offload_to=disk: no folder is named") as error:
        auto_parallelize(
            case.build(), plan="offload=optimizer offload_to=disk", cluster=cpu_ranks(1), **options
        )
    assert "offload_folder" in error.value.hints[0]
