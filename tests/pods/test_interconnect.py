"""Rates of groups of chips, by hand on small tori and nodes."""

import dataclasses

import numpy as np
import pytest

from distflow_jax.planning.chips import CHIPS
from distflow_jax.pods.interconnect import Nodes, Torus

# links of 1 byte/s and nothing to wait for; a dim of 4 goes round, of 2 or 3 does not
CHIP = dataclasses.replace(
    CHIPS["v5p"],
    link_bandwidth=1.0,
    hop_seconds=0.0,
    wraps=4,
    network_bandwidth=0.1,
    network_seconds=0.0,
)
SLOW = dataclasses.replace(CHIP, hop_seconds=1.0)


def torus(*sizes, chip=CHIP):
    places = np.stack(np.unravel_index(np.arange(np.prod(sizes)), sizes), axis=1)
    return Torus(chip, sizes, places)


def test_a_closed_ring_has_two_ways_and_a_line_one():
    assert torus(4, 4).span([0, 1, 2, 3]).ring == 2.0
    assert torus(3, 4).span([0, 4, 8]).ring == 1.0
    assert torus(4, 4).span([0, 1]).ring == 1.0  # a part of a ring is a line


def test_dims_add_up():
    assert torus(4, 4).span(range(16)).ring == 4.0
    assert torus(4, 4, 4).span(range(64)).ring == 6.0
    assert torus(2, 4).span(range(8)).ring == 3.0


def test_groups_between_each_other_share_links():
    every_second = torus(8).span([0, 2, 4, 6])
    assert every_second.ring == 2.0 / 2 and every_second.devices == 4


def test_devices_of_a_chip_share_its_links():
    chip = dataclasses.replace(CHIP, devices=2, inner_bandwidth=6.0)
    ring = torus(4, chip=chip)
    both = Torus(chip, (4,), np.repeat(ring.places, 2, axis=0))
    assert both.span(range(8)).ring == torus(4).span(range(4)).ring == 2.0  # data enter once
    assert both.span([0, 2, 4, 6]).ring == 2.0 / 2  # beside the group of the other devices
    assert both.span(range(8)).exchange == both.span([1, 3, 5, 7]).exchange == 2.0 / 2
    assert both.span([0, 1]).ring == 6.0
    assert both.span([0, 1, 2]) is None  # a half of a chip is missing


def test_what_is_no_box_has_no_rate():
    assert torus(4, 4).span([0, 1, 2, 4]) is None  # a corner is missing
    assert torus(8).span([0, 1, 3, 4]) is None  # uneven steps
    assert torus(4, 4).span([0, 1, 4, 5]) is not None


def test_collectives_of_a_ring():
    span = torus(4).span(range(4))
    # 3/4 of 8 bytes, 2 bytes a second
    assert span.seconds("all-gather", 8.0) == span.seconds("reduce-scatter", 8.0) == 3.0
    assert span.seconds("all-reduce", 8.0) == 6.0


def test_all_to_all_is_bound_by_the_middle():
    # each of 4 sends 4 bytes to either half: of a line 8 cross its one link, of a ring 4 each
    assert torus(4).span(range(4)).exchange == pytest.approx(2.0)
    line = dataclasses.replace(CHIP, wraps=5)
    assert torus(4, chip=line).span(range(4)).exchange == pytest.approx(1.0)
    assert torus(8).span(range(8)).exchange == pytest.approx(1.0)


def test_latency_is_that_of_the_farthest():
    assert torus(4, chip=SLOW).span(range(4)).latency == 2.0  # half way round
    assert torus(4, 4, chip=SLOW).span(range(16)).latency == 4.0
    assert torus(3, chip=SLOW).span(range(3)).latency == 2.0


def test_permutations_go_by_their_hops():
    around = np.array([[i, (i + 1) % 4] for i in range(4)])
    assert torus(4).permute_seconds(around, 6.0) == 6.0  # the last goes over the closing link
    assert torus(4).permute_seconds(np.array([[0, 2], [2, 0]]), 6.0) == 12.0
    assert torus(4).permute_seconds(np.array([[0, 0]]), 6.0) == 0.0
    assert torus(4, chip=SLOW).permute_seconds(around, 0.0) == 1.0


def test_nodes():
    pod = Nodes(CHIP, 4, 2)
    assert pod.span([0, 1]).ring == pytest.approx(1.0)
    # one of each node: all goes through the adapters
    assert pod.span([0, 2, 4, 6]).ring == pytest.approx(0.1)
    # all 8: 3/4 from outside, half of it by each adapter, and then round inside
    seconds = (3 / 4 / 2 / 0.1 + 1 / 2 / 1.0) * 8
    assert pod.span(range(8)).seconds("all-gather", 8.0) == pytest.approx(seconds)
    assert pod.span([0, 1, 2]) is None
    assert pod.permute_seconds(np.array([[0, 1], [1, 0]]), 2.0) == 2.0
    assert pod.permute_seconds(np.array([[1, 2], [2, 1]]), 2.0) == pytest.approx(20.0)


def test_a_group_of_all_costs_no_more_than_its_bisection_and_rings_allow():
    """Of any box, all-to-all is never faster than the ring that could carry it."""
    for sizes in ((4,), (2, 4), (4, 4), (8, 4), (4, 4, 8)):
        span = torus(*sizes).span(range(int(np.prod(sizes))))
        assert 0 < span.exchange <= span.ring


@pytest.mark.parametrize("places", [torus(4, 8), Nodes(CHIP, 4, 8)], ids=["torus", "nodes"])
def test_groups_of_one_form_have_equal_rates(places):
    numbers = np.arange(32)
    for axes in ((4, 8), (8, 4), (16, 2)):
        for groups in (numbers.reshape(axes), numbers.reshape(axes).T):
            rates = [places.span(group) for group in groups]
            found = [places.span(group) for group in places.unlike(groups)]
            assert set(found) == set(rates) and found[0] == rates[0]
            assert len(found) <= 2
    apart = np.array([[0, 1], [2, 3], [0, 9], [8, 9]])
    assert places.unlike(apart).tolist() == [[0, 1], [0, 9]]
