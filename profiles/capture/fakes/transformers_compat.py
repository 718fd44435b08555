"""Replaces data-dependent decisions of transformers by those of a real run, without importing
it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    Wrapper: TypeAlias = Callable[[Callable[..., object]], Callable[..., object]]

_MASKS = "transformers.masking_utils"  # where every model of transformers 5 gets its masks from
_LAYERS = "transformers.pytorch_utils"


@contextmanager
def masks_of_a_real_run(
    *, is_unpacked: Callable[[Tensor], bool], is_all_ones: Callable[[Tensor], bool]
) -> Iterator[None]:
    """Inside, models leave out the masks that say nothing, as they do where values can be read.

    Where values cannot be read transformers (5.23, `is_tracing` in `masking_utils`) keeps to the
    safe side: it takes sequences to be packed into rows, and padding to be masked, so that each
    layer gets a mask of length times length. A real run reads positions and padding, finds neither,
    and leaves the causal pattern to the attention kernel.

    What the batch says stays data: for positions and padding masks in it the mask is kept, even if
    they happen to say nothing in a sample, since other batches have packed or padded rows. Masks
    that are part of the model (sliding windows shorter than the sequence) are made as ever.

    A transformers that is not imported, or has no such functions, is left alone.

    Args:
        is_unpacked: whether these position ids (samples, length) count one sequence a row, because
            the model made them.
        is_all_ones: whether this padding mask (samples, length) is known to hide nothing.
    """

    def unpacked(find: Callable[..., object]) -> Callable[..., object]:
        def find_indices(position_ids: Tensor) -> object:
            packed = find(position_ids)  # a real run does the operations, too
            return None if is_unpacked(position_ids) else packed

        return find_indices

    def unpadded(can_ignore: Callable[..., object]) -> Callable[..., object]:
        def decided(padding_mask: Tensor | None, *args: object, **kwargs: object) -> object:
            if padding_mask is not None and is_all_ones(padding_mask):
                padding_mask = None
            return can_ignore(padding_mask, *args, **kwargs)

        return decided

    masks = sys.modules.get(_MASKS)
    wrappers: dict[str, Wrapper] = {
        "find_packed_sequence_indices": unpacked,
        "_ignore_causal_mask_sdpa": unpadded,
        "_ignore_bidirectional_mask_sdpa": unpadded,
    }
    originals = {name: getattr(masks, name) for name in wrappers if hasattr(masks, name)}
    try:
        for name, original in originals.items():
            setattr(masks, name, wrappers[name](original))
        yield
    finally:
        for name, original in originals.items():
            setattr(masks, name, original)


def is_transposed_linear(module: object) -> bool:
    """True if `module` is transformers' `Conv1D`, a linear layer whose weight is (in, out)."""
    kind = getattr(sys.modules.get(_LAYERS), "Conv1D", None)
    return kind is not None and type(module) is kind
