"""Experts shared out over ranks: tokens travel there and back; training is that of one process."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from engines.apply import apply_plan
from engines.data.replicas import local_part
from engines.experts.container import containers, require_separable
from engines.experts.experts import Experts
from engines.legality import problems
from engines.plan import Plan
from engines.runtime.mesh import Mesh
from engines.runtime.world import join_world
from engines.tensor.proposal import propose_styles
from profiles.capture.batch.call import Batch
from profiles.capture.capture import capture
from profiles.capture.module.experts import experts_of
from profiles.errors import ModelError, PlanError
from profiles.model.profile import ModelProfile, Numerics
from tests.captured import captured
from tests.engines.cases import cpu_ranks
from tests.engines.parity import local_rows, relative, sgd, state_error
from tests.nightly import nightly
from tests.workers import Pool


class Mixture(nn.Module):
    """Stacked experts with a bias, in the form of transformers; a `power` of 2 breaks it."""

    def __init__(self, *, experts: int = 4, width: int = 6, power: int = 1) -> None:
        super().__init__()
        self.num_experts = experts
        self.weight = nn.Parameter(torch.randn(experts, width, width) / 2)
        self.bias = nn.Parameter(torch.randn(experts, width) / 2)
        self.power = power

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        mixed = torch.zeros_like(hidden)
        for number in range(self.num_experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            made = torch.tanh(hidden[token] @ self.weight[number] + self.bias[number])
            share = weights[token, place, None] ** self.power
            mixed = mixed.index_add(0, token, made * share)
        return mixed


class Listed(nn.Module):
    """Experts in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))


def test_experts_are_weights_with_a_dimension_of_their_own() -> None:
    assert experts_of(Mixture()) == 4
    assert containers(nn.Sequential(Mixture(), nn.Linear(6, 6))).keys() == {"0"}
    assert not containers(Listed())
    assert experts_of(nn.Conv1d(4, 4, 3)) == 0


def test_expert_activations_must_be_in_proportion_to_their_weights() -> None:
    require_separable("mixture", Mixture(), size=2)
    with pytest.raises(PlanError, match="their parts do not add up to the whole"):
        require_separable("mixture", Mixture(power=2), size=2)


class Scaled(Mixture):
    """A factor for each expert, which training code changes; all are one at first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Buffer(torch.ones(4))

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        scales = torch.stack([(chosen == n) * self.scale[n] for n in range(self.num_experts)])
        return super().forward(hidden, chosen, weights * scales.sum(0))


class Penalised(Mixture):
    """Its block adds `penalty` to the loss."""

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        mixed = super().forward(hidden, chosen, weights)
        self.penalty = mixed.square().mean()
        return mixed


class Counting(Mixture):
    """Counts the tokens of each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Buffer(torch.zeros(4, dtype=torch.long))

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        self.counts.add_(chosen.flatten().bincount(minlength=4))
        return super().forward(hidden, chosen, weights)


class Bounded(Mixture):
    """An expert takes no more than 1.5 times its share of the tokens."""

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        most = int(1.5 * chosen.numel() / self.num_experts)
        taken = torch.stack([(chosen == n).flatten().cumsum(0) for n in range(self.num_experts)])
        place = taken.gather(0, chosen.reshape(1, -1)).view(chosen.shape)
        return super().forward(hidden, chosen, weights * (place <= most))


def test_experts_are_told_apart_by_numbers_that_are_equal_at_first() -> None:
    with pytest.raises(PlanError, match="their parts do not add up to the whole"):
        require_separable("mixture", Scaled(), size=2)
    still = Mixture(power=2)
    nn.init.zeros_(still.weight)
    nn.init.zeros_(still.bias)
    with pytest.raises(PlanError, match="their parts do not add up to the whole"):
        require_separable("mixture", still, size=2)


@pytest.mark.parametrize(("mixture", "name"), [(Penalised, "penalty"), (Counting, "counts")])
def test_experts_keep_nothing_of_tokens_that_other_ranks_sent(
    mixture: type[Mixture], name: str
) -> None:
    with pytest.raises(PlanError, match=f"a call keeps `{name}`"):
        require_separable("mixture", mixture(), size=2)


