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

# Packages that need torch, and modules in the others that do. Everything else must import without
# it: planning a cluster needs none.
WITH_TORCH_PACKAGES = (
    "advisor.auto",
    "advisor.inputs.bundled",
    "advisor.tutorial",
    "engines.apply",
    "engines.blocks",
    "engines.context",
    "engines.data",
    "engines.experts",
    "engines.offload",
    "engines.optional",
    "engines.parallel",
    "engines.pipeline",
    "engines.runtime",
    "engines.state",
    "engines.tensor",
    "profiles.capture",
    "profiles.machine.bench",
    "profiles.torch_compat",
)
WITH_TORCH = {
    "profiles.allocator.process_peak",
    "profiles.machine.gpus",
    "profiles.machine.probe",
    "profiles.timing.stopwatch",
    "profiles.timing.block_timer",
}
TORCH_FREE_INSIDE = {
    "advisor.tutorial.demo.launch",
    "advisor.tutorial.notebooks.pictures",
    "advisor.tutorial.notebooks.ranks",
    "engines.optional.aggregation.rounds",
    "engines.pipeline.cuts",
    "engines.runtime.learning_rate",
    "engines.tensor.rules",
    "engines.tensor.styles",
    "profiles.capture.frames",
}


def modules() -> list[str]:
    results = []
    for layer in LAYERS:
        for path in sorted((ROOT / layer).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            results.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return results


def may_import_torch(module: str) -> bool:
    packages = WITH_TORCH_PACKAGES
    is_inside = any(module == package or module.startswith(f"{package}.") for package in packages)
    return module in WITH_TORCH or (is_inside and module not in TORCH_FREE_INSIDE)


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
    assert (WITH_TORCH | set(WITH_TORCH_PACKAGES) | TORCH_FREE_INSIDE).issubset(modules())


@pytest.mark.parametrize(("layer", "most"), [("profiles", 17), ("engines", 17), ("advisor", 14)])
def test_a_package_has_few_entries_at_its_top(layer: str, most: int) -> None:
    # Folders without a file are what another checkout has left.
    entries = [e for e in (ROOT / layer).iterdir() if e.is_file() or any(e.glob("*.py"))]
    names = [entry.name for entry in entries]
    assert len(names) <= most, sorted(names)


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
        if module.startswith("profiles.torch_compat"):
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


PARSERS = {"json.load", "json.loads", "tomllib.load", "tomllib.loads", "open", "os.open", "eval"}
METHODS = {"read_text", "read_bytes", "model_validate_json"}
# Bounds are those of `profiles.record`; beside it these read what no stranger writes.
MAY_READ = {
    "advisor.auto.local_ranks": "a file of its own child",
    "advisor.report.glossary": "packaged",
    "advisor.report.html": "packaged",
    "advisor.tutorial.notebooks.ranks": "a file of its own child",
    "engines.apply.proofs": "messages of ranks",
    "engines.state.checkpoint.agreement": "messages of ranks",
    "engines.state.checkpoint.folder": "writes, and locks",
    "engines.state.checkpoint.shard_file": "writes",
    "engines.data.finite": "messages of ranks",
    "engines.data.replica_checksums": "messages of ranks",
    "engines.runtime.rank_agreement": "messages of ranks",
    "profiles.allocator.process_peak": "/proc",
    "profiles.closed_forms.families.profile": "its own text",
    "profiles.machine.catalogue": "packaged",
    "profiles.machine.host": "/proc and /sys",
    "profiles.timing.stopwatch": "/proc",
    "profiles.workload.stack": "packaged",
}


def test_files_of_strangers_are_read_by_one_bounded_reader() -> None:
    readers = set()
    for module in modules():
        path = ROOT / (module.replace(".", "/") + ".py")
        path = path if path.exists() else ROOT / module.replace(".", "/") / "__init__.py"
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            method = isinstance(node.func, ast.Attribute) and called.split(".")[-1]
            if called in PARSERS or method in METHODS:
                readers.add(module)
    assert {m for m in readers if not m.startswith("profiles.record.")} == set(MAY_READ)
