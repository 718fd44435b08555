"""Which values go where, against models whose wiring is known, and arithmetic by hand."""

from __future__ import annotations

import networkx as nx
import pytest
import torch
from torch import Tensor, nn

from profiles.capture import capture
from profiles.flow import GLUE, LOSS, Call, Edge, Flow, Value
from profiles.model import ModelProfile
from tests.engines.cases import TinyGPT, token_loss

F32 = 4
ROWS, WIDTH = 2, 8


def flow_of(model: nn.Module, *inputs: Tensor) -> Flow:
    return capture(model, inputs or torch.randn(ROWS, WIDTH)).flow


def names(flow: Flow) -> list[tuple[str, str]]:
    return [(flow.calls[e.source].unit, flow.calls[e.target].unit) for e in flow.edges]


def before(flow: Flow, unit: str) -> int:
    return next(number for number, call in enumerate(flow.calls) if call.unit == unit)


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
        kept = self.first(x)
        changed = torch.relu_(kept)
        out: Tensor = self.second(changed) + kept
        return out


def test_what_is_changed_in_place_after_it_was_handed_on_is_marked() -> None:
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
    from profiles.affine import Affine
    from profiles.errors import InputError

    value = Value(shape=(1,), dtype="float32", bytes=Affine(fixed=4))
    calls = tuple(Call(unit=f"u{n}", values=(value,)) for n in range(602))
    edges = tuple(Edge(source=n, value=0, target=n + 1) for n in range(601))
    with pytest.raises(InputError, match="601 edges"):
        Flow(calls=calls, edges=edges).mermaid()


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


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Keeps(nn.Module):
    """Leaves one of its values in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.inner(x)
        out: Tensor = self.outer(x)
        return out


class Reads(nn.Module):
    def __init__(self, other: Keeps) -> None:
        super().__init__()
        self.layer = linear()
        self.other = (other,)  # somebody else's module

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * self.other[0].kept
        return out


class ByAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Keeps()
        self.second = linear()
        self.third = Reads(self.first)
        self.fourth = linear()

    def forward(self, x: Tensor) -> Tensor:
        x = self.third(self.second(self.first(x)))
        out: Tensor = self.fourth(x + self.first.kept)
        return out


def test_what_a_unit_leaves_in_an_attribute_feeds_who_reads_it() -> None:
    flow = flow_of(ByAttribute())
    assert names(flow) == [
        ("first", "second"),
        ("first", "third"),
        ("second", "third"),
        ("first", "fourth"),
        ("third", "fourth"),
    ]
    assert [value.is_returned for value in flow.calls[0].values] == [True, False]
    # Before the third: what the second made, and what the first left.
    assert [value.is_returned for value in flow.crossing(2)] == [False, True]


class Writes(nn.Module):
    """Adds to its second argument and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor, total: Tensor) -> None:
        total.add_(self.layer(x))


class ByArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = linear(), Writes(), linear()

    def forward(self, x: Tensor) -> Tensor:
        total = self.first(x)
        self.second(x, total)
        out: Tensor = self.third(total)
        return out


def test_what_a_unit_writes_to_its_argument_feeds_who_takes_that() -> None:
    flow = flow_of(ByArgument())
    assert names(flow) == [("first", "second"), ("second", "third")]
    assert flow.calls[0].values[0].is_overwritten
    assert not flow.calls[1].values[0].is_returned


class Remembers(nn.Module):
    def __init__(self, memory: Tensor, *, is_writer: bool) -> None:
        super().__init__()
        self.layer, self.is_writer = linear(), is_writer
        self.register_buffer("memory", memory)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.memory, Tensor)
        out: Tensor = self.layer(x)
        if self.is_writer:
            self.memory.copy_(out.detach().mean(0))
            return out
        return out + self.memory


class ByBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        memory = torch.zeros(WIDTH)
        self.writer = Remembers(memory, is_writer=True)
        self.between = linear()
        self.reader = Remembers(memory, is_writer=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.reader(self.between(self.writer(x)))
        return out


def test_what_a_unit_writes_to_a_buffer_feeds_who_reads_that() -> None:
    edges = names(flow_of(ByBuffer()))
    assert edges == [("writer", "between"), ("writer", "reader"), ("between", "reader")]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(WIDTH), linear()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.layer(self.norm(x)))
        return out


def test_running_statistics_are_no_value_of_a_norm_that_is_called_again() -> None:
    flow = flow_of(Normed(), torch.randn(4, WIDTH))
    assert names(flow) == [("norm", "layer"), ("layer", "norm")]
    assert [len(call.values) for call in flow.calls] == [1, 1, 1]


class Thirds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.layer(x).chunk(3, -1)


class Chunked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.thirds, self.query, self.key, self.out = Thirds(), linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.thirds(x)
        key = key.unflatten(-1, (2, -1)).flatten(-2)
        out: Tensor = self.out(self.query(query) * self.key(key) + value)
        return out


def test_chunks_of_one_memory_go_where_each_is_taken() -> None:
    flow = flow_of(Chunked())
    taken = {e.value: flow.calls[e.target].unit for e in flow.edges if e.source == 0}
    assert taken == {0: "query", 1: "key", 2: "out"}


class InGlue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        total = self.first(x) * 1.0
        total[:, :4].add_(self.second(x)[:, :4])
        out: Tensor = self.third(total)
        return out


def test_what_glue_made_and_changes_itself_overwrites_no_output() -> None:
    flow = flow_of(InGlue())
    assert names(flow) == [("first", "third"), ("second", "third")]
    assert not any(value.is_overwritten for call in flow.calls for value in call.values)


class Prompt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.table.expand(x.shape)


class Prompted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prompt, self.first, self.second = Prompt(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x) + self.prompt(x))
        return out


def test_a_parameter_that_a_unit_returns_is_a_value_of_it() -> None:
    flow = flow_of(Prompted())
    assert names(flow) == [("first", "second"), ("prompt", "second")]
    assert all(value.depends_on_parameters for value in flow.crossing(2))
    assert len(flow.crossing(2)) == 2


class Gives:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Wraps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, given: Gives) -> Gives:
        return Gives(self.layer(given.x))


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Wraps(), Wraps()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(Gives(x))).x
        return out


def test_tensors_in_objects_of_the_users_own_are_followed() -> None:
    assert names(flow_of(Wrapped())) == [("first", "second")]


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError(self.layer(x).shape)


class Catches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fails, self.first, self.second = Fails(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.fails(x)
        except NotImplementedError:
            x = self.first(x)
        out: Tensor = self.second(x)
        return out


def test_a_call_that_raised_and_was_caught_is_over() -> None:
    flow = flow_of(Catches())
    assert names(flow) == [("first", "second")]
    assert flow.inside == ()


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


class Keeping(nn.Module):
    """Hands on one tensor, and leaves another one in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        made = self.linear(x)
        self.kept[:] = [made * 2]
        out: Tensor = made.relu()
        return out


def test_what_a_call_makes_and_keeps_back_is_seen_where_it_is_taken() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Keeping(), nn.Linear(WIDTH, WIDTH)
            self.third = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.second(self.first(x))
            out: Tensor = self.third(y + self.first.kept[0])
            return out

    flow = flow_of(Whole())
    assert flow.hidden == ((0, 2),)
    assert names(flow) == [("first", "second"), ("first", "third"), ("second", "third")]
    assert [value.is_returned for value in flow.calls[0].values] == [True, False]


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
    assert flow.crossing_keys(2) == ((0, 0),)
