"""Numbers that no machine, model or plan has are refused before anything is made of them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from engines.plan import PartialPlan, Plan, load_plan
from profiles.closed_forms.families import profile_from_config
from profiles.errors import InputError
from profiles.machine.cluster import ClusterProfile
from profiles.machine.clusters import cluster_from_name, load_cluster, resolve_cluster
from profiles.machine.launcher import launcher
from profiles.record.bounds import MOST_DEVICES, whole_number
from profiles.workload.workload import Workload
from tests.factories import cpus
from tests.profiles.closed_forms.family_configs import DECODER, GPT2

BILLION = 1_000_000_000
LLAMA = {**DECODER, "model_type": "llama"}


@pytest.fixture(autouse=True)
def _at_once() -> Any:
    start = time.process_time()
    yield
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nodes = 1000000000", "`nodes` = 1000000000: 1,000,000 is the most"),
        ("devices_per_node = 1000000000", "`devices_per_node` = 1000000000: 1,024 is the most"),
        ("nodes = 1000000\ndevices_per_node = 8", "= 8,000,000 devices: 1,000,000 are the most"),
        ("nodes_per_domain = 1000000000", "`nodes_per_domain` = 1000000000: 1,000,000"),
        ("network_cards = 1000000000", "`network_cards` = 1000000000: 1,024"),
        ("host_memory = 1e40", "1e[+]40"),
        ("[[node]]\ncount = 1000000000\n[[node]]", "`node.0.count`|`count` = 1000000000"),
    ],
)
def test_a_cluster_file_without_bounds_is_refused(
    tmp_path: Path, text: str, complaint: str
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(f'accelerator = "H100-SXM-80GB"\n{text}\n')
    with pytest.raises(InputError, match=complaint) as caught:
        load_cluster(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "1000000000x8xH100-SXM-80GB",
        "8x1000000000xH100-SXM-80GB",
        "1000000000xdgx-h100",
        f"{'9' * 100_000}xH100-SXM-80GB",
        "200000x8xH100-SXM-80GB",
    ],
)
def test_a_cluster_name_without_bounds_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"1,000,000 (is|are) the most") as caught:
        cluster_from_name(name)
    assert len(str(caught.value)) < 300


def test_a_name_of_endless_kinds_of_nodes_is_refused() -> None:
    with pytest.raises(InputError, match="more than 64 kinds of nodes"):
        cluster_from_name("+".join(["8xH100-SXM-80GB"] * 100_000))


def test_a_hundred_thousand_devices_are_a_cluster() -> None:
    cluster = cluster_from_name("12500x8xH100-SXM-80GB")
    assert cluster.world_size == 100_000
    assert cluster_from_name("1389x72xGB200").world_size == 100_008
    assert ClusterProfile.from_json(cluster.to_json()) == cluster


def test_a_saved_cluster_is_as_bounded_as_a_written_one() -> None:
    data = json.loads(cpus(2).to_json())
    with pytest.raises(InputError, match="`num_nodes` = 1000000000: 1,000,000 is the most"):
        ClusterProfile.from_json(json.dumps({**data, "num_nodes": BILLION}))


def test_a_saved_cluster_whose_nodes_nothing_joins_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({**json.loads(cpus(2).to_json()), "num_nodes": 7}))
    with pytest.raises(InputError, match="`inter` is null, and 7 nodes are joined by it"):
        resolve_cluster(str(path))


@pytest.mark.parametrize(
    "text",
    [
        "microbatches=1000000000",
        "accumulation=1000000000",
        "dp_shard=1000000000",
        "pp=1000000000 schedule=gpipe",
        "servers=1000000000",
        f"tp={'9' * 100_000}",
    ],
)
def test_settings_without_bounds_are_refused(tmp_path: Path, text: str) -> None:
    key, value = text.split()[0].split("=")
    for parse in (PartialPlan.parse, Plan.parse):
        with pytest.raises(InputError, match=f"`{key}` = .*is the most") as caught:
            parse(text)
        assert len(caught.value.what) < 300
    if len(value) < 20:
        path = tmp_path / "plan.json"
        path.write_text(json.dumps({key: int(value)}))
        with pytest.raises(InputError, match=f"`{key}` = {value}: .* is the most"):
            load_plan(path)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({**LLAMA, "num_hidden_layers": BILLION}, "`num_hidden_layers` = 1,000,000,000: 20,000"),
        ({**GPT2, "n_layer": BILLION}, "`n_layer` = 1,000,000,000: 20,000 is the most"),
        ({**LLAMA, "num_labels": BILLION}, "`num_labels` = 1,000,000,000: 100,000 is the most"),
        ({**LLAMA, "a": [{"num_experts": 10**30}]}, "num_experts` = .*65,536 is the most"),
        ({**LLAMA, "hidden_size": 10**29}, "`hidden_size` = "),
        ({**LLAMA, "num_hidden_layers": -2}, "`num_hidden_layers` = -2: 0 is the least"),
        ({**LLAMA, "vision_config": {"num_heads": -1}}, "num_heads` = -1: 0 is the least"),
    ],
)
def test_a_config_without_bounds_is_refused(config: dict[str, object], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint) as caught:
        profile_from_config(config, samples=1, sequence_length=16, name="x")
    assert caught.value.where == "config.json"


def test_an_index_from_the_end_is_no_count() -> None:
    config = {**LLAMA, "vision_feature_layer": -2, "out_indices": [-1], "num_ctx": -1}
    assert profile_from_config(config, samples=1, sequence_length=16, name="x").units


@pytest.mark.parametrize(("field", "beyond"), [("host_overhead_s", 90_000.0), ("imbalance", 1e30)])
def test_a_step_that_waits_for_days_is_refused(field: str, beyond: float) -> None:
    """A report would show it with as many digits as it has."""
    with pytest.raises(InputError, match=f"`{field}` = .* is the most"):
        Workload.build({"global_batch_size": 8, field: beyond})


def test_a_batch_of_a_trillion_samples_is_refused() -> None:
    with pytest.raises(InputError, match="1,000,000,000 is the most"):
        Workload.build({"global_batch_size": 10**12})
    assert Workload.build({"global_batch_size": 10**6, "dataset_samples": 5 * 10**9})


def test_a_job_of_a_billion_nodes_is_none() -> None:
    srun = {
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "4(x1000000000)",
    }
    with pytest.raises(InputError, match="1,000,000 is the most"):
        launcher(environment=srun)


@pytest.mark.parametrize("text", ["", "-1", "1.5", "x", "²", "1 000", "0", "00"])
def test_what_is_no_positive_number_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="`--x` wants a positive whole number, not"):
        whole_number(text, "--x", most=10)


def test_numbers_up_to_their_bound_are_read() -> None:
    assert whole_number("0010", "--x", most=10) == 10
    assert whole_number("0", "--x", least=0, most=10) == 0
    assert whole_number(str(MOST_DEVICES), "--x", most=MOST_DEVICES) == MOST_DEVICES
    with pytest.raises(InputError, match="`--x` = 11: 10 is the most"):
        whole_number("11", "--x", most=10)
    with pytest.raises(InputError, match=r"9\.\.\.: 10 is the most"):
        whole_number("9" * 1_000_000, "--x", most=10)
