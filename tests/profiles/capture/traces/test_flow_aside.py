"""Values that go another way than from what a unit returns to what one is given.

Attributes, arguments that are written to, buffers, shared memory, objects of the user's own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from profiles.model.flow import GLUE
from tests.profiles.model.flows import WIDTH, flow_of, linear, names


class Keeps(nn.Module):
    """Leaves one of its values in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.inner(x)
        out: Tensor = self.outer(x)
        return out


class Reads(nn.Module):
    def __init__(self, other: Keeps) -> None:
        super().__init__()
        self.layer = linear()
        self.other = (other,)  # somebody else's module

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * self.other[0].hidden
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
        out: Tensor = self.fourth(x + self.first.hidden)
        return out


def test_a_tensor_in_an_attribute_flows_to_its_reader() -> None:
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


def test_a_write_to_an_argument_flows_to_its_next_reader() -> None:
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


def test_a_write_to_a_buffer_flows_to_its_reader() -> None:
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


def test_chunks_of_one_storage_flow_to_their_own_readers() -> None:
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


def test_in_place_changes_of_glue_tensors_overwrite_no_output() -> None:
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


def test_a_parameter_that_a_unit_returns_is_a_parameter_where_it_is_taken() -> None:
    flow = flow_of(Prompted())
    assert names(flow) == [("first", "second"), (GLUE, "second")]
    assert [call.parameters for call in flow.calls if call.unit == GLUE] == [("prompt.table",)]
    assert len(flow.crossing(2)) == 1


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


def test_a_call_whose_error_was_caught_has_ended() -> None:
    flow = flow_of(Catches())
    assert names(flow) == [("first", "second")]
    assert flow.inside == ()


class Keeping(nn.Module):
    """Hands on one tensor, and leaves another one in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.hidden: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        made = self.linear(x)
        self.hidden[:] = [made * 2]
        out: Tensor = made.relu()
        return out


def test_a_hidden_value_is_seen_where_it_is_read() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Keeping(), nn.Linear(WIDTH, WIDTH)
            self.third = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.second(self.first(x))
            out: Tensor = self.third(y + self.first.hidden[0])
            return out

    flow = flow_of(Whole())
    assert flow.hidden == ((0, 2),)
    assert names(flow) == [("first", "second"), ("first", "third"), ("second", "third")]
    assert [value.is_returned for value in flow.calls[0].values] == [True, False]
