"""Captured costs of each architecture of `tests.zoo`: `python -m tests.benchmarks.capture_table`.

FLOP and kept bytes are compared with a real run of the same small model on the CPU.
"""

from __future__ import annotations

import logging
import time
import warnings

import torch

from profiles.capture.capture import capture
from profiles.errors import AdvisorError
from profiles.model.profile import Numerics
from tests.profiles.capture.measured import measure
from tests.zoo import ARCHITECTURES


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print(
        "again: units called more than once; changed: values overwritten after they were handed on"
    )
    print(
        f"{'architecture':30} {'units':>5} {'blocks':>6} {'calls':>5} {'edges':>5} {'again':>5}"
        f" {'changed':>7} {'tied':>4} {'FLOP':>9} {'kept':>9} {'time':>7}"
    )
    for name, (build, batch) in ARCHITECTURES.items():
        torch.manual_seed(0)
        model = build()
        start = time.perf_counter()
        try:
            profile = capture(model, batch)
        except AdvisorError as error:
            print(f"{name:30} {error}")
            continue
        seconds = time.perf_counter() - start
        measured = measure(model, batch)
        costs = [unit.cost(Numerics.AS_BUILT) for unit in profile.units]
        saved_bytes = sum(cost.activation_bytes.at(profile.samples) for cost in costs)
        flow = profile.flow
        changed = sum(value.is_overwritten for call in flow.calls for value in call.values)
        print(
            f"{name:30} {len(profile.units):5} {len(list(profile.blocks())):6}"
            f" {len(flow.calls):5} {len(flow.edges):5} {len(flow.called_again()):5}"
            f" {changed:7} {len(profile.tied):4}"
            f" {profile.flop(profile.samples) / measured.flop - 1:+8.2%}"
            f" {saved_bytes / measured.saved_bytes - 1:+9.3%} {seconds:5.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
