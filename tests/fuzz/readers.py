"""Readers by name: what is done with a file, and real files that cases are made from."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random

from tests.fuzz.mutations import mutated

TOKENS = 16


@dataclass(frozen=True)
class Reader:
    """A way to read a file.

    Attributes:
        file: its name, whose ending counts.
        read: given the path; a text that it returns says what is wrong with what it read.
        seeds: real contents.
        most_s: seconds of the processor that a file may take.
    """

    name: str
    file: str
    read: Callable[[Path], object]
    seeds: Callable[[], list[bytes]]
    most_s: float = field(default=1.0, kw_only=True)

    def write(self, folder: Path, random: Random) -> Path:
        """A case in `folder`, in the place of the one before."""
        path = folder / self.file
        path.write_bytes(mutated(random.choice(self.seeds()), random))
        path.chmod(0o600)
        return path


def _text(path: Path) -> str:
    """As a command line gives it: what is no UTF-8 becomes surrogates."""
    return path.read_bytes().decode(errors="surrogateescape")[:100_000]


@cache
def _documents() -> dict[str, list[bytes]]:
    """Small documents of every kind, made by the package itself."""
    from advisor.decide.choose import choose
    from advisor.learning.run_log import Anchor
    from engines.plan import Plan
    from profiles.machine.clusters import cluster_from_name
    from profiles.timing.runs import TrainingRun
    from tests.advisor.learning.test_anchor import HERE, anchor, predicted
    from tests.factories import cpus

    def saved(plan: Plan) -> bytes:  # without its hash, which no change would survive
        return json.dumps(plan.model_dump(mode="json"), indent=2).encode()

    made: dict[str, list[bytes]] = {"plan": [], "decision": []}
    for text in (
        "dp_shard=4 microbatches=2 recompute=full",
        "pp=2 tp=2 schedule=1f1b stages=layers.2 tensor_styles=layers.*:column",
        "dp_replicate=4 zero=1 aggregation=ring compression=bf16 bucket_mib=50",
    ):
        made["plan"].append(saved(Plan.parse(text)))
    facts = predicted()
    decision = choose(facts)
    made["decision"].append(decision.to_json().encode())
    made["plan"].append(decision.plan.to_json().encode())
    known: Anchor = anchor(facts)
    made["anchor"] = [known.to_json().encode()]
    made["profile"] = [facts.model.to_json().encode()]
    clusters = [
        cpus(2),
        cluster_from_name("2x8xH100-SXM-80GB"),
        cluster_from_name("2xdgx-a100-40gb"),
    ]
    made["cluster"] = [cluster.to_json().encode() for cluster in clusters]
    run = {
        "machine": HERE.model_dump(mode="json"),
        "model": "gpt",
        "fingerprint": "0" * 16,
        "plan": "dp_replicate=2",
        "dtype": "float32",
        "predicted_s": 0.5,
        "parts": {"matrix products": {"seconds": 0.3, "unit_s": 1e-12}},
        "step": {"median_s": 0.5, "low_s": 0.4, "high_s": 0.6, "repeats": 10},
        "peak": {"predicted_bytes": 1e9, "measured_bytes": 1.1e9, "doubt_bytes": 1e8},
        "pace": {"scatter": 0.01, "straggling": 0.1, "slowest": 1},
        "ended_at": "2025-01-01T00:00:00+00:00",
    }
    made["run"] = [TrainingRun.build(run).to_json().encode()]
    return made


def _documents_of(kind: str) -> Callable[[], list[bytes]]:
    return lambda: _documents()[kind]


@cache
def _tomls() -> list[bytes]:
    from profiles.machine.clusters import cluster_from_name, to_toml
    from tests.factories import cpus

    by_hand = (
        'nodes = 4\ndevices_per_node = 8\naccelerator = "H100-SXM-80GB"\n\n[inter]\n'
        'bandwidth = "400 Gbit/s"\nlatency = { value = "5 us", source = "measured",'
        " relative_error = 0.1 }\n",
        '[[node]]\ncount = 2\nsystem = "dgx-h100"\n\n[[node]]\nsystem = "dgx-h200"\n',
        'devices_per_node = 4\n[device]\nkind = "cuda"\nmemory = "24 GiB"\n'
        'memory_bandwidth = "1 TB/s"\nflop_rate = { float32 = "80 TFLOP/s" }\n[intra]\n'
        'link = "pcie4"\nwiring = "mesh"\n[host_bridge]\ndevices = 2\npeer_to_peer = false\n',
    )
    named = [cluster_from_name("2x8xH100-SXM-80GB"), cpus(2)]
    return [text.encode() for text in (*by_hand, *map(to_toml, named))]


@cache
def _configs() -> list[bytes]:
    from tests.profiles.closed_forms import family_configs as known

    configs = [value for value in vars(known).values() if isinstance(value, dict)]
    configs.remove(known.T5)  # is captured, which takes seconds
    configs = [config for config in configs if "vocab_size" in config]  # no images
    small = [c for c in configs if "model_type" in c and c.get("num_hidden_layers", 3) == 3]
    with_code = {**known.DECODER, "model_type": "olmo", "auto_map": {"AutoConfig": "a--b.C"}}
    return [json.dumps(config).encode() for config in (*small, with_code)]


@cache
def _built_configs() -> list[bytes]:
    """Of kinds without a closed form: transformers builds them."""
    sizes = {
        "vocab_size": 100,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    kinds = ("olmo", "falcon", "bloom", "starcoder2", "granite", "ernie")
    configs = [
        {"model_type": kind, **sizes, "auto_map": {"AutoConfig": "a--b.C"}} for kind in kinds
    ]
    return [
        json.dumps({**config, "num_labels": 2, "dtype": "float32"}).encode() for config in configs
    ]


@cache
def _tables() -> list[bytes]:
    from tests.advisor.predict.test_resolve import CELLS

    network = {
        **{"row_id": "v-1", "model_name": "resnet50-224px", "arch": "resnet", "dtype": "fp16"},
        **{"gpu_type": "V100-SXM2-32GB", "gpus_per_node": "8", "n_gpus": "8", "dp": "8"},
        **{"microbatch": "32", "global_batch": "256", "intra_link": "NVLink2"},
    }
    mixture = {**CELLS, "arch": "moe", "n_experts": "8", "moe_topk": "2", "moe_ffn_hidden": "4096"}
    return [
        f"{','.join(row)}\n{','.join(row.values())}\n".encode() for row in (CELLS, network, mixture)
    ]


@cache
def _logs() -> list[bytes]:
    from tests.profiles.machine.test_nccl_tests import log

    hosts = ("node1",) * 4 + ("node2",) * 4
    return [log("all_reduce_perf").encode(), log("sendrecv_perf", hosts=hosts).encode()]


@cache
def _weights(suffix: str) -> list[bytes]:
    import torch
    from safetensors.torch import save

    tensors = {"a.weight": torch.arange(12.0).reshape(3, 4), "a.bias": torch.ones(4)}
    if suffix == "safetensors":
        return [save(tensors)]
    index = {"metadata": {"total_size": 64}, "weight_map": dict.fromkeys(tensors, "w.safetensors")}
    return [json.dumps(index).encode()]


def _cluster(path: Path) -> None:
    from profiles.machine.clusters import resolve_cluster, to_toml

    cluster = resolve_cluster(str(path))
    to_toml(cluster)
    if cluster.world_size > 1:
        cluster.group_bandwidth(min(cluster.world_size, 8))


def _cluster_name(path: Path) -> None:
    from profiles.machine.clusters import cluster_from_name

    cluster_from_name(_text(path))


def _profile(path: Path) -> None:
    from advisor.inputs.models import profile_model
    from profiles.model.profile import ModelProfile

    profile = profile_model(str(path), samples=1, sequence_length=TOKENS)
    ModelProfile.from_json(profile.to_json())


def _saved_profile(path: Path) -> None:
    from rich.console import Console

    from advisor.cli.model_table import model_table
    from advisor.inputs.models import profile_model

    profile = profile_model(str(path), samples=1, sequence_length=None)
    profile.shard_units()
    Console(file=io.StringIO()).print(model_table(profile))
    profile.flow.mermaid()


def _plan(path: Path) -> None:
    from engines.plan import load_plan

    plan = load_plan(path)
    type(plan).parse(str(plan))


def _plan_text(path: Path) -> None:
    from engines.plan import PartialPlan, Plan

    str(PartialPlan.parse(_text(path)))
    str(Plan.parse(_text(path)))


def _quantities(path: Path) -> None:
    from profiles import units

    text = _text(path)
    if "FLOP" in text:
        units.parse_flop_rate(text)
    elif text.endswith(("/s", "bps")):
        units.parse_bandwidth(text)
    elif text.endswith(("B", "bit", "bytes")):
        units.parse_bytes(text)
    elif text.endswith("W"):
        units.parse_watts(text)
    else:
        units.parse_seconds(text)


def _options(path: Path) -> None:
    """The options of commands that no file says: counts and seconds."""
    import click

    from advisor.cli import command

    context, option = click.Context(click.Command("x")), click.Option(["--x"])
    for convert in (command.count, command.tokens, command.seconds, command.fraction):
        convert(context, option, _text(path))


def _decision(path: Path) -> None:
    from advisor.decide.decision import Decision

    str(Decision.load(path))


def _cached(path: Path) -> object:
    """A cache is never relied on: nothing is raised, whatever is in it."""
    from advisor.learning.anchor import Anchor
    from profiles.cache import every, recall
    from profiles.errors import AdvisorError
    from profiles.timing.runs import TrainingRun

    path.parent.chmod(0o700)
    try:
        recall(path, Anchor)
        list(every("run", TrainingRun, folder=path.parent))
    except AdvisorError as error:
        return f"raised {type(error).__name__}"
    return None


def _anchor(path: Path) -> None:
    from advisor.learning.anchor import Anchor, anchored
    from tests.advisor.learning.test_anchor import predicted

    anchored(predicted(), Anchor.load(path))


def _table(path: Path) -> None:
    from advisor.predict.prediction import predict, write_predictions
    from advisor.predict.rows import read_rows

    write_predictions(map(predict, read_rows(path)), path.parent / "out.csv")


def _log(path: Path) -> None:
    from profiles.machine.nccl_tests import cluster_of_logs

    cluster_of_logs([path])


def _open_weights(path: Path) -> None:
    import torch

    from engines.state.weights import open_weights

    if path.suffix == ".json":
        (path.parent / "w.safetensors").write_bytes(_weights("safetensors")[0])
    tensors = open_weights(path)
    assert not callable(tensors)
    for name in tensors.names:
        form = tensors.form(name)
        target = torch.empty(form.shape, dtype=form.dtype)
        tensors.read(name, target, offsets=(0,) * target.dim())


def _words(*texts: str) -> Callable[[], list[bytes]]:
    return lambda: [text.encode() for text in texts]


def readers() -> Iterator[Reader]:
    """All of them; those of checkpoints need torch's modules of a model."""
    from tests.fuzz.saves import checkpoints

    yield Reader("cluster.toml", "cluster.toml", _cluster, _tomls)
    yield Reader("cluster.json", "cluster.json", _cluster, _documents_of("cluster"))
    yield Reader(
        "cluster-name",
        "name",
        _cluster_name,
        _words("4x8xH100-SXM-80GB", "2xdgx-h100", "72xGB200", "8xH100-SXM-80GB+8xA100-SXM-80GB"),
    )
    yield Reader("profile", "model.json", _saved_profile, _documents_of("profile"))
    # A type of model that has no closed form is captured.
    yield Reader("config", "config.json", _profile, _configs, most_s=5.0)
    yield Reader("config-built", "config.json", _profile, _built_configs, most_s=5.0)
    yield Reader("plan", "plan.json", _plan, _documents_of("plan"))
    yield Reader(
        "plan-text",
        "words",
        _plan_text,
        _words(
            "dp_shard=4 microbatches=2 recompute=full",
            "pp=2 schedule=1f1b stages=a,b",
            "dp_replicate=4 zero=1 tp=2 tensor_styles=a.*:column,b:row",
            "dp_replicate=2 accumulation=4 bucket_mib=50",
        ),
    )
    yield Reader(
        "quantities",
        "text",
        _quantities,
        _words("80 GiB", "400 Gbit/s", "989 TFLOP/s", "5 us", "700 W", "1.5e3 GB/s", "12 min"),
    )
    yield Reader("options", "text", _options, _words("8", "128", "0.5", "1e3"))
    yield Reader("decision", "plan.json", _decision, _documents_of("decision"))
    yield Reader("cache", "run-0.json", _cached, _documents_of("run"))
    yield Reader("anchor", "anchor.json", _anchor, _documents_of("anchor"))
    yield Reader("table", "rows.csv", _table, _tables)
    yield Reader("nccl-log", "all_reduce_perf.log", _log, _logs)
    yield Reader("weights", "w.safetensors", _open_weights, lambda: _weights("safetensors"))
    yield Reader(
        "weights-index", "model.safetensors.index.json", _open_weights, lambda: _weights("json")
    )
    yield from checkpoints()