def test_experts_that_drop_tokens_beyond_a_capacity_are_refused() -> None:
    with pytest.raises(PlanError, match="their parts do not add up to the whole"):
        require_separable("mixture", Bounded(), size=2)


def chosen_for_no_expert(number: int) -> str:
    module = Mixture()
    mesh = Mesh(Plan.parse("dp_replicate=2 ep=2"), join_world())
    Experts(module, mesh.ep, mesh.expert_copies, replicas=2)
    chosen = torch.tensor([[0], [number]])
    with pytest.raises(ModelError) as raised:
        module(torch.randn(2, 6), chosen, torch.ones(2, 1))
    return raised.value.what


@pytest.mark.dist
@pytest.mark.parametrize("number", [-1, 4])
def test_tokens_that_a_router_drops_have_no_rank_to_go_to(pool: Pool, number: int) -> None:
    for what in pool.run(chosen_for_no_expert, number, world_size=2):
        assert f"was given {number} for the number of an expert in place of 0 to 3" in what


@pytest.mark.parametrize(
    ("name", "count"), [("mixtral", 3), ("Qwen 3 MoE", 4), ("GPT-OSS", 4), ("DeepSeek-V3", 4)]
)
def test_experts_of_transformers_are_found_and_proved(name: str, count: int) -> None:
    pytest.importorskip("transformers")
    from tests import zoo

    model = zoo.mixtral() if name == "mixtral" else zoo.ARCHITECTURES[name][0]()
    experts = containers(model)
    assert 0 < len(experts) <= count
    path, module = next(iter(experts.items()))
    require_separable(path, module, size=2)


def in_a_row(plan: str) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    mesh = Mesh(Plan.parse(plan), join_world())
    return mesh.ep.position, mesh.ep.ranks, mesh.expert_copies.ranks


@pytest.mark.dist
def test_neighbours_on_the_data_axes_share_experts(pool: Pool) -> None:
    results = pool.run(in_a_row, "dp_replicate=4 ep=2", world_size=4)
    assert results[1] == (1, (0, 1), (1, 3))
    assert results[2] == (0, (2, 3), (0, 2))
    results = pool.run(in_a_row, "dp_replicate=2 cp=2 ep=2", world_size=4)
    assert results[1] == (0, (1, 3), (0, 1))


def build(name: str) -> tuple[nn.Module, Batch]:
    """A model and a batch of it; all tokens of a `starved` mixtral go to the same two experts."""
    from tests import zoo

    torch.manual_seed(0)
    model = zoo.ARCHITECTURES[name][0]() if name in zoo.ARCHITECTURES else zoo.mixtral()
    if name == "starved":
        for gate in (module.gate for module in model.modules() if hasattr(module, "gate")):
            with torch.no_grad():
                gate.weight.zero_()
    model.config.use_cache = False  # recompute would fill it twice
    ids = torch.arange(4 * 16).reshape(4, 16) % 90 + 3
    return model.eval(), {"input_ids": ids, "labels": ids}


def test_experts_of_a_starved_rank_get_no_token() -> None:
    pytest.importorskip("transformers")
    model, batch = build("starved")
    model(**batch).loss.backward()
    for name, weight in model.named_parameters():
        if weight.dim() == 3:
            assert weight.grad is not None, name
            none, some = sorted(half.abs().max() for half in weight.grad.chunk(2))
            assert none == 0 < some


STAGED = "pp=2 microbatches=2 stages=model.layers.2"
FOLDED = "pp=2 microbatches=2 stages=model.layers.0,model.layers.1,model.layers.2"


