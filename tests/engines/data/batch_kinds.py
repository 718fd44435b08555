"""Batches as people have them: one small model each, its batches and its loss."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, CLASSES = 12, 5


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x).relu())
        return out


class Trunk(nn.Module):
    """(rows, 6) to the logits of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def run(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out

    def forward(self, x: Tensor) -> Any:
        return self.run(x)


class OfNested(Trunk):
    def forward(self, inputs: dict[str, Any], labels: Tensor) -> dict[str, Tensor]:
        x = inputs["x"] * inputs["more"]["scale"][0].unsqueeze(1)
        return {"loss": F.cross_entropy(self.run(x), labels)}


class OfOptions(Trunk):
    """Takes what is no tensor, and says so if it is not what it was."""

    def forward(
        self,
        x: Tensor,
        names: list[str] | None = None,
        mode: str = "",
        factor: float = 0.0,
        mask: Tensor | None = None,
    ) -> Tensor:
        assert mode == "train"
        assert mask is None
        assert names is not None
        assert len(names) == len(x)
        return self.run(x) * factor


class OfObject(Trunk):
    """Takes the whole batch as its one argument, and returns a tuple that begins with the loss."""

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else (batch.x, batch.y)
        logits = self.run(x)
        return F.cross_entropy(logits, y), logits


class WithTable(Trunk):
    """A table of positions that all samples share, and a temperature."""

    def forward(self, x: Tensor, table: Tensor, temperature: Tensor) -> Tensor:
        return self.run((x + table).mean(1)) / temperature


class TimeMajor(Trunk):
    """(time, rows, 6)."""

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x.cumsum(0)[-1])


class OfImages(Trunk):
    """Images of several sizes in a list, and boxes of each, as detection has them."""

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        assert len(images) == len(targets)
        pooled = torch.stack([image.mean((1, 2)) for image in images])
        boxes = torch.stack([target["boxes"].sum(0) for target in targets])
        logits = self.run(torch.cat([pooled, boxes], 1))
        return {"class": logits, "box": logits.square().mean()}


class OfNestedTensor(Trunk):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.stack([row.mean(0) for row in x.unbind()])
        return self.run(rows)


class ShiftedTokens(nn.Module):
    """Next-token loss inside of the model, as causal models of transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(2))
        self.head = nn.Linear(WIDTH, 17)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        return {"loss": F.cross_entropy(logits.view(-1, 17), shifted.view(-1)), "logits": logits}


@dataclass
class Sample:
    x: Tensor
    y: Tensor
    note: str = ""


class Plain:
    """An object of the user's own."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Kind:
    """A model, its batches by their number of rows, and its loss."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss_fn: Callable[..., Tensor] | None = F.cross_entropy


def _x(rows: int, *shape: int) -> Tensor:
    return torch.randn(rows, *(shape or (6,)), generator=torch.Generator().manual_seed(rows))


def _y(rows: int) -> Tensor:
    return torch.arange(rows) % CLASSES


def _ids(rows: int) -> dict[str, Tensor]:
    """Row i has i + 2 labels, the rest are padding; lengths change with the rows."""
    ids = torch.randint(0, 17, (rows, 12 + rows), generator=torch.Generator().manual_seed(rows))
    labels = ids.clone()
    for row in range(rows):
        labels[row, row + 2 :] = -100
    return {"input_ids": ids, "labels": labels}


def _images(rows: int) -> dict[str, Any]:
    images = [_x(3, 4 + row, 5) for row in range(rows)]
    targets = [{"boxes": _x(1 + row % 3, 3), "class": _y(rows)[row]} for row in range(rows)]
    return {"images": images, "targets": targets}


def _detection_loss(output: dict[str, Tensor], batch: dict[str, Any]) -> Tensor:
    classes = torch.stack([target["class"] for target in batch["targets"]])
    return F.cross_entropy(output["class"], classes) + output["box"]


def _of_keys(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output, batch["y"])


def _encoding(rows: int) -> Any:
    from transformers import BatchEncoding

    return BatchEncoding(_ids(rows))


def _model_output(rows: int) -> Any:
    from transformers.modeling_outputs import SequenceClassifierOutput

    return SequenceClassifierOutput(logits=_x(rows), loss=_y(rows))


class OfModelOutput(Trunk):
    def forward(self, loss: Tensor, logits: Tensor) -> tuple[Tensor]:
        return (F.cross_entropy(self.run(logits), loss),)


def _nested(rows: int) -> tuple[Tensor, Tensor]:
    parts = [_x(2 + row % 3) for row in range(rows)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged), _y(rows)


def _options(rows: int) -> dict[str, Any]:
    names = [f"row {row}" for row in range(rows)]
    others = {"names": names, "mode": "train", "factor": 2.0, "mask": None}
    return {"x": _x(rows), "y": _y(rows), **others}


def _deep(rows: int) -> dict[str, Any]:
    scale = torch.linspace(1, 2, rows)
    return {"inputs": {"x": _x(rows), "more": {"scale": [scale]}}, "labels": _y(rows)}


def _table(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _x(rows, 7, 6), _x(7, 6), torch.tensor(1.5), _y(rows)


KINDS = {
    "tuple": Kind(Trunk, lambda rows: (_x(rows), _y(rows))),
    "list": Kind(Trunk, lambda rows: [_x(rows), _y(rows)]),
    "named tuple": Kind(Trunk, lambda rows: Pair(_x(rows), _y(rows))),
    "nested dicts": Kind(OfNested, _deep, None),
    "options": Kind(OfOptions, _options, _of_keys),
    "one dict": Kind(OfObject, lambda rows: {"x": _x(rows), "y": _y(rows)}, None),
    "dataclass": Kind(OfObject, lambda rows: Sample(_x(rows), _y(rows)), None),
    "own object": Kind(OfObject, lambda rows: Plain(_x(rows), _y(rows)), None),
    "table and scalar": Kind(WithTable, _table),
    "time first": Kind(TimeMajor, lambda rows: (_x(7, rows, 6), _y(rows))),
    "images in a list": Kind(OfImages, _images, _detection_loss),
    "nested tensor": Kind(OfNestedTensor, _nested),
    "padded labels": Kind(ShiftedTokens, _ids, None),
    "BatchEncoding": Kind(ShiftedTokens, _encoding, None),
    "ModelOutput": Kind(OfModelOutput, _model_output, None),
}
