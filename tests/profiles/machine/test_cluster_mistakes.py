"""Mistakes in cluster files: each names the key, the rule and the change."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiles.errors import AdvisorError
from profiles.machine.clusters import load_cluster

H200 = 'nodes = 2\naccelerator = "h200"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            H200 + '[inter]\nbandwidth = "400"',
            "`400` has no unit\n"
            "  cluster.toml: inter.bandwidth\n\n"
            'hint: write "400 Gbit/s" or "50 GB/s" (network cards are quoted in bits)',
        ),
        (
            H200 + "[inter]\nbandwidth = 400",
            "`400` has no unit\n"
            "  cluster.toml: inter.bandwidth\n\n"
            'hint: write "400 Gbit/s" or "50 GB/s" (network cards are quoted in bits)',
        ),
        (
            H200 + '[inter]\nbandwidt = "4 GB/s"',
            "unknown key `bandwidt`\n  cluster.toml: inter.bandwidt\n\n"
            "hint: did you mean `bandwidth`?",
        ),
        (
            H200 + '[inter]\nbandwidth = { value = "4 GB/s", sources = "you" }',
            "unknown key `sources`\n  cluster.toml: inter.bandwidth.sources\n\n"
            "hint: did you mean `source`?",
        ),
        (
            'accelerator = "H20O-SXM"',
            "unknown accelerator `H20O-SXM`\n  cluster.toml: accelerator\n\n"
            "hint: did you mean `H200-SXM` or `B300-SXM`?",
        ),
        (
            'system = "dgx-h10"',
            "unknown system `dgx-h10`\n  cluster.toml: system\n\n"
            "hint: did you mean `dgx-h100` or `dgx-h200`?",
        ),
        (
            H200 + '[inter]\nlink = "ib-ndr-8x40"',
            "unknown link `ib-ndr-8x40`\n  cluster.toml: inter.link\n\n"
            "hint: did you mean `ib-ndr-8x400` or `ib-ndr-4x400`?",
        ),
        (
            H200 + '[device]\nflop_rate = { bf16 = "1 TFLOP/s" }',
            "unknown dtype `bf16`\n  cluster.toml: device.flop_rate\n\n"
            "hint: did you mean `bfloat16`?",
        ),
        (
            H200 + '[inter.fits.allreduce]\nlatency = "3 us"\nbandwidth = "4 GB/s"',
            "unknown collective `allreduce`\n  cluster.toml: inter.fits\n\n"
            "hint: did you mean `all_reduce`?",
        ),
        (
            H200 + '[inter]\nbandwidth = "0 GB/s"',
            "0 is given where a number above 0 is wanted\n  cluster.toml: inter.bandwidth",
        ),
        (
            H200 + '[device]\nmemory_bandwidth = "0 GB/s"',
            "0 is given where a number above 0 is wanted\n  cluster.toml: device.memory_bandwidth",
        ),
        (
            H200 + '[device]\nflop_rate = { float32 = "0 TFLOP/s" }',
            "0 is given where a number above 0 is wanted\n  cluster.toml: device.flop_rate.float32",
        ),
        (
            H200 + "[device]\nmatmul_fraction = 80",
            "80 is not a share: above 0, and about 1 at most\n"
            "  cluster.toml: device.matmul_fraction\n\n"
            "hint: 80 % is 0.8",
        ),
        (
            H200 + "[device]\nmatmul_fraction = 0",
            "0 is not a share: above 0, and about 1 at most\n"
            "  cluster.toml: device.matmul_fraction",
        ),
        (
            H200 + '[inter]\nbandwidth = { value = "4 GB/s", source = "you", relative_error = 10 }',
            "`relative_error` = 10 is not half a range: a fraction of the value, 1 at most\n"
            "  cluster.toml: inter.bandwidth\n\nhint: 0.1 is +-10 %",
        ),
        (
            H200 + "[[axes]]\ngroup_size = 1\nstride = 1",
            "`axes.0.group_size` = 1: Input should be greater than or equal to 2\n"
            "  cluster.toml: axes.0.group_size",
        ),
        (
            'system = "dgx-h100"\naccelerator = "A100-SXM-80GB"',
            "`dgx-h100` brings its own devices, H100-SXM-80GB\n  cluster.toml: accelerator\n\n"
            "hint: leave `accelerator` out, or `system`",
        ),
        (
            'accelerator = "h200"\nnodes = 0',
            "`nodes` = 0: more than 0 is wanted\n  cluster.toml: nodes",
        ),
        (
            "",
            "`accelerator` is missing\n  cluster.toml\n\n"
            'hint: write `accelerator = "H100-SXM-80GB"`, a `system`, or a `[device]` table',
        ),
        (
            '[device]\nmemory = "3 GiB"\nflop_rate = { float32 = "1 TFLOP/s" }',
            "`device.memory_bandwidth` is missing\n  cluster.toml\n\n"
            "hint: write it, or name an `accelerator` or `system` of the catalogue",
        ),
        (
            '[device]\nkind = "cpu"\nmemory = "3 GiB"',
            "`device.memory_bandwidth` and `device.flop_rate` and `device.launch` and"
            " `device.context` are missing\n  cluster.toml\n\n"
            "hint: write it, or name an `accelerator` or `system` of the catalogue",
        ),
        (
            'devices_per_node = 2\n[device]\nmemory = "3 GiB"\nmemory_bandwidth = "1 GB/s"\n'
            'flop_rate = { float32 = "1 TFLOP/s" }',
            "`intra.bandwidth` and `intra.latency` are missing\n  cluster.toml\n\n"
            'hint: write them in a table `[intra]`, or name a `link` there: "nvlink4", "pcie4",'
            ' "ib-ndr-1x400" ...',
        ),
        (
            "nodes = = 2",
            "not TOML: Invalid value (at line 1, column 9)\n  cluster.toml",
        ),
    ],
)
def test_a_mistake_in_a_file_names_the_key_and_the_change(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cluster.toml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AdvisorError) as caught:
        load_cluster("cluster.toml")
    assert str(caught.value) == message
    assert caught.value.exit_code == 2
