"""Whatever a cluster profile holds, its file gives it back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiles.machine.cluster import (
    AxisFits,
    ClusterProfile,
    Collective,
    Device,
    HostBridge,
    Link,
    LinkFit,
    Overlap,
    SharedCores,
)
from profiles.machine.clusters import load_cluster, to_toml
from profiles.provenance import Quantity, Source

rates = st.floats(min_value=1e-3, max_value=1e18, allow_nan=False)
# Control characters are refused where a file is read.
texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12)


def amounts(values: st.SearchStrategy[float]) -> st.SearchStrategy[Quantity]:
    return st.builds(
        Quantity,
        value=values,
        source=st.sampled_from(Source),
        relative_error=st.floats(min_value=0, max_value=1),
        origin=texts,
    )


sizes = amounts(st.integers(min_value=1, max_value=2**50).map(float))
times = amounts(st.floats(min_value=0, max_value=1e4))
fits = st.dictionaries(
    st.sampled_from(Collective),
    st.builds(
        LinkFit,
        latency_s=st.floats(min_value=0, max_value=1),
        busbw_bytes_per_s=rates,
        relative_residual=st.floats(min_value=0, max_value=2),
    ),
)
links = st.builds(
    Link,
    name=texts.filter(bool),
    wiring=st.sampled_from(["switch", "mesh"]),
    bandwidth_bytes_per_s=amounts(rates),
    latency_s=times,
    fits=fits,
)
counts = st.integers(min_value=1, max_value=2**16)
factors = amounts(st.floats(min_value=1e-3, max_value=1e3))
clusters = st.builds(
    ClusterProfile,
    schema_version=st.just(1),
    name=texts.filter(bool),
    notes=st.lists(texts, max_size=2).map(tuple),
    network_cards=st.none() | st.integers(min_value=1, max_value=32),
    oversubscription=st.floats(min_value=1, max_value=64),
    nodes_per_switch=st.none() | st.integers(min_value=1, max_value=32),
    pair=st.none() | links,
    host_bridge=st.none()
    | st.builds(
        HostBridge,
        link=links,
        devices=st.integers(min_value=1, max_value=16),
        peer_to_peer=st.booleans(),
    ),
    num_nodes=st.just(2),
    devices_per_node=st.just(2),
    device=st.builds(
        Device,
        name=texts.filter(bool),
        kind=st.sampled_from(["cuda", "cpu"]),
        memory_bytes=sizes,
        memory_bandwidth_bytes_per_s=amounts(rates),
        flop_per_s=st.fixed_dictionaries(
            {"float32": amounts(rates)}, optional={"bfloat16": amounts(rates)}
        ),
        matmul_fraction=amounts(st.floats(min_value=1e-3, max_value=1)),
        launch_s=times,
        context_bytes=sizes,
        matmul_efficiency=st.dictionaries(counts, factors, max_size=3),
    ),
    intra=links,
    inter=links,
    host_memory_bytes=st.none() | sizes,
    cores=st.none() | st.integers(min_value=1, max_value=512),
    axes=st.lists(
        st.builds(AxisFits, group_size=counts.map(lambda n: n + 1), stride=counts, fits=fits),
        max_size=3,
    ).map(tuple),
    overlap=st.none() | st.builds(Overlap, computing=factors, communication=factors),
    shared_cores=st.none() | st.builds(SharedCores, alone=factors, across_nodes=st.booleans()),
)


@settings(deadline=None)
@given(cluster=clusters)
def test_any_profile_survives_its_file(
    cluster: ClusterProfile, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(to_toml(cluster), encoding="utf-8")
    assert load_cluster(path) == cluster
