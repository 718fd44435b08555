"""Time and memory of capturing large models: `python -m tests.benchmarks.capture_large`.

Llama 3 shapes on the meta device, sequence 4096, forward and backward at two batch sizes. Each runs
in a process of its own, so that the peak of main memory is its own; importing transformers is part
of it. Target: 405B in 3 s and 1 GiB on two cores; it takes 1.6 s and 389 MiB.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable

from profiles.units import MIB

# hidden, intermediate, layers, heads: Llama 3 model card (arXiv 2407.21783, table 3).
SHAPES = {
    "8B": (4096, 14336, 32, 32),
    "70B": (8192, 28672, 80, 64),
    "405B": (16384, 53248, 126, 128),
}
LIMIT_S = 300


def main() -> None:
    print(
        f"{'model':6} {'parameters':>11} {'FLOP':>10} {'build':>7} {'capture':>8} {'peak RSS':>9}"
    )
    for name in SHAPES:
        command = [sys.executable, "-m", "tests.benchmarks.capture_large", name]
        subprocess.run(command, check=True, timeout=LIMIT_S)


def captured(name: str) -> Callable[[], str]:
    """Captures the model of that name, which is built here; says what it has."""
    import torch
    import transformers

    from profiles.capture.capture import capture

    width, wide, layers, heads = SHAPES[name]
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=width,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    ids = torch.zeros(1, 4096, dtype=torch.long)

    def piece() -> str:
        profile = capture(model, {"input_ids": ids, "labels": ids})
        return f"{profile.parameters / 1e9:9.1f} B {profile.flop(1):10.3g}"

    return piece


def one(name: str) -> None:
    start = time.perf_counter()
    piece = captured(name)
    built = time.perf_counter()
    about = piece()
    end = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"{name:6} {about} {built - start:5.1f} s {end - built:6.1f} s {peak / MIB:5.0f} MiB",
        flush=True,
    )


if __name__ == "__main__":
    one(sys.argv[1]) if len(sys.argv) > 1 else main()
