"""Models of usual kinds at sizes that two shared cores train in tenths of a second.

Random weights, no dropout. Four are unmodified classes of transformers, which is imported when one
of them is built.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from advisor.inputs.bundled.gpt import GPT, GPTConfig, loss
from profiles.capture.batch.call import Batch
from tests.engines.cases import Case

VOCABULARY = 256
CLASSES = 10


def _seeded(rows: int) -> torch.Generator:
    return torch.Generator().manual_seed(rows)


def _ids(high: int, *shape: int) -> Tensor:
    """Ids in [3, high): none of the special ones."""
    return torch.randint(3, high, shape, generator=_seeded(shape[0]))


def _next_tokens(length: int) -> Callable[[int], Batch]:
    def batch(rows: int) -> Batch:
        ids = _ids(VOCABULARY, rows, length + 1)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return batch


def _gpt(*, layers: int, width: int, length: int) -> Case:
    config = GPTConfig(
        vocab_size=VOCABULARY, context=length, num_layers=layers, num_heads=4, width=width
    )
    return Case(lambda: GPT(config), _next_tokens(length), loss)


def _hugging_face(name: str, **settings: object) -> nn.Module:
    import transformers

    kind = getattr(transformers, name)
    model: nn.Module = kind(kind.config_class(**settings)).train()
    return model


def _labelled_ids(length: int) -> Callable[[int], Batch]:
    def batch(rows: int) -> Batch:
        ids = _ids(VOCABULARY, rows, length)
        return {"input_ids": ids, "labels": ids}

    return batch


def _labelled_images(size: int) -> Callable[[int], Batch]:
    def batch(rows: int) -> Batch:
        images = torch.randn(rows, 3, size, size, generator=_seeded(rows))
        return {"pixel_values": images, "labels": _ids(CLASSES, rows)}

    return batch


def _t5() -> nn.Module:
    return _hugging_face(
        "T5ForConditionalGeneration", vocab_size=VOCABULARY, d_model=192, d_kv=48, d_ff=768,
        num_layers=4, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0,
        use_cache=False,
    )  # fmt: skip


def _vit() -> nn.Module:
    return _hugging_face(
        "ViTForImageClassification", hidden_size=192, num_hidden_layers=6, num_attention_heads=4,
        intermediate_size=768, image_size=64, patch_size=8, num_labels=CLASSES,
    )  # fmt: skip


def _resnet() -> nn.Module:
    """Depths of ResNet-50, at a quarter of its widths."""
    return _hugging_face(
        "ResNetForImageClassification", embedding_size=16, hidden_sizes=[64, 128, 256, 512],
        depths=[3, 4, 6, 3], layer_type="bottleneck", num_labels=CLASSES,
    )  # fmt: skip


def _mixtral() -> nn.Module:
    return _hugging_face(
        "MixtralForCausalLM", vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        use_cache=False,
    )  # fmt: skip


def _convolutions(taken: int, given: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(taken, given, 3, padding=1, bias=False),
        nn.GroupNorm(8, given),
        nn.ReLU(inplace=True),
        nn.Conv2d(given, given, 3, padding=1),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Images (B, 3, H, W) to a class of every pixel; each level skips over those below it.

    Ronneberger et al., arXiv:1505.04597, with padding, three levels and widths of 24 and up.
    """

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(
            _convolutions(*pair) for pair in zip([3, *widths], widths, strict=False)
        )
        self.bottom = _convolutions(widths[-1], 8 * width)
        self.widen = nn.ModuleList(
            nn.ConvTranspose2d(2 * own, own, 2, stride=2) for own in reversed(widths)
        )
        self.up = nn.ModuleList(_convolutions(2 * own, own) for own in reversed(widths))
        self.leave = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for level in self.down:
            x = level(x)
            skipped.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for widen, level in zip(self.widen, self.up, strict=True):
            x = level(torch.cat([widen(x), skipped.pop()], 1))
        out: Tensor = self.leave(x)
        return out


def _labelled_pixels(rows: int) -> Batch:
    images = torch.randn(rows, 3, 32, 32, generator=_seeded(rows))
    return images, _ids(CLASSES, rows, 32, 32)


class Mlp(nn.Module):
    """One residual block after another; `inner` are their hidden widths."""

    def __init__(self, inner: tuple[int, ...], width: int = 256) -> None:
        super().__init__()
        self.enter = nn.Linear(64, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, own), nn.GELU(), nn.Linear(own, width)) for own in inner
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


def _vectors(rows: int) -> Batch:
    return torch.randn(rows, 64, generator=_seeded(rows)), _ids(CLASSES, rows)


class Recommender(nn.Module):
    """DLRM (arXiv:1906.00091): tables of categories and an MLP of numbers, their products, an MLP.

    Takes numbers (B, 13) and ids (B, tables), gives a logit (B,).
    """

    def __init__(self, tables: int = 8, rows: int = 16_000, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.numbers = nn.Sequential(
            nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, width), nn.ReLU()
        )
        pairs = tables * (tables + 1) // 2
        self.click = nn.Sequential(
            nn.Linear(width + pairs, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(),
            nn.Linear(128, 1),
        )  # fmt: skip
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        dense = self.numbers(numbers)
        rows = [dense, *(table(ids[:, n]) for n, table in enumerate(self.tables))]
        features = torch.stack(rows, 1)  # B, tables + 1, width
        products = features @ features.transpose(1, 2)
        first, second = self.pairs
        logits: Tensor = self.click(torch.cat([dense, products[:, first, second]], 1)).squeeze(1)
        return logits


def _clicks(rows: int) -> Batch:
    numbers = torch.randn(rows, 13, generator=_seeded(rows))
    return numbers, _ids(16_000, rows, 8), (numbers[:, 0] > 0).float()


MODELS = {
    "gpt-small": _gpt(layers=4, width=128, length=64),
    "gpt-large": _gpt(layers=8, width=256, length=64),
    "t5": Case(_t5, _labelled_ids(32), None),
    "moe": Case(_mixtral, _labelled_ids(32), None),
    "vit": Case(_vit, _labelled_images(64), None),
    "resnet": Case(_resnet, _labelled_images(64), None),
    "unet": Case(UNet, _labelled_pixels),
    "huge-layer": Case(lambda: Mlp((512, 512, 8192, 512, 512)), _vectors),
    "recommender": Case(Recommender, _clicks, F.binary_cross_entropy_with_logits),
}


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)
