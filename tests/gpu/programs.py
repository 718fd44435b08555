"""Programs of 1 to 60 million parameters, as people write them: predicted before they ran.

Nothing was calibrated on any. Most keep a large device busy for milliseconds, so that launches, the
optimizer's kernels and elementwise ones are more of a step than in the models of `subjects`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from profiles.capture.batch.call import Batch
from tests.gpu.subjects import BatchMaker, Subject, draw, gpt_of, ids

WORDS = 8192


class SmallViT(nn.Module):
    """Pictures (B, 3, 32, 32) to logits (B, 10), by torch's own encoder layers."""

    def __init__(self, width: int = 192, depth: int = 7) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.places = nn.Parameter(torch.zeros(1, 64, width))
        layer = nn.TransformerEncoderLayer(
            width, 6, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.patches(pictures).flatten(2).transpose(1, 2) + self.places
        out: Tensor = self.head(self.layers(x).mean(1))
        return out


class BasicBlock(nn.Module):
    """Two 3x3 convolutions about a way past them."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.past: nn.Module = nn.Identity()
        if stride != 1 or before != width:
            self.past = nn.Sequential(
                nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.past(x))


def resnet18() -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    width = 64
    for wide, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [BasicBlock(width, wide, stride), BasicBlock(wide, wide, 1)]
        width = wide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


class Squeezed(nn.Module):
    """An inverted bottleneck: depthwise, with a gate over its channels."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        inner = 4 * before
        self.body = nn.Sequential(
            nn.Conv2d(before, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.SiLU(),
            nn.Conv2d(inner, inner, 5, stride, 2, groups=inner, bias=False),
            nn.BatchNorm2d(inner), nn.SiLU(),
        )  # fmt: skip
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(inner, before // 2, 1), nn.SiLU(),
            nn.Conv2d(before // 2, inner, 1), nn.Sigmoid(),
        )  # fmt: skip
        self.leave = nn.Sequential(nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width))
        self.is_past = before == width and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        out = self.leave(out * self.gate(out))
        return x + out if self.is_past else out


def efficient() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.SiLU()]
    width = 32
    for wide, depth, stride in ((24, 2, 2), (48, 3, 2), (96, 4, 2), (160, 4, 2), (224, 2, 1)):
        for number in range(depth):
            layers.append(Squeezed(width, wide, stride if number == 0 else 1))
            width = wide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(224, 1000))


class GruTagger(nn.Module):
    """Ids (B, T) to logits (B, tags, T), by two layers that read both ways."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.gru = nn.GRU(
            width, width, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2
        )
        self.head = nn.Linear(2 * width, 50)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.head(self.gru(self.embed(words))[0]).transpose(1, 2)
        return out


class CellLoop(nn.Module):
    """Series (B, T, features) to a value (B,): a cell of LSTM called for every time."""

    def __init__(self, features: int = 32, width: int = 512) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(features, width)
        self.head = nn.Linear(width, 1)

    def forward(self, series: Tensor) -> Tensor:
        h = c = series.new_zeros(series.shape[0], self.cell.hidden_size)
        for x in series.unbind(1):
            h, c = self.cell(x, (h, c))
        out: Tensor = self.head(h).squeeze(1)
        return out


class Dilated(nn.Module):
    """A residual pair of causal convolutions of normed weights."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.pad = 2 * dilation
        self.one = weight_norm(nn.Conv1d(width, width, 3, dilation=dilation))
        self.two = weight_norm(nn.Conv1d(width, width, 3, dilation=dilation))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.drop(F.relu(self.one(F.pad(x, (self.pad, 0)))))
        out = self.drop(F.relu(self.two(F.pad(out, (self.pad, 0)))))
        return F.relu(x + out)


def tcn() -> nn.Module:
    blocks = [Dilated(256, 2**n) for n in range(8)]
    return nn.Sequential(nn.Conv1d(16, 256, 1), *blocks, nn.Conv1d(256, 1, 1), nn.Flatten())


class Translator(nn.Module):
    """Ids of two languages to logits (B, vocabulary, T), by `torch.nn.Transformer`."""

    def __init__(self, width: int = 512, length: int = 128) -> None:
        super().__init__()
        self.source = nn.Embedding(WORDS, width)
        self.target = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(torch.zeros(1, length, width))
        self.transformer = nn.Transformer(width, 8, batch_first=True)
        self.head = nn.Linear(width, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        length = target.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=target.device)
        x = self.source(source) + self.places[:, : source.shape[1]]
        y = self.target(target) + self.places[:, :length]
        out: Tensor = self.head(self.transformer(x, y, tgt_mask=mask, tgt_is_causal=True))
        return out.transpose(1, 2)


