"""Tensor-parallel layers against Megatron's own counts, and sums done by hand."""

from __future__ import annotations

import pytest

from advisor.cost import Estimate, estimate
from advisor.cost.load.loads import Loads, loads_of
from advisor.cost.load.tensor import cut_share
from advisor.cost.load.unit_load import UnitLoad
from engines.plan import Plan
from engines.tensor.styles import Style
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


def layer(path: str, inputs: int, outputs: int, *, saved: float, **more: object) -> LayerCost:
    """A linear layer with a bias; what follows it saves `saved` bytes a sample for backward."""
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
        "after": Stretch(
            activation_bytes=per_sample(saved), selective_activation_bytes=per_sample(saved)
        ),
    }
    return LayerCost(path=path, inputs=inputs, outputs=outputs, **{**settings, **more})


LAYERS = (
    layer("q", H, H, saved=ROW, same_input=0, sources=(INPUT,)),
    layer("k", H, H, saved=ROW, same_input=0, sources=(INPUT,)),
    # The value itself, and the output of attention, which `o` saves.
    layer("v", H, H, saved=2 * ROW, same_input=0, sources=(INPUT,)),
    # The sum after it, and its norm, which `up` saves.
    layer("o", H, H, saved=2 * ROW, same_input=3, sources=(0, 1, 2)),
    layer("up", H, WIDE, saved=2 * INNER, same_input=4, sources=(INPUT, 3)),
    layer("down", WIDE, H, saved=0.0, same_input=5, sources=(4,), reaches_output=True),
)
WEIGHTS = 4 * (4 * H * H + 2 * H * WIDE)
COLUMN_BIASES, ROW_BIASES, NORMS = 4 * (3 * H + WIDE), 4 * 2 * H, 4 * 4 * H
# The block's input and its norm, in addition to what the layers save.
SAVED_BEFORE = 2 * ROW
SAVED_SPLIT = 4 * ROW + 2 * INNER
SAVED_WHOLE = SAVED_BEFORE + 2 * ROW


