"""Curves: what is measured, against what, and at which sizes.

`prepare` of a curve makes what it needs, imports included, and returns the piece that is measured:
once, in a fresh process, as a user's first call.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.known_configs import LLAMA_8B, LLAMA_70B, LLAMA_405B, MIXTRAL, Config

Piece = Callable[[], str]
"""Does what is measured, and says what came of it."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One thing that is done at several sizes.

    Attributes:
        against: what the sizes are; empty of a single one.
        most_s, most_mib: the mark at the size `marked`: seconds of the processor, and memory.
        most_exponent: the mark of the exponents.
    """

    name: str
    against: str
    sizes: tuple[float, ...]
    prepare: Callable[[int], Piece]
    marked: float = 0
    most_s: float = math.inf
    most_mib: float = math.inf
    most_exponent: float = 1.1

    @property
    def key(self) -> str:
        return f"{self.name} by {self.against}" if self.against else self.name


def _profile(config: Config, *, tokens: int = 8192) -> Any:
    from profiles.closed_forms.families import profile_from_config
    from profiles.model.profile import Numerics

    kinds = (Numerics.AS_BUILT, Numerics.BF16, Numerics.BF16_AUTOCAST)
    return profile_from_config(
        config, samples=1, sequence_length=tokens, name="model", numerics=kinds
    )


def _decision(config: Config, *, devices: int, batch: int) -> Piece:
    """A decision, its search and all that a report shows; the profile is there already."""
    from advisor.decide.choose import choose
    from advisor.inputs.facts import Facts
    from profiles.errors import NoPlanError
    from profiles.machine.clusters import resolve_cluster
    from profiles.workload.workload import Workload

    shape = f"{devices // 8}x8x" if devices >= 8 else f"{devices}x" if devices > 1 else ""
    facts = Facts(
        model=_profile(config),
        cluster=resolve_cluster(f"{shape}H100-SXM-80GB"),
        workload=Workload(global_batch_size=batch, precision="bf16"),
    )

    def piece() -> str:
        try:
            decision = choose(facts)
        except NoPlanError:
            return "nothing fits"
        degrees = [w for w in str(decision.plan).split() if "styles" not in w and "stages" not in w]
        return f"{decision.weighed} plans, {decision.estimated} in detail: {' '.join(degrees)}"

    return piece


def _by_layers(layers: int) -> Piece:
    """As many blocks of Llama 3 8B on 64 devices."""
    return _decision({**LLAMA_8B, "num_hidden_layers": layers}, devices=64, batch=512)


def _by_devices(devices: int) -> Piece:
    """Llama 3 70B, with 32,768 tokens a device and step: a batch that grows with the cluster."""
    return _decision(LLAMA_70B, devices=devices, batch=max(512, 4 * devices))


def _by_experts(experts: int) -> Piece:
    config = {**MIXTRAL, "num_local_experts": experts, "num_experts_per_tok": min(2, experts)}
    return _decision(config, devices=256, batch=1024)


def _by_candidates(batch: int) -> Piece:
    """Batches with more and more divisors."""
    return _decision(LLAMA_8B, devices=64, batch=batch)


def _405b(_: int) -> Piece:
    return _decision(LLAMA_405B, devices=1024, batch=2048)


def _counted(layers: int) -> Piece:
    """A profile in closed form."""
    config = {**LLAMA_8B, "num_hidden_layers": layers}
    return lambda: f"{_profile(config).parameters / 1e9:.1f} B parameters"


def _captured(*, layers: int, width: int) -> Piece:
    """A profile of a module on the meta device, forward and backward on fake tensors."""
    import torch

    from advisor.inputs.bundled.gpt import GPT, GPTConfig, loss
    from profiles.capture.capture import capture

    with torch.device("meta"):
        model = GPT(
            GPTConfig(vocab_size=256, context=128, num_layers=layers, num_heads=8, width=width)
        )
    ids = torch.zeros(1, 128, dtype=torch.long)
    return lambda: f"{capture(model, (ids, ids), loss_fn=loss).parameters / 1e6:,.1f} M parameters"


def _capture_by_layers(layers: int) -> Piece:
    return _captured(layers=layers, width=64)


_GPT_LAYERS = 12


def _blocks_of(width: int) -> float:
    """Parameters of the blocks of a GPT: 12 a square of the width (arXiv:2001.08361, table 1)."""
    return 12.0 * _GPT_LAYERS * width**2


def _capture_by_parameters(parameters: int) -> Piece:
    return _captured(layers=_GPT_LAYERS, width=round((parameters / _blocks_of(1)) ** 0.5))


def _capture_405b(_: int) -> Piece:
    from tests.benchmarks.capture_large import captured

    return captured("405B")


def _bench(ranks: int) -> Piece:
    """`advise probe --bench` of so many ranks, all of them on this machine."""
    from tests.benchmarks.bench_duration import run

    def piece() -> str:
        with tempfile.TemporaryDirectory() as folder:
            run(ranks, ["probe", "--bench", "-o", f"{folder}/cluster.toml"], Path(folder))
        return f"{ranks} ranks"

    return piece


def _small() -> tuple[Any, Any]:
    """Model and batch so small that a step is what torch and we do around it."""
    import torch

    from tests.benchmarks import subject

    for name, size in {"TOKENS": 8, "WIDTH": 32, "HEADS": 2, "VOCABULARY": 64}.items():
        setattr(subject, name, size)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return subject.GPT(), subject.make_batch(2, seed=0)


def _prepared(plan: str, ranks: int) -> tuple[Callable[[], Any], Any]:
    """Applies `plan` on one rank of so many, with its batch."""
    from engines.apply import apply_plan
    from engines.plan import Plan
    from profiles.capture.capture import capture
    from tests.benchmarks import by_hand, subject
    from tests.engines.cases import cpu_ranks

    model, batch = _small()
    profile = capture(model, batch, loss_fn=subject.loss_fn)

    def apply() -> Any:
        return apply_plan(
            model,
            Plan.parse(plan.format(ranks)),
            profile=profile,
            cluster=cpu_ranks(ranks),
            loss_fn=subject.loss_fn,
            optimizer=by_hand.adam,
            sample=batch,
        )

    return apply, batch


def _applied(plan: str) -> Callable[[int], Piece]:
    def prepare(ranks: int) -> Piece:
        from tests.contract.fake_world import fake_rank

        apply, _ = _prepared(plan, ranks)

        def piece() -> str:
            with fake_rank(0, ranks):
                return str(apply().plan)

        return piece

    return prepare


STEPS = 50
_OPEN: list[object] = []
"""Worlds that live to the end of the process; one that nothing holds is left at once."""


def _steps(plan: str, hand: str) -> Callable[[int], Piece]:
    """`STEPS` steps of ours; a step of the same plan by hand is said beside it."""

    def prepare(ranks: int) -> Piece:
        from tests.benchmarks import by_hand
        from tests.contract.fake_world import fake_rank

        apply, batch = _prepared(plan, ranks)
        world = fake_rank(0, ranks)
        world.__enter__()
        _OPEN.append(world)
        model, (ids, targets) = _small()
        theirs = getattr(by_hand, hand)(model, ids, targets)
        parallel = apply()
        for _ in range(3):
            parallel.train_step(batch)
        by_hand_s = _median_cpu_s(theirs)

        def piece() -> str:
            ours_s = _median_cpu_s(lambda: parallel.train_step(batch))
            return (
                f"a step {ours_s * 1e3:.2f} ms, by hand {by_hand_s * 1e3:.2f} ms:"
                f" {(ours_s - by_hand_s) * 1e3:+.2f} ms"
            )

        return piece

    return prepare


def _median_cpu_s(step: Callable[[], object]) -> float:
    taken = []
    for _ in range(STEPS):
        began = time.process_time()
        step()
        taken.append(time.process_time() - began)
    return statistics.median(taken)


_TENS = (10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10_000.0)
_RANKS = (1.0, 2.0, 8.0, 32.0, 128.0, 512.0, 1024.0)

CURVES = (
    Curve("decide", "layers", _TENS, _by_layers, marked=100, most_s=1.0),
    Curve(
        "decide",
        "devices",
        (1, 8, 64, 256, 1024, 4096, 16_384, 100_000),
        _by_devices,
        marked=1024,
        most_s=1.0,
    ),
    Curve("decide", "experts", (1, 4, 16, 64, 256, 1024), _by_experts, marked=256, most_s=1.0),
    Curve("decide", "batch", (64, 720, 5040, 55_440, 720_720, 7_207_200), _by_candidates),
    Curve("decide 405B on 1,024 devices", "", (1,), _405b, marked=1, most_s=1.0),
    Curve("count a profile", "layers", _TENS, _counted),
    Curve("capture", "layers", _TENS[:5], _capture_by_layers),
    Curve(
        "capture",
        "parameters",
        tuple(_blocks_of(width) for width in (64, 256, 1024, 4096, 16_384)),
        _capture_by_parameters,
    ),
    Curve("capture 405B", "", (1,), _capture_405b, marked=1, most_s=3.0, most_mib=1024),
    Curve("bench", "ranks", (1, 2, 4, 8), _bench),
    Curve("apply DDP", "ranks", _RANKS, _applied("dp_replicate={}")),
    Curve("apply ZeRO-3", "ranks", _RANKS, _applied("dp_shard={}")),
    Curve("50 steps of DDP", "ranks", _RANKS, _steps("dp_replicate={}", "ddp")),
    Curve("50 steps of ZeRO-3", "ranks", _RANKS, _steps("dp_shard={}", "zero3")),
)
