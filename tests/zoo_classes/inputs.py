"""Batches for a class of transformers, from the signature of its forward and its config.

Every value has a row for each of `ROWS` samples. Targets go by the end of the class's name; a class
that has none there, or does not take it, is trained on `smooth_loss` of its outputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo_classes.configs import IMAGE, SPECIAL

ROWS = 4
"""Two replicas of two microbatches have one row each."""
LENGTH = 16
FRAMES, SAMPLES, STEPS = 4, 3200, 64
"""Of a video; of a waveform; of a spectrogram."""
LABELS = 3
_ANY = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


@dataclass(frozen=True)
class Inputs:
    """A batch by the names of the forward's arguments, and whether the model makes its loss."""

    batch: dict[str, Any]
    has_own_loss: bool

    @property
    def loss_fn(self) -> Callable[..., Tensor] | None:
        return None if self.has_own_loss else smooth_loss


def smooth_loss(output: object, batch: object) -> Tensor:
    """The mean of softplus over every tensor of numbers in `output`, each counted alike.

    Not of squares: those of a layer norm's outputs have a fixed sum, and no gradient.
    """
    means = [F.softplus(t.float()).mean() for t in _numbers(output)]
    return torch.stack(means).mean()


def _numbers(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() and value.numel() else []
    if isinstance(value, Mapping):
        value = list(value.values())
    return [t for part in value for t in _numbers(part)] if isinstance(value, tuple | list) else []


def inputs_for(kind: type[nn.Module], config: Any) -> Iterator[Inputs]:
    """Batches that the class may take, the likeliest first."""
    taken = inspect.signature(kind.forward).parameters
    main = getattr(kind, "main_input_name", "input_ids")
    names = [n for n in ([main] if isinstance(main, str) else main) if n in taken]
    required = [n for n, p in taken.items() if p.default is p.empty and p.kind not in _ANY]
    names += [n for n in required if n != "self" and n not in names]
    further = ("pixel_values", "input_features", "input_ids", "bbox")
    both = [*names, *(n for n in further if n in taken and n not in names)]
    for variant in (0, 1, 2):
        for chosen in [both, names] if both != names else [names]:
            if variant and not any(n in VARIED for n in chosen):
                continue
            batch = {n: value(n, config, kind, variant) for n in chosen}
            batch = {n: v for n, v in batch.items() if v is not None}
            needs = "input_ids" not in batch or _is_encoder_decoder(config)
            decoder = (
                {"decoder_input_ids": text(config, 2)}
                if needs and "decoder_input_ids" in taken
                else {}
            )
            target = target_for(kind, taken, batch, config)
            if target:
                yield Inputs({**batch, **target}, has_own_loss=True)
            yield Inputs({**batch, **decoder}, has_own_loss=False)


def _is_encoder_decoder(config: Any) -> bool:
    return bool(getattr(config, "is_encoder_decoder", False))


def target_for(
    kind: type[nn.Module], taken: Mapping[str, object], batch: Mapping[str, Any], config: Any
) -> dict[str, Any]:
    """Labels, or what else the model's loss compares with, by the end of the class's name."""
    name = kind.__name__
    if "start_positions" in taken and "QuestionAnswering" in name:
        names = ("start_positions", "end_positions")
        return {n: whole(1, LENGTH, ROWS, seed=seed) for seed, n in enumerate(names)}
    if "return_loss" in taken and "labels" not in taken:
        return {"return_loss": True}
    if "labels" not in taken:
        return {}
    if name.endswith(("TokenClassification", "AudioFrameClassification")):
        return {"labels": whole(0, LABELS, ROWS, LENGTH)}
    if name.endswith("MultipleChoice"):
        return {"labels": whole(0, 2, ROWS)}
    if "NextSentence" in name:
        return {"labels": whole(0, 2, ROWS)}
    if name.endswith(("Classification", "XVector")):
        return {"labels": whole(0, LABELS, ROWS)}
    if "Segmentation" in name and "pixel_values" in batch:
        side = batch["pixel_values"].shape[-2:]
        return {"labels": whole(0, LABELS, ROWS, *side)}
    if name.endswith("CTC"):
        return {"labels": whole(SPECIAL, _vocabulary(config), ROWS, 2)}
    if name.endswith(("Generation", "Seq2Seq")) or "input_ids" in batch:
        own = "input_ids" in batch and not _is_encoder_decoder(config)
        return {"labels": batch["input_ids"].clone() if own else text(config, 3)}
    return {}


def whole(low: int, high: int, *shape: int, seed: int = 4) -> Tensor:
    return torch.randint(low, max(high, low + 1), shape, generator=_seeded(seed))


def numbers(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, generator=_seeded(seed))


def text(config: Any, seed: int = 1) -> Tensor:
    """Ids (rows, length), none of the special ones."""
    return whole(SPECIAL, _vocabulary(config), ROWS, LENGTH, seed=seed)


def _seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def field(config: Any, *names: str, default: Any) -> Any:
    """The first of these fields that the config or one inside it has."""
    for name in names:
        known = _find(config, name)
        if known is not None:
            return known
    return default


def _find(config: Any, name: str) -> Any:
    try:
        value = getattr(config, name, None)
    except Exception:
        value = None
    if value is not None:
        return value
    inner = [v for v in vars(config).values() if hasattr(v, "model_type")]
    return next((v for v in (_find(c, name) for c in inner) if v is not None), None)


def _vocabulary(config: Any) -> int:
    return int(field(config, "vocab_size", default=128))


def _size(config: Any) -> tuple[int, int]:
    side = field(config, "image_size", "img_size", "input_size", default=IMAGE)
    if isinstance(side, Mapping):
        side = (side.get("height", IMAGE), side.get("width", IMAGE))
    pair = tuple(side) if isinstance(side, tuple | list) else (side, side)
    pair = pair if len(pair) == 2 else (pair[-1], pair[-1])
    return int(pair[0]), int(pair[1])


def _vision(config: Any) -> Any:
    return next(
        (v for n in ("vision_config", "vision_encoder_config", "backbone_config")
         if (v := getattr(config, n, None)) is not None and hasattr(v, "model_type")),
        config,
    )  # fmt: skip


def _video(kind: type[nn.Module]) -> bool:
    words = ("Video", "Vjepa", "VJEPA", "Vivit", "Timesformer")
    return any(word.lower() in kind.__name__.lower() for word in words)


def pixels(config: Any, kind: type[nn.Module], variant: int) -> Tensor:
    """Images (rows, channels, height, width); (rows, frames, ...) of videos and sets of images."""
    config = _vision(config)
    height, width = _size(config)
    channels = int(field(config, "num_channels", "in_channels", "in_chans", default=3))
    if _video(kind) != (variant == 1):
        frames = int(field(config, "num_frames", "frames_per_clip", default=FRAMES))
        frames = frames if _video(kind) else 1
        return numbers(ROWS, frames, channels, height, width)
    if variant == 2:
        return numbers(ROWS, channels, IMAGE, IMAGE)
    return numbers(ROWS, channels, height, width)


def spectrogram(config: Any, kind: type[nn.Module], variant: int) -> Tensor:
    """(rows, bins, steps), or the other way around."""
    bins = int(field(config, "num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels",
                     "input_dim", default=80))  # fmt: skip
    steps = int(field(config, "max_length", default=STEPS)) if "AST" in kind.__name__ else STEPS
    turned = variant == 1
    return numbers(ROWS, steps, bins) if turned else numbers(ROWS, bins, steps)


def waves(config: Any, kind: type[nn.Module], variant: int) -> Tensor:
    """(rows, samples), with a channel, or features by steps."""
    if variant == 1:
        return numbers(ROWS, 1, SAMPLES)
    if variant == 2:
        bins = int(field(config, "num_mel_bins", default=80))
        return numbers(ROWS, int(field(config, "max_length", default=STEPS)), bins)
    return numbers(ROWS, SAMPLES)


def _ids(config: Any, kind: type[nn.Module], variant: int) -> Tensor:
    if kind.__name__.endswith("MultipleChoice"):
        return whole(SPECIAL, _vocabulary(config), ROWS, 2, LENGTH, seed=1)
    ids = text(config)
    if _is_encoder_decoder(config) and kind.__name__.endswith("SequenceClassification"):
        ids[:, -1] = field(config, "eos_token_id", default=2)  # its output is what is classified
    return ids


def _boxes(config: Any, kind: type[nn.Module], variant: int) -> Tensor:
    return whole(0, 20, ROWS, LENGTH, 2).repeat(1, 1, 2) + torch.tensor([0, 0, 5, 5])


def _past(config: Any, kind: type[nn.Module], variant: int) -> Tensor:
    length = int(field(config, "context_length", default=STEPS))
    lags = field(config, "lags_sequence", default=[0])
    channels = int(field(config, "num_input_channels", "input_size", default=1))
    steps = length + (max(lags) if "lags_sequence" in vars(config) else 0)
    shape = (ROWS, steps) if channels == 1 else (ROWS, steps, channels)
    return numbers(*shape)


def _ones(config: Any, kind: type[nn.Module], variant: int) -> Tensor:
    return torch.ones(ROWS, LENGTH, dtype=torch.long)


def _states(config: Any, kind: type[nn.Module], variant: int) -> Tensor:
    width = int(field(config, "hidden_size", "d_model", default=32))
    return numbers(ROWS, LENGTH, width)


_Maker = Callable[[Any, type[nn.Module], int], Any]
MAKERS: dict[str, _Maker] = {
    "input_ids": _ids,
    "qformer_input_ids": _ids,
    "task_inputs": _ids,
    "bbox": _boxes,
    "pixel_values": pixels,
    "pixel_values_videos": pixels,
    "prompt_pixel_values": pixels,
    "prompt_masks": pixels,
    "input_features": spectrogram,
    "audio_mel": spectrogram,
    "input_values": waves,
    "past_values": _past,
    "past_observed_mask": lambda *a: torch.ones_like(_past(*a)),
    "past_time_features": lambda c, *a: numbers(
        *_past(c, *a).shape[:2], int(field(c, "num_time_features", default=0)) + 1
    ),
    "query_embeds": _states,
    "hidden_states": _states,
    "inputs_embeds": _states,
    "encoder_hidden_states": _states,
    "inputs": _states,
    "attention_mask": _ones,
}
VARIED = ("pixel_values", "pixel_values_videos", "input_features", "input_values", "audio_mel")
"""Arguments of which there are several shapes."""


def value(name: str, config: Any, kind: type[nn.Module], variant: int) -> Any:
    """A value for argument `name`; None where no rule knows one."""
    maker = MAKERS.get(name)
    return None if maker is None else maker(config, kind, variant)
