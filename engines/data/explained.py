"""Errors of torch in a forward, in words of the plan that brought them about."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from engines.data.batch_norm import explained_single_values
from engines.plan import Plan, Precision
from profiles.capture.frames import model_line
from profiles.errors import ModelError

_TWO_DTYPES = re.compile("same dtype|should be the same|expected scalar type")


@contextmanager
def explained_errors(module: nn.Module, plan: Plan) -> Iterator[None]:
    """Around a forward of `module`.

    Raises:
        BatchError: see `explained_single_values`.
        ModelError: see `_explained_dtypes`.
    """
    with explained_single_values(), _explained_dtypes(module, plan):
        yield


@contextmanager
def _explained_dtypes(module: nn.Module, plan: Plan) -> Iterator[None]:
    """Explain torch's error about two dtypes where FSDP2 casts the weights.

    Raises:
        ModelError: an operation got a weight in 16 bits and another tensor in fp32.
    """
    try:
        yield
    except RuntimeError as error:
        if not (_casts(module, plan) and _TWO_DTYPES.search(str(error))):
            raise
        raise ModelError(
            f"an operation got two dtypes: {str(error).strip().splitlines()[0]}. Under {plan}"
            f" weights are cast to {plan.precision}, and inputs of blocks; what a block makes of"
            " them and of buffers in fp32 is not",
            where=model_line(error) or None,
            hints=[
                "cast it where it is used: `(h * self.scale).to(h.dtype)`",
                "or replicate without `zero`: autocast chooses a dtype for each operation",
            ],
        ) from error


def _casts(module: nn.Module, plan: Plan) -> bool:
    """True if FSDP2 has weights in fp32 and computes in 16 bits."""
    is_narrow = plan.precision in (Precision.BF16, Precision.FP16, Precision.FP8)
    is_sharded = isinstance(module, FSDPModule)
    return is_narrow and is_sharded and any(p.dtype is torch.float32 for p in module.parameters())
