"""Checkpoints of release 0.1, as torch.distributed.checkpoint writes them."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from profiles.errors import FileError
from tests.engines.cases import CASES
from tests.engines.parity import alone
from tests.engines.state.checkpoint.test_save_and_load import adamw


def old_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """Save after a step, as release 0.1 did; returns the weights."""
    model, parallel = alone("gpt", optimizer=adamw)
    parallel.train_step(CASES["gpt"].batch(4))
    model_state, optimizer_state = get_state_dict(model, parallel.optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    return {name: value.clone() for name, value in parallel.state_dict().items()}


def test_weights_states_and_settings_load(tmp_path: Path) -> None:
    weights = old_checkpoint(tmp_path)
    model, parallel = alone("gpt", optimizer=lambda p: torch.optim.AdamW(p, lr=0.5))
    parallel.load(tmp_path)
    assert all(torch.equal(value, weights[n]) for n, value in parallel.state_dict().items())
    assert parallel.optimizer.param_groups[0]["lr"] == 0.01
    states = parallel.optimizer.state[model.get_parameter("head.weight")]
    assert states["step"] == 1
    assert states["exp_avg"].abs().max() > 0


class RunsCode:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)

    path = ""


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_no_code_in_them_is_run(tmp_path: Path, file: str) -> None:
    old_checkpoint(tmp_path / "checkpoint")
    RunsCode.path = str(tmp_path / "was run")
    content = pickle.dumps(RunsCode())
    path = tmp_path / "checkpoint" / file
    path.write_bytes(content + path.read_bytes()[len(content) :] * (file != ".metadata"))
    _, parallel = alone("gpt", optimizer=adamw)
    with pytest.raises(FileError, match="cannot"):
        parallel.load(tmp_path / "checkpoint")
    assert not (tmp_path / "was run").exists()
