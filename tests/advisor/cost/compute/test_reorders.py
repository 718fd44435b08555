"""Copies that convolutions make of maps and weights on processors, as oneDNN lists them."""

from __future__ import annotations

import re
from math import prod

import pytest
import torch
from torch import Tensor, nn

from advisor.cost.calibration import CALIBRATION
from advisor.cost.compute.rates import DeviceRates
from advisor.cost.load.loads import loads_of
from profiles.model.profile import Numerics
from profiles.workload.stack import TORCH
from tests.engines.cases import Case, cpu_ranks, profile_of

ROWS = 2
REORDER = re.compile(r"exec,cpu,reorder,.*,(\d+(?:x\d+)+),[\d.e+-]+$", re.MULTILINE)


class Net(nn.Module):
    """Channels fill blocks of 16; only the second convolution has a gradient for its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(16, 32, 3, padding=1, bias=False)
        self.second = nn.Conv2d(32, 48, 3, stride=2, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x)).mean((2, 3))
        return out


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 16, 8, 8), torch.randint(48, (rows,))


CASE = Case(Net, _batch)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="other processors' kernels take maps as they are",
)
def test_the_copies_that_are_charged_are_those_that_onednn_makes(
    capfd: pytest.CaptureFixture[str],
) -> None:
    model, (x, target) = CASE.build(), _batch(ROWS)
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        nn.functional.cross_entropy(model(x), target).backward()
    listed = REORDER.findall(capfd.readouterr().out)
    assert len(listed) == 3 + 3 + 3 + 6  # of two forwards, one backward with one product, and one
    copied = sum(2 * 4 * prod(map(int, shape.split("x"))) for shape in listed)

    device = cpu_ranks(1).device
    rates = DeviceRates.of(device, "float32", TORCH, CALIBRATION)
    loads = loads_of(profile_of(CASE, model), numerics=Numerics.AS_BUILT, samples=ROWS)
    charged_s = 0.0
    for product in (product for unit in loads.runs for product in unit.work.products):
        plain = product._replace(is_convolution=False)
        for flop in (product.forward_flop, product.backward_flop):
            charged_s += rates.product_s(product, flop, 0.0) - rates.product_s(plain, flop, 0.0)
    assert charged_s * rates.bandwidth == pytest.approx(copied)
