"""Split layers against Megatron's own counts, and sums done by hand."""

from __future__ import annotations

import pytest

from advisor.cost import Estimate, estimate
from advisor.cost.loads import Loads, loads_of
from advisor.cost.unit_load import UnitLoad
from engines.plan import Plan
from profiles.machine.cluster import Collective
from profiles.model.layers import INPUT, LayerCost, LayerKind, Stretch
from profiles.model.profile import (
    LOSS,
    ModelProfile,
    Numerics,
    ParameterShape,
    UnitCost,
    UnitProfile,
)
from tests.factories import cpus, facts, gpus, per_sample

# A block of arXiv:1909.08053 in fp32: h = 8, four times as wide inside, s = 4 tokens a sample.
H, WIDE, TOKENS, VOCAB = 8, 32, 4, 64
ROW = TOKENS * H * 4
INNER = TOKENS * WIDE * 4
STYLES = (
    ("blocks.*.q", "column"),
    ("blocks.*.k", "column"),
    ("blocks.*.v", "column"),
    ("blocks.*.o", "row"),
    ("blocks.*.up", "column"),
    ("blocks.*.down", "row"),
)
BY_TOKENS = (
    *STYLES,
    ("blocks.*", "sequence"),
    *((f"blocks.*.{name}", "joined") for name in ("q", "k", "v", "up")),
)
VOCABULARY = (("embed", "vocab"), ("head", "vocab"))


def layer(path: str, inputs: int, outputs: int, *, kept: float, **more: object) -> LayerCost:
    """A linear layer with a bias; `kept` bytes a sample are kept of what is made of its output."""
    flop = 2.0 * TOKENS * inputs * outputs
    settings = {
        "kind": LayerKind.LINEAR,
        "weight_bytes": 4 * inputs * outputs,
        "weight_gradient_bytes": 4 * inputs * outputs,
        "bias_bytes": 4 * outputs,
        "bias_gradient_bytes": 4 * outputs,
        "input_bytes": per_sample(4.0 * TOKENS * inputs),
        "output_bytes": per_sample(4.0 * TOKENS * outputs),
        "own": Stretch(forward_flop=per_sample(flop), backward_flop=per_sample(2 * flop)),
        "after": Stretch(activation_bytes=per_sample(kept)),
    }
    return LayerCost(path=path, inputs=inputs, outputs=outputs, **{**settings, **more})


LAYERS = (
    layer("q", H, H, kept=ROW, same_input=0, sources=(INPUT,)),
    layer("k", H, H, kept=ROW, same_input=0, sources=(INPUT,)),
    # Of the value: itself, and what attention makes of all three, which `o` keeps.
    layer("v", H, H, kept=2 * ROW, same_input=0, sources=(INPUT,)),
    # The sum after it, and its norm, which `up` keeps.
    layer("o", H, H, kept=2 * ROW, same_input=3, sources=(0, 1, 2)),
    layer("up", H, WIDE, kept=2 * INNER, same_input=4, sources=(INPUT, 3)),
    layer("down", WIDE, H, kept=0.0, same_input=5, sources=(4,), reaches_output=True),
)
WEIGHTS = 4 * (4 * H * H + 2 * H * WIDE)
COLUMN_BIASES, ROW_BIASES, NORMS = 4 * (3 * H + WIDE), 4 * 2 * H, 4 * 4 * H
# The block's input and its norm beside what follows from layers.
KEPT_BEFORE = 2 * ROW
KEPT_SPLIT = 4 * ROW + 2 * INNER
KEPT_WHOLE = KEPT_BEFORE + 2 * ROW


def block(number: int) -> UnitProfile:
    flop = sum(each.own.forward_flop.per_sample for each in LAYERS)
    cost = UnitCost(
        forward_flop=per_sample(flop),
        backward_flop=per_sample(2 * flop),
        forward_moved_bytes=per_sample(20.0 * ROW),
        backward_moved_bytes=per_sample(40.0 * ROW),
        activation_bytes=per_sample(KEPT_SPLIT + KEPT_WHOLE),
        selective_activation_bytes=per_sample(KEPT_SPLIT + KEPT_WHOLE),
        input_bytes=per_sample(ROW),
        output_bytes=per_sample(ROW),
        layers=LAYERS,
    )
    total = WEIGHTS + COLUMN_BIASES + ROW_BIASES + NORMS
    return UnitProfile(
        name=f"blocks.{number}",
        kind="Block",
        is_block=True,
        parameters=total // 4,
        trainable_parameters=total // 4,
        parameter_bytes=total,
        gradient_bytes=total,
        dtypes=("float32",),
        shapes=(
            ParameterShape(sizes=(H, H), element_bytes=4, count=4),
            ParameterShape(sizes=(WIDE, H), element_bytes=4),
            ParameterShape(sizes=(H, WIDE), element_bytes=4),
            ParameterShape(sizes=(H,), element_bytes=4, count=9),
            ParameterShape(sizes=(WIDE,), element_bytes=4),
        ),
        costs={Numerics.AS_BUILT: cost},
    )


