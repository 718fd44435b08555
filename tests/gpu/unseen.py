"""Models of other kinds, which nothing was calibrated on: predicted before they ran."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profiles.capture.batch.call import Batch
from tests.gpu.subjects import DECODER, Subject, draw, ids, images, labelled, of_transformers
from tests.regret.models import UNet

WORDS, PIXELS, SECONDS = 32_000, 256, 10
SAMPLES_PER_S = 16_000


class LstmLm(nn.Module):
    """Ids (B, T) to logits (B, vocabulary, T): a language model of two LSTM layers."""

    def __init__(self, width: int = 1024, hidden: int = 2048) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.lstm = nn.LSTM(width, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.embed(tokens))[0]).transpose(1, 2)
        return out


def _next_words(rows: int) -> Batch:
    tokens = ids(rows, 257, WORDS)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _pixels(rows: int) -> Batch:
    classes = torch.randint(10, (rows, PIXELS, PIXELS), generator=draw(rows))
    return torch.randn(rows, 3, PIXELS, PIXELS, generator=draw(rows)), classes


def _waves(rows: int) -> Batch:
    labels = torch.randint(2, (rows,), generator=draw(rows))
    waves = torch.randn(rows, SECONDS * SAMPLES_PER_S, generator=draw(rows))
    return {"input_values": waves, "labels": labels}


UNSEEN: dict[str, Subject] = {
    "Falcon 1.3B": of_transformers(
        "FalconForCausalLM", labelled(2048, 50_000), 2, vocab_size=50_304, hidden_size=2048,
        num_hidden_layers=24, num_attention_heads=32, multi_query=True, parallel_attn=True,
        bias=False, alibi=False, **DECODER,
    ),
    "DeBERTa v2 large": of_transformers(
        "DebertaV2ForMaskedLM", labelled(512, 30_000), 8, vocab_size=30_528, hidden_size=1024,
        num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        relative_attention=True, position_buckets=256, share_att_key=True,
        norm_rel_ebd="layer_norm", pos_att_type=["p2c", "c2p"], max_relative_positions=-1,
    ),
    "DINOv2 large": of_transformers(
        "Dinov2ForImageClassification", images(224, named=True), 64, hidden_size=1024,
        num_hidden_layers=24, num_attention_heads=16, image_size=224, patch_size=14,
        num_labels=1000,
    ),
    "OLMoE, 32 experts": of_transformers(
        "OlmoeForCausalLM", labelled(2048, 50_000), 4, vocab_size=50_304, hidden_size=1024,
        intermediate_size=512, num_hidden_layers=12, num_attention_heads=16,
        num_key_value_heads=16, num_experts=32, num_experts_per_tok=4, **DECODER,
    ),
    "MobileNet v2": of_transformers(
        "MobileNetV2ForImageClassification", images(224, named=True), 128, num_labels=1000
    ),
    "wav2vec 2.0 large": of_transformers(
        "Wav2Vec2ForSequenceClassification", _waves, 8, hidden_size=1024, num_hidden_layers=24,
        num_attention_heads=16, intermediate_size=4096, feat_extract_norm="layer",
        do_stable_layer_norm=True, apply_spec_augment=False, layerdrop=0.0,
    ),
    "LSTM": Subject(LstmLm, _next_words, 32, F.cross_entropy),
    "U-Net": Subject(lambda: UNet(64), _pixels, 16, F.cross_entropy),
}  # fmt: skip
