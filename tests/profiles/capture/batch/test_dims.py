"""The rows of a batch are inferred or said, and decide how it is cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from profiles.capture.batch.dims import ELEMENTS, describe_dims, dims_of, possible_dims
from profiles.capture.batch.rows import batch_size, repeat_rows, split_rows
from profiles.capture.batch.tree import batch_tensors
from profiles.errors import BatchError, UnknownNameError

X, Y = torch.arange(6.0).reshape(3, 2), torch.tensor([1, 2, 3])


def test_rows_are_cut_as_views_and_add_up() -> None:
    first, empty, last = split_rows({"x": X, "y": Y, "flag": True}, [2, 0, 1])
    assert (batch_size(first), batch_size(empty), batch_size(last)) == (2, 0, 1)
    assert first["x"].data_ptr() == X.data_ptr()
    assert torch.equal(torch.cat([part["y"] for part in (first, empty, last)]), Y)
    assert last["flag"] is True
    with pytest.raises(BatchError, match=r"3 rows cannot be cut into 2 \+ 2"):
        split_rows(X, [2, 2])


IMAGES = [torch.ones(3, 4 + n, 5) for n in range(2)]
BOXES = [{"boxes": torch.ones(1 + n, 4), "labels": torch.ones(1 + n)} for n in range(2)]


@pytest.mark.parametrize(
    ("batch", "dims"),
    [
        ((X, Y), {"element 0": 0, "element 1": 0}),
        ({"x": X, "scale": torch.tensor(2.0)}, {"x": 0, "scale": None}),
        ({"a": {"x": X}, "b": [Y, Y]}, {"a.x": 0, "b[0]": 0, "b[1]": 0}),
        ({"x": X, "names": ["a", "b", "c"]}, {"x": 0, "names": ELEMENTS}),
        ({"x": X, "names": ["a", "b"], "n": 3, "o": None}, {"x": 0}),
        ((IMAGES, BOXES), {"element 0": ELEMENTS, "element 1": ELEMENTS}),
        # As torch's own detection training collates them.
        (tuple(zip(*zip(IMAGES, BOXES, strict=True), strict=True)), "as before"),
        (([torch.ones(8, c, c) for c in (4, 2)], torch.ones(8)), "maps of features"),
    ],
)
def test_dimensions_that_the_sizes_decide(batch: object, dims: object) -> None:
    if dims == "as before":
        dims = {"element 0": ELEMENTS, "element 1": ELEMENTS}
    if dims == "maps of features":
        dims = {"element 0[0]": 0, "element 0[1]": 0, "element 1": 0}
    assert dims_of(batch) == dims


@pytest.mark.parametrize(
    ("batch", "choices"),
    [
        # The target says how many rows there are; the frames may have them second.
        ((torch.ones(12, 8, 4), torch.ones(8)), [{"element 0": d} for d in (None, 1)]),
        # Most tensors have 8 rows.
        (
            {"ids": torch.ones(8, 16), "positions": torch.ones(16), "labels": torch.ones(8, 16)},
            [{"positions": None}],
        ),
    ],
)
def test_what_the_sizes_leave_open_is_to_be_tried(
    batch: object, choices: list[dict[str, object]]
) -> None:
    possible = possible_dims(batch)
    assert [
        {n: dims[n] for n in choice} for dims, choice in zip(possible, choices, strict=True)
    ] == (choices)
    with pytest.raises(BatchError, match="first dimensions differ"):
        dims_of(batch)


@pytest.mark.parametrize(
    ("said", "dims"),
    [
        ({"frames": 1}, {"frames": 1, "table": None, "y": 0}),
        ({"table": 0, "frames": None, "y": None}, {"frames": None, "table": 0, "y": None}),
    ],
)
def test_dimensions_that_are_said_stand(said: dict[str, int | None], dims: object) -> None:
    batch = {"frames": torch.ones(12, 8, 4), "table": torch.ones(5), "y": torch.ones(8)}
    assert possible_dims(batch, said)[0] == dims


def test_dimensions_of_a_container_are_those_of_its_tensors() -> None:
    batch = ({"a": torch.ones(2, 3), "b": [torch.ones(5, 3)]}, torch.ones(3))
    assert possible_dims(batch, (1, 0)) == [{"element 0.a": 1, "element 0.b[0]": 1, "element 1": 0}]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"tables": 0}, "unknown value of the batch `tables`"),
        ({"table": 1}, "`table` has 1 dimensions, there is no dimension 1"),
        ({"table": "rows"}, "`table` = 'rows' is no dimension"),
    ],
)
def test_dimensions_that_are_not_there_are_refused(said: dict[str, object], message: str) -> None:
    with pytest.raises((BatchError, UnknownNameError), match=message):
        possible_dims({"table": torch.ones(5)}, said)  # type: ignore[arg-type]


def test_what_all_samples_share_goes_with_every_part() -> None:
    batch = {"frames": torch.arange(24.0).view(3, 4, 2), "table": X, "names": list("abcd")}
    dims = {"frames": 1, "table": None, "names": ELEMENTS}
    first, second = split_rows(batch, [1, 3], dims)
    assert torch.equal(torch.cat([first["frames"], second["frames"]], 1), batch["frames"])
    assert first["table"] is X
    assert (first["names"], second["names"]) == (["a"], ["b", "c", "d"])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_cut_and_repeated_by_rows(layout: torch.layout) -> None:
    rows = [torch.full((n, 2), float(n)) for n in (2, 1, 3)]
    nested = torch.nested.nested_tensor(rows, layout=layout)

    def contents(tensor: Tensor) -> list[list[list[float]]]:
        return [row.tolist() for row in tensor.unbind()]

    parts = [part[0] for part in split_rows((nested, Y), [1, 2])]
    assert [c for part in parts for c in contents(part)] == [row.tolist() for row in rows]
    twice = repeat_rows(nested, 2, {"input": 0})
    assert contents(twice) == 2 * [row.tolist() for row in rows]


def test_rows_are_repeated_and_shared_tensors_are_not() -> None:
    batch = (X.clone().requires_grad_(), Y, [torch.ones(1), torch.ones(2), torch.ones(3)])
    twice = repeat_rows(batch, 2, {"element 0": 0, "element 1": None, "element 2": ELEMENTS})
    assert [tuple(t.shape) for t in batch_tensors(twice)] == [(6, 2), (3,), *[(1,), (2,), (3,)] * 2]
    assert twice[0].is_leaf
    assert twice[0].requires_grad


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": X, "y": Y[:2]}, r"first dimensions differ: x has 3, y has 2"),
        ((X, [Y[:1]]), r"first dimensions differ: element 0 has 3, element 1\[0\] has 1"),
        ((), r"the batch holds no tensor"),
        ((torch.tensor(1.0),), r"the batch holds no tensor with a dimension"),
        ((X, pack_sequence([Y, Y])), r"`element 1` is a PackedSequence"),
        ((X, Y.numpy()), r"`element 1` is a numpy array"),
    ],
)
def test_unusable_batches_are_refused_by_name(batch: object, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        batch_size(batch)


def test_a_later_batch_whose_sizes_differ_names_them_and_where() -> None:
    dims = {"frames": 1, "y": 0}
    with pytest.raises(BatchError, match="frames has 8 along dimension 1, y has 7"):
        batch_size({"frames": torch.ones(12, 8), "y": torch.ones(7)}, dims)
    with pytest.raises(BatchError, match="`frames` has 1 dimensions, its rows are along"):
        batch_size({"frames": torch.ones(12), "y": torch.ones(7)}, dims)


def test_dimensions_are_said_in_one_line() -> None:
    dims = {"ids": 0, "frames": 1, "table": None, "images": ELEMENTS, "labels": 0}
    assert describe_dims(dims) == (
        "rows: ids, labels; rows along dimension 1: frames; shared by all samples: table;"
        " a sample an element: images"
    )
