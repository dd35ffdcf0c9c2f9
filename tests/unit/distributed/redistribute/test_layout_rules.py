"""Layouts that are rejected, and the canonical form of those that are accepted."""

import copy
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.harness.ranks import FORK_SERVER
from tests.redistribution.layouts import layouts, mesh_shapes, meshes, shapes
from tests.redistribution.reference import coordinates, dims_of, elements_of
from torchtitan_lite.core.errors import LayoutError
from torchtitan_lite.distributed.redistribute import Box, HolderMesh, Layout
from torchtitan_lite.distributed.redistribute.planning.partition import Split
from torchtitan_lite.distributed.redistribute.planning.placements import decode_strided
from torchtitan_lite.distributed.torch_compat import is_strided_shard, strided_shard

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
FOUR, SQUARE = HolderMesh.ranks(4), HolderMesh.ranks(2, 2)


@pytest.mark.parametrize(
    ("make", "parts_of_message"),
    [
        (lambda: HolderMesh((2, 2), (0, 1, 2)), ["(2, 2)", "needs 4 holders", "3 were given"]),
        (lambda: HolderMesh((2, 0), ()), ["(2, 0)", "0 were given"]),
        (lambda: HolderMesh((3,), (0, 7, 7)), ["Holder 7 is twice", "List each once"]),
        (lambda: HolderMesh((2,), (0, 1), ("a", "b")), ["needs 1 different", "('a', 'b')"]),
        (lambda: HolderMesh((1, 2), (0, 1), ("a", "a")), ["needs 2 different", "('a', 'a')"]),
        (lambda: Layout(SQUARE, [S0]), ["1 placements", "the 2 axes", "Give one an axis"]),
        (lambda: Layout(FOUR, [Shard(-1)]).check((4,)), ["dim -1 from the end", "with_num_dims"]),
        (lambda: Layout(FOUR, [Partial("bitor")]), ["'bitor'", "sum, avg, product, min, max"]),
        (
            lambda: Layout(SQUARE, [P, Partial("max")]),
            ["reductions, sum and max", "Reduce the one"],
        ),
        (lambda: Layout(SQUARE, [S0, S0], {0: (0,)}), ["(0,)", "dim 0", "(0, 1)", "once each"]),
        (lambda: Layout(SQUARE, [S0, S0], {0: (0, 0)}), ["(0, 0)", "once each"]),
        (lambda: Layout(SQUARE, [S0, R], {1: (1,)}), ["(1,)", "dim 1", "()"]),
        (
            lambda: Layout(SQUARE, [strided_shard(0, 2), S0], {0: (1, 0)}),
            ["Dim 0 has both", "(1, 0)", "no order"],
        ),
        (lambda: Layout(FOUR, ["Shard(0)"]), ["'Shard(0)'", "Replicate, Shard"]),  # pyright: ignore
        (lambda: Layout(FOUR, [S1]).check((3,)), ["dim 1", "axis0", "(3,)", "has 1 dims"]),
        (lambda: Layout(FOUR, [S0]).boxes((), 0), ["dim 0", "()", "has 0 dims"]),
        (
            lambda: Layout(FOUR, [strided_shard(0, 2)]).box((16,), (0,)),
            ["(16,)", "(0,)", "2 boxes"],
        ),
        (lambda: HolderMesh((2,), (7, 7), ("a", "b")), ["needs 1 different", "('a', 'b')"]),
        (lambda: Layout(FOUR, [strided_shard(0, 0)]), ["split factor of at least 1"]),
        (lambda: Layout(FOUR, [Shard(-3)]).with_num_dims(2), ["S(-3)", "2 dims", "-2 to 1"]),
    ],
)
def test_errors_name_the_given_and_the_required_value(
    make: Callable[[], object], parts_of_message: list[str]
) -> None:
    with pytest.raises(LayoutError) as error:
        make()
    for part in parts_of_message:
        assert part in str(error.value)


def test_equal_layouts_have_one_canonical_form() -> None:
    plain = Layout(SQUARE, [S0, S0])
    same = [
        Layout(SQUARE, (S0, S0), {0: [0, 1]}),
        Layout(SQUARE, [strided_shard(0, 1), S0]),
        Layout(HolderMesh((2, 2), (0, 1, 2, 3), ("axis0", "axis1")), [S0, S0], ((0, (0, 1)),)),
    ]
    for other in same:
        assert other == plain and hash(other) == hash(plain) and str(other) == str(plain)
    others = [
        Layout(SQUARE, [S0, S0], {0: (1, 0)}),
        Layout(SQUARE, [strided_shard(0, 2), S0]),
        Layout(HolderMesh((2, 2), (0, 1, 3, 2)), [S0, S0]),
        Layout(SQUARE, [S0, S1]),
    ]
    assert len({plain, *others}) == 5
    assert Layout(SQUARE, [S0, S0], {0: [1, 0]}) == Layout(SQUARE, [S0, S0], {0: (1, 0)})


