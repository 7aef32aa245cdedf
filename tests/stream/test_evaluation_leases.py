"""Evaluations as tasks of a buffer: by one version, by few workers, each problem answered once."""

import pytest

from distflow_jax.stream.leases import SHARE
from distflow_jax.stream.schedule import Rule
from distflow_jax.stream.task_buffer import TaskBuffer
from distflow_jax.stream.tasks import EVALUATION, GroupTask, Piece

LEASE, FIRST = 10.0, 1 << 30


def evaluation(version, count, samples=1):
    return [
        GroupTask(
            key=(FIRST + place, f"{EVALUATION} {version}"),
            content=f"problem {place}",
            node=EVALUATION,
            step=version,
            samples=range(samples),
        )
        for place in range(count)
    ]


def group(counter, step):
    return GroupTask(key=(counter, "gen"), content="", step=step, samples=range(1))


def whole(version, text=""):
    return Piece(1, version, version, True, text)


@pytest.fixture(params=[False, True], ids=["in_flight", "exact"])
def buffer(request):
    """Of weights after one step, whose evaluation of three problems has begun."""
    made = TaskBuffer(
        Rule(4, max_staleness=1), exact=request.param, version=0, lease_seconds=LEASE, max_tries=2
    )
    made.publish(1)
    for task in evaluation(1, 3):
        made.begin_group(task, {})
    return made


def join(buffer, count, now=0.0):
    names = [f"w{place}" for place in range(count)]
    for name in names:
        buffer.heartbeat(name, now)
    buffer.expire(now)
    return names


def evaluators(buffer, names):
    return [name for name in names if buffer.evaluates(name) is not None]


@pytest.mark.parametrize("count", [1, 3, SHARE, 4 * SHARE + 1])
def test_few_workers_evaluate_and_the_others_train_on(buffer, count):
    names = join(buffer, count)
    chosen = evaluators(buffer, names)
    assert len(chosen) == max(1, count // SHARE)
    for counter in range(4, 8):
        buffer.begin_group(group(counter, 3), {})
    for name in set(names) - set(chosen):
        assert all(task.trains for task in buffer.lease(name, 1, 1, 0.0))
    given = [task for name in chosen for task in buffer.lease(name, 1, 3, 0.0)]
    assert [task.key[0] - FIRST for task in given if not task.trains] == [0, 1, 2]
    buffer.expire(0.0)
    assert evaluators(buffer, names) == []  # nothing of it waits: the newest weights are for them


def test_one_version_alone_answers(buffer):
    (name,) = join(buffer, 1)
    buffer.publish(2)
    assert buffer.evaluates(name) == 1
    assert buffer.lease(name, 0, 8, 0.0) == buffer.lease(name, 2, 8, 0.0) == []
    first, *others = buffer.lease(name, 1, 8, 0.0)
    for wrong in (0, 2):
        assert buffer.submit(name, first.key, {0: whole(wrong)}, 0.0) == []
    assert not first.ended and not buffer.take_evaluations()
    for task in (first, *others):
        assert buffer.submit(name, task.key, {0: whole(1)}, 0.0) == [0]
    assert list(buffer.take_evaluations()) == [1]
    assert not buffer.take_evaluations() and not buffer.take() and not buffer.open


def test_a_dead_worker_s_part_goes_to_another_one_and_each_problem_is_answered_once(buffer):
    names = join(buffer, 2)
    (dead,) = evaluators(buffer, names)
    (other,) = set(names) - {dead}
    given = buffer.lease(dead, 1, 3, 0.0)
    buffer.submit(dead, given[0].key, {0: whole(1, "dead")}, 0.0)
    buffer.heartbeat(other, LEASE)
    buffer.expire(LEASE)
    assert evaluators(buffer, names) == [other]
    again = buffer.lease(other, 1, 3, LEASE)
    assert again == given[1:]
    for task in again:
        buffer.submit(other, task.key, {0: whole(1, "other")}, LEASE)
        assert buffer.submit(dead, task.key, {0: whole(1, "late")}, LEASE) == []
    (tasks,) = buffer.take_evaluations().values()
    assert [task.ended[0].content for task in tasks] == ["dead", "other", "other"]


def test_a_problem_that_no_worker_answers_is_left_out_with_the_reason(buffer):
    names = join(buffer, 1)
    for _ in range(2):
        buffer.expire(0.0)
        task = buffer.lease(names[0], 1, 1, 0.0)[0]
        buffer.fail(names[0], task.key, "too long")
    for task in buffer.lease(names[0], 1, 8, 0.0):
        buffer.submit(names[0], task.key, {0: whole(1)}, 0.0)
    (tasks,) = buffer.take_evaluations().values()
    assert [task.lost for task in tasks] == ["too long", "", ""]
    assert not buffer.given_up  # no prompt of the training is


def test_the_oldest_evaluation_comes_first(buffer):
    (name,) = join(buffer, 1)
    buffer.publish(2)
    for task in evaluation(2, 2):
        buffer.begin_group(task, {})
    buffer.expire(0.0)
    for version, count in ((1, 3), (2, 2)):
        assert buffer.evaluates(name) == version
        for task in buffer.lease(name, version, 8, 0.0):
            buffer.submit(name, task.key, {0: whole(version)}, 0.0)
        buffer.expire(0.0)
        (tasks,) = buffer.take_evaluations().values()
        assert len(tasks) == count
    assert buffer.evaluates(name) is None
