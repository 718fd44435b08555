"""Sequences shared out over ranks: the ring is exact, models train like one process, and what
cannot be shared is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.apply import apply_plan
from engines.context.input_sharding import InputSharding
from engines.context.proof import prove
from engines.context.ring import Ring
from engines.context.tokens import joined, part
from engines.legality import problems
from engines.parallel import ParallelModel
from engines.plan import Plan
from engines.runtime.mesh import Mesh
from engines.runtime.world import join_world
from profiles.capture.batch import Batch
from profiles.capture.capture import capture
from profiles.errors import AdvisorError, BatchError, ModelError, PlanError
from profiles.torch_compat import attention as attention_kernels
from profiles.torch_compat.attention import attend, attend_backward
from tests.engines.cases import CASES, TinyGPT, cpu_ranks, profile_of, token_loss
from tests.engines.parity import (
    gradient_error,
    local_rows,
    measure,
    parallelize,
    reference_loss,
    relative,
    state_error,
)
from tests.workers import Pool

# The kernels


def written_out(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> Tensor:
    """Attention by its formula."""
    scores = q @ k.transpose(2, 3) * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(3) @ v


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("width", [8, 6], ids=["kernel", "plain"])
def test_attention_with_its_log_sum_exp_is_the_formula(width: int, is_causal: bool) -> None:
    q, k = (torch.randn(2, 3, 7, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    v = torch.randn(2, 3, 7, width, dtype=torch.float64, requires_grad=True)
    wanted = written_out(q, k, v, is_causal=is_causal, scale=0.3)
    gradient = torch.randn_like(wanted)
    wanted.backward(gradient)
    given = [t.detach() for t in (q, k, v)]
    out, lse = attend(*given, is_causal=is_causal, scale=0.3)
    assert torch.allclose(out, wanted)
    if not is_causal:
        assert torch.allclose(lse, (given[0] @ given[1].transpose(2, 3) * 0.3).logsumexp(3))
    gradients = attend_backward(gradient, *given, out, lse, is_causal=is_causal, scale=0.3)
    for got, leaf in zip(gradients, (q, k, v), strict=True):
        assert leaf.grad is not None
        assert torch.allclose(got, leaf.grad)


def test_the_flash_kernel_of_cuda_is_given_a_dense_log_sum_exp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It reads the numbers from their first address on, whatever the strides; of the later half of
    the queries these are a view."""
    given: list[Tensor] = []
    name = "_scaled_dot_product_flash_attention_backward"
    monkeypatch.setattr(attention_kernels, "_kernel", lambda *_: "flash")
    monkeypatch.setattr(torch.ops.aten, name, lambda *args, **_: given.extend(args[:6]))
    q, k, v, out, gradient = (torch.randn(2, 3, 8, 4) for _ in range(5))
    lse, rows = torch.randn(2, 3, 8), slice(4, None)
    later = (t[:, :, rows] for t in (gradient, q, k, v, out, lse))
    attend_backward(*later, is_causal=False, scale=0.5)
    assert given[5].is_contiguous()
    assert torch.equal(given[5], lse[:, :, rows])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_the_kernel_of_cuda_takes_the_later_half_of_the_queries() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(2, 3, 64, 32, device="cuda", dtype=torch.bfloat16, generator=generator)
        for _ in range(3)
    )
    rows = slice(32, None)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    wanted = written_out(*leaves, is_causal=False, scale=0.2)[:, :, rows]
    gradient = torch.randn_like(wanted)
    wanted.backward(gradient)
    out, lse = attend(q, k, v, is_causal=False, scale=0.2)
    given = (t[:, :, rows] for t in (gradient.bfloat16(), q))
    gradients = attend_backward(
        *given, k, v, out[:, :, rows], lse[:, :, rows], is_causal=False, scale=0.2
    )
    for got, leaf, own in zip(gradients, leaves, (rows, slice(None), slice(None)), strict=True):
        assert leaf.grad is not None
        assert (got - leaf.grad[:, :, own]).abs().max() < 5e-2 * leaf.grad.abs().max()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("is_causal", [True, False])
def test_the_kernel_of_cuda_is_the_formula_too(is_causal: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(2, 3, 64, 32, device="cuda", dtype=torch.bfloat16, generator=generator)
        for _ in range(3)
    )
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    wanted = written_out(*leaves, is_causal=is_causal, scale=0.2)
    gradient = torch.ones_like(q)
    wanted.backward(gradient.double())
    out, lse = attend(q, k, v, is_causal=is_causal, scale=0.2)
    assert (out - wanted).abs().max() < 2e-2
    gradients = attend_backward(gradient, q, k, v, out, lse, is_causal=is_causal, scale=0.2)
    for got, leaf in zip(gradients, leaves, strict=True):
        assert leaf.grad is not None
        assert (got - leaf.grad).abs().max() < 5e-2 * leaf.grad.abs().max()


