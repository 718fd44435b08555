"""A program: a model and its batches, drawn from a seed.

A program is written `17: embedding | mlp x2, bag-pair, tied | tokens | dict`, and made again by its
seed. Every block draws from a generator of its own, so that a program without some of its blocks
has the others as they were.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fuzz_modules import unusual_code  # noqa: F401  # its blocks are registered
from tests.fuzz_modules.common import COMMON, VOCABULARY
from tests.fuzz_modules.unusual import UNUSUAL

ROWS, CLASSES, FEATURES = 8, 5, 6
STEMS = ("features", "embedding", "picture", "bag")
HEADS = ("classes", "tokens", "regression", "two", "own", "tied", "last")
BATCHES = ("tuple", "mapping", "nested")
HOLDERS = ("list", "attributes", "sequential", "groups", "dict")
BLOCKS = {**COMMON, **UNUSUAL}
LossFn = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Program:
    """A model and its batches.

    Attributes:
        without: numbers of blocks that are left out.
        only: names of `BLOCKS` in place of those that are drawn.
        drawn: everything else, from the seed.
    """

    seed: int
    without: frozenset[int] = frozenset()
    only: tuple[str, ...] = ()
    drawn: dict[str, Any] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        draw = Random(f"program {self.seed}")
        blocks = []
        for _ in range(draw.choice((1, 2, 2, 3, 3, 4))):
            name = draw.choice(sorted(UNUSUAL if draw.random() < 0.7 else COMMON))
            blocks.append((name, draw.choice((1, 1, 1, 2, 3))))
        drawn: dict[str, Any] = {
            "blocks": [(name, 1) for name in self.only] or blocks,
            "width": draw.choice((8, 12, 15, 16, 16, 16, 24)),
            "tokens": draw.choice((4, 6, 7, 8)),
            "stem": draw.choice(STEMS),
            "head": draw.choice(HEADS),
            "batch": draw.choice(BATCHES),
            "holder": draw.choice(HOLDERS),
            "shared_norm": draw.choice(("", "", "", "between", "inside")),
            "residual": draw.choice((False, False, True)),
            "borrows": draw.random() < 0.15,
            "extra": draw.random() < 0.15,
        }
        if drawn["head"] == "own" and drawn["batch"] == "nested":
            drawn["batch"] = "mapping"
        if drawn["stem"] != "embedding" and drawn["head"] == "tied":
            drawn["head"] = "tokens"
        object.__setattr__(self, "drawn", drawn)

    def __str__(self) -> str:
        d = self.drawn
        blocks = ", ".join(f"{n} x{times}" if times > 1 else n for n, times in self.blocks)
        more = [f"{d['shared_norm']} shared norm"] if d["shared_norm"] else []
        more += [word for word in ("residual", "borrows", "extra") if d[word]]
        said = [d["stem"], f"{d['holder']}: {blocks}", *more, d["head"], d["batch"]]
        return f"{self.seed}: {d['width']} wide, {d['tokens']} tokens | {' | '.join(said)}"

    @property
    def again(self) -> str:
        """The options that run it again."""
        left = ",".join(map(str, sorted(self.without)))
        words = [f"--only {self.seed}", *(f"--block {name}" for name in self.only)]
        return " ".join([*words, f"--without {left}"] if left else words)

    @property
    def blocks(self) -> list[tuple[str, int]]:
        drawn = enumerate(self.drawn["blocks"])
        return [block for number, block in drawn if number not in self.without]

    @property
    def numbers(self) -> Collection[int]:
        """Of the blocks that it has."""
        return [n for n in range(len(self.drawn["blocks"])) if n not in self.without]

    def build(self) -> nn.Module:
        """The model, the same every time."""
        torch.manual_seed(self.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of weight norm, which has a successor
            kind = NestedModel if self.drawn["batch"] == "nested" else Model
            return kind(self).train()

    def batch(self, number: int) -> Any:
        """Batch `number`, `ROWS` samples: (inputs ..., target), a mapping, or a mapping in a tuple.

        Masks have something in every half of the rows, so that each part of a batch has.
        """
        made = torch.Generator().manual_seed(1000 * self.seed + number)
        d = self.drawn
        ids = torch.randint(0, VOCABULARY, (ROWS, d["tokens"]), generator=made)
        mask = torch.rand(ROWS, d["tokens"], generator=made) < 0.3
        mask[:, 0], mask[:, 1] = False, True
        x = {
            "features": torch.randn(ROWS, d["tokens"], FEATURES, generator=made),
            "embedding": ids,
            "picture": torch.randn(ROWS, 1, 4, 2 * d["tokens"], generator=made),
            "bag": ids,
        }[d["stem"]]
        targets = {
            "tokens": torch.randint(0, VOCABULARY, (ROWS, d["tokens"]), generator=made),
            "regression": torch.randn(ROWS, d["tokens"], d["width"], generator=made),
        }
        targets["tied"] = targets["tokens"]
        target = targets.get(d["head"])
        if target is None:
            target = torch.randint(0, CLASSES, (ROWS,), generator=made)
        inputs = {"x": x} | {
            name: value
            for name, value in (("ids", ids), ("mask", mask))
            if any(name in getattr(BLOCKS[b], "takes", ()) for b, _ in self.blocks)
        }
        if d["head"] == "own":
            return {**inputs, "labels": target}
        if d["batch"] == "mapping":
            return {**inputs, "labels": target}
        if d["batch"] == "nested":
            return {"x": inputs.pop("x"), "more": [inputs, None, "a name"]}, target
        if len(inputs) == 2 and "mask" in inputs:
            inputs = {"x": x, "ids": ids, "mask": mask}
        return (*inputs.values(), target)

    @property
    def loss_fn(self) -> LossFn | None:
        if self.drawn["head"] == "own":
            return None
        kind = {
            "tokens": tokens_loss,
            "tied": tokens_loss,
            "regression": squares,
            "two": two_losses,
        }
        chosen = kind.get(self.drawn["head"], F.cross_entropy)
        if self.drawn["batch"] != "mapping":
            return chosen
        return labelled[chosen]


def tokens_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def squares(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def two_losses(output: dict[str, Tensor], target: Tensor) -> Tensor:
    """Two outputs, with a loss each."""
    values = F.mse_loss(output["value"], target.float())
    return F.cross_entropy(output["logits"], target) + 0.5 * values


def _labelled(loss: LossFn) -> LossFn:
    def of_batch(output: Any, batch: dict[str, Tensor]) -> Tensor:
        return loss(output, batch["labels"])

    return of_batch


labelled = {loss: _labelled(loss) for loss in (tokens_loss, squares, two_losses, F.cross_entropy)}


class Model(nn.Module):
    """Stem, blocks in some holder, head."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        d = program.drawn
        self.stem_kind, self.head_kind, self.holder = d["stem"], d["head"], d["holder"]
        self.residual, self.borrows = d["residual"], d["borrows"]
        width = d["width"]
        if self.stem_kind == "features":
            self.stem: nn.Module = nn.Linear(FEATURES, width)
        elif self.stem_kind == "picture":
            self.stem = nn.Conv2d(1, width, (4, 2), stride=(4, 2))
        elif self.stem_kind == "bag":
            self.stem = nn.EmbeddingBag(VOCABULARY, width, mode="sum")
            self.positions = nn.Parameter(torch.randn(d["tokens"], width) * 0.3)
        else:
            self.stem = nn.Embedding(VOCABULARY, width)
        blocks: list[nn.Module] = []
        for (name, times), number in zip(program.blocks, program.numbers, strict=True):
            for _ in range(times):  # equal ones: the blocks of a stack
                blocks.append(BLOCKS[name](Random(f"block {program.seed} {number}"), width))
        self._hold(blocks)
        self.norm_place = d["shared_norm"]
        if self.norm_place:
            self.shared_norm = nn.LayerNorm(width)
        if self.norm_place == "inside":
            for each in blocks:
                if isinstance(getattr(each, "norm", None), nn.LayerNorm):
                    each.norm = self.shared_norm
        if d["extra"]:
            self.never_called = nn.Linear(width, 3)
        self._make_head(width)

    def _hold(self, blocks: list[nn.Module]) -> None:
        if self.holder == "attributes":
            self.count = len(blocks)
            for number, each in enumerate(blocks):
                setattr(self, f"block_{number}", each)
        elif self.holder == "groups":
            middle = len(blocks) // 2
            self.encoder, self.decoder = Group(blocks[:middle]), Group(blocks[middle:])
        elif self.holder == "dict":
            self.blocks = nn.ModuleDict({f"b{n}": each for n, each in enumerate(blocks)})
        elif self.holder == "sequential":
            self.blocks = Group(blocks)
        else:
            self.blocks = nn.ModuleList(blocks)

    def _held(self) -> list[nn.Module]:
        if self.holder == "attributes":
            return [getattr(self, f"block_{number}") for number in range(self.count)]
        if self.holder == "groups":
            return [self.encoder, self.decoder]
        if self.holder == "sequential":
            return [self.blocks]
        return list(self.blocks.values() if self.holder == "dict" else self.blocks)

    def _make_head(self, width: int) -> None:
        sizes = {"tokens": VOCABULARY, "tied": VOCABULARY, "regression": width}
        self.head = nn.Linear(
            width, sizes.get(self.head_kind, CLASSES), bias=self.head_kind != "tied"
        )
        if self.head_kind == "tied":
            self.head.weight = self.stem.weight
        if self.head_kind == "two":
            self.value = nn.Linear(width, 1)

    def forward(
        self,
        x: Tensor,
        ids: Tensor | None = None,
        mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Any:
        given = {"ids": ids, "mask": mask}
        if self.stem_kind == "picture":
            x = self.stem(x).flatten(2).transpose(1, 2)
        elif self.stem_kind == "bag":
            x = self.stem(x)[:, None] + self.positions
        else:
            x = self.stem(x)
        start = x
        for each in self._held():
            if self.norm_place == "between":
                x = self.shared_norm(x)
            x = each(x, **_taken(each, given))
        if self.borrows and isinstance(self.stem, nn.Embedding):
            x = x + self.stem.weight.mean(0)
        elif self.borrows:
            x = x * self.head.weight.mean(0)
        x = x + start if self.residual else x
        return self._output(x, labels)

    def _output(self, x: Tensor, labels: Tensor | None) -> Any:
        if self.head_kind in ("tokens", "tied", "regression"):
            return self.head(x)
        pooled = x[:, -1] if self.head_kind == "last" else x.mean(1)
        logits = self.head(pooled)
        if self.head_kind == "two":
            return {"logits": logits, "value": self.value(pooled)[:, 0]}
        if self.head_kind == "own":
            return {
                "loss": F.cross_entropy(logits, labels) + 0.01 * x.pow(2).mean(),
                "logits": logits,
            }
        return logits


class NestedModel(Model):
    """The same, called with one nested argument."""

    def forward(self, batch: Any) -> Any:  # type: ignore[override]
        rest, _, _ = batch["more"]
        return super().forward(batch["x"], **rest)


class Group(nn.Module):
    """A container with a forward of its own."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)
        self.takes = sorted({name for each in blocks for name in getattr(each, "takes", ())})

    def forward(self, x: Tensor, **given: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, **_taken(layer, given))
        return x


def _taken(module: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in getattr(module, "takes", ())}
