"""Estimates: bounds of what runs at once, sums of what does not."""

import numpy as np
import pytest

from distflow_jax.planning.chips import CHIPS
from distflow_jax.pods.efficiency import Range, efficiency_of
from distflow_jax.pods.roofline import Estimate, collective_seconds, estimate
from distflow_jax.pods.topology import open_topology
from distflow_jax.programs.overlap import Beside
from distflow_jax.programs.traffic import CollectiveTraffic, Covered, merged

POD = open_topology("h100:2x8")
NODE = np.arange(16).reshape(2, 8)


def gather(size, *, overlapped, times=1):
    return CollectiveTraffic("all-gather", ("tensor",), overlapped, size, times, NODE)


def test_what_runs_at_once_takes_the_longest_and_the_rest_comes_on_top():
    chip = POD.chip
    beside, alone = gather(9e9, overlapped=True), gather(4.5e9, overlapped=False)
    found = estimate(
        POD, flops=chip.flops, accessed=chip.memory_bandwidth / 2, traffic=[beside, alone]
    )
    assert (found.compute, found.memory) == (1.0, 0.5)
    seconds = [collective_seconds(POD.interconnect, t) for t in (beside, alone)]
    assert found.links == {"tensor": pytest.approx(sum(seconds))}
    assert found.exposed == seconds[1]
    assert found.total == pytest.approx(1.0 + seconds[1]) and found.bound == "compute"


def test_links_can_be_what_a_program_waits_for():
    found = estimate(POD, flops=1.0, accessed=1.0, traffic=[gather(9e11, overlapped=True)])
    assert found.bound == "tensor" and found.total == found.links["tensor"]


def test_a_collective_is_hidden_only_as_long_as_the_work_beside_it():
    chip, kind = POD.chip, ("all-gather", ("tensor",), True)
    alone = collective_seconds(POD.interconnect, gather(4.5e9, overlapped=False))
    half = Beside(flops=alone / 2 * chip.flops, bytes=alone / 4 * chip.memory_bandwidth)
    long = Beside(bytes=9 * alone * chip.memory_bandwidth)
    covered = Covered(4.5e9, 2, half), Covered(4.5e9, 1, long), Covered(4.5e9, 1, Beside())
    sent = CollectiveTraffic(*kind, 4 * 4.5e9, 4, NODE, covered)
    found = estimate(POD, flops=chip.flops, accessed=0.0, traffic=[sent])
    assert found.exposed == pytest.approx((2 * 0.5 + 0 + 1) * alone)
    twice = estimate(POD, flops=chip.flops, accessed=0.0, traffic=merged([sent, sent.repeated(1)]))
    assert twice.exposed == pytest.approx(2 * found.exposed)
    assert (
        estimate(POD, flops=0.0, accessed=0.0, traffic=[gather(9e9, overlapped=True)]).exposed == 0
    )


def test_every_collective_waits_for_its_latency():
    once, often = (gather(1e6, overlapped=True, times=n) for n in (1, 100))
    links = POD.interconnect
    latency = links.span(NODE[0]).latency
    assert latency == pytest.approx(7 * 3.4e-6)
    apart = collective_seconds(links, often) - collective_seconds(links, once)
    assert apart == pytest.approx(99 * latency)


def test_the_slowest_group_counts():
    mixed = CollectiveTraffic("all-gather", ("x",), False, 1e9, 1, np.array([[0, 1], [7, 8]]))
    alone = CollectiveTraffic("all-gather", ("x",), False, 1e9, 1, np.array([[7, 8]]))
    links = POD.interconnect
    assert collective_seconds(links, mixed) == collective_seconds(links, alone)


def test_groups_that_are_no_box_go_round_everything():
    odd = CollectiveTraffic("all-gather", ("?",), False, 1e9, 1, np.array([[0, 1, 8], [9, 14, 15]]))
    whole = POD.interconnect.span(range(16))
    assert collective_seconds(POD.interconnect, odd) == whole.seconds("all-gather", 1e9)


def test_what_runs_one_after_the_other_adds_up():
    one = Estimate(1.0, 2.0, {"fsdp": 3.0}, 1.0)
    other = Estimate(1.0, 0.0, {"fsdp": 1.0, "tensor": 2.0}, 0.0)
    both = one + other
    assert (both.compute, both.memory, both.exposed) == (2.0, 2.0, 1.0)
    assert both.links == {"fsdp": 4.0, "tensor": 2.0} and both.bound == "fsdp"
    assert both.total == one.total + other.total == 6.0
    assert (both * 3).total == 18.0 and ((one * 3) + (other * 3)).total == 18.0
    efficiency = efficiency_of(POD.chip)
    apart = one.expected(efficiency) + other.expected(efficiency)
    assert both.expected(efficiency) == apart


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_expected_seconds_are_a_narrow_range_above_the_bound(chip):
    """For every mixture of terms: a step, which is a sum of them, is as narrow."""
    drawn, efficiency = np.random.default_rng(0), efficiency_of(chip)
    for kind in 100 * tuple(efficiency.work):
        compute, memory, exposed, overlapped = drawn.exponential(size=4) ** 4
        links = {"fsdp": exposed + overlapped}
        found = Estimate(compute, memory, links, exposed, kind, steps=drawn.integers(1000))
        expected = found.expected(efficiency)
        assert found.total < expected.low <= expected.high <= 1.6 * expected.low * (1 + 1e-12)


def test_latencies_do_not_depend_on_the_rates_of_links():
    efficiency = efficiency_of(POD.chip)
    small, large = (
        estimate(POD, flops=0.0, accessed=0.0, traffic=[gather(size, overlapped=False, times=9)])
        for size in (0.0, 9e9)
    )
    assert small.latency == small.exposed == large.latency
    assert small.expected(efficiency) == Range(small.exposed, small.exposed)
    sent = large.exposed - large.latency
    expected = large.expected(efficiency)
    assert expected.low == pytest.approx(large.latency + sent / efficiency.links.high)
