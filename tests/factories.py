"""Hand-made facts for tests: models, clusters and workloads with numbers one can check by hand."""

from __future__ import annotations

from functools import cache

from advisor.inputs.facts import Facts
from profiles.closed_forms.families import profile_from_config
from profiles.machine.cluster import ClusterProfile, Device, Link
from profiles.model.profile import LOSS, Affine, ModelProfile, Numerics, UnitCost, UnitProfile
from profiles.provenance import Quantity, Source
from profiles.units import GIB
from profiles.workload.stack import TORCH, Stack
from profiles.workload.workload import Workload

ALL_NUMERICS = (Numerics.AS_BUILT, Numerics.BF16, Numerics.BF16_AUTOCAST)


def per_sample(value: float) -> Affine:
    return Affine(per_sample=value)


def linear_cost(parameters: int, *, tokens: int, width: int, element_bytes: int) -> UnitCost:
    """A unit that multiplies `tokens` x `width` by its parameters: 2 FLOP per multiply-add."""
    flop = 2.0 * tokens * parameters
    row = float(tokens * width * element_bytes)
    return UnitCost(
        forward_flop=per_sample(flop),
        backward_flop=per_sample(2 * flop),
        forward_moved_bytes=per_sample(2 * row),
        backward_moved_bytes=per_sample(4 * row),
        forward_kernels=1,
        backward_kernels=2,
        activation_bytes=per_sample(row),
        selective_activation_bytes=per_sample(row),
        input_bytes=per_sample(row),
        output_bytes=per_sample(row),
        forward_transient_bytes=per_sample(row),
        backward_transient_bytes=per_sample(row),
    )


def transformer(
    *,
    name: str = "llama-7b-like",
    layers: int = 32,
    hidden: int = 4096,
    ffn: int = 11008,
    vocab: int = 32000,
    tokens: int = 4096,
    numerics: tuple[Numerics, ...] = ALL_NUMERICS,
) -> ModelProfile:
    """A decoder with gated MLP, built in float32; 6.74 B parameters by default, as Llama 7B."""
    block_parameters = 4 * hidden * hidden + 3 * hidden * ffn + 2 * hidden

    def block_cost(kind: Numerics) -> UnitCost:
        size = 4 if kind is Numerics.AS_BUILT else 2
        row = float(tokens * hidden * size)
        wide = float(tokens * ffn * size)
        matmul = 2.0 * tokens * block_parameters
        attention = 4.0 * tokens * tokens * hidden
        return UnitCost(
            forward_flop=per_sample(matmul + attention),
            backward_flop=per_sample(2 * matmul + 2.5 * attention),
            forward_moved_bytes=per_sample(30 * row + 8 * wide),
            backward_moved_bytes=per_sample(60 * row + 16 * wide),
            forward_kernels=40,
            backward_kernels=80,
            activation_bytes=per_sample(12 * row + 4 * wide),
            selective_activation_bytes=per_sample(6 * row + 2 * wide),
            input_bytes=per_sample(row),
            output_bytes=per_sample(row),
            forward_transient_bytes=per_sample(12 * row + 5 * wide),
            backward_transient_bytes=per_sample(4 * row + 3 * wide),
        )

    def loss_cost(kind: Numerics) -> UnitCost:
        logits = float(tokens * vocab * 4)
        return UnitCost(
            forward_moved_bytes=per_sample(4 * logits),
            backward_moved_bytes=per_sample(3 * logits),
            forward_kernels=3,
            backward_kernels=3,
            activation_bytes=per_sample(logits),
            selective_activation_bytes=per_sample(logits),
            input_bytes=per_sample(logits / (1 if kind is Numerics.AS_BUILT else 2)),
            output_bytes=Affine(fixed=4),
            forward_transient_bytes=per_sample(2 * logits),
            backward_transient_bytes=per_sample(logits),
        )

    def unit(path: str, kind: str, parameters: int, costs: dict[Numerics, UnitCost]) -> UnitProfile:
        return UnitProfile(
            name=path,
            kind=kind,
            is_block=kind == "DecoderBlock",
            parameters=parameters,
            trainable_parameters=parameters,
            parameter_bytes=4 * parameters,
            gradient_bytes=4 * parameters,
            dtypes=("float32",) if parameters else (),
            costs=costs,
        )

    def embedding_cost(kind: Numerics) -> UnitCost:
        row = float(tokens * hidden * (4 if kind is Numerics.AS_BUILT else 2))
        return UnitCost(
            forward_moved_bytes=per_sample(2 * row),
            backward_moved_bytes=per_sample(2 * row),
            forward_kernels=1,
            backward_kernels=2,
            output_bytes=per_sample(row),
            forward_transient_bytes=per_sample(row),
        )

    def head_cost(kind: Numerics) -> UnitCost:
        size = 4 if kind is Numerics.AS_BUILT else 2
        cost = linear_cost(hidden * vocab, tokens=tokens, width=hidden, element_bytes=size)
        logits = per_sample(float(tokens * vocab * size))
        return cost.model_copy(update={"output_bytes": logits, "forward_transient_bytes": logits})

    units = [
        unit("embed", "Embedding", vocab * hidden, {k: embedding_cost(k) for k in numerics}),
        *(
            unit(
                f"layers.{index}",
                "DecoderBlock",
                block_parameters,
                {k: block_cost(k) for k in numerics},
            )
            for index in range(layers)
        ),
        unit("head", "Linear", vocab * hidden, {k: head_cost(k) for k in numerics}),
        unit(LOSS, "CrossEntropyLoss", 0, {k: loss_cost(k) for k in numerics}),
    ]
    return ModelProfile(
        name=name,
        units=tuple(units),
        dtype="float32",
        samples=1,
        tokens_per_sample=tokens,
        batch_bytes=per_sample(16.0 * tokens),
        has_loss=True,
    )


