"""Blocks that are split by tokens, from border to border, beside the same model on one process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from engines.apply import apply_plan
from engines.legality import problems
from engines.plan import Plan
from engines.tensor.proposal import Proposal, propose_styles
from engines.tensor.rules import proposed_styles
from engines.tensor.split_proof import prove_split
from engines.tensor.token_rules import split_tokens
from profiles.capture.batch.call import call_model, loss_of
from profiles.capture.capture import capture
from profiles.errors import BatchError, PlanError
from profiles.model.profile import ModelProfile
from tests.engines.cases import cpu_ranks
from tests.matrix.architectures import Architecture, architecture_of
from tests.matrix.cell import TOLERANCE, Find, difference
from tests.nightly import nightly
from tests.workers import Pool

pytest.importorskip("transformers")


@dataclass(frozen=True)
class Shortened:
    """Architectures whose batches are cut to so many tokens."""

    tokens: int

    def __call__(self, name: str) -> Architecture:
        architecture = architecture_of(name)
        assert isinstance(architecture.batch, Mapping)
        batch = {key: ids[:, : self.tokens].clone() for key, ids in architecture.batch.items()}
        return replace(architecture, batch=batch)


@functools.lru_cache
def looked_at(name: str, size: int, find: Find = architecture_of) -> tuple[ModelProfile, Proposal]:
    """A model's profile, and its split by features and tokens as it is proved."""
    architecture = find(name)
    torch.manual_seed(0)
    model, has_target = architecture.build(), architecture.loss_fn is not None
    profile = capture(model, architecture.batch, loss_fn=architecture.loss_fn, name=name)
    proposal = propose_styles(
        model, architecture.batch, size=size, profile=profile, has_target=has_target, by_tokens=True
    )
    return profile, proposal


PLANS = [
    ("GPT-2", "tp=4"),
    ("GPT-2", "tp=2 pp=2 schedule=1f1b microbatches=2 stages=transformer.h.2"),
    ("Llama", "tp=2 dp_shard=2"),
    ("Llama", "tp=2 pp=2 schedule=zbv microbatches=2"
     " stages=model.layers.1,model.layers.2,model.layers.3"),
    ("GPT-2", "tp=2 cp=2"),
    ("BERT", "tp=4"),
    ("ViT, 16 tokens", "tp=2 pp=2 schedule=gpipe microbatches=2 stages=vit.layers.2"),
    *nightly(
        ("Llama", "tp=2 recompute=full"),
        ("BERT", "tp=2 dp_replicate=2 zero=1"),
        ("ViT, 16 tokens", "tp=2"),
    ),
]  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize(("name", "text"), PLANS)
def test_loss_and_gradients_are_those_of_one_process(pool: Pool, name: str, text: str) -> None:
    plan = Plan.parse(f"{text} sequence_parallel=true")
    profile, proposal = looked_at(name, plan.tp)
    plan = plan.model_copy(update={"tensor_styles": proposal.styles})
    for result in pool.run(difference, name, plan, profile, world_size=plan.world_size):
        assert result.loss < TOLERANCE
        assert result.gradient < TOLERANCE, result.worst_gradient


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "BERT", "GPT-NeoX", "ViT, 16 tokens"])
def test_the_profile_says_what_is_proved(name: str) -> None:
    profile, proposal = looked_at(name, 2)
    tokens = {"sequence", "entry", "exit", "joined"}
    proved = {pair for pair in proposal.styles if pair[1] in tokens}
    styles = split_tokens(profile, proposed_styles(profile, 2), 2)
    assert proved == {pair for pair in styles if pair[1] in tokens}
    assert {style for _, style in proved} == tokens


def test_a_chain_of_blocks_cuts_sequences_once_and_gathers_them_once() -> None:
    _, proposal = looked_at("Llama", 2)
    ends = {pair for pair in proposal.styles if pair[1] in ("entry", "exit")}
    assert ends == {("model.layers.0", "entry"), ("model.layers.3", "exit")}


