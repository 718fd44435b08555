"""Dataflow against models whose wiring is known, and arithmetic by hand."""

from __future__ import annotations

import networkx as nx
import pytest
import torch
from torch import Tensor, nn

from profiles.capture.capture import capture
from profiles.errors import InputError
from profiles.model.affine import Affine
from profiles.model.flow import GLUE, LOSS, Edge, Flow, TakenSum, UnitCall, Value
from profiles.model.profile import ModelProfile
from tests.engines.cases import TinyGPT, token_loss
from tests.profiles.model.flows import F32, ROWS, WIDTH, before, flow_of, names


def test_a_cut_of_a_gpt_sends_one_hidden_state() -> None:
    ids = torch.randint(0, 32, (ROWS, 12))
    model = TinyGPT()
    flow = capture(model, (ids, ids), loss_fn=token_loss).flow
    width = model.norm.normalized_shape[0]
    blocks = [c.unit for c in flow.calls if c.unit.startswith("blocks.")]
    for block in blocks:
        (hidden,) = flow.crossing(before(flow, block))
        assert hidden.shape == (ROWS, 12, width)
        assert hidden.bytes.at(5) == 5 * 12 * width * F32
        assert hidden.needs_gradient
        assert not hidden.is_overwritten
    assert flow.calls[-1].unit == LOSS
    assert nx.is_directed_acyclic_graph(flow.graph())


class UNet(nn.Module):
    """Two levels down and up; each level's output skips to its mirror."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.bottom = nn.Conv2d(16, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(32, 8, 2, stride=2)
        self.leave = nn.Conv2d(16, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = self.enter(x).relu()
        low = self.down(high).relu()
        bottom = self.bottom(low)
        up = self.up(torch.cat([bottom, low], 1))
        out: Tensor = self.leave(torch.cat([up, high], 1))
        return out


def test_skip_edges_cross_every_cut_between_their_ends() -> None:
    flow = flow_of(UNet(), torch.randn(ROWS, 3, 16, 16))
    assert set(names(flow)) == {
        ("enter", "down"),
        ("down", "bottom"),
        ("down", "up"),
        ("bottom", "up"),
        ("enter", "leave"),
        ("up", "leave"),
    }
    high, low = 8 * 16 * 16 * F32, 16 * 8 * 8 * F32
    sizes = [sum(v.bytes.at(1) for v in flow.crossing(cut)) for cut in range(len(flow.calls))]
    #        enter  down  bottom      up              leave
    assert sizes == [0, high, high + low, high + low + low, high + high]


class Overwriting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        changed = torch.relu_(hidden)
        out: Tensor = self.second(changed) + hidden
        return out


def test_a_value_changed_in_place_after_use_is_marked() -> None:
    flow = flow_of(Overwriting())
    assert [v.is_overwritten for call in flow.calls for v in call.values] == [True, False]
    # The sum comes after the last unit: the first one's value reaches the second only.
    assert names(flow) == [("first", "second")]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.between = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.shared(self.between(self.shared(x)))
        return out


def test_a_unit_that_is_called_again_is_named_and_lies_on_a_cycle() -> None:
    flow = flow_of(Twice())
    assert [call.unit for call in flow.calls] == ["shared", "between", "shared"]
    assert flow.called_again() == ("shared",)
    assert list(nx.simple_cycles(flow.graph())) in (
        [["shared", "between"]],
        [["between", "shared"]],
    )
    assert flow.graph().nodes["shared"]["calls"] == 2


class Positions(nn.Module):
    """A table of its own, added between units; and a table that depends on no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.clock = Clock()
        self.leave = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        ticks = self.clock(x)
        out: Tensor = self.leave(self.enter(x) + self.table + ticks)
        return out


class Clock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rate", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.arange(WIDTH) * self.rate


def test_parameters_in_glue_and_values_without_parameters_are_told_apart() -> None:
    flow = flow_of(Positions())
    assert [call.unit for call in flow.calls] == ["clock", "enter", GLUE, "leave"]
    assert names(flow) == [("clock", "leave"), ("enter", "leave"), (GLUE, "leave")]
    clock, enter, glue, _ = (call.values for call in flow.calls)
    assert not clock[0].depends_on_parameters
    assert clock[0].bytes.at(100) == WIDTH * F32  # the same for every batch
    assert enter[0].depends_on_parameters
    assert glue[0].shape == (WIDTH,)
    # Of the three only the unit's output has to be sent.
    assert flow.crossing(3) == enter


def test_a_unit_inside_another_is_part_of_its_call() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.weight = nn.Linear(WIDTH, WIDTH)
            self.inner = (inner,)  # somebody else's module

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner[0](self.weight(x))
            return out

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.outer = Outer(self.inner)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.outer(self.inner(x))
            return out

    flow = flow_of(Whole())
    assert [call.unit for call in flow.calls] == ["inner", "outer"]
    assert flow.inside == (("inner", "outer"),)
    assert flow.called_again() == ("inner",)