class Mixer(nn.Module):
    """MLPs over patches and over channels in turn: pictures (B, 3, 224, 224) to (B, 1000)."""

    def __init__(self, width: int = 512, depth: int = 8, patches: int = 196) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 16, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.across = nn.ModuleList(
            nn.Sequential(nn.Linear(patches, 256), nn.GELU(), nn.Linear(256, patches))
            for _ in range(depth)
        )
        self.along = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 1000)

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.stem(pictures).flatten(2).transpose(1, 2)
        for number, (across, along) in enumerate(zip(self.across, self.along, strict=True)):
            x = x + across(self.norms[2 * number](x).transpose(1, 2)).transpose(1, 2)
            x = x + along(self.norms[2 * number + 1](x))
        out: Tensor = self.head(x.mean(1))
        return out


def autoencoder() -> nn.Module:
    layers: list[nn.Module] = []
    for before, width in ((3, 64), (64, 128), (128, 256), (256, 512)):
        layers += [nn.Conv2d(before, width, 4, 2, 1), nn.BatchNorm2d(width), nn.LeakyReLU(0.2)]
    for before, width in ((512, 256), (256, 128), (128, 64)):
        layers += [nn.ConvTranspose2d(before, width, 4, 2, 1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Sigmoid())


class Volumes(nn.Module):
    """Scans (B, 1, D, D, D) to logits (B, 4, D, D, D): a small U-Net of three dimensions."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()

        def pair(before: int, after: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv3d(before, after, 3, padding=1), nn.InstanceNorm3d(after, affine=True),
                nn.LeakyReLU(), nn.Conv3d(after, after, 3, padding=1),
                nn.InstanceNorm3d(after, affine=True), nn.LeakyReLU(),
            )  # fmt: skip

        self.down = nn.ModuleList(
            [pair(1, width), pair(width, 2 * width), pair(2 * width, 4 * width)]
        )
        self.up = nn.ModuleList([pair(6 * width, 2 * width), pair(3 * width, width)])
        self.head = nn.Conv3d(width, 4, 1)

    def forward(self, scans: Tensor) -> Tensor:
        one = self.down[0](scans)
        two = self.down[1](F.max_pool3d(one, 2))
        x = self.down[2](F.max_pool3d(two, 2))
        x = self.up[0](torch.cat([F.interpolate(x, scale_factor=2.0), two], 1))
        x = self.up[1](torch.cat([F.interpolate(x, scale_factor=2.0), one], 1))
        out: Tensor = self.head(x)
        return out


def tabular() -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(200, 1024)]
    for _ in range(6):
        layers += [nn.BatchNorm1d(1024), nn.ReLU(), nn.Dropout(0.2), nn.Linear(1024, 1024)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(1024, 2))


class Points(nn.Module):
    """Clouds (B, 3, N) to logits (B, 40): the same MLP for each point, and a maximum."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, width in ((3, 64), (64, 128), (128, 1024)):
            layers += [nn.Conv1d(before, width, 1), nn.BatchNorm1d(width), nn.ReLU()]
        self.points = nn.Sequential(*layers)
        self.head = nn.Sequential(
            nn.Linear(1024, 512), nn.ReLU(), nn.Dropout(0.3), nn.Linear(512, 40)
        )

    def forward(self, clouds: Tensor) -> Tensor:
        out: Tensor = self.head(self.points(clouds).max(2).values)
        return out


class GraphLayers(nn.Module):
    """Nodes (B, N, features) and weights of edges (B, N, N) to a value (B,)."""

    def __init__(self, width: int = 256, depth: int = 6) -> None:
        super().__init__()
        self.enter = nn.Linear(32, width)
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.others = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = self.enter(nodes)
        edges = edges / edges.sum(-1, keepdim=True)
        for own, others, norm in zip(self.own, self.others, self.norms, strict=True):
            heard = torch.einsum("bij,bjf->bif", edges, others(x))
            x = norm(x + F.gelu(own(x) + heard))
        out: Tensor = self.head(x.sum(1)).squeeze(1)
        return out


class Denoiser(nn.Module):
    """Noisy pictures (B, 3, 64, 64) to their noise: group norms, SiLU, attention in the middle."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()

        def block(before: int, after: int) -> nn.Sequential:
            return nn.Sequential(
                nn.GroupNorm(min(32, before), before), nn.SiLU(),
                nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(32, after), nn.SiLU(),
                nn.Conv2d(after, after, 3, padding=1),
            )  # fmt: skip

        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.one, self.two = block(width, width), block(width, 2 * width)
        self.norm = nn.GroupNorm(32, 2 * width)
        self.attention = nn.MultiheadAttention(2 * width, 4, batch_first=True)
        self.three, self.four = block(2 * width, 2 * width), block(3 * width, width)
        self.head = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, pictures: Tensor) -> Tensor:
        first = self.one(self.stem(pictures))
        x = self.two(F.avg_pool2d(first, 2))
        x = F.avg_pool2d(x, 2)
        seen = self.norm(x).flatten(2).transpose(1, 2)
        seen = self.attention(seen, seen, seen, need_weights=False)[0]
        x = self.three(x + seen.transpose(1, 2).unflatten(2, x.shape[2:]))
        x = F.interpolate(x, scale_factor=4.0)
        out: Tensor = self.head(self.four(torch.cat([x, first], 1)))
        return out


def pictures(pixels: int, classes: int) -> BatchMaker:
    def batch(rows: int) -> Batch:
        labels = torch.randint(classes, (rows,), generator=draw(rows))
        return torch.randn(rows, 3, pixels, pixels, generator=draw(rows)), labels

    return batch


def normal(shape: tuple[int, ...], target: tuple[int, ...]) -> BatchMaker:
    """Values and targets of these shapes a row."""

    def batch(rows: int) -> Batch:
        generator = draw(rows)
        return (
            torch.randn(rows, *shape, generator=generator),
            torch.rand(rows, *target, generator=generator),
        )

    return batch


def classes(shape: tuple[int, ...], labelled: tuple[int, ...], classes: int) -> BatchMaker:
    """Values, and classes of this shape a row."""

    def batch(rows: int) -> Batch:
        generator = draw(rows)
        values = torch.randn(rows, *shape, generator=generator)
        return values, torch.randint(classes, (rows, *labelled), generator=generator)

    return batch


def _tags(rows: int) -> Batch:
    return ids(rows, 128, WORDS), torch.randint(50, (rows, 128), generator=draw(rows))


def _sentences(rows: int) -> Batch:
    target = ids(rows, 129, WORDS)
    source = ids(rows + 1, 128, WORDS)[1:].contiguous()
    return source, target[:, :-1].contiguous(), target[:, 1:].contiguous()


def _graphs(rows: int) -> Batch:
    generator = draw(rows)
    nodes = torch.randn(rows, 100, 32, generator=generator)
    edges = torch.rand(rows, 100, 100, generator=generator)
    return nodes, edges, torch.randn(rows, generator=generator)


PROGRAMS: dict[str, Subject] = {
    "ViT, 3 M": Subject(SmallViT, pictures(32, 10), 256, F.cross_entropy),
    "ResNet-18": Subject(resnet18, pictures(224, 1000), 128, F.cross_entropy),
    "inverted bottlenecks": Subject(efficient, pictures(224, 1000), 64, F.cross_entropy),
    "letters, GPT of 11 M": gpt_of(layers=6, heads=6, width=384, length=256, vocabulary=128),
    "GRU tagger": Subject(GruTagger, _tags, 64, F.cross_entropy),
    "cell in a loop": Subject(CellLoop, normal((64, 32), ()), 256, F.mse_loss),
    "temporal convolutions": Subject(tcn, normal((16, 1024), (1024,)), 32, F.mse_loss),
    "translator": Subject(Translator, _sentences, 32, F.cross_entropy),
    "MLP-Mixer": Subject(Mixer, pictures(224, 1000), 64, F.cross_entropy),
    "autoencoder": Subject(autoencoder, normal((3, 128, 128), (3, 128, 128)), 64, F.mse_loss),
    "scans, 3-d U-Net": Subject(Volumes, classes((1, 64, 64, 64), (64, 64, 64), 4), 4,
                                F.cross_entropy),
    "tables, MLP": Subject(tabular, classes((200,), (), 2), 4096, F.cross_entropy),
    "point clouds": Subject(Points, classes((3, 2048), (), 40), 32, F.cross_entropy),
    "graphs": Subject(GraphLayers, _graphs, 64, F.mse_loss),
    "denoiser": Subject(Denoiser, normal((3, 64, 64), (3, 64, 64)), 32, F.mse_loss),
}  # fmt: skip
