"""Task buffers of groups that workers answer: cases by hand, and a model with random faults.

In the model a worker samples, runs a second node on groups whose samples are complete, or both.
Another one may claim all that it can get, before the others do, and give nothing.

Nightly: over 1,000,000 random faults of workers, messages and trainers no group is lost, split, or
trained twice.
"""

import collections
import dataclasses
import random

import pytest
from support.counted_buffers import request_of, response_of

from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.environments.episodes import single_turn
from distflow_jax.stream.schedule import Admission, Rule
from distflow_jax.stream.task_buffer import ANSWER_BYTES, TaskBuffer
from distflow_jax.stream.tasks import (
    EVALUATION,
    PIECES_BYTES,
    SAMPLER,
    SAMPLING,
    GroupTask,
    NodeTask,
    Piece,
    pieces_of,
)

LEASE = 10.0


def buffer_of(**changed):
    options = {"exact": False, "version": 0, "lease_seconds": LEASE, "max_tries": 2}
    return TaskBuffer(Rule(2, max_staleness=1), **(options | changed))


def group(counter, step=1, samples=2):
    return GroupTask(
        key=(counter, "gen"),
        content=f"prompt {counter}",
        step=step,
        samples=range(samples),
        order=(0.0,),
    )


def piece(versions, *, whole=True, content=None):
    low, high = (min(versions), max(versions)) if versions else (0, 0)
    return Piece(len(versions), low, high, whole, content or tuple(versions))


def submit(buffer, worker, key, pieces, now, **options):
    """Whether the worker has the group afterwards."""
    buffer.submit(worker, key, pieces, now, **options)
    return buffer.holds(worker, key)


def counters(leased):
    return [task.key[0] for task in leased]


def test_work_is_given_once_by_steps_and_while_there_is_room():
    buffer = buffer_of()
    for counter, step in ((3, 2), (0, 1), (1, 1)):
        buffer.begin_group(group(counter, step), {})
    assert buffer.lease("a", 0, 0, 0.0) == []
    assert counters(buffer.lease("a", 0, 3, 0.0)) == [0, 1]  # room for one and a half
    assert counters(buffer.lease("b", 0, 8, 0.0)) == [3]
    assert buffer.lease("b", 0, 8, 0.0) == []


def test_a_group_begins_by_the_version_that_its_worker_holds():
    buffer = buffer_of()
    buffer.begin_group(group(4, step=3), {})
    buffer.publish(1)
    assert buffer.lease("a", 0, 8, 0.0) == []  # would be 2 steps old
    assert buffer.lease("a", 2, 8, 0.0) == []  # of weights that are not known
    assert counters(buffer.lease("a", 1, 8, 0.0)) == [4]


def test_a_worker_starves_that_finds_nothing_by_the_newest_weights():
    buffer = buffer_of()
    buffer.begin_group(group(0), {})
    buffer.lease("b", 0, 8, 0.0)
    assert not buffer.starving
    buffer.lease("a", 0, 8, 0.0)
    assert not buffer.starving  # another task buffer may have something for it
    buffer.lease("a", 0, 8, 0.0, idle=True)
    assert buffer.starving
    buffer.publish(1)
    assert not buffer.starving
    buffer.lease("a", 0, 8, 0.0, idle=True)  # it has not taken them yet
    assert not buffer.starving
    buffer.lease("a", 1, 8, 0.0, idle=True)
    assert buffer.starving
    buffer.begin_group(group(1), {})
    assert not buffer.starving
    assert counters(buffer.lease("a", 1, 8, 0.0, idle=True)) == [1]
    assert not buffer.starving
    buffer.lease("c", 1, 8, 0.0, idle=True)
    assert buffer.starving
    buffer.expire(LEASE + 1)  # it is gone
    assert not buffer.starving


def test_with_exact_versions_only_one_version_answers():
    buffer = buffer_of(exact=True)
    buffer.publish(1)
    buffer.publish(2)
    buffer.begin_group(group(4, step=3), {})
    assert buffer.wanted() == [1]
    assert buffer.lease("a", 2, 8, 0.0) == []
    assert counters(buffer.lease("a", 1, 8, 0.0)) == [4]
    assert buffer.wanted() == [2]  # nothing waits
    assert submit(buffer, "a", (4, "gen"), {0: piece([2])}, 1.0)
    assert not buffer.open[4, "gen"].ended


def unlike(one, other):
    return None if one == other else (one, other)


