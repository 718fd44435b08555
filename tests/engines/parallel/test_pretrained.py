"""Files of other programs: whatever the plan, what is read and written is what one process has."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engines.apply import apply_plan
from engines.data.replicas import local_part
from engines.parallel import ParallelModel
from engines.plan import Plan
from engines.state.deferred import deferred
from engines.tensor.proposal import propose_styles
from profiles.capture.batch import Batch
from profiles.capture.capture import capture
from tests.engines.cases import cpu_ranks
from tests.engines.parity import relative, sgd
from tests.nightly import nightly
from tests.workers import Pool

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

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
