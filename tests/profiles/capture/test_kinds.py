"""Plain torch models of kinds that users bring, against real runs of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profiles.capture.batch.call import Batch, LossFn
from profiles.capture.capture import capture
from profiles.model.profile import ModelProfile, Numerics
from tests.engines.cases import TinyGPT, token_loss
from tests.profiles.capture.measured import measure

B, T, WIDTH, CLASSES = 4, 10, 16, 5


class UNet(nn.Module):
    """Two levels with skip connections and normalisation by batch."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = self._stage(3, 8)
        self.down = self._stage(8, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.leave = self._stage(16, CLASSES)

    @staticmethod
    def _stage(inside: int, outside: int) -> nn.Sequential:
        convolution = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outside), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        high = self.enter(x)
        low = self.down(F.max_pool2d(high, 2))
        out: Tensor = self.leave(torch.cat([self.up(low), high], 1))
        return out


class LowRank(nn.Module):
    """A frozen linear and a small trained one beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def with_adapters() -> nn.Module:
    model = TinyGPT().requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.endswith("qkv"):
            parent = model.get_submodule(name.rpartition(".")[0])
            parent.qkv = LowRank(module)
    return model


class Translator(nn.Module):
    """torch's own encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, WIDTH)
        self.body = nn.Transformer(WIDTH, 2, 4, 4, 32, batch_first=True)
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        mixed = self.body(self.words(source), self.words(target), tgt_mask=mask, tgt_is_causal=True)
        out: Tensor = self.head(mixed)
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        hidden, _ = self.layer(x)
        logits = self.head(hidden[:, -1])
        return {"logits": logits, "loss": F.cross_entropy(logits, target)}


class Experts(nn.Module):
    """Each sample goes through the expert that its position says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for experts in self.layers:
            x = torch.cat([experts[0](x[::2]), experts[1](x[1::2])]).relu()
        return x.square().mean()


def saved_bytes(profile: ModelProfile) -> float:
    costs = (unit.cost(Numerics.AS_BUILT) for unit in profile.units)
    return sum(cost.activation_bytes.at(profile.samples) for cost in costs)


def classes(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.float(), target)


LABELS = torch.arange(B) % CLASSES
ROWS = torch.randn(B, WIDTH, generator=torch.Generator().manual_seed(0))
IDS = torch.randint(0, 32, (B, T), generator=torch.Generator().manual_seed(0))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, CLASSES))


KINDS: dict[str, tuple[nn.Module, Batch, LossFn | None]] = {
    "a sequence": (plain(), (ROWS, LABELS), classes),
    "in eval mode": (plain().eval(), (ROWS, LABELS), classes),
    "in bf16": (plain().bfloat16(), (ROWS.bfloat16(), LABELS), classes),
    "in fp16": (plain().half(), (ROWS.half(), LABELS), classes),
    "in fp64": (plain().double(), (ROWS.double(), LABELS), classes),
    "a U-Net": (
        UNet(),
        (torch.randn(B, 3, 16, 16), torch.zeros(B, 16, 16, dtype=torch.long)),
        classes,
    ),
    "adapters on a frozen model": (with_adapters(), (IDS, IDS), token_loss),
    "an encoder and a decoder": (
        Translator(),
        (IDS, IDS, IDS),
        token_loss,
    ),
    "recurrent, dict in and out": (
        Recurrent(),
        {"x": torch.randn(B, T, WIDTH), "target": LABELS},
        None,
    ),
    "experts, loss inside": (Experts(), ROWS, None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_real_run_takes_the_flop_and_activations_predicted(kind: str) -> None:
    model, batch, loss_fn = KINDS[kind]
    profile = capture(model, batch, loss_fn=loss_fn)
    measured = measure(model, batch, loss_fn)
    assert profile.flop(profile.samples) == measured.flop
    assert saved_bytes(profile) == measured.saved_bytes
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert profile.trainable_parameters == sum(p.numel() for p in trainable)
    assert profile.gradient_bytes == sum(p.nbytes for p in trainable)
