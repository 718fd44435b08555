"""Small models with one awkward thing each, their batches, and the CPU ranks they run on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from profiles.capture.batch.call import Batch
from profiles.machine.cluster import ClusterProfile, Device, Link
from profiles.model.profile import ModelProfile
from profiles.provenance import Quantity, Source
from tests.captured import captured


@dataclass(frozen=True)
class Case:
    """A model factory, a maker of global batches and the loss."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None = F.cross_entropy


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of logits (B, T, V) against ids (B, T)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        parts = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, c))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class TinyGPT(nn.Module):
    """Token ids to logits; the head is its own matrix."""

    def __init__(self, *, vocabulary: int = 61, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(16, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class TiedFrozenGPT(TinyGPT):
    """The head is the embedding; positions and the first block are frozen; one layer is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight
        self.position.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        self.never = nn.Linear(8, 8)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.scale


class Residual(nn.Module):
    def __init__(self, channels: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = norm(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        out: Tensor = self.relu(x + self.norm2(self.conv2(y)))
        return out


class TinyResNet(nn.Module):
    """Stem, residual blocks, pooled head; in-place ReLU as in the real one."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1, bias=False), norm(12), nn.ReLU(inplace=True)
        )
        self.layers = nn.Sequential(*(Residual(12, norm) for _ in range(3)))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.pool(self.layers(self.stem(x))).flatten(1))
        return out


class TinyUNet(nn.Module):
    """Down and up again; each level's output skips to its mirror, past the bottom."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.bottom = nn.Conv2d(16, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(32, 8, 2, stride=2)
        self.leave = nn.Conv2d(16, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = self.enter(x).relu()
        low = self.down(high).relu()
        up = self.up(torch.cat([self.bottom(low), low], 1))
        out: Tensor = self.leave(torch.cat([up, high], 1)).mean((2, 3))
        return out


class Siamese(nn.Module):
    """One trunk for both halves of an image, and a table of its own between the units."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(32, 16)
        self.middle = nn.Linear(16, 32)
        self.head = nn.Linear(32, 10)
        self.table = nn.Parameter(torch.randn(16) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.flatten(1).chunk(2, dim=1)
        first = self.trunk(left) + self.table
        second = self.trunk(self.middle(first) + right) * self.table
        out: Tensor = self.head(torch.cat([first, second], 1))
        return out


class Overwriting(nn.Module):
    """Outputs of units are changed in place between units, after others took them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 16)
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(16, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.flatten(1))
        hidden.add_(1.0)
        y = hidden + self.second(hidden)
        hidden = self.third(y)
        hidden.mul_(0.5)
        out: Tensor = self.head(y + hidden)
        return out


class HandedThrough(nn.Module):
    """Units that return their argument itself, or a view of it, which code uses beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.same = nn.Linear(64, 16), nn.Identity()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.halves, self.third = nn.Unflatten(1, (2, 8)), nn.Linear(8, 8)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x.flatten(1))
        x = x + torch.tanh(self.first(self.same(x)))
        x = x + torch.tanh(self.second(self.same(x)))
        halves = self.halves(x)
        x = x + torch.tanh(self.third(halves)).flatten(1)
        out: Tensor = self.head(x)
        return out


