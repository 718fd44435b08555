"""Models of the races: their batches by step, and what their users know of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from advisor.inputs.bundled.gpt import GPT, GPTConfig
from advisor.inputs.bundled.gpt import loss as gpt_loss
from profiles.capture.batch.call import Batch

ROWS, LENGTH, VOCABULARY = 16, 64, 512
PIXELS, LABELS = 64, 10
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Subject:
    """A model by its depth, 0.8 M parameters at `depth`, without dropout.

    Attributes:
        block: class of the repeated modules, which users of FSDP name as its units.
        batch: of all ranks, by step.
        loss_fn: None if the model returns its loss.
        has_batch_norms: replicas normalise by their own rows, so that one process trains otherwise.
    """

    build: Callable[[int], nn.Module]
    depth: int
    block: str
    batch: Callable[[int], Batch]
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None
    has_batch_norms: bool = False

    def model(self, depth: int | None = None) -> nn.Module:
        """Build it in training mode, with the same parameters on every rank and every time."""
        torch.manual_seed(0)
        return self.build(depth or self.depth).train()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean loss of a batch."""
        if isinstance(batch, dict):
            out: Tensor = model(**batch).loss
            return out
        inputs, targets = batch
        assert self.loss_fn is not None
        return self.loss_fn(model(inputs), targets)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The repeated modules."""
        return [module for module in model.modules() if type(module).__name__ == self.block]


def share(batch: Batch, rank: int, of: int) -> Batch:
    """Rows of a rank, as contiguous as loaders give them."""

    def rows(tensor: Tensor) -> Tensor:
        size = len(tensor) // of
        return tensor[rank * size : (rank + 1) * size].contiguous()

    if isinstance(batch, dict):
        return {name: rows(tensor) for name, tensor in batch.items()}
    return tuple(rows(tensor) for tensor in batch)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of every script."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


def _ids(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(3, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)


def _next_tokens(step: int) -> Batch:
    ids = _ids(step)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _labelled_tokens(step: int) -> Batch:
    ids = _ids(step)[:, :LENGTH].contiguous()
    return {"input_ids": ids, "labels": ids}


def _images(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return {
        "pixel_values": torch.randn(ROWS, 3, PIXELS, PIXELS, generator=generator),
        "labels": torch.randint(LABELS, (ROWS,), generator=generator),
    }


def _gpt(depth: int) -> nn.Module:
    shape = GPTConfig(
        vocab_size=VOCABULARY, context=LENGTH, num_layers=depth, num_heads=4, width=128
    )
    return GPT(shape)


def _llama(depth: int) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=depth,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=LENGTH,
        use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _t5(depth: int) -> nn.Module:
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=128, d_kv=32, d_ff=384, num_layers=depth, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _resnet(depth: int) -> nn.Module:
    import transformers

    config = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=[32, 48, 64, 128], depths=[depth] * 4, layer_type="basic",
        num_labels=LABELS,
    )  # fmt: skip
    return transformers.ResNetForImageClassification(config)


SUBJECTS = {
    "GPT, tied head": Subject(_gpt, 4, "Block", _next_tokens, gpt_loss),
    "Llama": Subject(_llama, 4, "LlamaDecoderLayer", _labelled_tokens),
    "T5, shared table": Subject(_t5, 2, "T5Block", _labelled_tokens),
    "ResNet": Subject(_resnet, 2, "ResNetBasicLayer", _images, has_batch_norms=True),
}
