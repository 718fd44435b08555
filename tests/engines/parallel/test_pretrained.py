"""Files of other programs: whatever the plan, what is read and written is what one process has."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from engines.apply import apply_plan
from engines.data.replicas import local_part
from engines.parallel import ParallelModel
from engines.plan import Plan
from engines.state.checkpoint.shard_file import ShardWriter
from engines.state.deferred import deferred
from engines.tensor.proposal import propose_styles
from profiles.capture.batch.call import Batch
from profiles.capture.capture import capture
from profiles.errors import FileError, InputError, ModelError
from tests.engines.cases import cpu_ranks
from tests.engines.parity import relative, sgd
from tests.nightly import nightly
from tests.workers import Pool

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
safe_open = pytest.importorskip("safetensors").safe_open

SHARD = "20KB"
SMALL = {"vocab_size": 61, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2}
BLOCKS = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def config_of(name: str) -> Any:
    if name == "gpt2":
        return transformers.GPT2Config(**SMALL, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    if name == "llama":
        return transformers.LlamaConfig(**SMALL, **BLOCKS)
    return transformers.MixtralConfig(**SMALL, **BLOCKS, num_local_experts=4)


def build(name: str) -> nn.Module:
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config_of(name))
    return model.eval()


@cache
def batch_of(rows: int) -> Batch:
    ids = torch.arange(rows * 12).reshape(rows, 12) % 50 + 3
    return {"input_ids": ids, "labels": ids}


def applied(model: nn.Module, plan: str, **options: Any) -> ParallelModel:
    parsed, sample = Plan.parse(plan), batch_of(2)
    profile = capture(model, sample, name=type(model).__name__)
    if parsed.tp > 1:
        split = propose_styles(model, sample, size=parsed.tp, profile=profile, has_target=False)
        parsed = parsed.model_copy(update={"tensor_styles": split.styles})
    return apply_plan(
        model,
        parsed,
        profile=profile,
        cluster=cpu_ranks(parsed.world_size),
        optimizer=sgd,
        sample=sample,
        **options,
    )


def off(parallel: ParallelModel, wanted: dict[str, Tensor]) -> float:
    """The largest difference of a state dict."""
    state = parallel.state_dict()
    assert state.keys() == wanted.keys()
    return max(float((state[name] - wanted[name]).abs().max()) for name in wanted)


def there_and_back(name: str, plan: str, folder: str) -> tuple[float, float, float]:
    """Differences of what was read: at the start, and into changed weights; and of the loss."""
    torch.manual_seed(1)
    reference = build(name)
    wanted = reference.state_dict()
    with deferred():
        model = build(name)
    parallel = applied(model, plan, weights=f"{folder}/in")
    at_start = off(parallel, wanted)
    with torch.no_grad():
        for parameter in parallel.module.parameters():
            if 0 not in parameter.stride():  # those are of other stages
                local_part(parameter).add_(1)
    parallel.load_pretrained(f"{folder}/in")
    later = off(parallel, wanted)
    parallel.save_pretrained(f"{folder}/out", max_shard_size=SHARD)
    loss = parallel.eval_step(batch_of(2))
    with torch.no_grad():
        error = relative(loss, reference(**batch_of(2)).loss)
    return at_start, later, error


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("gpt2", "tp=2"),
        ("llama", "dp_shard=2"),
        ("gpt2", "pp=2 schedule=gpipe microbatches=2 stages=transformer.h.1"),
        ("mixtral", "dp_replicate=2 ep=2"),
        *nightly(
            ("llama", "dp_replicate=2"),
            ("llama", "dp_replicate=2 zero=1"),
            ("llama", "tp=2"),
            ("gpt2", "dp_shard=2"),
            ("gpt2", "dp_replicate=2"),
            ("llama", "pp=2 schedule=gpipe microbatches=2 stages=model.layers.1"),
            ("mixtral", "dp_shard=2 ep=2"),
            ("llama", "dp_shard=2 tp=2"),
            ("gpt2", "dp_replicate=2 dp_shard=2"),
            ("gpt2", "pp=2 dp_shard=2 schedule=gpipe microbatches=2 stages=transformer.h.1"),
            ("gpt2", "pp=2 tp=2 schedule=gpipe microbatches=2 stages=transformer.h.1"),
            ("mixtral", "dp_shard=4 ep=2"),
        ),
    ],
)
def test_weights_go_from_transformers_through_a_plan_and_back(
    pool: Pool, tmp_path: Path, name: str, plan: str
) -> None:
    torch.manual_seed(1)
    reference = build(name)
    fused = {"save_original_format": False} if name == "mixtral" else {}
    reference.save_pretrained(tmp_path / "in", max_shard_size=SHARD, **fused)  # type: ignore[operator]
    assert (tmp_path / "in" / "model.safetensors.index.json").exists()
    size = Plan.parse(plan).world_size
    for at_start, later, loss in pool.run(
        there_and_back, name, plan, str(tmp_path), world_size=size
    ):
        assert at_start == later == 0
        assert loss < 1e-5
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(again) is type(reference)
    with torch.no_grad():
        outputs = [model(batch_of(2)["input_ids"]).logits for model in (again, reference)]  # type: ignore[index,call-overload]
    assert torch.equal(*outputs)


def alone(model: nn.Module | None = None, **options: Any) -> ParallelModel:
    """A model on one process."""
    torch.manual_seed(2)
    return applied(build("gpt2") if model is None else model, "", **options)


def test_what_does_not_fit_is_named_and_nothing_is_changed(tmp_path: Path) -> None:
    parallel = alone()
    before = {name: value.clone() for name, value in parallel.state_dict().items()}
    good = {n: v + 1 for n, v in before.items() if n != "lm_head.weight"}  # it is tied
    name = "transformer.h.1.ln_1.weight"
    rest = {n: v for n, v in good.items() if n != name}
    cases = {
        f"has no `{name}`": rest,
        "has `transformer.h.2.ln_1.weight`, the model has not": {
            **good,
            "transformer.h.2.ln_1.weight": torch.ones(32),
        },
        r"has the shape \(16,\), in the model \(32,\)": {**good, name: torch.ones(16)},
        "float64, in the model .* float32: it would round": {**good, name: good[name].double()},
    }
    path = tmp_path / "model.safetensors"
    for text, tensors in cases.items():
        safetensors.save_file(tensors, path)
        with pytest.raises(ModelError, match=text):
            parallel.load_pretrained(path)
        assert off(parallel, before) == 0
    safetensors.save_file({**rest, name: good[name].double()}, path)
    parallel.load_pretrained(path, cast=True)
    assert off(parallel, {n: before[n] + 1 for n in before}) == 0
    safetensors.save_file({**{n: before[n] for n in rest}, "more": torch.ones(1)}, path)
    parallel.load_pretrained(path, strict=False)
    assert off(parallel, {n: before[n] + (n == name) for n in before}) == 0


def test_half_precision_and_names_without_the_prefix_are_read(tmp_path: Path) -> None:
    parallel = alone()
    wanted = {n: v.bfloat16() for n, v in parallel.state_dict().items() if "lm_head" not in n}
    bare = {name.removeprefix("transformer."): value for name, value in wanted.items()}
    bare["h.0.attn.bias"] = torch.ones(1)  # a mask that old files of GPT-2 have
    safetensors.save_file(bare, tmp_path / "model.safetensors")
    parallel.load_pretrained(tmp_path)
    state = parallel.state_dict()
    assert all(torch.equal(state[name], value.float()) for name, value in wanted.items())


def test_pickles_are_refused(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(FileError, match=r"pytorch_model.bin` .* a pickle may run code"):
        alone().load_pretrained(tmp_path)


def test_a_checkpoint_of_ours_is_read_without_its_optimizer(tmp_path: Path) -> None:
    saved = alone()
    saved.train_step(batch_of(2))
    saved.save(tmp_path)
    wanted = {name: value.clone() for name, value in saved.state_dict().items()}
    with deferred():
        model = build("gpt2")
    parallel = alone(model, weights=tmp_path)
    assert (off(parallel, wanted), parallel.step) == (0, 0)
    saved.train_step(batch_of(2))
    saved.load_pretrained(tmp_path)
    assert (off(saved, wanted), saved.step) == (0, 2)


def test_files_have_their_size_ties_are_written_once_and_nothing_is_overwritten(
    tmp_path: Path,
) -> None:
    parallel = alone()
    folder = parallel.save_pretrained(tmp_path / "whole")
    assert {path.name for path in folder.iterdir()} == {
        "model.safetensors", "config.json", "generation_config.json",
    }  # fmt: skip
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        names = set(file.keys())
    assert names == parallel.state_dict().keys() - {"lm_head.weight"}
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"]
    parallel.save_pretrained(tmp_path / "parts", max_shard_size="10KB")
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == names
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in parallel.module.parameters())
    for file_name in set(index["weight_map"].values()):
        inside = [name for name, file in index["weight_map"].items() if file == file_name]
        size = (tmp_path / "parts" / file_name).stat().st_size
        assert size < 10_000 + 1000 or len(inside) == 1
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(FileError, match="exists already: nothing is overwritten"):
        parallel.save_pretrained(tmp_path / "parts")
    for size in ("5 parsecs", 0, "0GB"):
        with pytest.raises(InputError, match="is no size of a file"):
            parallel.save_pretrained(tmp_path / "other", max_shard_size=size)  # type: ignore[arg-type]
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    parallel = alone()
    with (
        patch.object(ShardWriter, "write", side_effect=OSError(28, "No space left on device")),
        pytest.raises(FileError, match=r"cannot write .* No space left on device"),
    ):
        parallel.save_pretrained(tmp_path / "out")
    assert not list(tmp_path.iterdir())
