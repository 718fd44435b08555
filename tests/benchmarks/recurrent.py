"""`python -m tests.benchmarks.recurrent`: host time of operations that a loop in C++ launches.

Recurrent layers of a width at which nothing but launching takes time, forward and backward, over
operations launched from Python: `profiles.trace.scopes.LOOPED`.
"""

from __future__ import annotations

import sys
from unittest import mock

import torch
from torch import Tensor, nn

from profiles.capture.capture import capture
from profiles.machine.bench.device import KERNELS, launch_timing
from profiles.model.profile import Numerics
from profiles.trace import scopes
from tests.benchmarks.stage_host import processor_s

ROWS, STEPS, WIDTH = 1, 100, 8


class First(nn.Module):
    """The outputs of a recurrent layer alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x)[0]
        return outputs


def main() -> int:
    torch.set_num_threads(1)
    launch_s = launch_timing(torch.device("cpu"), seconds=1.0).median_s / KERNELS
    sys.stdout.write(f"a launch from Python takes {launch_s * 1e6:.1f} us; of it, in a loop:\n")
    for layer in (nn.GRU(WIDTH, WIDTH), nn.RNN(WIDTH, WIDTH)):
        model, x = First(layer), torch.randn(STEPS, ROWS, WIDTH)
        with mock.patch.object(scopes, "LOOPED", 1.0):
            profile = capture(model, x, batch_dims=1)
        costs = [unit.cost(Numerics.AS_BUILT) for unit in profile.units]
        forward_s = processor_s(lambda model=model, x=x: model(x))
        both_s = processor_s(lambda model=model, x=x: model(x).sum().backward())
        for name, took, kernels in (
            ("forward", forward_s, sum(cost.forward_kernels for cost in costs)),
            ("backward", both_s - forward_s, sum(cost.backward_kernels for cost in costs)),
        ):
            share = took / kernels / launch_s
            sys.stdout.write(f"  {type(layer).__name__}, {name}: {share:.2f}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