def differences(name: str, plan: str) -> tuple[float, float, float, int]:
    """From one process: loss, gradients over the largest one, and parameters after two clipped
    steps of SGD; and the elements of parameters that a rank holds of the whole model's."""
    model, batch = build(name)
    reference = copy.deepcopy(model)
    output = reference(**batch)
    output.loss.backward()
    parsed, profile = Plan.parse(plan), captured(name, model, batch, name=name)
    if parsed.tp > 1:
        tokens = parsed.sequence_parallel
        split = propose_styles(
            model, batch, size=parsed.tp, profile=profile, has_target=False, by_tokens=tokens
        )
        parsed = parsed.model_copy(update={"tensor_styles": split.styles})
    parallel = apply_plan(
        model,
        parsed,
        profile=profile,
        cluster=cpu_ranks(parsed.world_size),
        sample=batch,
        optimizer=sgd,
        max_grad_norm=0.5,
    )
    rows = local_rows(parallel, batch, 4)
    loss = parallel.forward_backward(rows)
    got = parallel.full_gradients()
    wanted = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    assert got.keys() == wanted.keys()
    largest = max(gradient.abs().max().item() for gradient in wanted.values())
    gradients = max((got[n] - wanted[n]).abs().max().item() for n in wanted) / largest
    parallel.zero_grad()
    reference.zero_grad()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for _ in range(2):
        parallel.train_step(rows)
        reference(**batch).loss.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    weights = [p for n, p in parallel.named_parameters() if n.endswith("down_proj")]
    experts = sum(local_part(p).shape[0] for p in weights)
    return (
        relative(loss, output.loss.detach()),
        gradients,
        state_error(parallel, reference),
        experts,
    )


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("mixtral", "dp_shard=4 ep=2 accumulation=2 recompute=full"),
        ("mixtral", "dp_replicate=2 cp=2 ep=2"),
        ("starved", f"dp_replicate=2 ep=2 schedule=zbv {FOLDED}"),
        ("DeepSeek-V3", f"dp_replicate=2 ep=2 zero=1 schedule=interleaved {FOLDED}"),
        ("mixtral", "dp_shard=2 tp=2 ep=2 sequence_parallel=true"),
        *nightly(
            ("mixtral", "dp_replicate=4 ep=2 zero=1 accumulation=2"),
            ("mixtral", f"dp_shard=2 ep=2 schedule=gpipe recompute=full {STAGED}"),
            ("mixtral", "dp_replicate=4 ep=2 recompute=full"),
            ("mixtral", "dp_replicate=2 dp_shard=2 ep=4"),
            ("mixtral", "dp_replicate=2 ep=2 zero=1 accumulation=2 recompute=selective"),
            ("Qwen 3 MoE", "dp_replicate=2 ep=2"),
            ("mixtral", f"dp_replicate=2 ep=2 schedule=1f1b {STAGED}"),
            ("DeepSeek-V3", "dp_replicate=2 tp=2 ep=2 zero=1"),
            ("mixtral", f"dp_replicate=2 ep=2 zero=2 schedule=1f1b {STAGED}"),
            ("starved", f"dp_replicate=2 ep=2 schedule=zero_bubble {STAGED}"),
            ("starved", f"dp_shard=2 ep=2 schedule=1f1b {STAGED}"),
            ("mixtral", "pp=2 dp_replicate=2 ep=2 schedule=naive stages=model.layers.2"),
            ("Qwen 3 MoE", f"dp_shard=2 ep=2 schedule=1f1b {STAGED}"),
            ("DeepSeek-V3", f"dp_replicate=2 ep=2 schedule=zbv {FOLDED}"),
        ),
    ],
)
def test_shared_experts_train_like_one_process(pool: Pool, name: str, plan: str) -> None:
    pytest.importorskip("transformers")
    parsed = Plan.parse(plan)
    results = pool.run(differences, name, plan, world_size=parsed.world_size)
    for loss, gradients, parameters, experts in results:
        assert max(loss, gradients, parameters) < 1e-5
        if name == "mixtral" and parsed.pp == 1:
            copies = parsed.data_degree * parsed.cp // parsed.ep
            assert experts == 3 * 4 / parsed.ep / (copies if parsed.shards_experts else 1)


def half(plan: str) -> float:
    """Largest difference of the loss from fp32 over two steps, relative."""
    model, batch = build("mixtral")
    losses = []
    for text in ("dp_replicate=2", plan):
        torch.manual_seed(0)
        parallel = apply_plan(
            copy.deepcopy(model),
            Plan.parse(text),
            profile=capture(model, batch, name="mixtral", numerics=tuple(Numerics)),
            cluster=cpu_ranks(2),
            optimizer=sgd,
        )
        rows = local_rows(parallel, batch, 4)
        losses.append([parallel.train_step(rows).item() for _ in range(2)])
    return max(abs(a - b) / a for a, b in zip(*losses, strict=True))