def test_the_first_result_counts_and_a_second_one_that_differs_is_reported_once():
    buffer = buffer_of(exact=True, differs=unlike)
    buffer.begin_group(group(0), {})
    buffer.lease("a", 0, 8, 0.0)
    assert submit(buffer, "a", (0, "gen"), {0: piece([0], content="first")}, 0.0)
    buffer.expire(LEASE)
    buffer.lease("b", 0, 8, LEASE)
    assert not submit(buffer, "a", (0, "gen"), {0: piece([0], content="first")}, LEASE)
    assert not buffer.differing
    for _ in range(2):
        assert not submit(buffer, "a", (0, "gen"), {0: piece([0], content="other")}, LEASE)
    assert buffer.differing == [((0, "gen"), 0, ("first", "other"))]
    assert not submit(buffer, "b", (0, "gen"), {1: piece([0], content="b")}, LEASE)
    (found,) = buffer.take()
    taken = found.ended
    assert [taken[s].content for s in (0, 1)] == ["first", "b"]
    assert (buffer.counts.second, buffer.counts.differing, buffer.expired) == (3, 2, 1)
    assert not submit(buffer, "b", (0, "gen"), {1: piece([0])}, LEASE)


ALL = 10**9  # room of a worker that wants everything


@pytest.mark.parametrize("slots", [0, ALL], ids=["says_nothing", "has_slots"])
@pytest.mark.parametrize("exact", [False, True])
def test_a_worker_that_claims_everything_and_gives_nothing_gets_little(exact, slots):
    """It asks before the other one, as soon as its leases have ended."""
    buffer, now = buffer_of(exact=exact), 0.0
    for counter in range(8):
        buffer.begin_group(group(counter), {})
    assert len(buffer.lease("greedy", 0, ALL, now, slots)) == 8  # nobody else is there
    assert counters(buffer.lease("honest", 0, 4, now)) == []
    greedy, honest, told = [], [], set()
    for counter in range(8, 408):
        buffer.begin_group(group(counter), {})
        now += LEASE / 5
        told.update(buffer.expire(now))
        greedy += [(now, c) for c in counters(buffer.lease("greedy", 0, ALL, now, slots))]
        for one in counters(buffer.lease("honest", 0, 4, now)):
            assert not submit(buffer, "honest", (one, "gen"), {s: piece([0]) for s in (0, 1)}, now)
            honest.append(one)
    assert len(honest) + buffer.num_open(SAMPLING) == 408 and buffer.num_open(SAMPLING) <= 1
    times, given = zip(*greedy, strict=True)
    assert len(set(given)) == len(given)  # no group twice
    later = [time for time in times if time >= LEASE]
    assert all(b - a >= LEASE for a, b in zip(later, later[1:], strict=False))  # one a lease
    assert told == {"greedy"}
    assert buffer.at_work() == {"honest"}


def test_a_worker_holds_twice_as_many_responses_as_it_has_slots():
    buffer = buffer_of()
    for counter in range(40):
        buffer.begin_group(group(counter), {})
    assert len(buffer.lease("a", 0, ALL, 0.0, slots=8)) == 8  # of two responses each
    assert buffer.lease("a", 0, ALL, 0.0, slots=8) == []
    submit(buffer, "a", (0, "gen"), {s: piece([0]) for s in (0, 1)}, 1.0)
    assert len(buffer.lease("a", 0, ALL, 1.0, slots=8)) == 1
    assert len(buffer.lease("b", 0, ALL, 1.0, slots=3)) == 3


@pytest.mark.parametrize("calls", [0.0, 500.0])
def test_news_without_a_token_prolong_no_lease_for_ever(calls):
    """`calls`: the longest time that an environment may take a response."""
    buffer = buffer_of(environment_seconds=calls)
    buffer.begin_group(group(0), {})
    buffer.lease("a", 0, 8, 0.0)
    now = 0.0
    while submit(buffer, "a", (0, "gen"), {0: piece([0], whole=False)}, now):
        now += LEASE / 2
        buffer.expire(now)
        assert now <= 32 * LEASE + calls, "a lease never ends"
    assert now >= 30 * LEASE + calls
    assert buffer.at_work() == set()
    buffer.heartbeat("b", now)
    assert buffer.lease("a", 0, 8, now) == []
    assert counters(buffer.lease("b", 0, 8, now)) == [0]


def test_a_worker_that_was_silent_has_its_groups_back_by_what_it_brings():
    buffer = buffer_of()
    for counter in range(4):
        buffer.begin_group(group(counter), {})
    buffer.lease("a", 0, 8, 0.0)
    buffer.heartbeat("a", LEASE / 2)
    assert buffer.expire(LEASE) == ["a"]
    assert len(buffer.lease("a", 0, 8, LEASE)) == 1  # one at a time
    assert buffer.lease("a", 0, 8, LEASE) == []
    assert not submit(buffer, "a", (3, "gen"), {}, LEASE)  # it has nothing
    assert submit(buffer, "a", (0, "gen"), {0: piece([0], whole=False)}, LEASE)
    assert not buffer.stalled
    assert len(buffer.lease("a", 0, 8, LEASE)) == 3


