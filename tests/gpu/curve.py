"""The device as it was timed, as a file for `--cluster`; and the lines that the catalogue lacks."""

from __future__ import annotations

import re
from pathlib import Path

from profiles.machine.bench.device import measured
from profiles.machine.cluster import ClusterProfile
from profiles.machine.cluster_text import to_toml
from tests.gpu.results import RESULTS, CaseResult, Results

LARGE = 8192
"""Edge of the product that stands for all large ones, as in `profiles.machine.bench.device`."""


def refitted(results: Results) -> ClusterProfile | None:
    """The bench with the finer curve of products of part f; None before both were run."""
    curve = next((case for case in results.of_part("f") if case.name == "curve"), None)
    if curve is None or results.bench is None or not curve.rows:
        return None
    rates = _rates(curve)
    best = rates.get(LARGE) or max(rates.values())
    device = results.bench.device
    usual = "bfloat16" if device.kind != "cpu" else "float32"
    efficiency = {edge: measured(min(1.0, rate / best), 0.0) for edge, rate in rates.items()}
    update: dict[str, object] = {"matmul_efficiency": efficiency}
    peak = device.flop_per_s.get(usual)
    if peak is not None and device.kind != "cpu":
        error = device.matmul_fraction.relative_error
        update["matmul_fraction"] = measured(best / peak.value, error)
    return results.bench.model_copy(
        update={"name": f"1x{device.name}", "device": device.model_copy(update=update)}
    )


def _rates(curve: CaseResult) -> dict[int, float]:
    """FLOP/s by edge."""
    return {int(row.term): row.measured for row in curve.rows}


def write(results: Results, folder: Path = RESULTS.parent) -> Path | None:
    """Write the cluster file beside the results; None where there is nothing to write yet."""
    cluster = refitted(results)
    if cluster is None:
        return None
    device = cluster.device
    name = re.sub(r"[^a-z0-9]+", "_", device.name.lower()).strip("_")
    path = folder / f"gpu_{name}.toml"
    share = f"{device.matmul_fraction.value:.3g}"
    head = [
        f"# Timed by `make gpu` on {results.device}, torch {results.torch}. For the catalogue:",
        f"# [{device.name}] matmul_fraction = {share}, by a product of 8192 of random values;",
        f"# {device.memory_bandwidth_bytes_per_s.value / 1e9:.4g} GB/s of a copy,"
        f" {device.launch_s.value * 1e6:.3g} us a launch.",
        "",
    ]
    path.write_text("\n".join(head) + to_toml(cluster))
    return path
