"""Ten further programs: predicted when the first fifteen had been measured and learned from."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profiles.capture.batch.call import Batch
from tests.gpu.programs import classes, normal, pictures
from tests.gpu.subjects import Subject, draw, ids

WORDS = 8192


class Rotary(nn.Module):
    """A decoder of today: root-mean-square norms, rotary positions, gated MLPs; ids to logits."""

    def __init__(self, width: int = 512, depth: int = 6, heads: int = 8, length: int = 512) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(WORDS, width)
        inner = 4 * width * 2 // 3
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.RMSNorm(width),
                    "qkv": nn.Linear(width, 3 * width, bias=False),
                    "out": nn.Linear(width, width, bias=False),
                    "norm2": nn.RMSNorm(width),
                    "gate": nn.Linear(width, inner, bias=False),
                    "up": nn.Linear(width, inner, bias=False),
                    "down": nn.Linear(inner, width, bias=False),
                }
            )
            for _ in range(depth)
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        half = width // heads // 2
        angles = torch.outer(
            torch.arange(length).float(), 1e4 ** (-torch.arange(half).float() / half)
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def turn(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)  # type: ignore[operator]
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            parts: nn.ModuleDict = block  # type: ignore[assignment]
            q, k, v = (
                part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for part in parts["qkv"](parts["norm1"](x)).chunk(3, -1)
            )
            mixed = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True)
            x = x + parts["out"](mixed.transpose(1, 2).flatten(2))
            y = parts["norm2"](x)
            x = x + parts["down"](F.silu(parts["gate"](y)) * parts["up"](y))
        out: Tensor = self.head(self.norm(x)).transpose(1, 2)
        return out


def vgg11() -> nn.Module:
    layers: list[nn.Module] = []
    before = 3
    for width in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if not width:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(True)]
        before = width
    head = [nn.Linear(512 * 16, 1024), nn.ReLU(True), nn.Dropout(), nn.Linear(1024, 100)]
    return nn.Sequential(*layers, nn.Flatten(), *head)


class Dense(nn.Module):
    """Layers that take all maps before them: pictures (B, 3, 64, 64) to logits (B, 100)."""

    def __init__(self, growth: int = 24) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 48, 3, padding=1, bias=False)
        self.layers, self.between, width = nn.ModuleList(), nn.ModuleList(), 48
        for _ in range(3):
            for _ in range(8):
                self.layers.append(
                    nn.Sequential(
                        nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 96, 1, bias=False),
                        nn.BatchNorm2d(96), nn.ReLU(),
                        nn.Conv2d(96, growth, 3, padding=1, bias=False),
                    )
                )  # fmt: skip
                width += growth
            self.between.append(
                nn.Sequential(nn.BatchNorm2d(width), nn.Conv2d(width, width // 2, 1, bias=False))
            )
            width //= 2
        self.head = nn.Linear(width, 100)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for number, layer in enumerate(self.layers):
            x = torch.cat([x, layer(x)], 1)
            if number % 8 == 7:
                x = F.avg_pool2d(self.between[number // 8](x), 2)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class Attending(nn.Module):
    """An LSTM that reads, one that writes and looks back: ids of both to logits (B, words, T)."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, width), nn.Embedding(WORDS, width)
        self.reader = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.writer = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.mix = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        seen, state = self.reader(self.source(source))
        said, _ = self.writer(self.target(target), state)
        weights = torch.softmax(said @ seen.transpose(1, 2) / said.shape[-1] ** 0.5, -1)
        x = torch.tanh(self.mix(torch.cat([said, weights @ seen], -1)))
        out: Tensor = self.head(x).transpose(1, 2)
        return out


class Gated(nn.Module):
    """Sound (B, 1, T) to logits (B, 256, T), by dilated convolutions with gates."""

    def __init__(self, width: int = 128, depth: int = 12) -> None:
        super().__init__()
        self.enter = nn.Conv1d(1, width, 1)
        self.both = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 3, padding=2**k, dilation=2**k)
            for k in (n % 6 for n in range(depth))
        )
        self.out = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(depth))
        self.head = nn.Sequential(
            nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, 256, 1)
        )

    def forward(self, sound: Tensor) -> Tensor:
        x = self.enter(sound)
        skipped = torch.zeros_like(x)
        for both, out in zip(self.both, self.out, strict=True):
            value, gate = both(x).chunk(2, 1)
            more, skip = out(torch.tanh(value) * torch.sigmoid(gate)).chunk(2, 1)
            x, skipped = x + more, skipped + skip
        logits: Tensor = self.head(skipped)
        return logits


class Sharper(nn.Module):
    """Pictures (B, 3, 48, 48) to (B, 3, 96, 96), without norms."""

    def __init__(self, width: int = 64, depth: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1),
            )
            for _ in range(depth)
        )  # fmt: skip
        self.up = nn.Sequential(
            nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2),
            nn.Conv2d(width, 3, 3, padding=1),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        first = x = self.stem(images)
        for block in self.body:
            x = x + 0.1 * block(x)
        out: Tensor = self.up(x + first)
        return out