def test_tokens_of_a_group_that_is_gone_show_that_a_worker_is_at_work():
    buffer = buffer_of()
    buffer.begin_group(group(0), {})
    buffer.lease("a", 0, 8, 0.0)
    buffer.heartbeat("a", LEASE / 2)
    buffer.expire(LEASE)
    buffer.lease("b", 0, 8, LEASE)
    submit(buffer, "b", (0, "gen"), {s: piece([0]) for s in (0, 1)}, LEASE)
    submit(buffer, "a", (0, "gen"), {}, LEASE)
    assert buffer.stalled == {"a"}
    submit(buffer, "a", (0, "gen"), {0: piece([0], whole=False)}, LEASE)
    assert not buffer.stalled


@pytest.mark.parametrize("exact", [False, True])
def test_tokens_of_a_lost_worker_go_on_unless_versions_are_exact(exact):
    buffer = buffer_of(exact=exact)
    buffer.begin_group(group(0), {})
    buffer.lease("a", 0, 8, 0.0)
    submit(buffer, "a", (0, "gen"), {0: piece([0, 0], whole=False), 1: piece([0])}, 5.0)
    assert buffer.lease("b", 0, 8, 14.0) == []
    buffer.expire(15.0)
    (work,) = buffer.lease("b", 0, 8, 15.0)
    assert sorted(work.sent()) == ([1] if exact else [0, 1])
    assert sum(task.tokens for task in buffer.groups()) == (1 if exact else 3)


def test_groups_of_a_worker_that_leaves_are_for_others_at_once():
    buffer = buffer_of()
    buffer.begin_group(group(0), {})
    buffer.lease("a", 0, 8, 0.0)
    buffer.deregister("a")
    assert not buffer.workers
    assert counters(buffer.lease("b", 0, 8, 0.1)) == [0]
    assert not submit(buffer, "b", (0, "gen"), {0: piece([0], whole=False)}, 0.2, goes_on=False)
    (work,) = buffer.lease("c", 0, 8, 0.3)
    assert work.sent()[0].tokens == 1


def test_a_failed_prompt_goes_to_another_worker_and_is_then_given_up():
    buffer = buffer_of()
    buffer.begin_group(group(0), {})
    buffer.lease("a", 0, 8, 0.0)
    buffer.heartbeat("b", 0.0)
    buffer.fail("a", (0, "gen"), "too long")
    assert buffer.lease("a", 0, 8, 0.0) == []
    assert counters(buffer.lease("b", 0, 8, 0.0)) == [0]
    buffer.fail("b", (0, "gen"), "too long for b")
    assert buffer.given_up == {0: "too long for b"}
    assert buffer.num_open(SAMPLING) == 0


def test_a_failure_after_the_lease_counts_once_and_leaves_the_next_lease_alone():
    buffer = buffer_of()
    buffer.begin_group(group(0), {})
    buffer.lease("a", 0, 8, 0.0)
    buffer.expire(LEASE)
    assert counters(buffer.lease("b", 0, 8, LEASE)) == [0]
    for _ in range(3):
        buffer.fail("a", (0, "gen"), "late")
    assert not buffer.given_up and buffer.lease("c", 0, 8, LEASE) == []
    buffer.fail("b", (0, "gen"), "not b either")
    assert buffer.given_up == {0: "not b either"}


