"""Workers that are found by their gaps of log-probs, and what becomes of their groups."""

import logging
import threading
import types

import numpy as np
import pytest
from support.counted_buffers import request_of, response_of

from distflow_jax.coordinator.batch_metrics import Gap, StepTable, mean_gap, take_gaps
from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.environments.episodes import single_turn
from distflow_jax.stream.quarantine import (
    LAST_GROUPS,
    LEAST_GROUPS,
    LEAST_TOKENS,
    Quarantine,
    outliers,
)
from distflow_jax.stream.sample_requests import SampleRequests
from distflow_jax.stream.schedule import Rule
from distflow_jax.stream.task_buffer import TaskBuffer
from distflow_jax.stream.tasks import GroupTask, pieces_of

TOKENS = 300  # of a group


def gaps_of(mean, groups=LEAST_GROUPS, seed=0):
    """Groups whose gaps scatter by a third around a mean."""
    draw = np.random.default_rng(seed)
    return [Gap(mean * max(0.1, 1 + draw.normal() / 3), TOKENS) for _ in range(groups)]


def outliers_of(**means):
    return outliers({n: gaps_of(mean, seed=s) for s, (n, mean) in enumerate(means.items())})


def test_a_worker_whose_gap_leaves_the_others_is_named_with_both():
    found = outliers_of(a=0.01, b=0.012, liar=1.0, c=0.011)
    assert list(found) == ["liar"]
    assert " nats per token from the trainers', and those of 3 others 0.01" in found["liar"]


@pytest.mark.parametrize(
    "means",
    [
        {"a": 0.01, "b": 0.012, "c": 0.04, "d": 0.09},  # within what nobody is ended for
        {"a": 0.5, "b": 0.6, "c": 0.7},  # all alike: the run's algorithm, not a worker
        {"a": 0.2, "b": 0.6},  # other ages
        {"alone": 5.0},
        {},
    ],
)
def test_workers_that_are_like_the_others_stay(means):
    assert outliers_of(**means) == {}


def test_a_minority_of_liars_is_found_whatever_it_says():
    honest = {f"honest{n}": 0.01 for n in range(5)}
    assert set(outliers_of(**honest, x=0.3, y=3.0, z=30.0)) == {"x", "y", "z"}


def test_few_groups_or_tokens_judge_nobody():
    known = {
        "a": gaps_of(0.01),
        "few groups": [Gap(9.0, LEAST_TOKENS)] * (LEAST_GROUPS - 1),
        "few tokens": [Gap(9.0, 1)] * LAST_GROUPS,
    }
    assert outliers(known) == {}
    known["few groups"].append(Gap(9.0, LEAST_TOKENS))
    assert set(outliers(known)) == {"few groups"}


def test_old_groups_are_forgotten():
    ended = []
    buffer = types.SimpleNamespace(workers={"a": 0.0, "b": 0.0}, end=lambda *of: ended.append(of))
    quarantine = Quarantine(types.SimpleNamespace(buffer=buffer, lock=threading.Lock()))
    quarantine.look({"b": gaps_of(9.0, LAST_GROUPS)})  # one alone is not judged
    quarantine.look({"b": gaps_of(0.01, LAST_GROUPS)})
    quarantine.look({"a": gaps_of(0.01)})
    assert not ended


def test_groups_that_several_have_sampled_do_not_decide():
    known = {
        "liar": gaps_of(2.0, 20),
        "honest": [*gaps_of(0.01, 20), *gaps_of(2.0, 9)],
        "other": gaps_of(0.01, 20),
    }
    assert set(outliers(known)) == {"liar"}


class Buffer:
    """A task buffer with two groups; of the first one a liar and an honest worker have sampled a
    response each."""

    def __init__(self):
        self.lock = threading.Condition()
        self.buffer = TaskBuffer(
            Rule(8, 1), exact=False, version=0, lease_seconds=100.0, max_tries=1
        )
        requests = SampleRequests(self.buffer, self.lock)
        for counter in (0, 1):
            requests.begin((counter, "gen"), request_of(counter), Progress())
        self.answer("liar", 0, 0)
        self.answer("honest", 0, 1)

    def answer(self, worker, counter, sample):
        response = response_of(request_of(counter), sample, [0] * 3)
        pieces = pieces_of(Progress({sample: single_turn(response)}))
        self.buffer.submit(worker, (counter, "gen"), pieces, 0.0)


def test_a_quarantined_worker_gets_nothing_and_leaves_nothing_in_open_groups(caplog):
    caplog.set_level(logging.WARNING, "distflow_jax")
    made = Buffer()
    buffer = made.buffer
    # both responses of group 0 are there: it is complete, and counts as it is; 1 is open
    assert [task.workers for task in buffer.complete.values()] == [{"liar", "honest"}]
    made.answer("liar", 1, 0)
    (task,) = buffer.of(GroupTask)
    assert set(task.ended) == {0}
    quarantine = Quarantine(types.SimpleNamespace(buffer=buffer, lock=made.lock))
    quarantine.look({"liar": gaps_of(3.0, 4), "honest": gaps_of(0.01)})
    assert not buffer.ended and not caplog.records
    quarantine.look({"liar": gaps_of(3.0, 4)})
    assert set(buffer.ended) == {"liar"} and "liar" not in buffer.workers
    assert not task.ended  # others sample it again
    (record,) = caplog.records
    assert record.getMessage().startswith("worker liar is quarantined: its log-probs are ")
    quarantine.look({"liar": gaps_of(3.0, 4)})  # groups of it that were under way
    assert len(caplog.records) == 1


def test_gaps_of_the_step_are_those_of_its_prompts():
    """In the order of counters; a group that no update has counted has none."""
    table = StepTable(
        np.array([7.0, 7.0, 9.0, 12.0]), *[np.array([1.0, 3.0, 5.0, 6.0])] * 2, None, None
    )
    metrics = {
        "actor/loss": 1.0,
        "actor/rollout_corr/gap_of_group": np.array([0.4, 0.2, 0.0, 0.0]),
        "actor/rollout_corr/tokens_of_group": np.array([0.2, 0.4, 0.0, 0.0]),
    }
    gaps = take_gaps(metrics, table)
    assert metrics == {"actor/loss": 1.0}
    assert gaps == {7: Gap(pytest.approx(2.0), 4), 9: Gap(pytest.approx(0.5), 5)}
    assert mean_gap(list(gaps.values())) == pytest.approx((2.0 * 4 + 0.5 * 5) / 9)
    assert take_gaps({"x": 1.0}, table) == {} and mean_gap([]) == 0.0
