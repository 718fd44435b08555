"""Numbers of a cluster file that mix up bits and bytes, or one direction and both."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiles.errors import InputError, UnitError
from profiles.machine import catalogue
from profiles.machine.clusters import cluster_from_name, load_cluster, to_toml
from profiles.provenance import Source
from profiles.units import GIB

H100 = 'nodes = 2\ndevices_per_node = 8\naccelerator = "H100-SXM-80GB"\n'
ALONE = 'nodes = 2\naccelerator = "H100-SXM-80GB"\n'


def insist(key: str, text: str) -> str:
    return (
        f'hint: if it is right, say where it is from: `{key} = {{ value = "{text}",'
        ' source = "you" }`'
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (  # bytes for bits, where the card is named
            ALONE + '[inter]\nlink = "ib-ndr-1x400"\nbandwidth = "400 GB/s"',
            "`400 GB/s` is 8 times what IB NDR 1x400Gb is rated for (50.0 GB/s)\n"
            "  cluster.toml: inter.bandwidth\n\n"
            "hint: did you mean `400 Gbit/s`, in bits?\n" + insist("bandwidth", "400 GB/s"),
        ),
        (  # ... where the system is
            'nodes = 2\nsystem = "dgx-h100"\n[inter]\nbandwidth = "3200 GB/s"',
            "`3200 GB/s` is 8 times what IB NDR 8x400Gb (DGX H100) is rated for (400 GB/s)\n"
            "  cluster.toml: inter.bandwidth\n\n"
            "hint: did you mean `3200 Gbit/s`, in bits?\n" + insist("bandwidth", "3200 GB/s"),
        ),
        (  # ... where only cards are counted
            ALONE + 'network_cards = 1\n[inter]\nbandwidth = "800 GB/s"',
            "`800 GB/s` is 8 times what the fastest network card known, 800 Gbit/s, is rated for"
            " (100 GB/s)\n"
            "  cluster.toml: inter.bandwidth\n\n"
            "hint: did you mean `800 Gbit/s`, in bits?\n" + insist("bandwidth", "800 GB/s"),
        ),
        (
            H100 + '[inter]\nbandwidth = "3200 GB/s"',
            "`3200 GB/s` is 4 times what 8 of the fastest network cards known, 800 Gbit/s each, are"
            " rated for (800 GB/s)\n"
            "  cluster.toml: inter.bandwidth\n\n"
            "hint: did you mean `3200 Gbit/s`, in bits?\n" + insist("bandwidth", "3200 GB/s"),
        ),
        (  # ... where a file of `advise probe` was edited
            ALONE + '[inter]\nname = "IB NDR 1x400Gb"\nbandwidth = "400 GB/s"',
            "`400 GB/s` is 8 times what IB NDR 1x400Gb is rated for (50.0 GB/s)\n"
            "  cluster.toml: inter.bandwidth\n\n"
            "hint: did you mean `400 Gbit/s`, in bits?\n" + insist("bandwidth", "400 GB/s"),
        ),
        (  # bits for bytes
            ALONE + '[inter]\nlink = "ib-ndr-1x400"\nbandwidth = "50 Gb/s"',
            "`50 Gb/s` is an eighth of what IB NDR 1x400Gb is rated for (50.0 GB/s)\n"
            "  cluster.toml: inter.bandwidth\n\n"
            "hint: did you mean `50 GB/s`, in bytes?\n" + insist("bandwidth", "50 Gb/s"),
        ),
        (
            H100 + '[intra]\nbandwidth = "450 Gbit/s"',
            "`450 Gbit/s` is an eighth of what NVLink4 (H100/H200/GH200) is rated for (450 GB/s)\n"
            "  cluster.toml: intra.bandwidth\n\n"
            "hint: did you mean `450 GB/s`, in bytes?\n" + insist("bandwidth", "450 Gbit/s"),
        ),
        (  # the data sheet's figure, both directions added
            H100 + '[intra]\nbandwidth = "900 GB/s"',
            "`900 GB/s` is 2 times what NVLink4 (H100/H200/GH200) is rated for (450 GB/s)\n"
            "  cluster.toml: intra.bandwidth\n\n"
            "hint: rates are of one direction: did you mean `450 GB/s`?\n"
            + insist("bandwidth", "900 GB/s"),
        ),
        (  # PCIe cards may have bridges: only what no link reaches is refused
            'devices_per_node = 2\naccelerator = "A100-PCIe-80GB"\n'
            '[intra]\nbandwidth = "7200 GB/s"',
            "`7200 GB/s` is 8 times what the fastest link known, NVLink5 (B200/GB200), is rated for"
            " (900 GB/s)\n"
            "  cluster.toml: intra.bandwidth\n\n"
            "hint: did you mean `7200 Gbit/s`, in bits?\n" + insist("bandwidth", "7200 GB/s"),
        ),
        (
            H100 + '[device]\nmemory = "640 GB"',
            "`640 GB` is 8 times what H100-SXM-80GB has, 74.5 GiB: device memory is of one"
            " device, in bytes\n"
            "  cluster.toml: device.memory\n\n" + insist("memory", "640 GB"),
        ),
        (
            H100 + '[device]\nmemory = "80 Gb"',
            "`80 Gb` is in bits, memory is in bytes\n"
            "  cluster.toml: device.memory\n\n"
            'hint: write "80 GB", in bytes\n'
            'hint: write "80 GiB" (binary) or "80 GB" (decimal)',
        ),
        (
            H100 + '[device]\nmemory_bandwidth = "3.35 Tbit/s"',
            "`3.35 Tbit/s` is an eighth of what the memory of H100-SXM-80GB is rated for"
            " (3350 GB/s)\n"
            "  cluster.toml: device.memory_bandwidth\n\n"
            "hint: did you mean `3.35 TB/s`, in bytes?\n"
            + insist("memory_bandwidth", "3.35 Tbit/s"),
        ),
        (
            'devices_per_node = 8\n[[node]]\naccelerator = "h200"\n'
            '[[node]]\nsystem = "dgx-a100-80gb"\n[node.inter]\nbandwidth = "1600 GB/s"',
            "`1600 GB/s` is 8 times what IB HDR 8x200Gb (DGX A100) is rated for (200 GB/s)\n"
            "  cluster.toml: node.1.inter.bandwidth\n\n"
            "hint: did you mean `1600 Gbit/s`, in bits?\n" + insist("bandwidth", "1600 GB/s"),
        ),
    ],
)
def test_a_likely_mixup_is_named_with_what_was_meant(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cluster.toml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnitError) as caught:
        load_cluster("cluster.toml")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "text",
    [
        H100 + '[inter]\nbandwidth = "400 GB/s"',  # eight cards of 400 Gbit/s
        H100 + '[inter]\nbandwidth = "400 Gb/s"',
        H100 + '[inter]\nbandwidth = "10 Gbit/s"',  # slow is possible
        H100 + '[inter]\nlink = "ib-ndr-8x400"\nbandwidth = "487 GB/s"',  # published: a tree
        H100 + '[intra]\nbandwidth = "482 GB/s"',  # published: NVLS
        'devices_per_node = 2\naccelerator = "A100-PCIe-80GB"\n[intra]\nbandwidth = "250 GB/s"',
        H100 + '[device]\nmemory = "79.1 GiB"',
        ALONE + 'network_cards = 8\n[inter]\nbandwidth = "400 GB/s"',
        'nodes = 2\n[device]\nmemory = "640 GB"\nmemory_bandwidth = "9 TB/s"\n'
        'flop_rate = { float32 = "1 TFLOP/s" }\n[inter]\nlink = "ib-hdr-1x200"',
    ],
)
def test_plausible_numbers_are_accepted(text: str, tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(text, encoding="utf-8")
    load_cluster(tmp_path / "cluster.toml")


def test_a_number_with_its_source_is_not_questioned(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        ALONE + '[inter]\nlink = "ib-ndr-1x400"\n'
        'bandwidth = { value = "400 GB/s", source = "you" }\n'
        '[device]\nmemory = { value = "640 GiB", source = "you" }\n'
    )
    cluster = load_cluster(path)
    assert cluster.inter is not None
    assert cluster.inter.bandwidth_bytes_per_s.value == 400e9
    assert cluster.inter.bandwidth_bytes_per_s.source is Source.USER
    assert cluster.device.memory_bytes.value == 640 * GIB
    path.write_text(to_toml(cluster))  # and what was insisted on stays so
    assert load_cluster(path) == cluster


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('accelerator = "h100"\nnodes = 2\n[inter]\nbandwidth = "9 GB/s"', "accelerator"),
        (ALONE + '[inter]\nlink = "ib-ndr-9x400"\nbandwidth = "9 GB/s"', "inter.link"),
        ('system = "dgx"\n[intra]\nbandwidth = "9 GB/s"', "system"),
    ],
)
def test_a_wrong_name_is_still_named_with_its_place(text: str, place: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_cluster(path)
    assert caught.value.where == f"{path}: {place}"


def test_a_measured_rate_of_gloo_may_be_written_by_hand(tmp_path: Path) -> None:
    """Fast processors reach several times the catalogue's rate."""
    path = tmp_path / "cluster.toml"
    path.write_text(
        '[device]\nkind = "cpu"\nmemory = "8 GiB"\nmemory_bandwidth = "9 GB/s"\n'
        'flop_rate = { float32 = "90 GFLOP/s" }\nlaunch = "5 us"\ncontext = "1 GiB"\n'
        '[intra]\nname = "gloo on one machine"\nbandwidth = "20 Gbit/s"\nlatency = "100 us"\n'
    )
    cluster = load_cluster(path)
    assert cluster.intra is not None
    assert cluster.intra.bandwidth_bytes_per_s.value == 2.5e9