# The ring


def test_each_rank_gets_one_chunk_from_each_end_of_the_sequence() -> None:
    whole = torch.arange(12).view(1, 12)
    parts = [part(whole, rank=rank, size=3) for rank in range(3)]
    assert parts[0].tolist() == [[0, 1, 10, 11]]
    assert torch.equal(joined(parts), whole)


def ring_error(is_causal: bool, groups: int, width: int) -> float:
    """Largest difference of outputs and gradients from attention in one process, in float64."""
    mesh = Mesh(Plan.parse("cp=4"), join_world())
    generator = torch.Generator().manual_seed(5)

    def made(heads: int, width: int) -> Tensor:
        values = torch.randn(2, heads, 16, width, generator=generator, dtype=torch.float64)
        return values.requires_grad_()

    q, k, v = made(4, 8), made(groups, 8), made(groups, width)
    times = 4 // groups
    wanted = written_out(
        q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1),
        is_causal=is_causal, scale=0.4,
    )  # fmt: skip
    gradient = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
    wanted.backward(gradient)

    def own(whole: Tensor) -> Tensor:
        return part(whole.detach(), rank=mesh.cp.position, size=4, dim=2)

    mine = [own(t).requires_grad_() for t in (q, k, v)]
    out = Ring(mesh.cp).attention(*mine, is_causal=is_causal, scale=0.4)
    out.backward(own(gradient))
    errors = [(out - own(wanted)).abs().max()]
    for leaf, whole in zip(mine, (q, k, v), strict=True):
        assert leaf.grad is not None
        assert whole.grad is not None
        errors.append((leaf.grad - own(whole.grad)).abs().max())
    return max(error.item() for error in errors)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("is_causal", "groups", "width"), [(False, 4, 8), (True, 2, 8), (True, 1, 6)]
)
def test_a_ring_of_four_is_attention_to_all_tokens(
    pool: Pool, is_causal: bool, groups: int, width: int
) -> None:
    assert max(pool.run(ring_error, is_causal, groups, width, world_size=4)) < 1e-12


# Parity

TOLERANCE = 1e-5


@pytest.mark.dist
@pytest.mark.parametrize(
    "plan",
    [
        "cp=2",
        "cp=2 recompute=selective accumulation=2",
        "cp=2 zero=3 recompute=full",
        "dp_replicate=2 cp=2",
        "dp_replicate=2 cp=2 zero=2 accumulation=2",
        "dp_shard=2 cp=2",
    ],
)
def test_shared_sequences_train_like_one_process(pool: Pool, plan: str) -> None:
    """The model counts its tokens itself, and slices a table by their number."""
    for result in pool.run(measure, "gpt", plan, world_size=Plan.parse(plan).world_size):
        assert result.loss < TOLERANCE
        assert result.gradient < TOLERANCE, result.worst_gradient
        assert result.parameter_after_steps < TOLERANCE


def to_largest(parallel: ParallelModel, reference: nn.Module) -> float:
    """Largest gradient difference over the largest gradient: the bias of a key has none but
    rounding."""
    got = parallel.full_gradients()
    wanted = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    assert got.keys() == wanted.keys()
    largest = max(gradient.abs().max().item() for gradient in wanted.values())
    return max((got[n] - wanted[n]).abs().max().item() for n in wanted) / largest