class TinyLSTM(nn.Module):
    """A recurrent classifier: no blocks at all."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x)[0][:, -1])
        return out


class Checkpointed(TinyGPT):
    """The author checkpoints two blocks together, and code around each of them."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position[: ids.shape[1]]
        x = checkpoint(self._both, x, use_reentrant=False)
        x = checkpoint(lambda y: y * torch.sigmoid(self.blocks[2](y)), x, use_reentrant=False)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _both(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks[1](torch.tanh(self.blocks[0](x)) * x)
        return out


class Reentrant(TinyGPT):
    """Each block in a checkpoint of the older kind, where modules run without a gradient."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position[: ids.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        logits: Tensor = self.head(self.norm(x))
        return logits


class EarlyFeatures(TinyGPT):
    """The hidden values of the first block are read; those of later ones are made for nothing."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position[: ids.shape[1]]
        first = x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        logits: Tensor = self.head(self.norm(first))
        return logits


class Exits(TinyGPT):
    """A head after the first block too: its logits are in the loss, and nothing else takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Linear(32, 61, bias=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = self.blocks[0](self.embed(ids) + self.position[: ids.shape[1]])
        early = self.early(x)
        for block in self.blocks[1:]:
            x = block(x)
        return early, self.head(self.norm(x))


def _exits_loss(logits: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return 0.3 * token_loss(logits[0], targets) + token_loss(logits[1], targets)


class LossInside(nn.Module):
    """Keyword arguments in, a dict with the loss out, as transformers models do."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = TinyGPT()

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.gpt(input_ids)
        return {"loss": token_loss(logits, labels), "logits": logits}


def _tokens(rows: int) -> Batch:
    ids = torch.randint(0, 61, (rows, 13), generator=torch.Generator().manual_seed(rows))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _keywords(rows: int) -> Batch:
    ids, targets = _tokens(rows)
    return {"input_ids": ids, "labels": targets}


def _images(rows: int) -> Batch:
    generator = torch.Generator().manual_seed(rows)
    return (
        torch.randn(rows, 1, 8, 8, generator=generator),
        torch.randint(0, 10, (rows,), generator=generator),
    )


def _series(rows: int) -> Batch:
    generator = torch.Generator().manual_seed(rows)
    return (
        torch.randn(rows, 7, 6, generator=generator),
        torch.randint(0, 5, (rows,), generator=generator),
    )


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(4, channels)


CASES = {
    "gpt": Case(TinyGPT, _tokens, token_loss),
    "tied-frozen-unused": Case(TiedFrozenGPT, _tokens, token_loss),
    "resnet-batch-norm": Case(partial(TinyResNet, nn.BatchNorm2d), _images),
    "resnet-group-norm": Case(partial(TinyResNet, _group_norm), _images),
    "lstm": Case(TinyLSTM, _series),
    "loss-inside": Case(LossInside, _keywords, None),
}


WIRINGS = {
    "unet": Case(TinyUNet, _images),
    "siamese": Case(Siamese, _images),
    "overwriting": Case(Overwriting, _images),
    "handed-through": Case(HandedThrough, _images),
    "checkpointed": Case(Checkpointed, _tokens, token_loss),
    "reentrant": Case(Reentrant, _tokens, token_loss),
    "early-features": Case(EarlyFeatures, _tokens, token_loss),
    "exits": Case(Exits, _tokens, _exits_loss),
}
"""What is awkward about these is what crosses a cut of them."""


def profile_of(case: Case, model: nn.Module, rows: int = 2) -> ModelProfile:
    """The profile of the case's model; `model` is one that its `build` made."""
    options = {"loss_fn": case.loss_fn, "name": type(model).__name__}
    return captured((case, rows), model, case.batch(rows), **options)


def cpu_ranks(count: int, *, nodes: int = 1) -> ClusterProfile:
    """CPU ranks of one machine, or of several; speeds are not looked at by engines."""

    def assumed(value: float) -> Quantity:
        return Quantity(value=value, source=Source.ASSUMED)

    link = Link(name="loopback", bandwidth_bytes_per_s=assumed(1e9), latency_s=assumed(1e-4))
    return ClusterProfile(
        name=f"{count} CPU ranks",
        num_nodes=nodes,
        devices_per_node=count // nodes,
        device=Device(
            name="CPU",
            kind="cpu",
            memory_bytes=assumed(4 * 2**30),
            memory_bandwidth_bytes_per_s=assumed(1e10),
            flop_per_s={"float32": assumed(1e11)},
            matmul_fraction=assumed(1.0),
            launch_s=assumed(1e-5),
            context_bytes=assumed(3e8),
        ),
        intra=link if count // nodes > 1 else None,
        inter=link if nodes > 1 else None,
    )