def test_a_flow_survives_json() -> None:
    profile = capture(UNet(), (torch.randn(ROWS, 3, 16, 16),))
    assert profile.flow.edges
    assert ModelProfile.from_json(profile.to_json()).flow == profile.flow


def test_a_flow_is_drawn_with_its_bytes() -> None:
    flow = flow_of(nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 2)), torch.randn(ROWS, WIDTH))
    assert flow.mermaid(samples=3).splitlines() == [
        "flowchart TD",
        '    u0["0"]',
        '    u1["1"]',
        f'    u0 -->|"{3 * 4 * F32} B"| u1',
    ]


def test_too_many_edges_are_refused_with_the_number() -> None:
    value = Value(shape=(1,), dtype="float32", bytes=Affine(fixed=4))
    calls = tuple(UnitCall(unit=f"u{n}", values=(value,)) for n in range(602))
    edges = tuple(Edge(source=n, value=0, target=n + 1) for n in range(601))
    with pytest.raises(InputError, match="601 edges"):
        Flow(calls=calls, edges=edges).mermaid()


@pytest.mark.parametrize(
    ("terms", "is_summed", "what"),
    [
        (((0, 0), (1, 0)), True, None),
        (((0, 0), (1, 0)), False, None),  # taken alone too
        ((), True, "in sums, and is in none"),
        (((0, 0), (2, 0)), False, "value 0 of call 2, which is no edge"),
    ],
)
def test_sums_are_of_values_that_their_call_takes(
    terms: tuple[tuple[int, int], ...], is_summed: bool, what: str | None
) -> None:
    value = Value(shape=(1,), dtype="float32", bytes=Affine(fixed=4))
    calls = tuple(UnitCall(unit=f"u{n}", values=(value,)) for n in range(4))
    edges = tuple(Edge(source=n, value=0, target=3, is_summed=is_summed) for n in range(2))
    sums = (TakenSum(terms=terms, target=3),) if terms else ()
    if what is not None:
        with pytest.raises(ValueError, match=what):  # pydantic's, with ours in it
            Flow(calls=calls, edges=edges, sums=sums)
        return
    alone = (((0, 0),), ((1, 0),))
    flow = Flow(calls=calls, edges=edges, sums=sums)
    assert flow.crossing_terms(2) == ((terms,) if is_summed else alone)


def test_every_decoder_block_of_t5_takes_what_the_encoder_made() -> None:
    transformers = pytest.importorskip("transformers")
    layers, width, source, target = 3, 32, 10, 7
    config = transformers.T5Config(
        vocab_size=99, d_model=width, d_kv=8, d_ff=64, num_layers=layers, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    ids, labels = torch.ones(ROWS, source).long(), torch.ones(ROWS, target).long()
    model = transformers.T5ForConditionalGeneration(config)
    flow = capture(model, {"input_ids": ids, "labels": labels}).flow
    cut = before(flow, "decoder.block.2")
    sizes = sorted(value.bytes.at(1) for value in flow.crossing(cut))
    hidden, encoded = target * width * F32, source * width * F32
    # Position biases of self and cross attention: heads x target x (target, source), no batch.
    biases = [4 * target * target * F32, 4 * target * source * F32]
    assert sizes == sorted([hidden, encoded, *biases])


def test_parameters_that_glue_uses_are_named_in_the_order_of_its_values() -> None:
    (glue,) = (call for call in flow_of(Positions()).calls if call.unit == GLUE)
    assert glue.parameters == ("table",)


def test_a_loss_that_the_model_returns_is_the_last_call() -> None:
    class WithLoss(Twice):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).mean()

    flow = flow_of(WithLoss())
    assert [call.unit for call in flow.calls] == ["shared", "between", "shared", LOSS]
    assert names(flow)[-1] == ("shared", LOSS)


def test_a_unit_that_takes_a_value_for_its_type_alone_does_not_depend_on_it() -> None:
    class Typed(Clock):
        def forward(self, x: Tensor) -> Tensor:
            return (torch.arange(WIDTH) * self.rate).to(x.dtype)

    class Whole(Positions):
        def __init__(self) -> None:
            super().__init__()
            self.clock = Typed()

        def forward(self, x: Tensor) -> Tensor:
            entered = self.enter(x)
            ticks = self.clock(entered)
            out: Tensor = self.leave(entered + ticks)
            return out

    flow = flow_of(Whole())
    assert [value.depends_on_parameters for call in flow.calls[:2] for value in call.values] == [
        True,
        False,
    ]
    assert flow.crossing_terms(2) == (((0, 0),),)
