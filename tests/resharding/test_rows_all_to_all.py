"""Rows change ranks and change back; a row goes straight to who needs it, and nobody gathers."""

import itertools
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.row_places import spread

from distflow_jax.parallel.mesh import MeshSizes, role_mesh
from distflow_jax.parallel.rules import rows_spec
from distflow_jax.resharding.rows_all_to_all import RowsAllToAll, _round, plan_moves

NOTHING = np.iinfo(np.int32).max


def carry(held, moves, room):
    """Executes plan_moves by hand: {device: {place: row}}."""
    out = {device: {} for device in held}
    for round_, sender, receiver, c in zip(*np.nonzero(moves.send != NOTHING), strict=True):
        source = int(moves.send[round_, sender, receiver, c])
        target = int(moves.receive[round_, receiver, sender, c])
        assert target not in out[receiver], "two rows in one place"
        assert target < room
        out[receiver][target] = held[sender][source]
    return out


@pytest.mark.parametrize("capacity", [1, 3])
def test_there_and_back_is_identity_for_all_pairs(capacity):
    rng = np.random.default_rng(0)
    for m, n in itertools.product(range(1, 17), repeat=2):
        devices = int(np.lcm(m, n))
        rows = int(rng.integers(1, 3 * max(m, n) + 1))
        at_m, at_n = spread(rows, m), spread(rows, n)
        room_m, room_n = -(-rows // m), -(-rows // n)
        held = {
            d: {p: i for i, (_, r, p) in enumerate(at_m) if r == d * m // devices}
            for d in range(devices)
        }
        there = plan_moves(
            list(zip(at_m, at_n, strict=True)),
            devices=devices,
            ranks=(m, n),
            rows=(room_m, room_n),
            capacity=capacity,
        )
        moved = carry(held, there, room_n)
        for d in range(devices):
            wanted = {p: i for i, (_, r, p) in enumerate(at_n) if r == d * n // devices}
            assert moved[d] == wanted
        back = plan_moves(
            list(zip(at_n, at_m, strict=True)),
            devices=devices,
            ranks=(n, m),
            rows=(room_n, room_m),
            capacity=capacity,
        )
        assert carry(moved, back, room_m) == held
        if m == n:
            assert there.moved == 0


WITH_COPIES = [MeshSizes(2, 2, data=2), MeshSizes(1, 4, data=2), MeshSizes(4, 1, data=2)]


@pytest.mark.parametrize(
    "sizes",
    [
        *itertools.permutations([MeshSizes(n, 8 // n) for n in (8, 4, 2, 1)], 2),
        *itertools.permutations(WITH_COPIES, 2),
        (MeshSizes(8, 1), MeshSizes(2, 1, data=4)),
        (MeshSizes(2, 2, pipeline=2), MeshSizes(4, 1, data=2)),
        (MeshSizes(4, 2), MeshSizes(1, 1, pipeline=4, context=2)),
        (MeshSizes(2, 2, expert=2), MeshSizes(2, 1, context=4)),
    ],
    ids=str,
)
def test_device_arrays_move_whole(sizes):
    rows, minis = 10, 2
    source, target = (s.ranks for s in sizes)
    meshes = [role_mesh(s) for s in sizes]
    rooms = [-(-rows // n) + 1 for n in (source, target)]
    places = [
        [(k, r, p) for k in range(minis) for _, r, p in spread(rows - 3 * k, n)]
        for n in (source, target)
    ]
    values = np.random.default_rng(1).normal(size=(len(places[0]), 5)).astype(np.float32)

    def lay(which):
        out = np.zeros((minis, sizes[which].ranks * rooms[which], 5), np.float32)
        for (k, r, p), value in zip(places[which], values, strict=True):
            out[k, r * rooms[which] + p] = value
        return out

    layouts = [NamedSharding(mesh, rows_spec(mesh)) for mesh in meshes]
    batch = {"a": jax.device_put(lay(0), layouts[0]), "b": jax.device_put(2 * lay(0), layouts[0])}
    move = RowsAllToAll(*meshes, tuple(rooms))
    moved, traffic = move(batch, list(zip(*places, strict=True)))
    for name, scale in (("a", 1), ("b", 2)):
        assert moved[name].sharding == layouts[1]
        np.testing.assert_array_equal(moved[name], scale * lay(1))
    # never more than every target device receiving its own rows, from elsewhere
    assert traffic.payload <= 2 * values.nbytes * (8 // target)


def test_the_program_holds_an_all_to_all_and_no_gather():
    mesh = role_mesh(MeshSizes(8, 1))
    x = jax.ShapeDtypeStruct(
        (1, 32, 256), np.float32, sharding=NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    )
    out = jax.ShapeDtypeStruct(
        (1, 64, 256), np.float32, sharding=NamedSharding(mesh, PartitionSpec(None, ("fsdp",)))
    )
    index = jax.ShapeDtypeStruct(
        (8, 8, 2), np.int32, sharding=NamedSharding(mesh, PartitionSpec(("fsdp", "tensor")))
    )
    text = _round.lower(mesh, x, out, index, index).compile().as_text()
    assert "all-to-all" in text
    assert not re.search(r"all-gather|all-reduce", text)
