"""Models whose code acts on values, or does what fake tensors cannot follow; one thing each.

All take (features (B, 6, 16), mask (B, 6), ids (B, 6), counts (B,)) and give logits (B, 5). What a
row gives does not depend on the other rows, so that parts of a batch give what the whole does; but
the parts take different paths: only the first rows have a mask, and count to more than one.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from profiles.capture.batch.call import Batch
from tests.engines.cases import Case

WIDTH, LENGTH, CLASSES, IMAGE = 16, 6, 5, 9


def batch(rows: int) -> Batch:
    """The first row is masked in two places and counts to 3, the second to 2, all others to 1."""
    made = torch.Generator().manual_seed(rows)
    mask = torch.zeros(rows, LENGTH, dtype=torch.bool)
    mask[0, 1:3] = True
    ids = torch.randint(0, IMAGE, (rows, LENGTH), generator=made)
    ids[:, 2:4] = IMAGE
    counts = torch.ones(rows, dtype=torch.long)
    counts[0], counts[1 % rows] = 3, 2
    features = torch.randn(rows, LENGTH, WIDTH, generator=made)
    return features, mask, ids, counts, torch.randint(0, CLASSES, (rows,), generator=made)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class Around(nn.Module):
    """Two plain blocks and a head around what a subclass does between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.set_up()
        self.blocks = nn.ModuleList(mlp() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def set_up(self) -> None:
        self.inner = mlp()

    def act(self, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
        x = self.act(self.first(x), mask, ids, counts)
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(x.mean(1))
        return logits


Act = Callable[[Any, Tensor, Tensor, Tensor, Tensor], Tensor]
ACTS: dict[str, type[Around]] = {}


def acting(act: Act, set_up: Callable[[Any], None] | None = None) -> Act:
    """Make a subclass of `Around` that does this, and register it by name."""
    members: dict[str, Any] = {"act": act}
    if set_up is not None:
        members["set_up"] = set_up
    name = act.__name__.replace("_", "-")
    ACTS[name] = type(act.__name__.title().replace("_", ""), (Around,), members)
    return act


def with_(set_up: Callable[[Any], None]) -> Callable[[Act], Act]:
    return functools.partial(acting, set_up=set_up)


def deep(self: Any) -> None:
    self.steps = nn.ModuleList(mlp() for _ in range(3))


def table(self: Any) -> None:
    self.table = nn.Embedding(IMAGE + 1, WIDTH)


# What follows from the batch alone: fake tensors with known values


@acting
def branch_on_a_mask(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    if mask.any():
        x = x + self.inner(x) * mask[..., None]
    return x


@acting
def loop_over_an_item(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    for step in range(int(counts.max().item())):
        x = torch.where(counts[:, None, None] > step, x + self.inner(x), x)
    return x


@with_(deep)
def early_exit(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    for number, step in enumerate(self.steps):
        is_left = counts > number
        if not bool(is_left.any()):
            break
        x = torch.where(is_left[:, None, None], x + step(x), x)
    return x


@acting
def boolean_index(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    changed = x.clone()
    changed[ids == IMAGE] = self.inner(x[ids == IMAGE])
    return changed


@acting
def nonzero_rows(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    rows, places = torch.nonzero(ids == IMAGE, as_tuple=True)
    return x.index_put((rows, places), self.inner(x[rows, places]))


@acting
def one_argument_where(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    places = torch.where(ids.flatten() == IMAGE)[0]
    flat = x.flatten(0, 1)
    return flat.index_add(0, places, self.inner(flat[places])).view_as(x)


@acting
def ragged_list(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    parts = [self.inner(row[:n]) for row, n in zip(x, counts.tolist(), strict=True)]
    return torch.stack([F.pad(part, (0, 0, 0, LENGTH - len(part))) for part in parts])


@acting
def numpy_round_trip(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    lengths = counts.detach().cpu().numpy()[:, None]
    shares = torch.from_numpy((np.arange(LENGTH) < lengths) / lengths).to(x.dtype)
    return x + self.inner(x) * shares[..., None]


@with_(table)
def unique_ids(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    present, places = torch.unique(ids, return_inverse=True)
    return x + self.table(present)[places]


@with_(table)
def merged_tokens(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    is_image = ids == IMAGE
    if int(is_image.sum()) != 2 * len(ids):
        raise ValueError("another number of image tokens than features")
    features = x[:, :2].reshape(-1, WIDTH)
    return self.table(ids).masked_scatter(is_image[..., None], features) + x


@acting
def repeated_by_counts(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    rows = torch.arange(len(x)).repeat_interleave(counts)
    return x.index_add(0, rows, self.inner(x[rows]))


@with_(lambda self: setattr(self, "inner", nn.LSTM(WIDTH, WIDTH, batch_first=True)))
def packed_lengths(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    packed = pack_padded_sequence(x, counts + 1, batch_first=True, enforce_sorted=False)
    out, _ = pad_packed_sequence(self.inner(packed)[0], batch_first=True, total_length=LENGTH)
    return out


def counter(self: Any) -> None:
    self.inner = mlp()
    self.register_buffer("calls", torch.zeros((), dtype=torch.long))


@with_(counter)
def counting_buffer(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    self.calls += 1
    return x + self.inner(x) / (1 if self.calls.item() < 100 else 2)


# What follows from parameters: a run


@acting
def asserted_finite(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    x = x + self.inner(x)
    assert torch.isfinite(x).all()
    return x


@acting
def logged_mean(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    x = x + self.inner(x)
    self.last = f"{x.mean():.3f}"
    return x


def experts(self: Any) -> None:
    self.router = nn.Linear(WIDTH, 3)
    self.experts = nn.ModuleList(mlp() for _ in range(3))


@with_(experts)
def routed_with_capacity(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    weights, choice = self.router(x).softmax(-1).topk(1, -1)
    out = x
    for number, expert in enumerate(self.experts):
        is_sent = choice[..., 0] == number
        is_sent = is_sent & (is_sent.cumsum(1) <= 3)  # the rest of a row's tokens are dropped
        places = is_sent.nonzero(as_tuple=True)
        if len(places[0]):
            out = out.index_put(places, expert(x[places]) * weights[places])
    return out


# Structures


def drops(self: Any) -> None:
    self.steps = nn.ModuleList(mlp() for _ in range(4))


@with_(drops)
def stochastic_depth(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    for step in self.steps:
        if random.random() < 0.5:
            x = x + step(x)
    return x


@with_(drops)
def layer_drop(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    for step in self.steps:
        if torch.rand([]) >= 0.4:
            x = x + step(x)
    return x


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradients[0]


@acting
def custom_function(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    return self.inner(Doubled.apply(x))  # type: ignore[no-untyped-call,no-any-return]


@with_(table)
def sparse_product(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    rows = torch.arange(ids.numel())
    one_hot = torch.sparse_coo_tensor(
        torch.stack([rows, ids.flatten()]), torch.ones(len(rows)), (len(rows), IMAGE + 1)
    )
    return x + torch.sparse.mm(one_hot, self.table.weight).view_as(x)


@with_(lambda self: setattr(self, "filter", nn.Parameter(torch.randn(LENGTH // 2 + 1, WIDTH, 2))))
def spectral_filter(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(x, dim=1) * torch.view_as_complex(self.filter)
    return torch.fft.irfft(spectrum, n=LENGTH, dim=1)


@acting
def vmap_of_grad(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    def energy(row: Tensor) -> Tensor:
        return row.tanh().square().sum()

    return self.inner(x + torch.func.vmap(torch.func.grad(energy))(x))  # type: ignore[no-any-return]


@with_(lambda self: setattr(self, "inner", torch.jit.script(nn.Linear(WIDTH, WIDTH))))
def scripted_part(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    return x + self.inner(x)


@with_(lambda self: setattr(self, "inner", torch.compile(mlp(), backend="eager")))
def compiled_part(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    return x + self.inner(x)


@with_(lambda self: setattr(self, "inner", parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))))
def weight_normed(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    return x + self.inner(x)


@with_(lambda self: setattr(self, "inner", nn.GRU(WIDTH, WIDTH, batch_first=True)))
def recurrent(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    return self.inner(x)[0]  # type: ignore[no-any-return]


@acting
def sampled_grid(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    places = torch.stack([torch.linspace(-1, 1, WIDTH), torch.zeros(WIDTH)], -1)
    grid = places.expand(len(x), LENGTH, WIDTH, 2)
    return self.inner(F.grid_sample(x[:, None], grid, align_corners=False)[:, 0])  # type: ignore[no-any-return]


def locked(self: Any) -> None:
    self.inner, self.lock = mlp(), threading.Lock()  # no deep copy, and not picklable


@with_(locked)
def no_deep_copy(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    with self.lock:
        return x + self.inner(x)


class Delegating(nn.Module):
    """Attributes that it does not have are those of what it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.wrapped = mlp()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("wrapped"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self[2](self[1](self[0](x)))  # type: ignore[no-any-return]

    def __getitem__(self, number: int) -> Any:
        return self.wrapped[number]


@with_(lambda self: setattr(self, "inner", Delegating()))
def delegated_attributes(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    return x + self.inner(x)


@with_(lambda self: setattr(self, "inner", nn.Linear(WIDTH, IMAGE + 2)))
def ctc_alignment(self: Any, x: Tensor, mask: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    scores = self.inner(x).log_softmax(-1).transpose(0, 1)
    lengths = torch.full_like(counts, LENGTH)
    each = F.ctc_loss(scores, ids[:, :3] + 1, lengths, counts, blank=0, reduction="none")
    return x * each.detach()[:, None, None].exp().reciprocal() + x * each[:, None, None]


CASES = {name: Case(kind, batch, F.cross_entropy) for name, kind in ACTS.items()}