class Reader(nn.Module):
    """Padded ids (B, T) to a class (B, 4), by torch's encoder with a mask of padding."""

    def __init__(self, width: int = 256, depth: int = 4, length: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width, padding_idx=0)
        self.places = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 1024, 0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 4)

    def forward(self, words: Tensor) -> Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        x = self.embed(words) + self.places(places)
        x = self.layers(x, src_key_padding_mask=words == 0)
        out: Tensor = self.head(x[:, 0])
        return out


class Crossing(nn.Module):
    """Ids (B, fields) and numbers (B, 13) to a score (B,), by products of all pairs of fields."""

    def __init__(self, fields: int = 20, rows: int = 20_000, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(fields))
        self.bottom = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
        pairs = (fields + 1) * fields // 2
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(),
            nn.Linear(256, 1),
        )  # fmt: skip
        self.register_buffer("pairs", torch.triu_indices(fields + 1, fields + 1, 1))

    def forward(self, rows: Tensor, numbers: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        looked_up = [table(rows[:, n]) for n, table in enumerate(self.tables)]
        both = torch.stack([dense, *looked_up], 1)
        products = torch.bmm(both, both.transpose(1, 2))
        first, second = self.pairs  # type: ignore[misc]
        score: Tensor = self.top(torch.cat([dense, products[:, first, second]], 1)).squeeze(1)
        return score


class Windows(nn.Module):
    """Attention in windows of 8 x 8 patches, shifted every second time: pictures to (B, 100)."""

    def __init__(self, width: int = 256, depth: int = 6, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.bias = nn.Parameter(torch.zeros(depth, heads, 64, 64))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 100)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).permute(0, 2, 3, 1)
        rows, height, across, width = x.shape
        for n in range(len(self.qkv)):
            y = self.norms[2 * n](x)
            y = y.roll((-4, -4), (1, 2)) if n % 2 else y
            y = y.view(rows, height // 8, 8, across // 8, 8, width).transpose(2, 3)
            q, k, v = (
                part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for part in self.qkv[n](y.reshape(-1, 64, width)).chunk(3, -1)
            )
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias[n].to(q.dtype))
            y = self.out[n](y.transpose(1, 2).flatten(2))
            y = y.view(rows, height // 8, across // 8, 8, 8, width).transpose(2, 3)
            y = y.reshape(rows, height, across, width)
            x = x + (y.roll((4, 4), (1, 2)) if n % 2 else y)
            x = x + self.mlp[n](self.norms[2 * n + 1](x))
        out: Tensor = self.head(x.mean((1, 2)))
        return out


class Variational(nn.Module):
    """Vectors (B, 784) to what they are made of again, by 32 numbers with noise."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Linear(784, 1024), nn.ELU(), nn.Linear(1024, 512), nn.ELU(), nn.Linear(512, 64)
        )
        self.up = nn.Sequential(
            nn.Linear(32, 512), nn.ELU(), nn.Linear(512, 1024), nn.ELU(), nn.Linear(1024, 784)
        )

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.down(x).chunk(2, -1)
        out: Tensor = self.up(mean + torch.randn_like(spread) * torch.exp(0.5 * spread))
        return out


def _words(length: int) -> object:
    def batch(rows: int) -> Batch:
        tokens = ids(rows, length + 1, WORDS)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return batch


def _sentences(rows: int) -> Batch:
    target = ids(rows, 65, WORDS)
    source = ids(rows + 1, 80, WORDS)[1:].contiguous()
    return source, target[:, :-1].contiguous(), target[:, 1:].contiguous()


def _padded(rows: int) -> Batch:
    words = ids(rows, 128, WORDS)
    words[:, 100:] = 0
    return words, torch.randint(4, (rows,), generator=draw(rows))


def _clicks(rows: int) -> Batch:
    generator = draw(rows)
    return (
        torch.randint(20_000, (rows, 20), generator=generator),
        torch.randn(rows, 13, generator=generator),
        torch.rand(rows, generator=generator),
    )


MORE_PROGRAMS: dict[str, Subject] = {
    "rotary decoder": Subject(Rotary, _words(512), 16, F.cross_entropy),  # type: ignore[arg-type]
    "VGG-11": Subject(vgg11, pictures(128, 100), 64, F.cross_entropy),
    "dense layers": Subject(Dense, pictures(64, 100), 64, F.cross_entropy),
    "LSTMs with attention": Subject(Attending, _sentences, 64, F.cross_entropy),
    "gated sound": Subject(Gated, classes((1, 4096), (4096,), 256), 16, F.cross_entropy),
    "sharper pictures": Subject(Sharper, normal((3, 48, 48), (3, 96, 96)), 32, F.l1_loss),
    "padded reader": Subject(Reader, _padded, 128, F.cross_entropy),
    "crossed fields": Subject(Crossing, _clicks, 4096, F.binary_cross_entropy_with_logits),
    "windows": Subject(Windows, pictures(128, 100), 64, F.cross_entropy),
    "variational": Subject(Variational, normal((784,), (784,)), 1024, F.mse_loss),
}
