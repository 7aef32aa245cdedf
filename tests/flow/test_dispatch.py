"""Dispatch of groups to workers: properties of the rules, and measured times."""

import random
import sys

import pytest
from support.paths import ROOT

from distflow_jax.flow.dispatch.dispatch_rule import DISPATCHES, Load, Offer, choose, step_seconds
from distflow_jax.flow.dispatch.fleet import Fleet, Report
from distflow_jax.flow.dispatch.slot_times import DecodePace, SlotTimes
from distflow_jax.flow.homes.home import Begun, Home, Piece
from distflow_jax.flow.lag_rule import Rule

sys.path.insert(0, str(ROOT / "benchmarks"))
import dispatch_model  # noqa: E402

PACE = ((1.0, 2.0), (9.0, 6.0))  # seconds of a decode step: 1.5 + n / 2


def offers_of(lengths, responses=4):
    return [Offer(False, responses, float(n), float(n) * responses) for n in lengths]


def load_of(active=0, *, slots=32, longest=0.0, pace=PACE):
    return Load(slots, active, longest, longest * active, pace)


def random_case(rng):
    offers = []
    for _ in range(rng.randrange(12)):
        count, length = rng.randrange(1, 9), rng.uniform(1, 1000)
        offers.append(Offer(rng.random() < 0.1, count, length, count * length))
    offers.sort(key=lambda o: (not o.begun, -o.length))
    fleet = {}
    for name in "abcd"[: rng.randrange(1, 5)]:
        slots = rng.choice([8, 64])
        pace = tuple(sorted((float(n), rng.uniform(0.1, 3)) for n in rng.sample(range(1, 65), 3)))
        active, longest = rng.randrange(slots + 1), rng.uniform(0, 1000)
        load = Load(slots, active, longest, active * longest, pace[: rng.randrange(4)])
        fleet[name] = load
    asker = rng.choice(sorted(fleet))
    return offers, fleet[asker].slots - fleet[asker].active, asker, fleet


def test_any_choice_is_admissible_and_repeats():
    """No more than there is room for, all that has begun, always something for an idle worker; the
    order of the fleet and a second call change nothing, and other workers make it no larger."""
    rng = random.Random(7)
    for _ in range(1500):
        offers, room, asker, fleet = random_case(rng)
        found = choose(offers, room, asker, fleet)
        assert 0 <= found <= choose(offers, room, asker, {}) <= len(offers)
        assert sum(offer.responses for offer in offers[: max(found - 1, 0)]) < max(room, 1)
        if room and offers and not fleet[asker].active:
            assert found
        if found < len(offers):
            left = sum(offer.responses for offer in offers[:found])
            assert left >= room or not offers[found].begun
        again = dict(rng.sample(sorted(fleet.items()), len(fleet)))
        assert choose(offers, room, asker, again) == found


def test_one_worker_gets_all_that_it_has_room_for():
    offers = offers_of([900, 800, 10, 9, 8])
    for fleet in ({}, {"a": load_of()}):
        assert choose(offers, 32, "a", fleet) == 5
        assert choose(offers, 9, "a", fleet) == 3


def test_a_worker_that_is_half_as_fast_gets_half_as_much():
    slow = tuple((n, 2 * seconds) for n, seconds in PACE)
    offers = offers_of([100] * 12)
    fleet = {"fast": load_of(slots=64), "slow": load_of(slots=64, pace=slow)}
    assert choose(offers, 64, "slow", {}) == 12
    given = choose(offers, 64, "slow", fleet)
    assert 2 <= given <= 5
    left = offers[given:]
    fleet["slow"] = load_of(4 * given, slots=64, longest=100.0, pace=slow)
    assert choose(left, 64, "fast", fleet) == len(left)


