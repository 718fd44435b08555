"""Models whose parameters are used outside of the module that holds them, or of its call."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profiles.capture.batch.call import Batch
from tests.engines.cases import Case

WIDTH, CLASSES = 32, 5


class Mixer(nn.Module):
    """A block: latents look at the inputs, then at themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), inputs, inputs, need_weights=False)[0]
        out: Tensor = x + self.down(F.gelu(self.up(x)))
        return out


class Bank(nn.Module):
    """A table that its call returns as it is."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(rows, WIDTH) * 0.3)

    def forward(self) -> Tensor:
        return self.table


class Decoder(nn.Module):
    """Its query is asked for before it is called, as Perceiver's are."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.mixer = Bank(64), Mixer()
        self.head = nn.Linear(WIDTH, CLASSES)

    def query(self, rows: int) -> Tensor:
        return self.queries().expand(rows, -1, -1)

    def forward(self, query: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.mixer(query, x).mean(1))
        return out


class Latents(nn.Module):
    """Perceiver: latents that a module returns, and queries of another that is not called yet."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.latents = nn.Linear(8, WIDTH), Bank(64)
        self.blocks = nn.ModuleList(Mixer() for _ in range(3))
        self.decoder = Decoder()

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.embed(x)
        x = self.latents().expand(len(x), -1, -1)
        for block in self.blocks:
            x = block(x, inputs)
        out: Tensor = self.decoder(self.decoder.query(len(x)), x)
        return out


class Handed(Latents):
    """The returned table goes to every block, and is read directly behind them."""

    def forward(self, x: Tensor) -> Tensor:
        inputs, table = self.embed(x), self.latents()
        x = table.expand(len(x), -1, -1)
        for block in self.blocks:
            x = block(x, inputs) * table
        x = x + self.latents.table[0] + self.blocks[0].norm.weight
        out: Tensor = self.decoder(self.decoder.query(len(x)), x)
        return out


class Borrowed(Latents):
    """A block is given its own weight, the last one that of the first, and code between both."""

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.embed(x)
        x = inputs
        for block in self.blocks:
            x = block(x, block.up.weight.expand(len(x), -1, -1))
        first = self.blocks[0]
        x = F.linear(F.linear(x, first.up.weight), self.blocks[2].down.weight)
        out: Tensor = self.decoder(self.blocks[2](x, first.down.weight.T.expand(len(x), -1, -1)), x)
        return out


class OneNorm(Latents):
    """All blocks hold the same norm, and code between them calls it too."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm = self.blocks[0].norm

    def forward(self, x: Tensor) -> Tensor:
        x = inputs = self.embed(x)
        for block in self.blocks:
            x = block(block.norm(x), inputs)
        out: Tensor = self.decoder(x, x)
        return out


def _batch(rows: int) -> Batch:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 7, 8, generator=generator), torch.arange(rows) % CLASSES


OUTSIDE = {kind.__name__: Case(kind, _batch) for kind in (Latents, Handed, Borrowed, OneNorm)}
