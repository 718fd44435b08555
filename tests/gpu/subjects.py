"""Models of 50 million to 3 billion parameters, built without memory; and their batches.

Plain torch where that is enough, else unmodified classes of transformers by their published shapes,
with random weights; those are left out where transformers is not installed.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from advisor.inputs.bundled import gpt
from advisor.inputs.bundled.resnet import CLASSES, ResNet
from engines.state.materialise import DeferredWeights
from profiles.capture.batch.call import Batch, LossFn
from profiles.capture.capture import capture
from profiles.model.profile import ModelProfile, Numerics
from tests.contract.watch import local
from tests.gpu.setting import LeftOutError

LOOKED_AT = 2  # rows of the profile: batch norms require two

BatchMaker = Callable[[int], Batch]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, its batches, and the rows of a microbatch that keep a large device busy.

    Attributes:
        build: called under the meta device.
        needs: a package.
    """

    build: Callable[[], nn.Module]
    batch: BatchMaker
    rows: int
    loss_fn: LossFn | None = None
    needs: str = ""

    def require(self) -> None:
        """Raises LeftOutError: its package is not installed."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            raise LeftOutError(f"{self.needs} is not installed")

    def module(self) -> nn.Module:
        """Without memory, in training mode."""
        with torch.device("meta"):
            return self.build().train()


def profile_of(name: str) -> ModelProfile:
    """Of a subject, in all numerics; looked at once in a process."""
    return captured(SUBJECTS[name], name)


@functools.cache
def captured(subject: Subject, name: str, *, on_processor: bool = False) -> ModelProfile:
    """Its profile as the device that steps are measured on runs it."""
    subject.require()
    return capture(
        subject.module(),
        subject.batch(LOOKED_AT),
        loss_fn=subject.loss_fn,
        numerics=tuple(Numerics),
        name=name,
        on_processor=on_processor,
    )


def fill(module: nn.Module) -> None:
    """Values of usual size of what a module holds itself; bytes do not depend on them."""
    for parameter in module.parameters(recurse=False):
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
        else:
            nn.init.ones_(parameter)
    for buffer in module.buffers(recurse=False):
        buffer.zero_()


@contextmanager
def filled_in_place() -> Iterator[None]:
    """Inside, what a rank keeps of a model without memory gets values where it lies, at once.

    The engine fills one module at a time in main memory, and takes its part of it: the same values
    for every plan, which nobody asks for here, and minutes for 70 billion of them.
    """

    def filled(weights: DeferredWeights, model: nn.Module, place: object = None) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                part = local(parameter)
                if part.dim() > 1:
                    part.normal_(std=0.02)
                else:
                    part.fill_(1.0)
            for buffer in model.buffers():
                buffer.zero_()

    with mock.patch.object(DeferredWeights, "fill", filled):
        yield


def gpt_of(
    *, layers: int, heads: int, width: int, length: int, vocabulary: int = 50_304
) -> Subject:
    """A bundled GPT; rows so that a microbatch has about 16 thousand tokens."""
    config = gpt.GPTConfig(
        vocab_size=vocabulary, context=length, num_layers=layers, num_heads=heads, width=width
    )
    rows = max(1, 16_384 // length)
    return Subject(lambda: gpt.GPT(config), _pairs(length, vocabulary), rows, gpt.loss)


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ids(rows: int, length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(3, vocabulary, (rows, length), generator=draw(rows))


def _pairs(length: int, vocabulary: int) -> BatchMaker:
    """Ids and the ids that come next."""

    def batch(rows: int) -> Batch:
        tokens = ids(rows, length + 1, vocabulary)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return batch


def labelled(length: int, vocabulary: int) -> BatchMaker:
    def batch(rows: int) -> Batch:
        tokens = ids(rows, length, vocabulary)
        return {"input_ids": tokens, "labels": tokens}

    return batch


def images(pixels: int, *, named: bool = False) -> BatchMaker:
    def batch(rows: int) -> Batch:
        pictures = torch.randn(rows, 3, pixels, pixels, generator=draw(rows))
        labels = torch.randint(CLASSES, (rows,), generator=draw(rows))
        return {"pixel_values": pictures, "labels": labels} if named else (pictures, labels)

    return batch


def _speech(rows: int) -> Batch:
    features = torch.randn(rows, 80, 3000, generator=draw(rows))
    return {"input_features": features, "labels": ids(rows, 256, 50_000)}


def of_transformers(
    kind: str, batch: BatchMaker, rows: int, *, parts: dict[str, dict[str, Any]] | None = None,
    **settings: Any,
) -> Subject:  # fmt: skip
    """The class `kind` of transformers with a config of its own."""

    def build() -> nn.Module:
        import transformers

        model = getattr(transformers, kind)
        built: nn.Module = model(model.config_class(**settings, **(parts or {})))
        return built

    return Subject(build, batch, rows, needs="transformers")


class Recommender(nn.Module):
    """Large embedding tables and a small network: ids (B, fields) to a score (B,)."""

    def __init__(self, fields: int = 26, rows: int = 400_000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(fields))
        sizes = [fields * width, 1024, 1024, 512]
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(sizes))
        )
        self.head = nn.Linear(sizes[-1], 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        looked_up = [table(ids[:, number]) for number, table in enumerate(self.tables)]
        score: torch.Tensor = self.head(self.layers(torch.cat(looked_up, 1))).squeeze(1)
        return score


class WideMlp(nn.Module):
    """One layer that is larger than all others together."""

    def __init__(self, width: int = 4096, wide: int = 65_536) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.large = nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        out: torch.Tensor = self.head(x + self.large(x))
        return out


def _clicks(rows: int) -> Batch:
    ids = torch.randint(400_000, (rows, 26), generator=draw(rows))
    return ids, torch.rand(rows, generator=draw(rows))


def _vectors(rows: int) -> Batch:
    labels = torch.randint(CLASSES, (rows,), generator=draw(rows))
    return torch.randn(rows, 4096, generator=draw(rows)), labels


DECODER = {"bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
SUBJECTS: dict[str, Subject] = {
    "gpt-1.3b": gpt_of(layers=24, heads=16, width=2048, length=2048),
    "Llama 3.2 1B": of_transformers(
        "LlamaForCausalLM", labelled(2048, 128_000), 4, vocab_size=128_256, hidden_size=2048,
        num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=8192, max_position_embeddings=8192, tie_word_embeddings=True, **DECODER,
    ),
    "ResNet-50": Subject(lambda: ResNet(50), images(224), 256, F.cross_entropy),
    "ViT-L/16": of_transformers(
        "ViTForImageClassification", images(224, named=True), 64, hidden_size=1024,
        num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, num_labels=CLASSES,
    ),
    "Mixture of 8 experts": of_transformers(
        "MixtralForCausalLM", labelled(2048, 32_000), 4, vocab_size=32_000, hidden_size=1024,
        num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=8,
        intermediate_size=3584, num_local_experts=8, num_experts_per_tok=2, **DECODER,
    ),
    "gpt-125m": gpt_of(layers=12, heads=12, width=768, length=1024),
    "T5 large": of_transformers(
        "T5ForConditionalGeneration", labelled(512, 32_000), 16, vocab_size=32_128, d_model=1024,
        d_kv=64, d_ff=4096, num_layers=24, num_heads=16, decoder_start_token_id=0, pad_token_id=0,
    ),
    "gpt-2.7b": gpt_of(layers=32, heads=32, width=2560, length=2048),
    "recommender": Subject(
        Recommender, _clicks, 16_384, F.binary_cross_entropy_with_logits
    ),
    "BERT large": of_transformers(
        "BertForMaskedLM", labelled(512, 30_000), 32, vocab_size=30_522, hidden_size=1024,
        num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
    ),
    "one huge layer": Subject(WideMlp, _vectors, 4096, F.cross_entropy),
    "Qwen 3 0.6B": of_transformers(
        "Qwen3ForCausalLM", labelled(2048, 150_000), 4, vocab_size=151_936, hidden_size=1024,
        num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        intermediate_size=3072, tie_word_embeddings=True, **DECODER,
    ),
    "gpt-50m": gpt_of(layers=8, heads=8, width=512, length=1024),
    "GPT-2 XL": of_transformers(
        "GPT2LMHeadModel", labelled(1024, 50_000), 4, vocab_size=50_257, n_embd=1600, n_layer=48,
        n_head=25, n_positions=1024, **DECODER,
    ),
    "Gemma 2 2B": of_transformers(
        "Gemma2ForCausalLM", labelled(2048, 250_000), 2, vocab_size=256_000, hidden_size=2304,
        num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4, head_dim=256,
        intermediate_size=9216, **DECODER,
    ),
    "Whisper medium": of_transformers(
        "WhisperForConditionalGeneration", _speech, 8, d_model=1024, encoder_layers=24,
        decoder_layers=24, encoder_attention_heads=16, decoder_attention_heads=16,
        encoder_ffn_dim=4096, decoder_ffn_dim=4096,
    ),
    "ConvNeXt large": of_transformers(
        "ConvNextForImageClassification", images(224, named=True), 64, depths=[3, 3, 27, 3],
        hidden_sizes=[192, 384, 768, 1536], num_labels=CLASSES,
    ),
    "OPT 1.3B": of_transformers(
        "OPTForCausalLM", labelled(2048, 50_000), 4, vocab_size=50_272, hidden_size=2048,
        num_hidden_layers=24, num_attention_heads=32, ffn_dim=8192, word_embed_proj_dim=2048,
        max_position_embeddings=2048, **DECODER,
    ),
    "ResNet-152": Subject(lambda: ResNet(152), images(224), 128, F.cross_entropy),
    "gpt-350m": gpt_of(layers=24, heads=16, width=1024, length=1024),
    "GPT-NeoX 1.4B": of_transformers(
        "GPTNeoXForCausalLM", labelled(2048, 50_000), 4, vocab_size=50_304, hidden_size=2048,
        num_hidden_layers=24, num_attention_heads=16, intermediate_size=8192,
        max_position_embeddings=2048, **DECODER,
    ),
    "BART large": of_transformers(
        "BartForConditionalGeneration", labelled(512, 50_000), 16, vocab_size=50_265, d_model=1024,
        encoder_layers=12, decoder_layers=12, encoder_attention_heads=16,
        decoder_attention_heads=16, encoder_ffn_dim=4096, decoder_ffn_dim=4096,
    ),
    "Phi 1.5": of_transformers(
        "PhiForCausalLM", labelled(2048, 50_000), 4, vocab_size=51_200, hidden_size=2048,
        num_hidden_layers=24, num_attention_heads=32, intermediate_size=8192,
        max_position_embeddings=2048, **DECODER,
    ),
    "Swin base": of_transformers(
        "SwinForImageClassification", images(224, named=True), 64, embed_dim=128,
        depths=[2, 2, 18, 2], num_heads=[4, 8, 16, 32], num_labels=CLASSES,
    ),
    "Mistral, 16 layers": of_transformers(
        "MistralForCausalLM", labelled(4096, 32_000), 2, vocab_size=32_000, hidden_size=2560,
        num_hidden_layers=16, num_attention_heads=20, num_key_value_heads=4,
        intermediate_size=6912, max_position_embeddings=8192, sliding_window=None, **DECODER,
    ),
}  # fmt: skip
"""Most telling first: of every kind one, then further sizes."""

SMALL: dict[str, Subject] = {
    "gpt, small": gpt_of(layers=2, heads=4, width=64, length=32, vocabulary=256),
}
"""To try the logic."""