def test_the_text_is_complete() -> None:
    mesh = HolderMesh((2, 2, 2, 1), tuple("abcdefgh"), ("w", "x", "y", "z"))
    layout = Layout(mesh, [S0, P, S0, strided_shard(1, 4)], {0: (2, 0)})
    assert str(layout) == (
        "[S0#1, P(sum), S0#0, S1] on (w 2 x x 2 x y 2 x z 1 of a, b, c, d, e, f, g, h)"
    )
    assert str(HolderMesh((9,), tuple("abcdefghi"))) == "(axis0 9 of a, b, c, d, e, f, g, h, …)"


def test_dims_from_the_end_are_counted_from_the_front() -> None:
    mesh = HolderMesh.ranks(2, 2, 2)
    for last, first in ((Shard(-1), Shard(-3)), (Shard(2), S0)):
        layout = Layout(mesh, [last, first, last], {last.dim: (2, 0)})
        assert layout.with_num_dims(3) == Layout(mesh, [Shard(2), S0, Shard(2)], {2: (2, 0)})
    assert layout.with_num_dims(3) is layout
    strided = Layout(SQUARE, [strided_shard(-1, 2), Shard(-1)])
    assert strided.with_num_dims(2) == Layout(SQUARE, [strided_shard(1, 2), S1])


def test_only_partial_values_of_the_given_reductions_become_replicas() -> None:
    layout = Layout(HolderMesh.ranks(2, 2, 2), [Partial("avg"), S0, P])
    assert layout.with_replicas(("avg", "max")) == Layout(layout.mesh, [R, S0, P])
    assert layout.with_replicas(("max",)) is layout


def test_axes_of_one_holder_and_coordinates_of_other_meshes() -> None:
    assert Layout(HolderMesh.ranks(1, 2), [S0, S0]).splits == {0: (Split(1, 2),)}
    for use in (lambda: SQUARE.at((1,)), lambda: Box((0, 0), (24,)).slices):
        with pytest.raises(ValueError, match="shorter"):
            use()
    assert Box((1, 2), (3, 0)).is_empty


@settings(max_examples=200)
@given(st.data())
def test_boxes_cover_exactly_the_elements_of_a_holder(data: st.DataObject) -> None:
    mesh, shape = data.draw(meshes(range(12))), data.draw(shapes())
    layout = data.draw(layouts(mesh, len(shape), "sum", averages=False))
    full = np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape)
    for holder, at in coordinates(mesh):
        boxes = layout.boxes(shape, holder)
        assert not any(box.is_empty for box in boxes)
        # In storage order: the boxes of a dim one after the other.
        mine = np.concatenate([np.empty(0, np.int64), *(full[b.slices].ravel() for b in boxes)])
        expected = elements_of(layout, shape, at)
        assert sorted(mine.tolist()) == sorted(expected.ravel().tolist())
        assert len(np.unique(mine)) == len(mine)
        assert layout.local_shape(shape, holder) == expected.shape


@pytest.mark.parametrize("length", [0, 1, 5, 8, 13])
@pytest.mark.parametrize(("count", "factor"), [(2, 2), (2, 3), (3, 2), (4, 5)])
def test_strided_shards_equal_torchs(length: int, count: int, factor: int) -> None:
    placement = strided_shard(0, factor)
    split = placement._split_tensor(  # pyright: ignore[reportAttributeAccessIssue]
        torch.arange(length), count, with_padding=False
    )[0]
    layout = Layout(HolderMesh.ranks(count), [placement])
    for index, theirs in enumerate(split):
        assert dims_of(layout, (length,), (index,))[0].tolist() == theirs.tolist()
        spans = [box.slices[0] for box in layout.boxes((length,), index)]
        assert [i for span in spans for i in range(span.start, span.stop)] == theirs.tolist()


