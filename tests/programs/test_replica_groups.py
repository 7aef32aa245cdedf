"""Replica groups in every form that HLO writes, and the mesh axes they go over."""

import numpy as np
import pytest

from distflow_jax.programs.traffic import axes_of, read_groups

MESH = {"data": 2, "fsdp": 4, "tensor": 2}


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("{}", [[0, 1, 2, 3]]),
        ("[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("[4,2]<=[2,2,2]T(0,2,1)", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2] {'b'}", [[0, 1], [2, 3]]),
        ("mesh['a'=2,'b'=2] {'a','b'}", [[0, 1, 2, 3]]),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", [[3, 1], [2, 0]]),
        ("mesh['a'=4] {'a':(2)2}", [[0, 1], [2, 3]]),  # the inner half of an axis
        ("mesh['a'=4] {'a':(1)2}", [[0, 2], [1, 3]]),  # the outer
    ],
)
def test_groups_in_every_form(text, groups):
    assert read_groups(text, 4).tolist() == groups


@pytest.mark.parametrize("text", ["", "{{0,1},{2}}", "mesh['a'=4] {'b'}", "[2,2]", "?"])
def test_what_is_in_no_known_form(text):
    assert read_groups(text, 4) is None


@pytest.mark.parametrize("axes", [("tensor",), ("fsdp",), ("data", "fsdp"), ("data", "tensor"), ()])
def test_axes_are_those_that_groups_were_made_of(axes):
    order = [a for a in MESH if a not in axes] + list(axes)
    numbers = np.arange(16).reshape(tuple(MESH.values()))
    numbers = numbers.transpose([list(MESH).index(a) for a in order])
    groups = numbers.reshape(-1, int(np.prod([MESH[a] for a in axes])))
    assert axes_of(groups, MESH) == axes
    # the order within a group, and that of the groups, is nobody's concern
    shuffled = np.random.default_rng(0).permuted(groups, axis=1)
    assert axes_of(shuffled[::-1], MESH) == axes


def test_pairs_of_a_permutation():
    around = read_groups("{{0,2},{2,4},{4,6},{6,0},{8,10},{10,12},{12,14},{14,8}}", 16)
    assert axes_of(around, MESH) == ("fsdp",)
    assert axes_of(np.array([[0, 0], [1, 1]]), MESH) == ()
