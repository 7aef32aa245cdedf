"""Tasks of nodes that workers run: leases, results that count, and prompts that are given up."""

import pytest

from distflow_jax.stream.leases import Leases
from distflow_jax.stream.node_tasks import NodeTask, NodeTasks

LEASE = 10.0


def tasks_of(*keys):
    found = NodeTasks(Leases(LEASE, max_tries=2), ["score", "mean"])
    for key in keys:
        found.begin(NodeTask(key, f"content of {key}", lambda sent: sent, lambda result: None))
    return found


def test_a_task_of_the_lowest_counter_goes_to_a_worker_that_serves_its_node():
    tasks = tasks_of((4, "score"), (2, "mean"), (3, "score"))
    assert tasks.ask("a", ["score"], 0.0).key == (3, "score")
    assert tasks.ask("b", ["score", "mean"], 0.0).key == (2, "mean")
    assert tasks.ask("b", ["mean"], 0.0) is None
    assert tasks.ask("b", ["score"], 0.0).key == (4, "score")
    assert tasks.ask("a", ["score", "mean"], 0.0) is None
    with pytest.raises(ValueError, match="'score' of prompt 3 has begun already"):
        tasks.begin(tasks.find((3, "score")))


def test_the_first_result_counts_whoever_brings_it_and_a_second_one_is_counted():
    tasks = tasks_of((0, "score"))
    tasks.ask("a", ["score"], 0.0)
    tasks.leases.expire(LEASE)
    assert tasks.leases.expired == 1 and not tasks.leases.workers
    assert tasks.ask("b", ["score"], LEASE).key == (0, "score")
    assert tasks.bring("a", (0, "score"), "a's")  # its lease is over, and it was the first
    assert not tasks.bring("b", (0, "score"), "b's")
    ((task, result),) = tasks.take()
    assert (task.key, result, tasks.take()) == ((0, "score"), "a's", [])
    assert (tasks.counts.given, tasks.counts.second) == (2, 1)
    tasks.forget([0])
    assert not tasks.bring("b", (0, "score"), "late")
    assert (tasks.counts.second, tasks.counts.unknown) == (1, 1)


def test_tasks_of_a_worker_that_leaves_are_for_others_at_once():
    tasks = tasks_of((0, "score"))
    tasks.ask("a", ["score"], 0.0)
    assert tasks.unserved() == []
    tasks.leases.leave("a")
    assert tasks.unserved() == ["score"] and tasks.num_open("score") == 1
    assert tasks.ask("b", ["score"], 0.1).key == (0, "score")


def test_a_failed_task_goes_to_another_worker_and_its_prompt_is_then_given_up():
    tasks = tasks_of((0, "score"), (1, "score"))
    tasks.leases.heard("b", 0.0, ["score"])
    assert tasks.ask("a", ["score"], 0.0).key == (0, "score")
    tasks.fail("a", (0, "score"), "no")
    tasks.fail("a", (0, "score"), "again")  # without a lease it is no try
    assert tasks.ask("a", ["score"], 0.0).key == (1, "score")
    assert tasks.ask("b", ["score"], 0.0).key == (0, "score")
    tasks.fail("b", (0, "score"), "not b either")
    assert tasks.leases.given_up == {0: "not b either"}
    assert tasks.find((0, "score")) is None and tasks.find((1, "score")) is not None


def test_the_only_worker_tries_again():
    tasks = tasks_of((0, "score"))
    tasks.leases.heard("b", 0.0, ["mean"])  # serves another node
    for _ in range(2):
        assert tasks.ask("a", ["score"], 0.0).key == (0, "score")
        tasks.fail("a", (0, "score"), "no")
    assert tasks.leases.given_up == {0: "no"}


def test_a_worker_that_claims_all_tasks_and_runs_none_gets_few_and_serves_no_node():
    tasks = tasks_of(*((counter, "score") for counter in range(8)))

    def claimed(worker, now):
        return list(iter(lambda: tasks.ask(worker, ["score"], now), None))

    tasks.leases.heard("b", 0.0, ["score"])
    assert len(claimed("a", 0.0)) == 2  # one that runs, and one that is next
    for _ in range(2):
        given = claimed("b", 0.0)
        assert len(given) == 2
        for task in given:
            assert tasks.bring("b", task.key, "a result")
    tasks.leases.heard("a", LEASE / 2, ["score"])
    tasks.leases.heard("b", LEASE / 2, ["score"])
    assert tasks.leases.expire(LEASE) == ["a"]
    (last,) = claimed("a", LEASE)  # one at a time, none that it had
    assert last.key == (7, "score") and len(claimed("b", LEASE)) == 2
    tasks.leases.leave("b")
    assert list(tasks.leases.workers) == ["a"] and tasks.unserved() == ["score"]
    assert tasks.bring("a", last.key, "a result") and tasks.unserved() == []


def test_a_failure_after_the_lease_counts_once_and_leaves_the_next_lease_alone():
    """Otherwise a node that takes longer than a lease to fail is tried for ever."""
    tasks = tasks_of((0, "score"))
    tasks.ask("a", ["score"], 0.0)
    tasks.leases.expire(LEASE)
    assert tasks.ask("b", ["score"], LEASE).key == (0, "score")
    tasks.fail("a", (0, "score"), "late")
    tasks.fail("a", (0, "score"), "again")
    assert not tasks.leases.given_up and tasks.ask("c", ["score"], LEASE) is None
    tasks.leases.expire(2 * LEASE)
    tasks.fail("b", (0, "score"), "late too")
    assert tasks.leases.given_up == {0: "late too"}