def test_known_responses_count_towards_the_bytes_of_an_answer():
    """Responses that no frame holds are left out: the worker samples them again."""
    buffer = buffer_of()
    large = dataclasses.replace(piece([0]), size=ANSWER_BYTES // 2 + 1)
    for counter in range(3):
        buffer.begin_group(group(counter), {0: large})
    assert [counters(buffer.lease("a", 0, 9, 0.0)) for _ in range(4)] == [[0], [1], [2], []]
    huge = dataclasses.replace(piece([0]), size=PIECES_BYTES // 2 + 1)
    buffer.begin_group(group(3, samples=3), dict.fromkeys(range(2), huge))
    (work,) = buffer.lease("a", 0, 9, 0.0)
    assert list(work.sent()) == [0]


def tasks_of(*keys):
    """A task buffer with nodes that a worker may run."""
    found = buffer_of(served=["score", "mean"])
    for key in keys:
        found.begin(NodeTask(key=key, content=f"content of {key}", read=None, then=None))
    return found


def test_a_task_of_the_lowest_counter_goes_to_a_worker_that_serves_its_node():
    tasks = tasks_of((4, "score"), (2, "mean"), (3, "score"))
    assert tasks.lease_node("a", ["score"], 0.0).key == (3, "score")
    assert tasks.lease_node("b", ["score", "mean"], 0.0).key == (2, "mean")
    assert tasks.lease_node("b", ["mean"], 0.0) is None
    assert tasks.lease_node("b", ["score"], 0.0).key == (4, "score")
    assert tasks.lease_node("a", ["score", "mean"], 0.0) is None
    with pytest.raises(ValueError, match="'score' of prompt 3 has begun already"):
        tasks.begin(tasks.find(NodeTask, (3, "score")))


def test_the_first_result_counts_whoever_brings_it_and_a_second_one_is_counted():
    tasks = tasks_of((0, "score"))
    tasks.lease_node("a", ["score"], 0.0)
    tasks.expire(LEASE)
    assert tasks.expired == 1 and not tasks.workers
    assert tasks.lease_node("b", ["score"], LEASE).key == (0, "score")
    assert tasks.submit_node("a", (0, "score"), "a's")  # its lease is over, and it was the first
    assert not tasks.submit_node("b", (0, "score"), "b's")
    ((task, result),) = tasks.take_results()
    assert (task.key, result, tasks.take_results()) == ((0, "score"), "a's", [])
    assert tasks.counts.second == 1
    tasks.forget([0])
    assert not tasks.submit_node("b", (0, "score"), "late")
    assert tasks.counts.second == 1


def test_a_task_that_each_worker_has_let_go_is_for_any_that_did_not_fail_it():
    tasks = tasks_of((0, "score"))
    tasks.heartbeat("b", 0.0, ["score"])
    for worker in ("a", "b"):
        assert tasks.lease_node(worker, ["score"], 0.0).key == (0, "score")
        tasks.take_back(worker, (0, "score"))
    assert tasks.lease_node("b", ["score"], 0.0).key == (0, "score")
    tasks.fail("b", (0, "score"), "no")
    assert tasks.lease_node("b", ["score"], 0.0) is None
    assert tasks.lease_node("a", ["score"], 0.0).key == (0, "score")


def test_the_only_worker_tries_again():
    tasks = tasks_of((0, "score"))
    tasks.heartbeat("b", 0.0, ["mean"])  # serves another node
    for _ in range(2):
        assert tasks.lease_node("a", ["score"], 0.0).key == (0, "score")
        tasks.fail("a", (0, "score"), "no")
    assert tasks.given_up == {0: "no"}


def test_a_worker_that_claims_all_tasks_and_runs_none_gets_few_and_serves_no_node():
    tasks = tasks_of(*((counter, "score") for counter in range(8)))

    def claimed(worker, now):
        return list(iter(lambda: tasks.lease_node(worker, ["score"], now), None))

    tasks.heartbeat("b", 0.0, ["score"])
    assert len(claimed("a", 0.0)) == 2  # one that runs, and one that is next
    for _ in range(2):
        given = claimed("b", 0.0)
        assert len(given) == 2
        for task in given:
            assert tasks.submit_node("b", task.key, "a result")
    tasks.heartbeat("a", LEASE / 2, ["score"])
    tasks.heartbeat("b", LEASE / 2, ["score"])
    assert tasks.expire(LEASE) == ["a"]
    (last,) = claimed("a", LEASE)  # one at a time, none that it had
    assert last.key == (7, "score") and len(claimed("b", LEASE)) == 2
    tasks.deregister("b")
    assert list(tasks.workers) == ["a"] and tasks.unserved() == ["score"]
    assert tasks.submit_node("a", last.key, "a result") and tasks.unserved() == []


# -- a model of trainers and workers with random faults -------------------------------------------


def check_indices(buffer):
    """The indices of a task buffer say what a look at all tasks finds."""
    tasks = list(buffer.open.values())
    for name in {task.worker for task in tasks} - {""}:
        held = [task.key for task in tasks if task.worker == name]
        assert sorted(task.key for task in buffer.open.held(name)) == sorted(held)
    for node in (*SAMPLER, "score"):
        free = [task for task in tasks if task.node == node and not task.worker]
        free.sort(key=lambda task: (task.priority, task.key))
        queues = buffer.open.queues([node])
        assert list(buffer.open.waiting(queues)) == free
        assert list(buffer.open.waiting(queues, backwards=True)) == free[::-1]
        assert buffer.num_open(node) == sum(task.node == node for task in tasks)
        assert buffer.at_work(node) <= buffer.workers.keys() - buffer.stalled


def test_a_question_costs_no_look_at_all_tasks():
    """Of 40 times the tasks and workers, a hundred questions look at about as many priorities."""
    seen = []

    class Counted(GroupTask):
        looks = 0

        @property
        def priority(self):
            Counted.looks += 1
            return super().priority

    for workers in (100, 4000):
        buffer = buffer_of()
        for counter in range(4 * workers):
            task = dataclasses.replace(group(counter, 1 + counter % 2))
            task.__class__ = Counted
            buffer.begin_group(task, {})
        for number in range(workers):
            assert len(buffer.lease(f"w{number}", 0, 2, 0.0, slots=4)) == 1
        Counted.looks = 0
        for number in range(100):
            (task,) = buffer.lease(f"w{number}", 0, 2, 1.0, slots=4)
            buffer.submit(f"w{number}", task.key, {s: piece([0]) for s in (0, 1)}, 1.0)
        seen.append(Counted.looks)
    assert seen[0] == seen[1]


SAMPLES, GROUPS, STALENESS = 2, 3, 2
# an evaluation of each third version has so many problems at each process, and so many may be
# under way; their counters begin above all others
EVERY, PROBLEMS, OPEN, FIRST = 3, 2, 2, 6_000_000
KEPT = STALENESS + 1  # newest versions that workers can get, beside those of evaluations


@dataclasses.dataclass
class Task:
    """A group at a worker: versions of the tokens of each response, and which have ended."""

    tokens: dict[int, list[int]]
    whole: set[int]


def score_of(pieces):
    """The word of the second node on a group."""
    return tuple(tuple(pieces[s].content) for s in sorted(pieces))


class Job:
    """Trainer processes, workers, and messages between them that are late, lost or repeated.

    With `scored` a group is complete once a worker has run the node "score" on it. With `greedy`
    one worker claims all that it can get, before the others, and gives nothing. With `evaluates`
    workers answer evaluations too.
    """

    def __init__(self, seed, *, exact, processes, scored=False, greedy=False, evaluates=False):
        self.random = random.Random(seed)
        self.exact, self.processes, self.scored = exact, processes, scored
        self.greedy, self.num_claimed = greedy, 0
        self.evaluates, self.num_evaluated = evaluates, 0
        self.recorded = {}  # version -> problems that no worker could answer
        self.num_scored = self.num_steps = 0
        self.rule = Rule(GROUPS, STALENESS)
        self.now, self.names = 0.0, 0
        self.attempt = 0
        # step, position, pieces by key, steps trained so far, counters given up
        self.saved = [(0, 0, {}, {}, set())]
        self.trained = {}  # step -> counters
        self.seen = collections.Counter()
        self.workers = {}
        self.late = []
        self.lost = set()
        self.start(0, 0, {}, set())
        self.join("both")

    def start(self, step, position, pieces, lost):
        self.attempt += 1
        self.step = step
        self.buffers = [
            TaskBuffer(
                self.rule,
                exact=self.exact,
                version=step,
                lease_seconds=LEASE,
                max_tries=2,
                served=["score"] if self.scored else [],
                differs=unlike,
            )
            for _ in range(self.processes)
        ]
        self.unscored = [{} for _ in range(self.processes)]  # sampled, by counter
        self.admissions = [
            Admission(self.rule, step=step, counter=position) for _ in range(self.processes)
        ]
        self.lost = set(lost)  # given up, and known to all
        for admission in self.admissions:
            for counter in sorted(lost):
                admission.judge(counter, False)
        self.next = [position] * self.processes  # first counter that has not begun
        self.complete = [{} for _ in range(self.processes)]
        self.news = set()  # given up, not known to all
        self.restored, self.archive, self.owed = pieces, {}, []
        self.recorded = {v: lost for v, lost in self.recorded.items() if v <= step}
        self.evaluating = {}  # version -> what each process has of it
        for place in range(self.processes):
            self.evaluate(place)
        for place in range(self.processes):
            self.admit(place)

    def admit(self, place):
        buffer, admission = self.buffers[place], self.admissions[place]
        end = max(admission.end(buffer.newest), 1 + max((c for c, _ in self.restored), default=-1))
        for counter in range(self.next[place], end):
            if counter % self.processes == place and counter not in self.lost:
                found = group(counter, admission.step_of(counter), SAMPLES)
                buffer.begin_group(found, self.restored.get(found.key, {}))
        self.next[place] = max(self.next[place], end)
        for found in buffer.take():
            pieces = found.ended
            assert sorted(pieces) == list(range(SAMPLES)), "a group was split"
            assert found.key[0] not in self.complete[place]
            if self.scored:
                self.hand_over(place, found.key[0], pieces)
            else:
                self.complete[place][found.key[0]] = self.archive[found.key] = pieces
        for task, result in buffer.take_results():
            task.then(result)
        for counter in buffer.given_up:
            self.unscored[place].pop(counter, None)
        self.news |= set(buffer.given_up)
        buffer.given_up.clear()

    def hand_over(self, place, counter, pieces):
        """Makes a task of a group whose samples are complete."""

        def then(result):
            assert result == score_of(pieces), "a score of other samples"
            assert self.unscored[place].pop(counter) is pieces, "scored twice"
            assert counter not in self.complete[place]
            self.complete[place][counter] = self.archive[counter, "gen"] = pieces
            self.num_scored += 1

        assert counter not in self.unscored[place]
        self.unscored[place][counter] = pieces
        task = NodeTask(key=(counter, "score"), content=score_of(pieces), read=None, then=then)
        self.buffers[place].begin(task)

    # -- evaluations ------------------------------------------------------------------------------

    def evaluate(self, place):
        """Begins the evaluation of the newest version at a process, if it is due."""
        version = self.step
        if not self.evaluates or version % EVERY or version in self.recorded:
            return
        self.evaluating.setdefault(version, {})
        for problem in range(PROBLEMS):
            counter = FIRST + self.processes * problem + place
            task = group(counter, version, SAMPLES)
            task.key, task.node = (counter, f"{EVALUATION} {version}"), EVALUATION
            self.buffers[place].begin_group(task, {})

    def take_evaluations(self):
        """Records an evaluation once all processes have it."""
        for place, buffer in enumerate(self.buffers):
            for version, tasks in buffer.take_evaluations().items():
                counters = [FIRST + self.processes * p + place for p in range(PROBLEMS)]
                assert [task.key[0] for task in tasks] == counters, "split, or answered twice"
                assert place not in self.evaluating[version]
                self.evaluating[version][place] = tasks
        for version, found in list(self.evaluating.items()):
            if len(found) == self.processes:
                assert version not in self.recorded
                tasks = [task for of_place in found.values() for task in of_place]
                self.recorded[version] = sum(bool(task.lost) for task in tasks)
                pieces = [task.ended for task in tasks if not task.lost]
                assert all(map(_whole, pieces))
                assert {v for of in pieces for p in of.values() for v in p.content} <= {version}
                self.num_evaluated += 1
                del self.evaluating[version]

    def wanted(self, name, buffer):
        """The version that a worker should hold, and whether it evaluates it."""
        newest = min(one.newest for one in self.buffers)
        told = [one.evaluates(name) for one in self.buffers]
        if evaluated := [version for version in told if version is not None]:
            return min(evaluated), True
        return min(buffer.wanted()[0], newest) if self.exact else newest, False

    # -- workers ----------------------------------------------------------------------------------

    def join(self, kind=None):
        self.names += 1
        if kind is None:
            kind = self.random.choice(["samples", "scores", "both"]) if self.scored else "samples"
        worker = {"held": self.step, "tasks": {}, "run": self.attempt}
        self.workers[f"w{self.names}"] = worker | {"kind": kind, "scoring": {}}

    def rejoin(self, worker):
        """Drops what later weights sampled, brings the rest, begins anew."""
        tasks, worker["tasks"] = worker["tasks"], {}
        worker["run"] = self.attempt
        for key, task in tasks.items():
            versions = [v for tokens in task.tokens.values() for v in tokens]
            if max(versions, default=0) <= self.step:
                yield key, task
        worker["held"] = min(worker["held"], self.step)
        worker["scoring"] = {}

    def score(self, name):
        """Asks for a node, or brings what is there."""
        worker, chance = self.workers[name], self.random.random
        if worker["kind"] == "samples" or worker["run"] != self.attempt:
            return
        buffer = self.buffers[self.random.randrange(self.processes)]
        if chance() < 0.5:
            task = buffer.lease_node(name, ["score"], self.now)
            if task is not None and chance() > 0.05:  # or the answer is lost
                worker["scoring"][task.key] = task.content
            return
        for key, content in list(worker["scoring"].items()):
            message = (self.attempt, name, key, content, None)
            luck = chance()
            if luck < 0.1 or luck > 0.95:
                self.late.append(message)
            if luck > 0.05:
                self.deliver(message)
                del worker["scoring"][key]

    def claim(self):
        """Takes everything, whatever it is."""
        for buffer in self.buffers:
            slots = self.random.choice([0, ALL])
            given = buffer.lease("greedy", buffer.wanted()[0], ALL, self.now, slots)
            self.num_claimed += len(given)
            while buffer.lease_node("greedy", ["score"], self.now) is not None:
                self.num_claimed += 1
            if self.random.random() < 0.1:
                for work in given:
                    submit(buffer, "greedy", work.key, {}, self.now)

    def ask(self, name):
        worker, place = self.workers[name], self.random.randrange(self.processes)
        if worker["kind"] == "scores":
            worker["run"], worker["scoring"] = self.attempt, {}
            return
        if worker["run"] != self.attempt:
            for key, task in self.rejoin(worker):
                self.send(name, key, task, goes_on=False)
            return
        wanted, evaluates = self.wanted(name, self.buffers[place])
        drains = evaluates and wanted < worker["held"]
        room = 0 if drains else self.random.randrange(6)
        slots = SAMPLES * len(worker["tasks"]) + room if self.random.random() < 0.9 else 0
        given = self.buffers[place].lease(name, worker["held"], room, self.now, slots)
        if self.random.random() < 0.05:
            return  # the answer is lost
        for work in given:
            tokens = {s: list(p.content) for s, p in work.sent().items()}
            whole = {s for s, p in work.sent().items() if p.whole}
            worker["tasks"][work.key] = Task(tokens, whole)

    def decode(self, name):
        worker = self.workers[name]
        for key, task in worker["tasks"].items():
            left = [s for s in range(SAMPLES) if s not in task.whole]
            if left:
                sample = self.random.choice(left)
                task.tokens.setdefault(sample, []).append(worker["held"])
                if len(task.tokens[sample]) == 1 + (7 * key[0] + sample) % 3:
                    task.whole.add(sample)

    def bring(self, name):
        for key, task in list(self.workers[name]["tasks"].items()):
            if self.random.random() < 0.7:
                self.send(name, key, task, goes_on=len(task.whole) < SAMPLES)

    def send(self, name, key, task, *, goes_on):
        pieces = {s: piece(t, whole=s in task.whole) for s, t in task.tokens.items() if t}
        message = (self.workers[name]["run"], name, key, pieces, goes_on)
        luck = self.random.random()
        if luck < 0.1:
            self.late.append(message)
        if luck > 0.05:
            self.deliver(message)
        if luck > 0.95:
            self.late.append(message)  # comes a second time

    def deliver(self, message):
        run, name, key, pieces, goes_on = message
        worker = self.workers.get(name)
        if run != self.attempt:
            return
        buffer = self.buffers[key[0] % self.processes]
        if key[1] == "score":
            buffer.submit_node(name, key, pieces)
            return
        goes_on = submit(buffer, name, key, pieces, self.now, goes_on=goes_on)
        if worker is not None and not goes_on:
            worker["tasks"].pop(key, None)

    def take_weights(self, name):
        worker = self.workers[name]
        if worker["run"] != self.attempt:
            return
        wanted, _ = self.wanted(name, self.random.choice(self.buffers))
        newest = max(one.newest for one in self.buffers)
        if wanted > min(one.newest for one in self.buffers):
            return  # it waits for these
        assert wanted > newest - KEPT or wanted in self.evaluating, "nobody has these weights"
        evaluates = any(key[1].startswith(EVALUATION) for key in worker["tasks"])
        between = not self.exact and wanted > worker["held"] and not evaluates
        if between or not worker["tasks"]:
            worker["held"] = wanted

    def fail(self, name):
        scoring = self.workers[name]["scoring"]
        if scoring and self.workers[name]["run"] == self.attempt:
            key = self.random.choice(sorted(scoring))
            del scoring[key]
            self.buffers[key[0] % self.processes].fail(name, key, "no")
        tasks = self.workers[name]["tasks"]
        if tasks and self.workers[name]["run"] == self.attempt:
            key = self.random.choice(sorted(tasks))
            del tasks[key]
            self.buffers[key[0] % self.processes].fail(name, key, "no")

    # -- trainers ---------------------------------------------------------------------------------

    def train(self):
        for place in range(self.processes):
            self.admit(place)
        self.take_evaluations()
        if self.random.random() < 0.05:
            check_indices(self.random.choice(self.buffers))
        step = self.step + 1
        if len(self.evaluating) > OPEN:
            return
        for counter in sorted(self.news):
            for admission in self.admissions:
                admission.judge(counter, False)
        self.lost |= self.news
        self.news.clear()
        cut = self.admissions[0].cut(step)
        assert all(admission.cut(step) == cut for admission in self.admissions)
        if not all(c in self.complete[c % self.processes] for c in cut.kept):
            return
        assert len(cut.kept) == GROUPS
        for counter in cut.kept:
            pieces = self.complete[counter % self.processes].pop(counter)
            versions = [v for p in pieces.values() for v in p.content]
            assert all(step - 1 - STALENESS <= v <= step - 1 for v in versions), (step, versions)
            if self.exact:
                assert len(set(versions)) == 1
        for buffer in self.buffers:
            buffer.forget(cut.counters)
        for admission in self.admissions:
            assert admission.finish(step) == cut
        self.trained[step] = cut.kept
        self.step = step
        self.num_steps += 1
        for place in self.random.sample(range(self.processes), self.processes):
            self.buffers[place].publish(step)
            self.evaluate(place)

    def save(self):
        found = {}
        for place, buffer in enumerate(self.buffers):
            self.admit(place)
            found |= {t.key: {**t.under_way, **t.ended} for t in buffer.groups()}
            found |= {(c, "gen"): dict(p) for c, p in self.complete[place].items()}
            found |= {(c, "gen"): dict(p) for c, p in self.unscored[place].items()}
        first = (self.step, self.admissions[0].position, dict(self.trained))
        if self.exact:
            end = self.admissions[0].end_of(self.step + STALENESS)
            self.owed.append((*first, end, None, None))
        else:
            self.owed.append((*first, first[1], found, set(self.lost)))

    def settle(self):
        """Completes checkpoints, with whole groups of the next steps where versions are exact, once
        older versions are evaluated: nobody has them after a restart."""
        for owed in list(self.owed):
            step, position, trained, end, found, lost = owed
            kept = [c for c in range(position, end) if c not in self.lost]
            if any(version < step for version in self.evaluating):
                continue
            if all((c, "gen") in self.archive for c in kept):
                self.owed.remove(owed)
                if found is None:
                    found, lost = {(c, "gen"): self.archive[c, "gen"] for c in kept}, set(self.lost)
                self.saved.append((step, position, found, trained, lost))

    def restart(self):
        """From one of the last checkpoints; later ones are gone."""
        self.saved = self.saved[-5:]
        back = self.random.randrange(1, min(3, len(self.saved)) + 1)
        self.saved = self.saved[: len(self.saved) - back + 1]
        step, position, pieces, trained, lost = self.saved[-1]
        self.trained = dict(trained)
        self.start(step, position, pieces, lost)

    def tick(self, *, faults=True):
        chance = self.random.random
        self.now += 0.3 * self.random.random()
        for buffer in self.buffers:
            buffer.expire(self.now)
        if self.greedy:
            self.claim()
        name = self.random.choice(sorted(self.workers)) if self.workers else None
        if name is not None:
            acts = [self.ask, self.decode, self.bring, self.take_weights]
            self.random.choice(acts + [self.score] * self.scored)(name)
        self.train()
        self.settle()
        if not faults:
            return
        if self.late and chance() < 0.1:
            self.deliver(self.late.pop(self.random.randrange(len(self.late))))
        if name is not None and chance() < 0.01:
            self.fail(name)
        if name is not None and chance() < 0.01:
            del self.workers[name]
            if chance() < 0.3:
                for buffer in self.buffers:
                    buffer.deregister(name)
        if len(self.workers) < 4 and chance() < 0.03:
            self.join()
        if chance() < 0.02:
            self.save()
        if chance() < 0.001:
            self.restart()

    def check_history(self):
        """Every counter below the position was trained once, but for those that were given up."""
        trained = [c for step in sorted(self.trained) for c in self.trained[step]]
        assert sorted(self.trained) == list(range(1, self.step + 1))
        assert len(trained) == len(set(trained)), "a counter was trained twice"
        assert trained == sorted(trained)
        position = self.admissions[0].position
        gaps = set(range(position)) - set(trained)
        assert gaps == {counter for counter in self.lost if counter < position}
        if self.evaluates:
            assert self.recorded.keys() | self.evaluating.keys() == set(
                range(0, self.step + 1, EVERY)
            )
            assert not self.recorded.keys() & self.evaluating.keys()


def _whole(pieces):
    return len(pieces) == SAMPLES and all(p.whole for p in pieces.values())


def run_model(events, seed, *, scored=False, greedy=False, evaluates=False):
    for number, (exact, processes) in enumerate([(False, 1), (False, 3), (True, 1), (True, 2)]):
        options = {"exact": exact, "processes": processes, "scored": scored, "greedy": greedy}
        options["evaluates"] = evaluates
        job = Job(seed + number, **options)
        for _ in range(events // 4):
            job.tick()
        job.check_history()
        assert sum(buffer.counts.differing for buffer in job.buffers) == 0
        job.join("both")
        assert job.num_steps > events / 4000
        assert not greedy or job.num_claimed > 0
        assert not evaluates or job.num_evaluated > job.num_steps / (2 * EVERY)
        if scored:
            assert job.num_scored > events / (800 if greedy else 400)
        before = job.step
        for _ in range(3000):  # without faults each step comes
            job.tick(faults=False)
            if job.step > before + 3:
                break
        assert job.step > before + 3, "nothing moves any more"
        job.check_history()


def test_random_faults_lose_and_repeat_nothing():
    run_model(100_000, seed=1)


def test_random_faults_of_workers_that_run_a_second_node_lose_and_repeat_nothing():
    run_model(60_000, seed=3, scored=True)


@pytest.mark.parametrize("scored", [False, True], ids=["sampling", "and_a_second_node"])
def test_others_train_on_beside_a_worker_that_claims_everything(scored):
    run_model(40_000, seed=4, scored=scored, greedy=True)


def test_random_faults_lose_no_evaluation_and_none_stops_the_training():
    run_model(60_000, seed=5, evaluates=True)


@pytest.mark.slow
@pytest.mark.parametrize("greedy", [False, True], ids=["honest", "one_is_greedy"])
@pytest.mark.parametrize("scored", [False, True], ids=["sampling", "and_a_second_node"])
def test_a_million_random_faults_lose_and_repeat_nothing(scored, greedy):
    run_model(1_000_000, seed=2, scored=scored, greedy=greedy, evaluates=True)


def test_tokens_of_an_environment_have_no_version_that_counts():
    request = request_of(4)
    response = response_of(request, 0, [3] * 5)
    response.version[1:3] = 0
    episode = single_turn(response)
    episode.mask[1:3] = False
    (found,) = pieces_of(Progress({0: episode})).values()
    assert (found.tokens, found.lowest, found.highest) == (3, 3, 3)
