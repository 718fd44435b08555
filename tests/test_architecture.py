"""The house as agreed: layers, what may import torch, start-up, public names."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("profiles", "engines", "advisor")

# Everything else must import without torch: planning a cluster needs none.
WITH_TORCH = {
    "profiles.batch",
    "profiles.bench",
    "profiles.by_hand",
    "profiles.calls",
    "profiles.capture",
    "profiles.copy_trace",
    "profiles.double",
    "profiles.experts",
    "profiles.fakes",
    "profiles.flow_trace",
    "profiles.gpus",
    "profiles.laps",
    "profiles.layer_trace",
    "profiles.look",
    "profiles.memory",
    "profiles.operators",
    "profiles.pretence",
    "profiles.probe",
    "profiles.repeats",
    "profiles.state",
    "profiles.stopwatch",
    "profiles.storages",
    "profiles.subject",
    "profiles.torch_compat",
    "profiles.torch_compat_attention",
    "profiles.torch_compat_fsdp",
    "engines.aggregation.aggregate",
    "engines.aggregation.hooks",
    "engines.batch_norm",
    "engines.boxes",
    "engines.by_hand.placement",
    "engines.checkpoint",
    "engines.compiled",
    "engines.context.attention",
    "engines.context.context",
    "engines.context.proof",
    "engines.context.ring",
    "engines.context.specimen",
    "engines.context.tokens",
    "engines.context.way",
    "engines.data",
    "engines.ddp",
    "engines.experts.container",
    "engines.experts.experts",
    "engines.experts.travel",
    "engines.failures",
    "engines.fake_world",
    "engines.draws",
    "engines.forwards",
    "engines.footprint",
    "engines.fsdp",
    "engines.gauges",
    "engines.gradients",
    "engines.hybrid",
    "engines.materialise",
    "engines.held",
    "engines.imbalance",
    "engines.kept",
    "engines.layout",
    "engines.mesh",
    "engines.microbatches",
    "engines.names",
    "engines.noise",
    "engines.offload.activations",
    "engines.offload.room",
    "engines.offload.shards",
    "engines.offload.states",
    "engines.optimizer",
    "engines.parallel",
    "engines.pipeline.evaluation",
    "engines.pipeline.holdings",
    "engines.pipeline.hooks",
    "engines.pipeline.parts",
    "engines.pipeline.pipeline",
    "engines.pipeline.recording",
    "engines.pipeline.replay",
    "engines.pipeline.schedules",
    "engines.pipeline.skeleton",
    "engines.pipeline.split",
    "engines.pipeline.stage",
    "engines.pipeline.tied",
    "engines.precision",
    "engines.recompute",
    "engines.replicas",
    "engines.state",
    "engines.steps",
    "engines.tensor.copies",
    "engines.tensor.exchange",
    "engines.tensor.layers",
    "engines.tensor.logits",
    "engines.tensor.proof",
    "engines.tensor.proposal",
    "engines.tensor.proved",
    "engines.tensor.sequence",
    "engines.tensor.slices",
    "engines.weights",
    "engines.tensor.specimen",
    "engines.tensor.split",
    "engines.tensor.ties",
    "engines.tensor.variants",
    "engines.threads.threads",
    "engines.updates.agreement",
    "engines.updates.apart",
    "engines.updates.build",
    "engines.updates.exchange",
    "engines.updates.link",
    "engines.updates.periodic",
    "engines.updates.server",
    "engines.updates.serving",
    "engines.updates.working",
    "engines.world",
    "advisor.auto",
    "advisor.check",
    "advisor.job",
    "advisor.look",
    "advisor.notebooks.noise",
    "advisor.notebooks.pipelining",
    "advisor.notebooks.splitting",
    "advisor.notebooks.summing",
    "advisor.notebooks.updating",
    "advisor.sweep.measure",
}
WITH_TORCH_PREFIXES = ("advisor.demo.", "profiles.bench.", "profiles.tracing", "profiles.modules")


def modules() -> list[str]:
    found = []
    for layer in LAYERS:
        for path in sorted((ROOT / layer).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


def may_import_torch(module: str) -> bool:
    return module in WITH_TORCH or module.startswith(WITH_TORCH_PREFIXES)


def test_modules_outside_the_list_import_without_torch() -> None:
    torch_free = [m for m in modules() if not may_import_torch(m)]
    code = f"""
import sys
sys.modules["torch"] = None  # any import of it raises
import importlib
for name in {torch_free!r}:
    importlib.import_module(name)
"""
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr


def test_the_list_names_only_modules_that_exist() -> None:
    assert WITH_TORCH.issubset(modules())


@pytest.mark.parametrize("layer", LAYERS)
def test_every_public_name_can_be_imported_and_is_documented(layer: str) -> None:
    package = importlib.import_module(layer)
    assert package.__all__ == sorted(package.__all__)
    for name in package.__all__:
        assert getattr(package, name).__doc__, f"{layer}.{name}"
    with pytest.raises(AttributeError, match="no attribute 'nothing_of_ours'"):
        _ = package.nothing_of_ours


def test_private_torch_names_live_in_the_compat_files() -> None:
    offenders = []
    for module in modules():
        if module in ("profiles.torch_compat", "profiles.torch_compat_fsdp"):
            continue
        path = ROOT / (module.replace(".", "/") + ".py")
        if not path.exists():
            path = ROOT / module.replace(".", "/") / "__init__.py"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            offenders += [
                f"{module}: {name}"
                for name in names
                if name.startswith("torch") and any(p.startswith("_") for p in name.split("."))
            ]
    assert offenders == []


def test_no_file_is_too_long_to_read_in_one_sitting() -> None:
    lengths = {
        path.relative_to(ROOT): len(path.read_text().splitlines())
        for layer in LAYERS
        for path in (ROOT / layer).rglob("*.py")
    }
    assert {str(path): n for path, n in lengths.items() if n > 450} == {}
