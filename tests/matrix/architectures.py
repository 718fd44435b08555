"""The rows of the matrix: 24 unmodified transformers models and six of plain torch, all tiny.

Random weights, eval mode (no dropout; gradients flow all the same), no caches, four blocks at
least, four heads (two of keys and values where they are grouped), batches of `ROWS` samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.data.loss_rule import LossWeight
from profiles.capture.batch.call import Batch
from profiles.capture.batch.rows import batch_size
from tests import zoo
from tests.engines.cases import token_loss
from tests.matrix import plain

ROWS = 8
"""Four replicas of two microbatches have one row each."""


@dataclass(frozen=True)
class Architecture:
    """One row of the matrix.

    Attributes:
        build: the model in eval mode; random, so set the seed before.
        batch: `ROWS` samples.
        loss_fn: None where the model returns its loss.
        loss_weight: said where rows act on each other: each microbatch trains on its own loss.
    """

    build: Callable[[], nn.Module]
    batch: Batch
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None
    loss_weight: LossWeight | None = None


def _seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def _ids(high: int, *shape: int, seed: int) -> Tensor:
    """Token ids in [3, high): none of the special ones."""
    return torch.randint(3, high, shape, generator=_seeded(seed))


_TEXT = _ids(99, ROWS, 16, seed=1)
TOKENS = {"input_ids": _TEXT, "labels": _TEXT}
_PICTURES = torch.randn(ROWS, 3, 64, 64, generator=_seeded(2))
PIXELS = {"pixel_values": _PICTURES, "labels": _ids(5, ROWS, seed=3)}
SEGMENTS = {"pixel_values": _PICTURES, "labels": _ids(5, ROWS, 64, 64, seed=4)}
SPEECH = {"input_features": torch.randn(ROWS, 8, 64, generator=_seeded(5)), "labels": _TEXT}
PAIRS = {"pixel_values": _PICTURES, "input_ids": _TEXT, "return_loss": True}
IMAGES = torch.randn(ROWS, 1, 16, 16, generator=_seeded(6))
CLASSES = torch.randint(0, plain.CLASSES, (ROWS,), generator=_seeded(7))
PLAIN_TEXT = _ids(plain.VOCABULARY, ROWS, 13, seed=8)
NEXT_TOKENS = (PLAIN_TEXT[:, :-1].contiguous(), PLAIN_TEXT[:, 1:].contiguous())


def _hugging_face(build: Callable[[], nn.Module], batch: Mapping[str, object]) -> Architecture:
    def built() -> nn.Module:
        model = build().eval()
        for module in model.modules():
            config: object = getattr(module, "config", None)
            if hasattr(config, "use_cache"):
                config.use_cache = False
        return model

    return Architecture(built, batch)  # type: ignore[arg-type]


def _zoo(name: str, batch: Mapping[str, object] = TOKENS) -> Architecture:
    build, _ = zoo.ARCHITECTURES[name]
    return _hugging_face(build, batch)


def _plain(
    kind: type[nn.Module],
    batch: Batch,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> Architecture:
    return Architecture(lambda: kind().eval(), batch, loss_fn)


def _phi() -> nn.Module:
    return zoo._built("PhiForCausalLM", zoo.DEEP)


def _segformer() -> nn.Module:
    return zoo._built(
        "SegformerForSemanticSegmentation",
        {"hidden_sizes": [16, 16, 32, 32], "depths": [2] * 4, "num_labels": 5},
        num_attention_heads=[4, 4, 4, 4], decoder_hidden_size=16,
    )  # fmt: skip


def _swin() -> nn.Module:
    return zoo._built(
        "SwinForImageClassification",
        {"image_size": 64, "embed_dim": 16, "depths": [4, 4], "num_labels": 5},
        num_heads=[4, 4], window_size=4,
    )  # fmt: skip


def _resnet() -> nn.Module:
    return zoo._built(
        "ResNetForImageClassification",
        {"embedding_size": 16, "hidden_sizes": [16, 32, 32, 64], "depths": [2] * 4},
        num_labels=5,
    )


ARCHITECTURES: dict[str, Architecture] = {
    "GPT-2": _zoo("GPT-2"),
    "Llama": _zoo("Llama"),
    "Qwen 3": _zoo("Qwen 3"),
    "Mistral": _zoo("Mistral"),
    "Gemma 2": _zoo("Gemma 2"),
    "GPT-NeoX": _zoo("GPT-NeoX"),
    "OPT": _zoo("OPT"),
    "BLOOM": _zoo("BLOOM"),
    "Phi": _hugging_face(_phi, TOKENS),
    "Falcon": _zoo("Falcon"),
    "Mixtral": _zoo("Mixtral"),
    "Mamba 2": _zoo("Mamba 2"),
    "BERT": _zoo("BERT"),
    "RoBERTa": _zoo("RoBERTa"),
    "DistilBERT": _zoo("DistilBERT"),
    "T5": _zoo("T5"),
    "BART": _zoo("BART"),
    "Whisper": _zoo("Whisper", SPEECH),
    "ViT": _zoo("ViT", PIXELS),
    "Swin": _hugging_face(_swin, PIXELS),
    "ConvNeXt": _zoo("ConvNeXt", PIXELS),
    "ResNet": _hugging_face(_resnet, PIXELS),
    "CLIP": replace(_zoo("CLIP", PAIRS), loss_weight=batch_size),
    "SegFormer": _hugging_face(_segformer, SEGMENTS),
    "MLP": _plain(plain.Mlp, (IMAGES, CLASSES)),
    "nn.Transformer": _plain(plain.Translator, (PLAIN_TEXT[:, 1:], *NEXT_TOKENS), token_loss),
    "LSTM": _plain(plain.LstmLanguageModel, NEXT_TOKENS, token_loss),
    "U-Net": _plain(
        plain.UNet, (IMAGES, torch.randint(0, 10, (ROWS, 16, 16), generator=_seeded(9)))
    ),
    "experts": _plain(plain.MixtureOfExperts, NEXT_TOKENS, token_loss),
    "siamese": _plain(plain.SiameseNet, (IMAGES, IMAGES.flip(0), CLASSES)),
}


def _even_vit() -> nn.Module:
    sizes = {**zoo.VISION, "image_size": (24, 40), "num_labels": 5}
    return zoo._built("ViTForImageClassification", sizes)


_WIDE = torch.randn(ROWS, 3, 24, 40, generator=_seeded(10))
OUTSIDE = {"ViT, 16 tokens": _hugging_face(_even_vit, {**PIXELS, "pixel_values": _WIDE})}
"""No rows of the matrix, but trained in the same way by other tests."""


def architecture_of(name: str) -> Architecture:
    """A row of the matrix, or one outside of it."""
    return {**ARCHITECTURES, **OUTSIDE}[name]