def transformer_error(name: str, plan: str) -> tuple[float, float, float]:
    """Largest relative differences of an unmodified transformers model from one process: loss,
    gradients of `train_step`'s kind, and those of a classic loop."""
    from tests import zoo

    torch.manual_seed(0)
    model: nn.Module = getattr(zoo, name)().eval()
    batch = zoo.TOKENS
    reference = copy.deepcopy(model)
    output = reference(**batch)
    output.loss.backward()
    parsed = Plan.parse(plan)
    parallel = apply_plan(
        model,
        parsed,
        profile=capture(model, batch, name=name),
        cluster=cpu_ranks(parsed.world_size),
        sample=batch,
    )
    rows = local_rows(parallel, batch, 2)
    loss = parallel.forward_backward(rows)
    stepped = to_largest(parallel, reference)
    parallel.zero_grad()
    if parallel.data_world_size > 1:
        return relative(loss, output.loss.detach()), stepped, 0.0
    with torch.no_grad():
        plain = parallel(input_ids=zoo.IDS).logits
    assert relative(plain, output.logits.detach()) < TOLERANCE
    classic = parallel(**batch)
    assert relative(classic.logits, output.logits) < TOLERANCE
    classic.loss.backward()
    return relative(loss, output.loss.detach()), stepped, to_largest(parallel, reference)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("llama", "cp=4"),
        ("llama", "dp_shard=2 cp=2"),
        ("gpt2", "cp=2"),
        ("bert", "cp=2"),
    ],
)
def test_an_unmodified_model_shares_its_sequences(pool: Pool, name: str, plan: str) -> None:
    """Causal and not, grouped heads; labels that are shifted across chunks."""
    pytest.importorskip("transformers")
    results = pool.run(transformer_error, name, plan, world_size=Plan.parse(plan).world_size)
    assert max(map(max, results)) < TOLERANCE


def across_plans(folder: str) -> tuple[float, float]:
    """A checkpoint of cp=2 read by ZeRO-3 over two; losses of an evaluation before and after."""
    case, reference, parallel = parallelize("gpt", "cp=2", max_grad_norm=0.1)
    batch = case.batch(4)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    reference_loss(reference, case, batch).backward()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    optimizer.step()
    parallel.train_step(local_rows(parallel, batch, 4))
    parallel.save(folder)
    _, _, other = parallelize("gpt", "dp_shard=2")
    other.load(folder)
    wanted = reference_loss(reference, case, batch).detach()
    evaluated = relative(parallel.eval_step(local_rows(parallel, batch, 4)), wanted)
    return max(state_error(other, reference), state_error(parallel, reference)), evaluated


@pytest.mark.dist
def test_clipping_evaluation_and_checkpoints_are_those_of_one_process(
    pool: Pool, tmp_path: object
) -> None:
    assert max(map(max, pool.run(across_plans, f"{tmp_path}/saved", world_size=2))) < TOLERANCE


def split_error() -> float:
    from advisor.auto.parallelize import auto_parallelize

    case = CASES["gpt"]
    torch.manual_seed(1)
    reference = case.build()
    model = copy.deepcopy(reference)
    batch = case.batch(4)
    parallel = auto_parallelize(
        model, sample=batch, loss_fn=case.loss_fn, plan="cp=2 tp=2", cluster=cpu_ranks(4),
        learns=False,
    )  # fmt: skip
    reference_loss(reference, case, batch).backward()
    parallel.forward_backward(batch)
    return gradient_error(parallel, reference)


@pytest.mark.dist
def test_context_and_tensor_parallelism_combine(pool: Pool) -> None:
    assert max(pool.run(split_error, world_size=4, timeout_s=120)) < TOLERANCE


def padded() -> list[str]:
    """Errors for a batch with padding, and for one of another length."""
    from tests import zoo

    batch: Batch = {**zoo.TOKENS, "attention_mask": torch.ones_like(zoo.IDS)}
    model = zoo.llama()
    parallel = apply_plan(
        model, Plan.parse("cp=2"), profile=capture(model, batch), cluster=cpu_ranks(2), sample=batch
    )
    hidden = torch.ones_like(zoo.IDS)
    hidden[0, :4] = 0
    said = []
    for other in ({**batch, "attention_mask": hidden}, {k: t[:, :14] for k, t in batch.items()}):
        try:
            parallel.train_step(other)
        except BatchError as error:
            said.append(str(error))
    assert parallel.train_step(batch).isfinite()
    return said


@pytest.mark.dist
def test_a_batch_that_cannot_be_shared_is_refused_on_every_rank_and_the_next_one_runs(
    pool: Pool,
) -> None:
    pytest.importorskip("transformers")
    for mask, length in pool.run(padded, world_size=2):
        assert "hides tokens" in mask
        assert "14 tokens cannot be cut into 4 equal chunks" in length
        assert "12 or 16 tokens" in length


# Refusals


class Averaging(TinyGPT):
    """Every token also sees the mean of all."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + super().forward(ids).mean(1, keepdim=True)


class ByHand(nn.Module):
    """Attention without `scaled_dot_product_attention`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return F.softmax(x @ x.transpose(1, 2), -1) @ x @ self.embed.weight.t()