@pytest.mark.parametrize("name", list(catalogue.links()))
def test_no_rate_of_the_catalogue_is_taken_for_a_mixup(name: str, tmp_path: Path) -> None:
    """Each link's printed rate, in bits and in bytes, is accepted for it; an eighth more is not."""
    entry = catalogue.links()[name]
    if entry.scope == "host":
        return
    path = tmp_path / "cluster.toml"
    head = f'{H100}[{entry.scope}]\nlink = "{name}"\nbandwidth = '
    rate = float(entry.nominal.split()[0])
    gbit = rate if "bit" in entry.nominal else 8 * rate
    for text in (f"{gbit} Gbit/s", f"{gbit / 8} GB/s"):
        path.write_text(f'{head}"{text}"\n')
        load_cluster(path)
    path.write_text(f'{head}"{gbit} GB/s"\n')
    with pytest.raises(UnitError, match=f"did you mean `{gbit} Gbit/s`"):
        load_cluster(path)
    path.write_text(f'{head}"{gbit / 8} Gbit/s"\n')
    with pytest.raises(UnitError, match=f"did you mean `{gbit / 8} GB/s`"):
        load_cluster(path)


def test_a_named_cluster_s_own_file_is_never_questioned(tmp_path: Path) -> None:
    for name in ("2x8xH100-SXM-80GB", "2xp5-48xlarge", "2x8xMI300X"):
        path = tmp_path / "cluster.toml"
        path.write_text(to_toml(cluster_from_name(name)))
        assert load_cluster(path) == cluster_from_name(name)