class Watched(nn.Module):
    """Blocks whose hidden values are looked at between two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Perceptron() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        seen = x
        for number, block in enumerate(self.blocks):
            x = block(x)
            seen = x if number == 1 else seen
        return x + seen.mean(1, keepdim=True)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return out


def of_watched(tokens: int) -> tuple[Watched, tuple[Tensor], ModelProfile]:
    torch.manual_seed(0)
    model, sample = Watched(), (torch.randn(2, tokens, 16),)
    return model, sample, capture(model, sample)


def test_hidden_values_that_other_code_takes_too_are_gathered() -> None:
    model, sample, profile = of_watched(8)
    proposal = propose_styles(model, sample, size=2, profile=profile, by_tokens=True)
    ends = {pair for pair in proposal.styles if pair[1] in ("entry", "exit")}
    assert ends == {
        ("blocks.0", "entry"), ("blocks.1", "exit"), ("blocks.2", "entry"), ("blocks.3", "exit"),
    }  # fmt: skip
    wrong = tuple(pair for pair in proposal.styles if pair != ("blocks.1", "exit"))
    with pytest.raises(PlanError, match=r"`blocks.1` has the styles `sequence`"):
        prove_split(model, sample, wrong, size=2, profile=profile, has_target=False)


def test_fewer_tokens_than_ranks_stay_whole() -> None:
    model, sample, profile = of_watched(3)
    proposal = propose_styles(model, sample, size=4, profile=profile, by_tokens=True)
    assert "sequence" not in dict(proposal.styles).values()
    assert any("3 tokens cannot be split over 4 ranks" in note.why for note in proposal.notes)
    assert split_tokens(profile, proposal.styles, 4) == proposal.styles
    words = "tp=4 sequence_parallel=true tensor_styles=blocks.*.up:column,blocks.*.down:row"
    (problem,) = problems(Plan.parse(words), profile, cpu_ranks(4))
    assert problem.what == "sequence_parallel=true, and 3 tokens have no share for each of 4 ranks"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("dp_replicate=2 sequence_parallel=true", "sequence-parallel-without-tensor"),
        ("tp=2 tensor_styles=blocks.*:sequence", "sequence-styles"),
    ],
)
def test_the_setting_and_the_styles_go_together(text: str, rule: str) -> None:
    _, _, profile = of_watched(8)
    assert rule in [problem.rule for problem in problems(Plan.parse(text), profile, cpu_ranks(2))]


UNEVEN = [
    ("Llama", "tp=4 recompute=full", 5),
    ("BERT", "tp=2 dp_replicate=2 zero=1", 15),
    *nightly(
        ("GPT-2", "tp=4", 13),
        ("Llama", "tp=2 pp=2 schedule=1f1b microbatches=2 stages=model.layers.2", 15),
    ),
]


@pytest.mark.dist
@pytest.mark.parametrize(("name", "text", "tokens"), UNEVEN)
def test_sequences_that_the_ranks_do_not_divide_are_split_too(
    pool: Pool, name: str, text: str, tokens: int
) -> None:
    plan, find = Plan.parse(f"{text} sequence_parallel=true"), Shortened(tokens)
    profile, proposal = looked_at(name, plan.tp, find)
    assert "sequence" in dict(proposal.styles).values()
    plan = plan.model_copy(update={"tensor_styles": proposal.styles})
    for result in pool.run(difference, name, plan, profile, find, world_size=plan.world_size):
        assert result.loss < TOLERANCE
        assert result.gradient < TOLERANCE, result.worst_gradient


def losses_of_lengths(
    name: str, plan: Plan, profile: ModelProfile, lengths: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Losses of steps on batches of these numbers of tokens, under the plan and in one process."""
    architecture = architecture_of(name)
    torch.manual_seed(0)
    model = architecture.build()
    alone = copy.deepcopy(model)
    parallel = apply_plan(
        model,
        plan,
        profile=profile,
        cluster=cpu_ranks(plan.world_size),
        sample=architecture.batch,
        optimizer=sgd,
    )
    optimizer = sgd(alone.parameters())
    got, wanted = [], []
    for tokens in lengths:
        batch = Shortened(tokens)(name).batch
        got.append(float(parallel.train_step(batch)))
        loss = loss_of(call_model(alone, batch, has_target=False), batch, None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    return got, wanted


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.dist
@pytest.mark.parametrize(
    "text", ["tp=2", "tp=2 pp=2 schedule=gpipe microbatches=2 stages=model.layers.2"]
)
def test_a_batch_may_have_any_length(pool: Pool, text: str) -> None:
    profile, proposal = looked_at("Llama", 2)
    plan = Plan.parse(f"{text} sequence_parallel=true")
    plan = plan.model_copy(update={"tensor_styles": proposal.styles})
    lengths = (16, 15, 16, 13, 14, 7, 2)
    for got, wanted in pool.run(
        losses_of_lengths, "Llama", plan, profile, lengths, world_size=plan.world_size
    ):
        assert got == pytest.approx(wanted, rel=1e-5)


class TwoLengths(nn.Module):
    """Two streams of tokens, through blocks of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Perceptron() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        means: Tensor = self.blocks[0](x).mean(1) + self.blocks[1](y).mean(1)
        return means


def shares_of_one_length(tokens: int) -> str:
    torch.manual_seed(0)
    model, sample = TwoLengths(), (torch.randn(2, 14, 16), torch.randn(2, 8, 16))
    profile = capture(model, sample)
    proposal = propose_styles(model, sample, size=2, profile=profile, by_tokens=True)
    plan = Plan.parse("tp=2 sequence_parallel=true")
    parallel = apply_plan(
        model,
        plan.model_copy(update={"tensor_styles": proposal.styles}),
        profile=profile,
        cluster=cpu_ranks(2),
        sample=sample,
    )
    parallel(*sample)
    try:
        parallel(sample[0], torch.randn(2, tokens, 16))
    except BatchError as error:
        return error.what
    return ""


@pytest.mark.dist
def test_two_lengths_whose_shares_are_one_are_refused(pool: Pool) -> None:
    assert set(pool.run(shares_of_one_length, 9, world_size=2)) == {""}
    for said in pool.run(shares_of_one_length, 13, world_size=2):
        assert "14 and of 13 tokens cannot both be split over 2 ranks" in said