def single(name: str, cost: UnitCost, parameters: int) -> UnitProfile:
    return UnitProfile(
        name=name,
        kind=name,
        parameters=parameters,
        trainable_parameters=parameters,
        parameter_bytes=4 * parameters,
        gradient_bytes=4 * parameters,
        shapes=(ParameterShape(sizes=(VOCAB, H), element_bytes=4),) if parameters else (),
        costs={Numerics.AS_BUILT: cost},
    )


def model(blocks: int = 2) -> ModelProfile:
    embedding = LayerCost(
        path="",
        kind=LayerKind.EMBEDDING,
        inputs=VOCAB,
        outputs=H,
        weight_bytes=4 * VOCAB * H,
        weight_gradient_bytes=4 * VOCAB * H,
        output_bytes=per_sample(ROW),
        needs_input_gradient=False,
        same_input=0,
    )
    logits = 4.0 * TOKENS * VOCAB
    head = layer("", H, VOCAB, kept=0.0, same_input=0, bias_bytes=0, bias_gradient_bytes=0)
    loss = UnitCost(activation_bytes=per_sample(logits), input_bytes=per_sample(logits))
    units = [
        single("embed", UnitCost(output_bytes=per_sample(ROW), layers=(embedding,)), VOCAB * H),
        *(block(number) for number in range(blocks)),
        single("head", UnitCost(output_bytes=per_sample(logits), layers=(head,)), VOCAB * H),
        single(LOSS, loss, 0),
    ]
    return ModelProfile(
        name="megatron", units=tuple(units), dtype="float32", samples=1, tokens_per_sample=TOKENS
    )


def split(tp: int, styles: tuple[tuple[str, str], ...], samples: int = 3) -> Loads:
    return loads_of(model(), numerics=Numerics.AS_BUILT, samples=samples, tp=tp, styles=styles)


def of_block(loads: Loads) -> UnitLoad:
    return next(unit for unit in loads.runs if unit.is_block)


def test_a_rank_has_its_part_of_the_weights_and_all_of_norms_and_biases_of_rows() -> None:
    found = of_block(split(4, STYLES))
    assert found.parameter_bytes == (WEIGHTS + COLUMN_BIASES) / 4 + ROW_BIASES + NORMS
    assert found.gradient_bytes == found.parameter_bytes
    assert found.forward_flop == 3 * 2 * TOKENS * (WEIGHTS / 4) / 4
    assert found.backward_flop == 2 * found.forward_flop


def test_a_vocabulary_that_does_not_divide_is_counted_on_the_rank_that_has_most() -> None:
    loads = split(3, VOCABULARY)
    assert loads.runs[0].parameter_bytes == 22 * H * 4  # 64 rows as 22, 22, 20


def test_between_column_and_row_activations_are_split_and_elsewhere_they_are_whole() -> None:
    found = of_block(split(4, STYLES))
    assert found.activation_bytes == pytest.approx(3 * (KEPT_SPLIT / 4 + KEPT_WHOLE))
    assert found.input_bytes == found.output_bytes == 3 * ROW


def test_by_tokens_all_is_split_but_what_was_joined() -> None:
    """arXiv:2205.05198, but for one thing: the engine keeps what it joined, here for each layer."""
    found = of_block(split(4, BY_TOKENS))
    norms, joined = 2 * ROW, 4 * ROW
    wanted = (KEPT_SPLIT + KEPT_WHOLE - norms) / 4 + joined
    assert found.activation_bytes == pytest.approx(3 * wanted)
    assert found.input_bytes == 3 * ROW / 4


def test_tokens_that_a_module_joins_are_sent_and_kept_once_for_all_its_layers() -> None:
    """Query, key and value in one module: of the first half of the block."""
    inside = [each.model_copy(update={"path": f"attn.{each.path}"}) for each in LAYERS[:4]]
    unit = block(0)
    cost = unit.costs[Numerics.AS_BUILT].model_copy(update={"layers": (*inside, *LAYERS[4:])})
    one = unit.model_copy(update={"costs": {Numerics.AS_BUILT: cost}})
    profile = model().model_copy(update={"units": (one,)})
    styles = (
        ("blocks.*", "sequence"),
        ("blocks.*.attn", "joined"),
        *((f"blocks.*.attn.{name}", "column") for name in ("q", "k", "v")),
        ("blocks.*.attn.o", "row"),
    )
    (found,) = loads_of(profile, numerics=Numerics.AS_BUILT, samples=1, tp=2, styles=styles).runs
    tokens = [each for each in found.exchanges if each.purpose == "tokens"]
    assert len(tokens) == 1 + 1  # the module, and the end of the block
    split_here, norm = 4 * ROW, ROW
    rest = KEPT_SPLIT + KEPT_WHOLE - split_here - norm
    assert found.activation_bytes == pytest.approx(split_here / 2 + norm + rest / 2)


def sent(unit: UnitLoad) -> list[tuple[Collective, float, bool]]:
    return sorted((each.kind, each.payload_bytes, each.in_forward) for each in unit.exchanges)


