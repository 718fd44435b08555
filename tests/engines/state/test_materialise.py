"""Models on the meta device: each rank gets values for what it holds, and nothing else is read."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.apply import apply_plan
from engines.parallel import ParallelModel
from engines.plan import Plan
from engines.state.materialise import DeferredWeights
from engines.state.weights import open_weights
from engines.tensor.proposal import propose_styles
from profiles.errors import FileError, InputError, ModelError, RankError
from tests.engines.cases import CASES, Case, TinyGPT, cpu_ranks, profile_of
from tests.engines.parity import relative, sgd
from tests.workers import Pool

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

PIPELINE = "pp=2 schedule=1f1b microbatches=2 stages=blocks.1"
PLANS = (
    PIPELINE,
    "dp_replicate=2",
    "dp_shard=2",
    "tp=2",
    "pp=2 dp_replicate=2 schedule=gpipe stages=blocks.1",
)


def on_meta(
    name: str, plan: str, weights: Any, *, model: nn.Module | None = None, **options: Any
) -> ParallelModel:
    """A case's model, built without values, under `plan`."""
    case = CASES[name]
    if model is None:
        with torch.device("meta"):
            model = case.build()
    parsed, profile, sample = Plan.parse(plan), profile_of(case, model), case.batch(2)
    if parsed.tp > 1:
        proposal = propose_styles(model, sample, size=parsed.tp, profile=profile, has_target=True)
        parsed = parsed.model_copy(update={"tensor_styles": proposal.styles})
    return apply_plan(
        model,
        parsed,
        profile=profile,
        cluster=cpu_ranks(parsed.world_size),
        loss_fn=case.loss_fn,
        sample=sample,
        weights=weights,
        **{"optimizer": sgd, **options},
    )


def init(module: nn.Module) -> None:
    """Random values for every kind of module of the cases."""
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter, std=0.1)
    for buffer in module.buffers(recurse=False):
        buffer.fill_(0.5)


def state_after(name: str, plan: str) -> dict[str, Tensor]:
    return on_meta(name, plan, init, seed=3).state_dict()


@pytest.mark.dist
@pytest.mark.parametrize("name", ["gpt", "tied-frozen-unused"])
def test_an_init_function_gives_the_same_values_under_every_plan(pool: Pool, name: str) -> None:
    with torch.device("meta"):
        model = CASES[name].build()
    _fill(model, init, seed=3)
    wanted = model.state_dict()
    assert wanted["blocks.0.qkv.weight"].std().item() == pytest.approx(0.1, rel=0.1)
    assert not torch.equal(wanted["blocks.0.qkv.weight"], wanted["blocks.1.qkv.weight"])
    for plan in PLANS:
        for state in pool.run(state_after, name, plan, world_size=Plan.parse(plan).world_size):
            assert list(state) == list(wanted)
            assert all(torch.equal(state[key], wanted[key]) for key in wanted), plan


def test_the_seed_changes_the_values() -> None:
    one, other = (_filled(TinyGPT(), init, seed=seed) for seed in (1, 2))
    assert not torch.equal(one["embed.weight"], other["embed.weight"])


def _filled(model: nn.Module, weights: Any, **options: Any) -> dict[str, Tensor]:
    model.to("meta")
    _fill(model, weights, **options)
    return model.state_dict()


def _fill(model: nn.Module, weights: Any, **options: Any) -> None:
    deferred = DeferredWeights(model, weights, **options)
    deferred.allocate(model, [*model.parameters(), *model.buffers()], device=torch.device("cpu"))
    deferred.fill(model)


def test_an_init_function_leaves_torchs_generator_as_it_was() -> None:
    model = TinyGPT()
    before = torch.get_rng_state()
    _filled(model, init)
    assert torch.equal(torch.get_rng_state(), before)


