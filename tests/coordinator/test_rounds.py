"""A region's rounds: who stays is the same whatever the rounds, and nothing is lost or doubled."""

import numpy as np
import pytest

from distflow_jax.batch import Prompt
from distflow_jax.coordinator.assignment import PackingPlan
from distflow_jax.coordinator.coordinator import Coordinator
from distflow_jax.coordinator.first_fit import RowLimits
from distflow_jax.coordinator.rounds import Ended, Rounds, informative
from distflow_jax.data.step_columns import loader_columns
from distflow_jax.layout import Edge, Layout, move_between
from distflow_jax.parallel.mesh import MeshSizes, role_mesh

HOST = Layout("host")
MESH = MeshSizes(4, 2)
SAMPLES = 3


def prompt_of(counter):
    return Prompt(
        counter, counter, np.arange(1, 4 + counter % 3, dtype=np.int32), "", "s", None, {}
    )


def response_of(counter, sample):
    return np.full(1 + (counter + sample) % 5, 100 * counter + sample, np.int32)


def coordinator_of(group_size=0):
    limits = RowLimits(tokens=64, sequences=8, shared=True, group_size=group_size)
    layout = MESH.layout
    return Coordinator(
        PackingPlan(limits, 1, 4, {layout: 8}, layout),
        {layout: role_mesh(MESH)},
        {None: HOST, "rollout": HOST, "reward": HOST, "pairs": HOST},
        {layout: {("rollout", "rows"), ("reward", "score")}},
    )


def edge(field, source, target=HOST):
    return Edge(field, source, "reader", HOST, target, move_between(HOST, target))


def answer(coordinator, score):
    """Writes the fields of rollout and reward nodes."""
    uid = coordinator.get(edge("uid", None)).tolist()
    responses = [response_of(counter, sample) for counter, sample in uid]
    coordinator.put("rollout", "response", responses)
    coordinator.put("rollout", "response_mask", [np.ones(len(r), bool) for r in responses])
    coordinator.put("rollout", "finished", np.ones(len(responses), bool))
    scores = [score(counter, sample) for counter, sample in uid]
    coordinator.put("reward", "score", np.array(scores, np.float32))
    coordinator.free("rollout", "finished")  # as after its last reader


def run(is_informative, *, groups, max_rounds, batches=100, per_round=4):
    """Counters of the step's groups in order, and the metrics."""
    coordinator = coordinator_of()
    drawn = iter(range(batches))

    def draw():
        k = next(drawn, None)
        if k is None:
            return None
        prompts = [prompt_of(c) for c in range(k * per_round, (k + 1) * per_round)]
        return loader_columns(prompts, SAMPLES)

    rounds = Rounds(coordinator, draw, informative, groups=groups, max_rounds=max_rounds)
    while rounds.next():
        answer(coordinator, lambda c, s: float(is_informative(c) and s == 0))
    samples = coordinator.samples()
    for (counter, sample), r in zip(samples.uid.tolist(), samples.response, strict=True):
        np.testing.assert_array_equal(r, response_of(counter, sample))
    assert len(samples.fields["finished"]) == len(samples)  # freed, but kept for the records
    counters = [p.counter for p in samples.prompt]
    assert counters == sorted(counters) and counters[::SAMPLES] == sorted(set(counters))
    return coordinator, counters[::SAMPLES], rounds.metrics()


def test_the_first_groups_worth_it_win():
    _, counters, metrics = run(lambda c: c % 3 == 1, groups=4, max_rounds=10)
    assert counters == [1, 4, 7, 10]
    assert metrics["training/sampling_rounds"] == 3
    assert metrics["training/groups_sampled"] == 12
    assert metrics["training/groups_missing"] == 0


def test_one_round_is_enough_where_all_are_worth_it():
    _, counters, metrics = run(lambda c: True, groups=4, max_rounds=10)
    assert counters == [0, 1, 2, 3]
    assert metrics["training/sampling_rounds"] == 1


@pytest.mark.parametrize("batches, max_rounds", [(100, 3), (3, 100)])
def test_at_the_limit_the_step_goes_on_smaller_with_a_warning(batches, max_rounds, caplog):
    rounds = {"max_rounds": max_rounds, "batches": batches}
    _, counters, metrics = run(lambda c: c in (2, 9), groups=4, **rounds)
    assert counters == [2, 9]
    assert metrics["training/groups_missing"] == 2
    assert "only 2 of 4 groups are worth training on after 3 rounds" in caplog.text


def test_the_end_of_the_data_is_told():
    with pytest.raises(Ended):
        run(lambda c: True, groups=4, max_rounds=2, batches=0)


@pytest.mark.parametrize("kept", [set(), {1}, {0, 3, 5, 6}])
def test_what_stays_is_packed_and_nothing_else(kept):
    coordinator, *_ = run(lambda c: c in kept, groups=4, max_rounds=2)
    rows = coordinator.get(edge("rows", "rollout", MESH.layout))
    score = np.asarray(coordinator.get(edge("score", "reward", MESH.layout)))
    valid, tokens = np.asarray(rows.valid), np.asarray(rows.tokens)
    mask = np.asarray(rows.response_mask)
    assert valid.sum() == len(kept) * SAMPLES
    assert score.sum() == len(kept)
    wanted = {int(x) for c in kept for s in range(SAMPLES) for x in response_of(c, s)}
    assert {int(x) for x in tokens[mask]} == wanted
    assert set(np.asarray(rows.group)[valid]) == set(range(len(kept)))


def test_a_group_whose_scores_are_equal_is_not_informative():
    uid = np.array([(5, 0), (5, 1), (3, 0), (3, 1), (9, 0)])
    columns = {"uid": uid, "score": np.array([1, 1, 0, 1, 1.0])}
    assert informative(columns).tolist() == [False, False, True, True, False]
    columns["unshaped_score"] = np.array([0, 1, 1, 1, 1.0])
    assert informative(columns).tolist() == [True, True, False, False, False]
    columns["unshaped_score"] = np.array([0, np.nan, 1, 0, np.nan])
    assert informative(columns).tolist() == [False, False, True, True, False]
    assert informative({"uid": np.zeros((0, 2), np.int64), "score": []}).tolist() == []


def test_kept_responses_are_ordered_and_pairs_share_a_row():
    coordinator = coordinator_of(group_size=2)
    coordinator.begin(loader_columns([prompt_of(c) for c in (2, 4, 6)], SAMPLES))
    answer(coordinator, lambda c, s: float(s))
    #               group 2    group 4: goes  group 6
    keep = np.array([2, 0, 1, *(0, 0, 0), 0, 1, 2])
    coordinator.put("pairs", "keep", keep)
    samples = coordinator.samples()
    assert [p.counter for p in samples.prompt] == [2, 2, 6, 6]
    assert samples.uid.tolist() == [[2, 2], [2, 0], [6, 1], [6, 2]]  # of what was sampled
    assert samples.fields["score"].tolist() == [2, 0, 1, 2]
    rows = coordinator.get(edge("rows", "rollout", MESH.layout))
    score = np.asarray(coordinator.get(edge("score", "reward", MESH.layout)))
    valid, group, member = (np.asarray(x) for x in (rows.valid, rows.group, rows.member))
    pairs = {}
    for place in np.argwhere(valid):
        k, r, s = place
        pairs.setdefault((k, r, group[k, r, s]), {})[int(member[k, r, s])] = float(score[k, r, s])
    assert {key[2]: members for key, members in pairs.items()} == {
        0: {0: 2.0, 1: 0.0},
        1: {0: 1.0, 1: 2.0},
    }
