"""Planning times: `python -m tests.benchmarks.planning_time`, two tables.

Not a test: nothing here passes or fails. The first table is of whole processes of `advise`, from
start to end: CPU seconds, seconds until the first line is on the screen (a terminal), and memory.
The second is of decisions alone, on one core, with the comparison of every kind of plan: models are
counted from their config.json in closed form, which is not part of these times.
"""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from advisor.decide.choose import choose
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Objective, Policy
from profiles.closed_forms.families import profile_from_config
from profiles.machine.clusters import resolve_cluster
from profiles.model.profile import ModelProfile, Numerics
from profiles.workload.workload import Workload

# Llama 3 (arXiv:2407.21783, table 3).
LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
LLAMA_405B = {
    **LLAMA_70B,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
}
# arXiv:2412.19437, section 4.2.
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
}


@dataclass(frozen=True, slots=True)
class Process:
    """A command line of `advise`, about the content of a config.json if there is one."""

    name: str
    options: str
    config: dict[str, object] | None = None


PROCESSES = (
    Process("--help", "--help"),
    Process(
        "405B on 1,024 H100",
        "--cluster 128x8xH100-SXM-80GB --global-batch 2048 --seq 8192 --precision bf16",
        dict(LLAMA_405B),
    ),
    Process(
        "DeepSeek-V3 on 2,048 H800",
        "--cluster 256x8xH800-SXM-80GB --global-batch 15360 --seq 4096 --precision bf16",
        dict(DEEPSEEK_V3),
    ),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A model on so many nodes of eight H100, and samples of 8,192 tokens a step."""

    name: str
    config: dict[str, object]
    nodes: int
    batch: int


CASES = (
    Case("70B", dict(LLAMA_70B), 8, 512),
    Case("405B", dict(LLAMA_405B), 128, 2048),
    Case("405B", dict(LLAMA_405B), 2048, 2048),
    Case("405B", dict(LLAMA_405B), 2048, 16384),
)


def profile(case: Case) -> ModelProfile:
    kinds = (Numerics.AS_BUILT, Numerics.BF16, Numerics.BF16_AUTOCAST)
    return profile_from_config(
        case.config, samples=1, sequence_length=8192, name=case.name, numerics=kinds
    )


def processes() -> None:
    print(f"{'process':26} {'CPU s':>6} {'wall s':>6} {'first line s':>12} {'MB':>6}")
    with tempfile.TemporaryDirectory() as folder:
        for process in PROCESSES:
            words = process.options.split()
            if process.config is not None:
                path = Path(folder, "model.json")
                path.write_text(json.dumps(process.config))
                words = [str(path), *words]
            _print_process(process.name, [sys.executable, "-m", "advisor", *words])


def _print_process(name: str, command: list[str]) -> None:
    """Run it with a terminal for stderr, or for stdout where nothing is said on stderr."""
    screen, end = pty.openpty()
    start = time.perf_counter()
    is_help = command[-1] == "--help"
    streams = {"stdout": end if is_help else subprocess.DEVNULL, "stderr": end}
    run = subprocess.Popen(command, **streams)  # type: ignore[call-overload]
    os.close(end)
    first = 0.0
    while True:
        try:
            said = os.read(screen, 4096)
        except OSError:  # the other end is closed
            break
        if not said:
            break
        first = first or time.perf_counter() - start
    os.close(screen)
    _, status, used = os.wait4(run.pid, 0)
    wall = time.perf_counter() - start
    run.returncode = os.waitstatus_to_exitcode(status)
    cpu = used.ru_utime + used.ru_stime
    print(f"{name:26} {cpu:6.2f} {wall:6.2f} {first:12.2f} {used.ru_maxrss / 1024:6.0f}")


def main() -> None:
    processes()
    print()
    print(f"{'model':6} {'GPUs':>6} {'batch':>6} {'objective':9} {'plans':>9} {'exact':>6} seconds")
    for case in CASES:
        facts = Facts(
            model=profile(case),
            cluster=resolve_cluster(f"{case.nodes}x8xH100-SXM-80GB"),
            workload=Workload(global_batch_size=case.batch, precision="bf16"),
        )
        for objective in (Objective.TREE, Objective.TIME):
            wall, cpu = time.perf_counter(), time.process_time()
            decision = choose(facts, policy=Policy(objective=objective))
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            print(
                f"{case.name:6} {facts.cluster.world_size:6} {case.batch:6} {objective:9}"
                f" {decision.weighed:9,} {decision.estimated:6} {cpu:.2f} (wall {wall:.2f})"
                f"  {decision.estimate.mfu:.0%} MFU: {_degrees(decision.plan)}"
            )


def _degrees(plan: object) -> str:
    words = str(plan).split()
    return " ".join(w for w in words if not w.startswith(("tensor_styles", "stages")))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