class Reading(Mapping[str, Tensor]):
    """A state dict that remembers what was taken from it."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.state = state
        self.read: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.read.append(name)
        return self.state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)

    def __contains__(self, name: object) -> bool:
        return name in self.state


def taken(name: str, plan: str) -> tuple[list[str], list[str], int, int, float]:
    """Names read, names on this rank, its bytes and its share, error after a step."""
    case = CASES[name]
    torch.manual_seed(5)
    reference = case.build()
    weights = Reading(reference.state_dict())
    parallel = on_meta(name, plan, weights)
    storages = {t.untyped_storage() for t in parallel.module.parameters()}
    allocated = sum(storage.nbytes() for storage in storages)
    own = [name for name, _ in parallel.named_parameters()]
    share = sum(p.nbytes for p in parallel.parameters())
    batch = case.batch(4)
    parallel.train_step(batch)
    assert case.loss_fn is not None
    optimizer = sgd([p for p in reference.parameters() if p.requires_grad])
    case.loss_fn(reference(batch[0]), batch[1]).backward()  # type: ignore[index]
    optimizer.step()
    after, wanted = parallel.state_dict(), reference.state_dict()
    error = max(relative(after[n].float(), wanted[n].float()) for n in wanted)
    return weights.read, own, allocated, share, error


@pytest.mark.dist
@pytest.mark.parametrize("name", ["gpt", "tied-frozen-unused"])
def test_a_stage_reads_and_allocates_its_own_part_of_a_state_dict(pool: Pool, name: str) -> None:
    count = len(list(CASES[name].build().parameters()))
    for read, own, allocated, share, error in pool.run(taken, name, PIPELINE, world_size=2):
        assert sorted(set(read) - {"scale"}) == sorted(own)
        assert len(read) <= 2 * len(set(read))  # looked at, then copied
        assert share <= allocated <= share + 4 * (count - len(own))  # others keep one element each
        assert error < 1e-5


def from_own_shard(folder: str) -> tuple[int, bool]:
    """A folder in which this rank finds its stage's shard and the index, as on a local disk."""
    rank = dist.get_rank()
    parallel = on_meta("gpt", PIPELINE, f"{folder}/{rank}")
    loss = parallel.train_step(CASES["gpt"].batch(4))
    return len(list(parallel.parameters())), bool(loss.isfinite())


@pytest.mark.dist
def test_a_stage_reads_only_its_own_safetensors_shard(pool: Pool, tmp_path: Path) -> None:
    state = CASES["gpt"].build().state_dict()
    first = {n for n in state if n.startswith(("embed", "position", "blocks.0"))}
    shard_of = {name: f"model-{1 if name in first else 2}.safetensors" for name in state}
    for rank in (0, 1):
        folder = tmp_path / str(rank)
        folder.mkdir()
        index = {"metadata": {}, "weight_map": shard_of}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        own = {n: t for n, t in state.items() if (n in first) == (rank == 0)}
        safetensors.save_file(own, folder / f"model-{rank + 1}.safetensors")
    results = pool.run(from_own_shard, str(tmp_path), world_size=2)
    assert results == [(len(first), True), (len(state) - len(first), True)]


def missing_on_one(folder: str) -> tuple[str, float]:
    path = f"{folder}/{dist.get_rank()}.safetensors"
    try:
        on_meta("gpt", PIPELINE, path)
    except (ModelError, RankError) as error:
        text = f"{type(error).__name__}: {error}"
    dist.all_reduce(done := torch.ones(()))  # the groups are whole
    return text, done.item()


@pytest.mark.dist
def test_tensors_missing_on_one_rank_are_named_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    state = CASES["gpt"].build().state_dict()
    safetensors.save_file(state, tmp_path / "0.safetensors")
    del state["blocks.2.out.bias"]
    safetensors.save_file(state, tmp_path / "1.safetensors")
    (other, _), (own, done) = pool.run(missing_on_one, str(tmp_path), world_size=2)
    assert own.startswith("ModelError: `weights` has no `blocks.2.out.bias`")
    assert "did you mean `blocks.1.out.bias` or `blocks.0.out.bias`?" in own
    assert other.startswith(
        "RankError: rank 1 failed: ModelError: `weights` has no `blocks.2.out.bias`"
    )
    assert done == 2


def largest_whole(plan: str) -> tuple[int, int]:
    """Elements of the largest set of whole tensors that exist at once, and of all together."""
    peak = 0
    allocate = DeferredWeights.allocate

    def counting(self: DeferredWeights, model: nn.Module, *args: Any, **options: Any) -> None:
        nonlocal peak
        allocate(self, model, *args, **options)
        results = [p for p in model.parameters() if not p.is_meta and type(p) is nn.Parameter]
        peak = max(peak, sum(p.numel() for p in results))

    case = CASES["gpt"]
    with torch.device("meta"):
        model = TinyGPT(layers=6)
    whole = sum(p.numel() for p in model.parameters())
    parsed = Plan.parse(plan)
    profile = profile_of(Case(lambda: model, case.batch, case.loss_fn), model)
    with patch.object(DeferredWeights, "allocate", counting):
        apply_plan(model, parsed, profile=profile, cluster=cpu_ranks(2), weights=init)
    return peak, whole