def sliding_window() -> nn.Module:
    import transformers

    from tests import zoo

    config = transformers.MistralConfig(**zoo.SMALL, num_key_value_heads=2, sliding_window=8)
    return transformers.MistralForCausalLM(config)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (Averaging, "an output differs"),
        (ByHand, "attention calls seen: 0"),
        (lambda: CASES["lstm"].build(), "set cp=1"),
    ],
)
def test_mixing_tokens_outside_of_attention_is_refused(
    build: Callable[[], nn.Module], says: str
) -> None:
    is_series = says == "set cp=1"
    case = CASES["lstm" if is_series else "gpt"]
    batch = case.batch(2)
    if is_series:
        batch = torch.randn(2, 8, 6), torch.randint(0, 5, (2,))
    with pytest.raises(PlanError) as error:
        prove(build(), batch, case.loss_fn, size=2)
    assert says in str(error.value)


class OfOneLength(nn.Module):
    """Has a place for each token of the whole sequence, and adds it as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(9, 8), nn.Parameter(torch.randn(32, 8))

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids) + self.places


def test_a_model_of_one_length_is_refused() -> None:
    with pytest.raises(PlanError, match="does not run over a shorter sequence: RuntimeError"):
        prove(OfOneLength(), torch.zeros(2, 32, dtype=torch.long), None, size=2)


def test_a_window_that_only_a_long_sequence_fills_is_seen_on_the_sample() -> None:
    """The proof runs over 8 tokens, which a window of 8 hides nothing of; the sample has 16."""
    pytest.importorskip("transformers")
    from tests import zoo

    with pytest.raises(ModelError, match="attention with a mask"):
        prove(sliding_window(), zoo.TOKENS, None, size=2)


class Waves(TinyGPT):
    """Beside what TinyGPT adds for places, `width` waves of them, whose frequencies it counts."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width = width

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])[:, None]
        frequencies = torch.arange(self.width) / self.width
        waves = torch.sin(places * 10**-frequencies)
        logits: Tensor = super().forward(ids) * (1 + waves.sum(1)[None, :, None])
        return logits


def test_a_range_that_may_be_a_count_is_not_taken_for_positions() -> None:
    """Of 16 tokens each of 2 ranks has 8: `arange(8)` may be both."""
    batch = torch.randint(0, 61, (2, 16)), torch.randint(0, 61, (2, 16))
    assert prove(Waves(7), batch, token_loss, size=2).counts == {7}
    with pytest.raises(PlanError, match="counts to 8 for something else too"):
        prove(Waves(8), batch, token_loss, size=2)
    proof = prove(Waves(6), batch, token_loss, size=2)
    with pytest.raises(BatchError, match="has 6 of 12 tokens"):  # a shorter batch, later
        proof.require_places(12, 2)
    proof.require_places(16, 2)


def test_labels_are_shifted_before_sharding_if_the_loss_shifts_them() -> None:
    pytest.importorskip("transformers")
    from tests import zoo

    assert prove(zoo.llama(), zoo.TOKENS, None, size=2).way == InputSharding(
        gives_positions=True, gives_mask=True, shifts_labels=True, has_target=False
    )
    case = CASES["loss-inside"]
    assert prove(case.build(), case.batch(2), None, size=2).way == InputSharding(
        gives_positions=False, gives_mask=False, shifts_labels=False, has_target=False
    )


def test_a_meta_model_is_proved_on_random_values() -> None:
    with torch.device("meta"):
        model = TinyGPT()
    proof = prove(model, CASES["gpt"].batch(2), token_loss, size=2)
    assert proof.outputs == (1,)  # the logits' tokens
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_proof_leaves_the_model_and_the_random_numbers_as_they_were() -> None:
    model, batch = TinyGPT(), CASES["gpt"].batch(2)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    prove(model, batch, token_loss, size=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_attention_dropout_is_refused_in_training() -> None:
    from engines.context.attention import require_plain

    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(AdvisorError, match=r"drops out weights \(p=0.1\)"):
        require_plain(q, q, attn_mask=None, dropout_p=0.1)


@pytest.mark.parametrize(
    ("plan", "case", "rule"),
    [
        ("cp=4", "gpt", "context-chunks"),
        ("cp=2", "resnet-batch-norm", "context-without-tokens"),
        ("cp=2 pp=2 schedule=gpipe stages=blocks.1", "gpt", "context-in-stages"),
        ("cp=2 compile=true", "gpt", "context-compiled"),
    ],
)
def test_plans_that_cannot_share_sequences_are_refused_by_name(
    plan: str, case: str, rule: str
) -> None:
    subject = CASES[case]
    profile = profile_of(subject, subject.build())
    parsed = Plan.parse(plan)
    assert rule in [p.rule for p in problems(parsed, profile, cpu_ranks(parsed.world_size))]
