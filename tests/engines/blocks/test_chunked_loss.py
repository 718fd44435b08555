"""Head and loss by chunks of the tokens, beside torch's own from whole logits."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.blocks.chunked_loss import ChunkedLogits, chunk_loss
from engines.blocks.logits import whole_tensors
from engines.plan import Plan
from profiles.errors import ModelError
from tests.contract.watch import LiveBytes

VOCABULARY, TOKENS, WIDTH = 11, 14, 6
WEIGHT = torch.linspace(0.5, 2.0, VOCABULARY)


def shifted(logits: Tensor, target: Tensor) -> Tensor:
    """As transformers' causal models compute it."""
    logits, target = logits[..., :-1, :].float().contiguous(), target[:, 1:]
    return F.cross_entropy(logits.view(-1, VOCABULARY), target.reshape(-1), ignore_index=-100)


def per_item(logits: Tensor, target: Tensor) -> Tensor:
    """As transformers' Trainer has it: a sum over a number that it was given."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / 7.0


def capped(logits: Tensor, target: Tensor) -> Tensor:
    """Gemma's: between two bounds."""
    return nn.CrossEntropyLoss()((torch.tanh(logits / 3.0) * 3.0).flatten(0, 1), target.flatten())


def smoothed(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=0.1)


def weighted(logits: Tensor, target: Tensor) -> Tensor:
    given = {"weight": WEIGHT, "label_smoothing": 0.2, "ignore_index": 3}
    return F.cross_entropy(logits.view(-1, VOCABULARY), target.clamp(min=0).view(-1), **given)


def classes_second(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), target, weight=WEIGHT)


LOSSES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    shifted, per_item, capped, smoothed, weighted, classes_second,
)  # fmt: skip


def parts(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    """Rows, weight and bias that learn, and targets, some of which do not count."""
    torch.manual_seed(0)
    shapes = [(2, TOKENS // 2, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,)]
    target = torch.randint(VOCABULARY, (2, TOKENS // 2))
    target[0, 2:4] = -100
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes], target


@pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("chunks", [2, 5, 100])
def test_loss_and_gradients_are_those_of_whole_logits(
    loss_fn: Callable[[Tensor, Tensor], Tensor], chunks: int
) -> None:
    whole, target = parts()
    wanted = loss_fn(F.linear(*whole), target)
    (2 * wanted).backward()  # type: ignore[no-untyped-call]
    chunked, _ = parts()
    loss = loss_fn(ChunkedLogits.of(*chunked, chunks=chunks), target)
    (2 * loss).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, wanted)
    for got, expected in zip(chunked, whole, strict=True):
        torch.testing.assert_close(got.grad, expected.grad)


def test_only_what_learns_gets_a_gradient() -> None:
    (rows, weight, bias), target = parts()
    weight.requires_grad_(False)
    shifted(ChunkedLogits.of(rows, weight, bias, chunks=4), target).backward()  # type: ignore[no-untyped-call]
    assert weight.grad is None
    assert rows.grad is not None
    assert bias.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_its_dtype_and_sums_in_that_of_the_weight(dtype: torch.dtype) -> None:
    whole, target = parts()
    with torch.autocast("cpu", dtype):
        wanted = F.linear(*whole)
    shifted(wanted, target).backward()  # type: ignore[no-untyped-call]
    chunked, _ = parts()
    with torch.autocast("cpu", dtype):
        logits = ChunkedLogits.of(*chunked, chunks=3)
    assert logits.dtype is wanted.dtype is dtype
    shifted(logits, target).backward()  # type: ignore[no-untyped-call]
    for got, expected in zip(chunked, whole, strict=True):
        assert got.grad is not None
        assert got.grad.dtype is torch.float32
        torch.testing.assert_close(got.grad, expected.grad, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("chunks", [4, 16])
def test_the_memory_of_logits_is_divided_by_the_chunks(chunks: int) -> None:
    vocabulary, tokens, width = 4096, 256, 8
    rows = torch.randn(tokens, width).requires_grad_()
    weight = torch.randn(vocabulary, width).requires_grad_()
    target = torch.randint(vocabulary, (tokens,))

    def peak(make: Callable[[], Tensor]) -> int:
        watched = LiveBytes([rows, weight, target])
        before = watched.now()
        with watched:
            F.cross_entropy(make(), target).backward()  # type: ignore[no-untyped-call]
        rows.grad = weight.grad = None
        return watched.peak_bytes - before

    logits = 4 * tokens * vocabulary
    whole = peak(lambda: F.linear(rows, weight))
    chunked = peak(lambda: ChunkedLogits.of(rows, weight, None, chunks=chunks))
    own = 4 * width * (vocabulary + tokens)  # gradients of weight and rows
    assert whole == pytest.approx(3 * logits, rel=0.01)
    assert chunked - own == pytest.approx(3 * logits / chunks, rel=0.05)


def test_hooks_on_the_logits_see_the_backward_before_the_head() -> None:
    (rows, weight, bias), target = parts()
    order: list[str] = []
    logits = ChunkedLogits.of(rows, weight, bias, chunks=2)
    logits.register_hook(lambda gradient: order.append("logits"))
    rows.register_hook(lambda gradient: order.append("rows"))
    logits.float().flatten(0, 1)
    shifted(logits, target).backward()  # type: ignore[no-untyped-call]
    assert order == ["logits", "rows"]


def test_whoever_reads_whole_logits_for_a_gradient_is_named() -> None:
    given, target = parts()
    logits = ChunkedLogits.of(*given, chunks=2, name="lm_head")
    with pytest.raises(ModelError, match="`logsumexp` reads the whole logits of `lm_head`"):
        logits.logsumexp(-1)
    with pytest.raises(ModelError, match="`cross_entropy` reads"):
        F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    with torch.no_grad():
        assert torch.equal(logits.argmax(-1), F.linear(*given).argmax(-1))
    assert torch.equal(whole_tensors({"logits": logits})["logits"], F.linear(*given))


def test_a_second_backward_is_refused() -> None:
    given, target = parts()
    loss = shifted(ChunkedLogits.of(*given, chunks=2), target)
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_nothing_stays_when_the_loss_is_gone() -> None:
    given, target = parts()
    logits = ChunkedLogits.of(*given, chunks=2)
    loss = shifted(logits, target)
    left = weakref.ref(logits)
    del logits, loss
    assert left() is None


class Cosine(nn.Linear):
    """A head of its own kind."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.normalize(x, dim=-1), F.normalize(self.weight, dim=-1))


@pytest.mark.parametrize("head", [Cosine(WIDTH, VOCABULARY), nn.Bilinear(WIDTH, WIDTH, VOCABULARY)])
def test_a_head_that_is_no_plain_linear_layer_is_refused(head: nn.Module) -> None:
    plan = Plan.parse("microbatch_size=1 loss_chunks=2")
    with pytest.raises(ModelError, match=r"loss_chunks=2 computes the product of an nn\.Linear"):
        chunk_loss(nn.ModuleDict({"head": head}), plan, "head")