@pytest.mark.dist
def test_a_sharded_model_is_cut_unit_by_unit(pool: Pool) -> None:
    with torch.device("meta"):
        block = sum(p.numel() for p in TinyGPT().blocks[0].parameters())
    for peak, whole in pool.run(largest_whole, "dp_shard=2", world_size=2):
        assert block // 2 < peak < 2 * block < whole


class Rotary(nn.Module):
    """A table that no state dict holds, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x * self.table)
        return out


def test_a_buffer_in_no_state_dict_is_refused_by_name_with_a_hint() -> None:
    state = Rotary().state_dict()
    with torch.device("meta"):
        model = Rotary()
    with pytest.raises(ModelError, match="buffer `table` is on the meta device") as caught:
        _fill(model, state)
    assert 'torch.arange(n, device="cpu")' in str(caught.value)


def test_transformers_models_make_such_buffers_themselves() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    reference = transformers.LlamaForCausalLM(config)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    _fill(model, reference.state_dict())
    ids = torch.arange(12).reshape(2, 6)
    assert torch.equal(model(ids).logits, reference(ids).logits)
    with torch.device("meta"):
        fresh = transformers.LlamaForCausalLM(config)
    _fill(fresh, fresh._init_weights)
    table = fresh.model.rotary_emb.inv_freq
    assert torch.equal(table, reference.model.rotary_emb.inv_freq)
    assert fresh.lm_head.weight.std().item() == pytest.approx(config.initializer_range, rel=0.1)


def test_a_tensor_that_the_init_function_leaves_out_is_refused_by_name() -> None:
    def linear_only(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.LayerNorm | nn.Embedding):
            module.reset_parameters()

    with torch.device("meta"):
        model = TinyGPT()
    with pytest.raises(ModelError, match=r"left `position` without values") as caught:
        _fill(model, linear_only)
    assert "init(TinyGPT)" in str(caught.value)


def test_weights_of_another_shape_are_refused_with_both_shapes() -> None:
    state = TinyGPT(width=16).state_dict()
    with torch.device("meta"):
        model = TinyGPT()
    with pytest.raises(ModelError, match=r"has the shape \(16, 16\).* in the model \(16, 32\)"):
        _fill(model, {**state, "embed.weight": torch.zeros(61, 32)})


def test_weights_for_a_model_with_values_are_refused() -> None:
    case, model = CASES["gpt"], CASES["gpt"].build()
    with pytest.raises(ModelError, match="this one has values"):
        apply_plan(
            model,
            Plan(),
            profile=profile_of(case, model),
            cluster=cpu_ranks(1),
            weights=model.state_dict(),
        )


def test_a_tensor_that_nothing_can_fill_is_refused_by_name() -> None:
    class Loose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.table = torch.arange(2.0)

    with torch.device("meta"):
        model = Loose()
    with pytest.raises(ModelError, match="`table` is a tensor on the meta device that is neither"):
        DeferredWeights(model, init)


def test_paths_that_hold_no_safetensors_are_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").touch()
    with pytest.raises(FileError, match="no safetensors file") as caught:
        open_weights(tmp_path / "weights.pt")
    assert "torch.load(path, mmap=True, weights_only=True)" in str(caught.value)
    with pytest.raises(FileError, match=r"weights\.pt` is no .*: a pickle may run code"):
        open_weights(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match="has neither"):
        open_weights(tmp_path / "empty")
    with pytest.raises(FileError, match="No such file"):
        open_weights(tmp_path / "none.safetensors")
    (tmp_path / "bad.safetensors").write_text("no header")
    with pytest.raises(FileError, match="cannot be read as safetensors"):
        open_weights(tmp_path / "bad.safetensors")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(FileError, match="no index of safetensors shards"):
        open_weights(tmp_path / "bad.json")
    with pytest.raises(InputError, match="weights is a module"):
        open_weights(nn.Linear(1, 1))
    with pytest.raises(InputError, match="weights is an int"):
        open_weights(3)  # type: ignore[arg-type]


def test_missing_safetensors_package_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(InputError, match="`safetensors`, which is not installed") as caught:
        open_weights(tmp_path / "model.safetensors")
    assert caught.value.hints == ("pip install safetensors",)