@settings(max_examples=200)
@given(st.data())
def test_an_order_survives_encoding_as_strided_shards(data: st.DataObject) -> None:
    mesh = HolderMesh.ranks(*data.draw(mesh_shapes()))
    layout = data.draw(layouts(mesh, 2, "sum", averages=False))
    if any(map(is_strided_shard, layout.placements)):
        return
    actual = decode_strided(mesh, layout.dtensor_placements)
    assert actual is not None
    decoded = Layout(mesh, *actual)
    shape = data.draw(st.tuples(st.integers(0, 13), st.integers(0, 13)))
    assert [decoded.boxes(shape, h) for h in mesh.holders] == [
        layout.boxes(shape, h) for h in mesh.holders
    ]
    if 1 not in mesh.shape:
        assert decoded == layout


def test_only_axes_after_others_in_the_mesh_are_encoded_as_strided() -> None:
    cube = HolderMesh.ranks(2, 3, 2)
    encoded = {
        (1, 0, 2): (strided_shard(0, 3), S0, S0),
        (2, 0, 1): (strided_shard(0, 2), strided_shard(0, 2), S0),
        (2, 1, 0): (strided_shard(0, 6), strided_shard(0, 2), S0),
    }
    for order, placements in encoded.items():
        layout = Layout(cube, [S0, S0, S0], {0: order})
        assert layout.dtensor_placements == placements
        assert decode_strided(cube, placements) == (layout.placements, layout.shard_order)
    assert decode_strided(cube, [strided_shard(0, 3), S0, R]) == ((S0, S0, R), ((0, (1, 0)),))


def test_a_stride_without_an_equivalent_order_is_not_decoded() -> None:
    order = Layout(SQUARE, [S0, S0], {0: (1, 0)})
    actual = decode_strided(SQUARE, [strided_shard(0, 2), S0])
    assert actual is not None and Layout(SQUARE, *actual) == order
    assert decode_strided(SQUARE, [strided_shard(0, 2), S1]) is None
    assert decode_strided(SQUARE, [strided_shard(0, 3), S0]) is None
    assert decode_strided(SQUARE, [S0, strided_shard(0, 2)]) is None
    assert decode_strided(FOUR, [S0, strided_shard(0, 2)]) is None
    assert decode_strided(SQUARE, [S0]) is None


def test_strided_shards_are_decoded_as_declared() -> None:
    # Nine rows over four and then two: an order gives other parts than a stride.
    mesh, placements = HolderMesh.ranks(4, 2), [strided_shard(0, 2), S0]
    order = Layout(mesh, [S0, S0], {0: (1, 0)})
    stride = Layout(mesh, placements)
    assert Layout.from_placements(mesh, placements, (9, 3), strided="order") == order
    assert Layout.from_placements(mesh, placements, (9, 3), strided="stride") == stride
    assert Layout.from_placements(mesh, placements, (8, 3)) == order
    with pytest.raises(LayoutError, match=r"\(9, 3\) holds other boxes .* strided=\"order\""):
        Layout.from_placements(mesh, placements, (9, 3))
    with pytest.raises(LayoutError, match='does not define a split order.*strided="stride"'):
        Layout.from_placements(SQUARE, [strided_shard(0, 2), S1], (8, 8), strided="order")
    no_order = Layout.from_placements(SQUARE, [strided_shard(0, 2), S1], (8, 8))
    assert no_order == Layout(SQUARE, [strided_shard(0, 2), S1])


def test_holders_are_anything_with_a_name() -> None:
    files = HolderMesh((2,), ("first.bin", "second.bin"))
    layout = Layout(files, [S0])
    assert layout.boxes((5, 3), "second.bin") == [Box((3, 0), (2, 3))]
    assert layout.boxes((5, 3), "third.bin") == []
    assert layout.local_shape((5, 3), "third.bin") == (0,)
    assert files.coordinate("third.bin") is None and files.position("second.bin") == 1


def test_copies_and_pickles_are_equal() -> None:
    layout = Layout(SQUARE, [S0, S0], {0: (1, 0)})
    for other in (copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
        assert other == layout and hash(other) == hash(layout)


def test_a_layout_from_another_process_is_found_by_its_hash() -> None:
    # String hashes differ between this process and the fork server.
    here, there = FORK_SERVER.Pipe()
    process = FORK_SERVER.Process(target=_send_layout, args=(there,))
    process.start()
    assert here.recv() in {Layout(HolderMesh.ranks(2), [S0])}
    process.join()


def _send_layout(pipe: Connection) -> None:
    layout = Layout(HolderMesh.ranks(2), [S0])
    # Were the hash kept, it would be sent.
    hash(layout)
    pipe.send(layout)
