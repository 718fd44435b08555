"""A copy of a model with random numbers, and a short sample for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engines.context.input_sharding import IGNORED, has_tokens, length_of
from profiles.capture.batch.call import Batch
from profiles.capture.batch.rows import batch_size, split_rows
from profiles.capture.batch.tree import map_batch
from profiles.torch_compat.module_copy import copy_module

SEED = 20
LARGE = 2**26  # parameters from which on layers of the copy share their numbers
CHUNK = 2  # tokens of a chunk in the short sequence


def short(sample: Batch, size: int) -> Batch:
    """A row or two of few tokens, on the CPU; values where the sample has none."""
    generator = torch.Generator().manual_seed(SEED)
    length = length_of(sample)
    rows = batch_size(sample)
    tokens = min(length, 2 * size * CHUNK)
    few = split_rows(sample, [min(rows, 2), rows - min(rows, 2)])[0]

    def made(tensor: Tensor) -> Tensor:
        short = tensor[:, :tokens].contiguous() if has_tokens(tensor, length) else tensor
        if short.is_meta:
            if short.is_floating_point():
                return torch.randn(short.shape, generator=generator)
            return torch.randint(0, 2, short.shape, generator=generator).to(short.dtype)
        short = short.detach().cpu()
        if short.is_floating_point():
            return short.float()
        is_constant = bool((short == short.reshape(-1)[:1]).all())
        if short.dtype is torch.bool or not is_constant or bool((short == 1).all()):
            return short  # ones may be a mask
        # Of equal tokens a mean is what each of them is, and without labels there is no loss.
        number = int(short.reshape(-1)[0])
        known = [0, number if number not in (0, IGNORED) else 1]
        drawn = torch.randint(0, len(known), short.shape, generator=generator)
        return torch.tensor(known, dtype=short.dtype)[drawn]

    return map_batch(made, few)


def copied(model: nn.Module) -> nn.Module:
    """The model with random numbers, in float32 on the CPU, in eval mode; buffers of zeros too."""
    generator = torch.Generator().manual_seed(SEED)
    is_large = sum(parameter.numel() for parameter in model.parameters()) > LARGE
    made: dict[torch.Size, Tensor] = {}

    def values(shape: torch.Size) -> Tensor:
        if is_large and shape in made:
            return made[shape]
        noise = torch.randn(shape, generator=generator)
        made[shape] = noise / shape[1:].numel() ** 0.5 if len(shape) > 1 else 0.5 + 0.5 * noise
        return made[shape]

    memo: dict[int, object] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(values(parameter.shape), requires_grad=False)
    for buffer in model.buffers():
        if buffer.is_meta:
            memo[id(buffer)] = values(buffer.shape).to(buffer.dtype)
        else:
            memo[id(buffer)] = _moved(buffer.detach().cpu(), generator)
    for tensor in memo.values():
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            tensor.data = tensor.data.float()
    return copy_module(model, memo).eval()


def _moved(buffer: Tensor, generator: torch.Generator) -> Tensor:
    """Its values; other ones in place of zeros alone, as of a factor that grows with the training,
    which would hide what they are multiplied with."""
    if not buffer.is_floating_point() or not buffer.numel() or buffer.any():
        return buffer.clone()
    return torch.rand(buffer.shape, generator=generator).to(buffer.dtype) + 0.5