def test_a_block_sums_twice_forward_and_twice_backward() -> None:
    """Megatron's f and g: two all-reduces of b s h in a forward and two in a backward."""
    found = of_block(split(4, STYLES, samples=1))
    reduce = Collective.ALL_REDUCE
    assert sent(found) == [(reduce, ROW, False)] * 2 + [(reduce, ROW, True)] * 2


def test_by_tokens_sums_become_scatters_and_gathers_of_the_same_bytes() -> None:
    """g-bar twice in a forward, and its gather in the backward; joined where pairs begin: here for
    each layer that takes the tokens. A block is entered and left with whole sequences."""
    found = of_block(split(4, BY_TOKENS, samples=1))
    gather, scatter = Collective.ALL_GATHER, Collective.REDUCE_SCATTER
    # Forward: q, k, v, up are joined, the end of the block. Backward: o, down, its beginning.
    assert sent(found) == sorted(
        [(gather, ROW, True)] * 5
        + [(scatter, ROW, True)] * 2
        + [(gather, ROW, False)] * 3
        + [(scatter, ROW, False)] * 4
    )
    assert found.partial_gradient_bytes == ROW_BIASES + NORMS


def test_gathered_outputs_are_sent_and_nothing_stays_split() -> None:
    found = of_block(split(2, (("blocks.*.up", "gather"),), samples=1))
    assert sent(found) == [
        (Collective.ALL_GATHER, INNER, True),
        (Collective.ALL_REDUCE, ROW, False),
    ]
    assert found.activation_bytes == KEPT_SPLIT + KEPT_WHOLE


def test_split_logits_cost_three_small_sums_and_leave_a_share_of_the_loss() -> None:
    whole, found = split(1, ()), split(4, VOCABULARY)
    embedding, head, loss = found.runs[0], found.runs[-2], found.runs[-1]
    assert sent(embedding) == [(Collective.ALL_REDUCE, 3 * ROW, True)]
    assert sent(head) == [(Collective.ALL_REDUCE, 3 * ROW, False)]
    assert sent(loss) == [(Collective.ALL_REDUCE, 3 * TOKENS * 4, True)] * 3
    # Its exponentials, and once more what they are of: torch keeps that to pick a row's class.
    logits = whole.runs[-1].activation_bytes
    assert loss.activation_bytes == 2 * logits / 4


def on_gpus(text: str) -> Estimate:
    plan = Plan.parse(f"{text} microbatch_size=1")
    return estimate(plan, facts(model(), gpus(2), batch=16, precision="fp32"))


def test_a_step_is_charged_with_what_its_blocks_send() -> None:
    words = ",".join(f"{pattern}:{style}" for pattern, style in STYLES)
    found = on_gpus(f"tp=8 dp_replicate=2 tensor_styles={words} accumulation=3")
    within = {t.purpose: t for t in found.traffic if t.group_size == 8}
    assert within["outputs"].count == within["gradients of inputs"].count == 2 * 2 * 3
    (gradients,) = (t for t in found.traffic if t.purpose == "gradients")
    # Replicas are tp ranks apart: each on another node.
    assert (gradients.group_size, gradients.stride, gradients.link) == (2, 8, "InfiniBand")


def test_recompute_repeats_the_sums_but_the_last_whose_result_nothing_keeps() -> None:
    words = ",".join(f"{pattern}:{style}" for pattern, style in STYLES)
    found = on_gpus(f"tp=8 dp_replicate=2 tensor_styles={words} recompute=full")
    outputs = next(t for t in found.traffic if t.purpose == "outputs")
    assert outputs.count == 2 * (2 + 1)


def test_sums_of_split_layers_are_waited_for() -> None:
    words = ",".join(f"{pattern}:{style}" for pattern, style in STYLES)
    found = on_gpus(f"tp=8 dp_replicate=2 tensor_styles={words}")
    within = sum(t.seconds for t in found.traffic if t.group_size == 8)
    assert found.time.exposed_s >= within > 0


def test_more_ranks_never_take_more_memory_each() -> None:
    words = ",".join(f"{pattern}:{style}" for pattern, style in (*STYLES, *VOCABULARY))
    peaks = []
    for tp in (1, 2, 4, 8):
        split_by = f"tensor_styles={words}" if tp > 1 else ""
        plan = Plan.parse(f"tp={tp} microbatch_size=4 {split_by}")
        cluster = cpus(tp)
        peaks.append(estimate(plan, facts(model(), cluster, batch=4, precision="fp32")).peak_bytes)
    assert peaks == sorted(peaks, reverse=True)


def test_affine_costs_stay_affine_in_the_microbatch() -> None:
    one, two, three = (of_block(split(4, BY_TOKENS, samples=n)) for n in (1, 2, 3))
    for field in ("activation_bytes", "forward_flop", "forward_moved_bytes"):
        first, second, third = (getattr(unit, field) for unit in (one, two, three))
        assert third - second == pytest.approx(second - first)