def home_of(dispatch, *, exact=False):
    return Home(
        Rule(4, max_lag=1),
        exact=exact,
        version=0,
        lease_seconds=10.0,
        max_tries=2,
        fleet=Fleet(dispatch),
    )


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_homes_give_each_group_once_and_only_where_the_rule_lets_them(dispatch, exact):
    """Random questions of uneven workers, until all groups of some steps are complete."""
    rng = random.Random(3)
    home, taken, newest, begun = home_of(dispatch, exact=exact), 0, 0, 0
    slots = {"a": 16, "b": 4, "c": 8}
    held, has = dict.fromkeys(slots, 0), {name: [] for name in slots}
    for _ in range(4000):
        while begun < 4 * (newest + 2):
            length = rng.uniform(1, 100)
            key = (begun, "gen")
            home.begin(Begun(key, begun // 4 + 1, range(3), (-length,), None, expected=length), {})
            begun += 1
        name = rng.choice(sorted(slots))
        if not has[name]:
            held[name] = home.wanted()[0] if exact else newest
        room = slots[name] - 3 * len(has[name])
        report = Report(slots[name], slots[name] - max(0, room), ((1.0, 0.1 * slots[name]),))
        for work in home.ask(name, held[name], room, 0.0, report):
            assert all(work.group.key not in groups for groups in has.values())
            step, version = work.group.step, held[name]
            assert version == max(0, step - 2) if exact else version >= step - 2
            has[name].append(work.group.key)
        if has[name] and rng.random() < 0.5:
            key = has[name].pop(rng.randrange(len(has[name])))
            piece = Piece(1, held[name], held[name], True, None)
            home.bring(name, key, dict.fromkeys(range(3), piece), 0.0, goes_on=False)
        taken += len(home.take())
        if newest < taken // 4:
            newest += 1
            home.publish(newest)
    assert newest > 50, "groups wait for ever"


def test_the_pace_of_decode_steps_is_smoothed_by_slots():
    pace = DecodePace()
    for _ in range(40):
        pace.note(8, 80, 1.0)  # ten steps
        pace.note(16, 160, 2.0)
    pace.note(0, 5, 1.0)
    pace.note(4, 0, 1.0)
    assert pace.table() == [(8.0, pytest.approx(0.1)), (16.0, pytest.approx(0.2))]
    pace.note(8, 40, 1.0)
    assert pace.table()[0][1] == pytest.approx(0.12)
    assert step_seconds(pace.table(), 32) > step_seconds(pace.table(), 16)
    assert step_seconds([], 3) == 1.0 and step_seconds([(4.0, 0.3)], 9) == 0.3
    falling = [(2.0, 0.5), (4.0, 0.4)]
    assert step_seconds(falling, 100) == 0.5


def test_a_worker_measures_its_slots():
    now = iter([0.0, 1.0, 3.0, 5.0])
    times = SlotTimes(8, lambda: next(now))
    times.round(4, 0)  # a second without anything
    times.round(4, 40)  # two seconds for ten steps of four slots
    times.round(0, 80)
    report = times.report(6)
    assert (report.slots, report.active) == (8, 2)
    assert report.pace == ((4.0, 0.2),)
    assert Report.of_facts(report.facts()) == report
    assert times.report(-3).active == 8


@pytest.mark.parametrize(
    "wrong",
    [
        {"slots": 2, "active": 3},
        {"pace": [[1.0, float("nan")]]},
        {"pace": [[1.0, 0.0]]},
        {"pace": [[float(n), 1.0] for n in range(100)]},
        {"active": -1},
        {"pace": 3},
        {"slots": None},
    ],
)
def test_a_report_with_numbers_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="a worker's report"):
        Report.of_facts(Report(8, 2).facts() | wrong)


def test_paced_workers_of_uneven_speed_make_shorter_steps():
    """The event model with the homes' own dispatch, on lengths that are known."""
    pool = dispatch_model.Pool((2.0, 1.0), lag=1, train=0.5, known=1.0)
    seconds = {d: dispatch_model.Job(pool, d, 14, 0).run() for d in DISPATCHES}
    assert seconds["paced"] < 0.9 * seconds["longest"]