def chain(
    *,
    units: int = 4,
    parameters: int = 1_000_000,
    tokens: int = 512,
    width: int = 1000,
    blocks: bool = True,
) -> ModelProfile:
    """Equal linear units in a row, float32 only; every number follows from the arguments."""
    cost = linear_cost(parameters, tokens=tokens, width=width, element_bytes=4)
    return ModelProfile(
        name="chain",
        units=tuple(
            UnitProfile(
                name=f"layers.{index}",
                kind="Linear",
                is_block=blocks,
                parameters=parameters,
                trainable_parameters=parameters,
                parameter_bytes=4 * parameters,
                gradient_bytes=4 * parameters,
                dtypes=("float32",),
                costs={Numerics.AS_BUILT: cost},
            )
            for index in range(units)
        ),
        dtype="float32",
        samples=1,
    )


def exact(value: float) -> Quantity:
    return Quantity(value=value, source=Source.MEASURED)


def datasheet(value: float, error: float = 0.15) -> Quantity:
    return Quantity(value=value, source=Source.DATASHEET, relative_error=error)


def link(
    name: str, bandwidth_bytes_per_s: float, latency_s: float = 5e-6, *, error: float = 0.15
) -> Link:
    return Link(
        name=name,
        bandwidth_bytes_per_s=datasheet(bandwidth_bytes_per_s, error),
        latency_s=datasheet(latency_s),
    )


def gpu(memory_gib: float = 79.6) -> Device:
    """An H100-like device: 989 TFLOP/s dense bf16, 3.35 TB/s (NVIDIA data sheet)."""
    return Device(
        name="H100-like",
        kind="cuda",
        memory_bytes=datasheet(memory_gib * GIB, 0.0),
        memory_bandwidth_bytes_per_s=datasheet(3.35e12),
        flop_per_s={"float32": datasheet(67e12, 0.0), "bfloat16": datasheet(989e12, 0.0)},
        matmul_fraction=datasheet(0.80, 0.10),
        launch_s=datasheet(7e-6),
        context_bytes=datasheet(2.0 * GIB, 0.25),
    )


def gpus(
    num_nodes: int = 2,
    devices_per_node: int = 8,
    *,
    memory_gib: float = 79.6,
    intra_bytes_per_s: float = 360e9,
    inter_bytes_per_s: float = 400e9,
) -> ClusterProfile:
    """DGX-like nodes; 360 GB/s in the node, eight 50 GB/s cards between them."""
    return ClusterProfile(
        name=f"{num_nodes}x{devices_per_node}xH100-like",
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        device=gpu(memory_gib),
        intra=link("NVLink", intra_bytes_per_s) if devices_per_node > 1 else None,
        inter=link("InfiniBand", inter_bytes_per_s, 10e-6) if num_nodes > 1 else None,
        host_memory_bytes=datasheet(2048.0 * GIB, 0.0),
    )


def cpus(ranks: int = 2, *, memory_gib: float = 8.0) -> ClusterProfile:
    """Ranks that share a machine; slow, measured, nothing overlaps."""
    return ClusterProfile(
        name=f"cpu-{ranks}",
        num_nodes=1,
        devices_per_node=ranks,
        device=Device(
            name="cpu",
            kind="cpu",
            memory_bytes=exact(memory_gib * GIB),
            memory_bandwidth_bytes_per_s=exact(10e9),
            flop_per_s={"float32": exact(50e9)},
            matmul_fraction=exact(0.8),
            launch_s=exact(5e-6),
            context_bytes=exact(0.25 * GIB),
        ),
        intra=link("loopback", 1e9, 50e-6, error=0.1) if ranks > 1 else None,
        inter=None,
    )


def facts(
    model: ModelProfile | None = None,
    cluster: ClusterProfile | None = None,
    *,
    batch: int = 128,
    precision: str = "bf16",
    stack: Stack = TORCH,
) -> Facts:
    """Llama-7B-like in bf16 on two nodes of eight, 128 samples a step, unless said."""
    return Facts(
        model=model or transformer(),
        cluster=cluster or gpus(),
        workload=Workload(global_batch_size=batch, precision=precision),
        stack=stack,
    )


@cache
def small_llama(*, layers: int = 4) -> ModelProfile:
    """Blocks of a width of 1,024 in closed form, as a config.json gives them."""
    return profile_from_config(
        {
            "model_type": "llama",
            "vocab_size": 4000,
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_hidden_layers": layers,
            "num_attention_heads": 16,
            "max_position_embeddings": 4096,
        },
        samples=1,
        sequence_length=1024,
        name="small",
        numerics=tuple(Numerics),
    )