@pytest.mark.dist
@pytest.mark.parametrize(
    "plan",
    [
        "dp_shard=2 ep=2 precision=bf16",
        *nightly(
            "dp_replicate=2 ep=2 precision=bf16",
            "dp_replicate=2 ep=2 precision=fp16",
            "dp_shard=2 ep=2 precision=fp16",
        ),
    ],
)
def test_experts_compute_in_16_bits_where_the_plan_says_so(pool: Pool, plan: str) -> None:
    pytest.importorskip("transformers")
    assert max(pool.run(half, plan, world_size=2)) < 5e-3


def across_plans(folder: str, text: str) -> float:
    """Experts saved by ranks that share them, read where nothing is shared, and back."""
    model, batch = build("mixtral")
    reference, plan = copy.deepcopy(model), Plan.parse(text)
    profile, cluster = capture(model, batch, name="mixtral"), cpu_ranks(plan.world_size)
    shared = apply_plan(model, plan, profile=profile, cluster=cluster)
    shared.train_step(local_rows(shared, batch, 4))
    shared.save(f"{folder}/shared")
    whole = Plan.parse(f"dp_shard={plan.world_size}")
    other = apply_plan(reference, whole, profile=profile, cluster=cluster)
    other.load(f"{folder}/shared")
    wanted = shared.state_dict()
    assert list(other.state_dict()) == list(wanted)
    errors = [relative(value, wanted[name]) for name, value in other.state_dict().items()]
    other.train_step(local_rows(other, batch, 4))
    other.save(f"{folder}/sharded")
    shared.load(f"{folder}/sharded")
    after = other.state_dict()
    errors += [relative(value, after[name]) for name, value in shared.state_dict().items()]
    return max(errors)


@pytest.mark.dist
@pytest.mark.parametrize(
    "plan", ["dp_replicate=2 ep=2", f"dp_replicate=2 ep=2 schedule=1f1b {STAGED}"]
)
def test_a_checkpoint_holds_whole_experts_under_their_names(
    pool: Pool, tmp_path: object, plan: str
) -> None:
    pytest.importorskip("transformers")
    ranks = Plan.parse(plan).world_size
    assert max(pool.run(across_plans, str(tmp_path), plan, world_size=ranks)) == 0.0


def by_settings() -> tuple[str, float]:
    """The plan that is made of "ep=2", and its loss against one process."""
    from advisor.auto.parallelize import auto_parallelize

    model, batch = build("mixtral")
    wanted = copy.deepcopy(model)(**batch).loss.detach()
    parallel = auto_parallelize(
        model, sample=batch, plan="ep=2 zero=0", cluster=cpu_ranks(2), learns=False,
        global_batch_size=4,
    )  # fmt: skip
    return str(parallel.plan), relative(parallel.eval_step(local_rows(parallel, batch, 4)), wanted)


@pytest.mark.dist
def test_open_settings_of_expert_parallelism_are_filled_in(pool: Pool) -> None:
    pytest.importorskip("transformers")
    for plan, error in pool.run(by_settings, world_size=2):
        assert {"dp_replicate=2", "ep=2"} <= set(plan.split())
        assert error < 1e-6


@cache
def _profile() -> ModelProfile:
    model, batch = build("mixtral")
    return capture(model, batch, name="mixtral")


@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        ("dp_replicate=2 ep=4", "experts-outside-data"),
        ("dp_replicate=3 ep=3", "experts-uneven"),
        ("dp_replicate=2 ep=2 compile=true", "experts-compiled"),
        ("dp_shard=2 ep=2 offload=states", "experts-offloaded"),
    ],
)
def test_plans_that_cannot_share_experts_are_refused_by_name(plan: str, rule: str) -> None:
    pytest.importorskip("transformers")
    profile = _profile()
    assert {unit.experts for unit in profile.blocks()} == {(4,)}
    parsed = Plan.parse(plan)
    assert rule in [p.rule for p in problems(parsed, profile, cpu_ranks(parsed.world_size))]


def test_a_model_without_experts_has_none_to_share() -> None:
    from tests.engines.cases import CASES, profile_of

    profile = profile_of(CASES["gpt"], CASES["gpt"].build())
    refusals = problems(Plan.parse("dp_replicate=2 ep=2"), profile, cpu_ranks(2))
    assert [p.rule for p in refusals] == ["experts-none"]
    assert "nn.ModuleList" in refusals[0].hint