def block(number: int) -> UnitProfile:
    flop = sum(each.own.forward_flop.per_sample for each in LAYERS)
    cost = UnitCost(
        forward_flop=per_sample(flop),
        backward_flop=per_sample(2 * flop),
        forward_moved_bytes=per_sample(20.0 * ROW),
        backward_moved_bytes=per_sample(40.0 * ROW),
        activation_bytes=per_sample(SAVED_SPLIT + SAVED_WHOLE),
        selective_activation_bytes=per_sample(SAVED_SPLIT + SAVED_WHOLE),
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
    head = layer("", H, VOCAB, saved=0.0, same_input=0, bias_bytes=0, bias_gradient_bytes=0)
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


def test_a_rank_holds_its_part_of_the_weights_and_all_norms_and_row_biases() -> None:
    load = of_block(split(4, STYLES))
    assert load.parameter_bytes == (WEIGHTS + COLUMN_BIASES) / 4 + ROW_BIASES + NORMS
    assert load.gradient_bytes == load.parameter_bytes
    assert load.forward_flop == 3 * 2 * TOKENS * (WEIGHTS / 4) / 4
    assert load.backward_flop == 2 * load.forward_flop


def test_a_vocabulary_that_does_not_divide_is_counted_on_the_rank_that_has_most() -> None:
    loads = split(3, VOCABULARY)
    assert loads.runs[0].parameter_bytes == 22 * H * 4  # 64 rows as 22, 22, 20


def test_between_column_and_row_activations_are_split_and_elsewhere_they_are_whole() -> None:
    load = of_block(split(4, STYLES))
    assert load.activation_bytes == pytest.approx(3 * (SAVED_SPLIT / 4 + SAVED_WHOLE))
    assert load.input_bytes == load.output_bytes == 3 * ROW


def test_selective_recompute_retains_the_share_of_a_product_before_its_output_is_gathered() -> None:
    load = of_block(split(4, tuple((pattern, "gather") for pattern, _ in STYLES)))
    assert load.activation_bytes == pytest.approx(3 * (SAVED_SPLIT + SAVED_WHOLE))
    gathered = 4 * ROW + INNER  # what is saved behind `down` belongs to the next block
    wanted = SAVED_SPLIT + SAVED_WHOLE - gathered * 3 / 4
    assert load.selective_bytes == pytest.approx(3 * wanted)


def test_sequence_parallelism_splits_all_activations_but_gathered_tokens() -> None:
    """arXiv:2205.05198, except that the engine saves gathered tokens: for q, k, v and for up."""
    load = of_block(split(4, BY_TOKENS))
    norms, joined = 2 * ROW, 2 * ROW
    wanted = (SAVED_SPLIT + SAVED_WHOLE - norms) / 4 + joined
    assert load.activation_bytes == pytest.approx(3 * wanted)
    assert load.input_bytes == load.output_bytes == 3 * ROW / 4


def test_tokens_gathered_by_a_module_are_sent_and_saved_once_for_all_its_layers() -> None:
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
    (load,) = loads_of(profile, numerics=Numerics.AS_BUILT, samples=1, tp=2, styles=styles).runs
    tokens = [each for each in load.exchanges if each.purpose == "tokens"]
    assert len(tokens) == 1
    split_here, norm = 4 * ROW, ROW
    rest = SAVED_SPLIT + SAVED_WHOLE - split_here - norm
    assert load.activation_bytes == pytest.approx(split_here / 2 + norm + rest / 2)


def sent(unit: UnitLoad) -> list[tuple[Collective, float, bool]]:
    return sorted((each.kind, each.payload_bytes, each.in_forward) for each in unit.exchanges)


def test_a_block_all_reduces_twice_forward_and_twice_backward() -> None:
    """Megatron's f and g: two all-reduces of b s h in a forward and two in a backward."""
    load = of_block(split(4, STYLES, samples=1))
    reduce = Collective.ALL_REDUCE
    assert sent(load) == [(reduce, ROW, False)] * 2 + [(reduce, ROW, True)] * 2


def test_sequence_parallelism_sends_scatters_and_gathers_of_the_same_bytes() -> None:
    """g and g-bar of arXiv:2205.05198, twice each in a forward and in a backward: each half of an
    all-reduce, of which a block without sequence parallelism has two and two."""
    load = of_block(split(4, BY_TOKENS, samples=1))
    gather, scatter = Collective.ALL_GATHER, Collective.REDUCE_SCATTER
    within = [(kind, ROW, forward) for kind in (gather, scatter) for forward in (False, True)] * 2
    assert sent(load) == sorted(within)
    assert load.partial_gradient_bytes == ROW_BIASES + NORMS


def test_the_ends_of_a_chain_of_blocks_gather_whole_sequences() -> None:
    """The last block its output; the first one, which cuts its input, the gradient of that."""
    gather = Collective.ALL_GATHER
    middle = sent(of_block(split(4, BY_TOKENS, samples=1)))
    first = of_block(split(4, (*BY_TOKENS, ("blocks.*", "entry")), samples=1))
    last = of_block(split(4, (*BY_TOKENS, ("blocks.*", "exit")), samples=1))
    assert sent(first) == sorted([*middle, (gather, ROW, False)])
    assert sent(last) == sorted([*middle, (gather, ROW, True)])
    assert (first.output_bytes, last.output_bytes) == (ROW / 4, ROW)


def test_gathered_outputs_are_sent_and_nothing_stays_split() -> None:
    load = of_block(split(2, (("blocks.*.up", "gather"),), samples=1))
    assert sent(load) == [
        (Collective.ALL_GATHER, INNER, True),
        (Collective.ALL_REDUCE, ROW, False),
    ]
    assert load.activation_bytes == SAVED_SPLIT + SAVED_WHOLE


def test_split_logits_cost_three_small_all_reduces_and_a_share_of_the_loss() -> None:
    whole, divided = split(1, ()), split(4, VOCABULARY)
    embedding, head, loss = divided.runs[0], divided.runs[-2], divided.runs[-1]
    assert sent(embedding) == [(Collective.ALL_REDUCE, 3 * ROW, True)]
    assert sent(head) == [(Collective.ALL_REDUCE, 3 * ROW, False)]
    assert sent(loss) == [(Collective.ALL_REDUCE, 3 * TOKENS * 4, True)] * 3
    # The exponentials and the logits themselves: torch saves those to pick the class of a row.
    logits = whole.runs[-1].activation_bytes
    assert loss.activation_bytes == 2 * logits / 4
    assert loss.forward_moved_bytes == whole.runs[-1].forward_moved_bytes / 4
    assert loss.backward_moved_bytes == whole.runs[-1].backward_moved_bytes / 4


def on_gpus(text: str) -> Estimate:
    plan = Plan.parse(f"{text} microbatch_size=1")
    return estimate(plan, facts(model(), gpus(2), batch=16, precision="fp32"))


def test_a_step_is_charged_with_what_its_blocks_send() -> None:
    words = ",".join(f"{pattern}:{style}" for pattern, style in STYLES)
    cost = on_gpus(f"tp=8 dp_replicate=2 tensor_styles={words} accumulation=3")
    within = {t.purpose: t for t in cost.traffic if t.group_size == 8}
    assert within["outputs"].count == within["gradients of inputs"].count == 2 * 2 * 3
    (gradients,) = (t for t in cost.traffic if t.purpose == "gradients")
    # Replicas are tp ranks apart: each on another node.
    assert (gradients.group_size, gradients.stride, gradients.link) == (2, 8, "InfiniBand")


def test_recompute_repeats_all_all_reduces_but_the_last() -> None:
    words = ",".join(f"{pattern}:{style}" for pattern, style in STYLES)
    cost = on_gpus(f"tp=8 dp_replicate=2 tensor_styles={words} recompute=full")
    outputs = next(t for t in cost.traffic if t.purpose == "outputs")
    assert outputs.count == 2 * (2 + 1)


def test_all_reduces_of_split_layers_are_exposed() -> None:
    words = ",".join(f"{pattern}:{style}" for pattern, style in STYLES)
    cost = on_gpus(f"tp=8 dp_replicate=2 tensor_styles={words}")
    within = sum(t.seconds for t in cost.traffic if t.group_size == 8)
    assert cost.time.exposed_s >= within > 0


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


@pytest.mark.parametrize(
    ("style", "share"), [("column", 8 / 30), ("column/3", 3 / 10), ("row", 2 / 8)]
)
def test_each_of_the_tensors_in_a_fused_weight_is_cut_as_torch_chunks_it(
    style: str, share: float
) -> None:
    """Of 30 outputs four ranks take 8, 8, 8 and 6; of three times ten 3, 3, 3 and 1 of each."""
    fused = layer("qkv", 8, 30, saved=0.0, same_input=0)
    assert cut_share(fused, Style.parse(style), 4) == pytest.approx(share)
