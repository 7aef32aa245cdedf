"""The pool keeps its deadlines and its order, whatever the functions do."""

import array
import contextlib
import os
import queue
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from support.paths import TESTS
from support.programs import alive
from support.waiting import HANG, until

from distflow_jax.config.data_config import RewardConfig
from distflow_jax.rewards.function_calls import result_from
from distflow_jax.rewards.pool import JobQueue, RewardPool, Scoring, failures
from distflow_jax.rewards.records import RewardRequest

FILE = TESTS / "support" / "user_rewards.py"
DEADLINE = 6.0  # seconds: what hangs is waited for so long, and nothing else is near it


def request(solution, **fields):
    return RewardRequest(**{"data_source": "s", "ground_truth": "47"} | fields, solution=solution)


def requests(*solutions):
    return [request(solution) for solution in solutions]


def scores(results):
    return [result.score for result in results]


def counts(results):
    """(rewards that failed, those of them that missed their deadline)"""
    found = failures(results)
    assert found["scored"] == len(results)
    return found["failed"], found["timeouts"]


def pool_of(function, **options):
    return RewardPool(
        RewardConfig(**{"function": f"{FILE}:{function}", "num_workers": 2} | options)
    )


@pytest.fixture(scope="module")
def row_pool():
    with pool_of("row", timeout_seconds=DEADLINE, on_error=-1.0) as pool:
        yield pool


HANGING = {  # rewards of which one hangs, by function
    "row": ("1", "2", "hang", "4", "5", "6"),
    "trl_acts": ("1", "raise", "3", "exit", "hang", "6"),
    "patient": (*map(str, range(20)), "hang"),
}


@pytest.fixture(scope="module")
def waited(row_pool):
    """{function: (results, seconds)} of those that hang, which wait at the same time."""

    def score(pool, solutions):
        start = time.monotonic()
        return pool.score(requests(*solutions)), time.monotonic() - start

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(HANGING)) as threads:
        pools = {"row": row_pool}
        for name in ("trl_acts", "patient"):
            one = pool_of(name, timeout_seconds=DEADLINE, num_workers=1)
            pools[name] = stack.enter_context(one)
        for pool in pools.values():
            pool.check(request("1"))  # the workers are there, the clock runs for the calls alone
        begun = {name: threads.submit(score, pools[name], HANGING[name]) for name in HANGING}
        return {name: future.result() for name, future in begun.items()}


def test_a_hanging_call_ends_at_the_deadline_and_costs_only_itself(waited):
    results, seconds = waited["row"]
    assert seconds >= DEADLINE
    assert scores(results) == [1, 2, -1, 4, 5, 6] and counts(results) == (1, 1)
    assert [result.error for result in results] == [None, None, "timeout", None, None, None]


@pytest.mark.parametrize("death", ["exit", "crash"])
def test_a_dying_worker_is_replaced_and_costs_only_its_request(row_pool, death):
    results = row_pool.score(requests("1", death, "3", "4"))
    assert scores(results) == [1, -1, 3, 4]
    assert (
        results[1].error
        == f"exception: the worker process ended with exit code {7 if death == 'exit' else -11}"
    )
    assert scores(row_pool.score(requests("5", "6", "7"))) == [5, 6, 7]


def test_errors_are_counted_and_keep_their_place(row_pool):
    results = row_pool.score(requests("raise", "2", "text", "nan", "sys.exit", "7"))
    assert scores(results) == [-1, 2, -1, -1, -1, 7]
    assert counts(results) == (4, 0)
    assert "KeyError: 'no such answer'" in results[0].error
    assert "user_rewards.py, line" in results[0].error.split("\n")[0]
    assert "Traceback" in results[0].error
    assert "returned 'good' (str)" in results[2].error
    assert "score of nan" in results[3].error
    assert "SystemExit: 3" in results[4].error


@pytest.mark.parametrize("score", ["nan", "inf", "-inf", "1.1e18", "-2e18", "1e39", "1e300"])
def test_scores_whose_squares_float32_does_not_hold_are_errors(score):
    """They would make the advantages of the whole batch 0, or nan."""
    with pytest.raises(ValueError, match=r"a score of \S+, outside ±1e\+18$"):
        result_from({"score": float(score), "format": 1})
    assert result_from(1e18).score == -result_from(-1e18).score == 1e18


def test_order_and_permutation(row_pool):
    solutions = [str(i) for i in range(200)]
    assert scores(row_pool.score(requests(*solutions))) == list(range(200))
    random.Random(0).shuffle(solutions)
    assert scores(row_pool.score(requests(*solutions))) == [float(s) for s in solutions]


def test_submitted_rewards_overlap_and_mix(row_pool):
    futures = [row_pool.submit(request(str(i))) for i in range(20)]
    assert scores(row_pool.score(requests("7", "8"))) == [7, 8]
    assert [future.result().score for future in futures] == list(range(20))


def test_check_names_what_is_wrong(row_pool):
    assert row_pool.check(request("3")).score == 3
    with pytest.raises(
        ValueError, match=r"failed on the first row: KeyError.*user_rewards.py, line"
    ):
        row_pool.check(request("raise"))
    with pytest.raises(ValueError, match=r"returned 'good' \(str\); expected a number or a dict"):
        row_pool.check(request("text"))
    with pool_of("row", num_workers=1, timeout_seconds=0.5) as pool:
        with pytest.raises(ValueError, match="timeout_seconds 0.5"):
            pool.check(request("hang"))


def test_error_rate(row_pool):
    results = row_pool.score(requests("raise", *map(str, range(9))))
    parts = [failures(results[:4]), failures(results[4:])]
    # 1 of 10 is allowed
    assert row_pool.check_error_rate(parts) == {"reward/errors": 1, "reward/timeouts": 0}
    with pytest.raises(RuntimeError, match=r"(?s)1 of 9 rewards failed.*0\.1.*Traceback.*KeyError"):
        row_pool.check_error_rate([failures(results[4:9]), failures(results[:4])])
    row_pool.check_error_rate([])


def test_workers_do_not_import_jax_nor_the_main_script():
    with pool_of("loaded_jax", num_workers=1) as pool:
        assert pool.check(request("")).score == 0


def test_a_file_of_the_working_folder_replaces_no_module_of_a_worker(tmp_path, monkeypatch):
    (tmp_path / "distflow_jax.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(filter(None, sys.path)))
    with pool_of("row", num_workers=1) as pool:
        assert scores(pool.score(requests("5"))) == [5]


def test_kwargs_and_logged_numbers():
    with pool_of("verl_style") as pool:
        results = pool.score(requests("47", "4"))
    assert scores(results) == [1, 0]
    assert [result.logged for result in results] == [{"length": 2.0}, {"length": 1.0}]
    with pool_of("by_length", kwargs={"scale": 0.5}, num_workers=1) as pool:
        assert pool.check(request("", tokens=array.array("i", [5, 6, 7]))).score == 1.5


def test_batch_function_sees_columns_and_contiguous_parts():
    rows = [request("47" if i % 3 else "4", extra_info={"weight": i}) for i in range(9)]
    with pool_of("trl_style") as pool:
        assert scores(pool.score(rows)) == [i if i % 3 else 0 for i in range(9)]
    with pool_of("trl_batch_size") as pool:
        assert scores(pool.score(rows)) == [5] * 5 + [4] * 4
        assert pool.check(rows[0]).score == 1


def test_one_bad_row_of_a_batch_does_not_cost_the_others(waited):
    results, _ = waited["trl_acts"]
    assert scores(results) == [1, 0, 3, 0, 0, 6]
    assert counts(results) == (3, 1)


def test_each_coroutine_has_the_deadline(waited):
    results, _ = waited["patient"]
    assert scores(results) == [*range(20), 0]
    assert results[-1].error == "timeout"


@pytest.mark.parametrize("one_by_one", [False, True])
def test_coroutines_wait_together(tmp_path, one_by_one):
    """Each returns once all are at work; before, one keeps a worker while they are submitted."""
    kwargs = {"folder": str(tmp_path), "count": 60}
    with pool_of("meets", timeout_seconds=HANG, kwargs=kwargs) as pool:
        if one_by_one:
            gate = pool.submit(request("gate"))
            until((tmp_path / "gate").exists)
            futures = [pool.submit(request(str(i))) for i in range(60)]
            (tmp_path / "open").touch()
            results = [future.result() for future in futures]
            assert gate.result().score == -1
        else:
            results = pool.score(requests(*map(str, range(60))))
    assert scores(results) == list(range(60))


def test_a_coroutine_that_ends_its_worker_costs_only_itself():
    with pool_of("patient", timeout_seconds=HANG, num_workers=1) as pool:
        futures = [pool.submit(request("exit" if i == 5 else str(i))) for i in range(12)]
        results = [future.result() for future in futures]
    assert scores(results) == [*range(5), 0, *range(6, 12)]
    assert counts(results) == (1, 0)


def test_a_share_leaves_jobs_to_threads_that_wait():
    jobs, taken = JobQueue(), queue.SimpleQueue()
    threads = [threading.Thread(target=lambda: taken.put(jobs.take())) for _ in range(2)]
    for i in range(8):
        jobs.put(Scoring([request(str(i))], [Future()]))
    assert jobs.take().requests[0].solution == "0"
    assert [job.requests[0].solution for job in jobs.take_share()] == list("1234567")
    for thread in threads:
        thread.start()
    assert until(lambda: jobs._waiting == 2)
    with jobs._changed:  # until all are there
        for i in range(7):
            jobs.put(Scoring([request(str(i))], [Future()]))
        jobs.take()
        assert len(jobs.take_share()) == 2  # three of seven
    for thread in threads:
        thread.join()
    assert len(jobs.take_share()) == 2
    assert not jobs.take_share()
    late = Scoring([request("1")], [Future()])
    jobs.close()
    jobs.put(late)
    assert late.futures[0].cancelled() and jobs.take() is None


@pytest.mark.parametrize("death", ["exit", "between"])
def test_programs_that_a_worker_started_end_with_it(tmp_path, death):
    pids = tmp_path / "pids"
    with pool_of("row", num_workers=1, timeout_seconds=HANG) as pool:
        result = pool.submit(request(f"leave {death} {pids}")).result()
        assert (result.error is not None) == (death == "exit")
        worker, child = map(int, pids.read_text().split())
        (tmp_path / "pids.end").touch()
        if death == "between":  # and no call is to blame, once all of its threads have ended
            ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
            assert until(lambda: os.waitid(os.P_PID, worker, ended))
        assert scores(pool.score(requests("5"))) == [5]
        assert until(lambda: not alive(child))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (f"{FILE}:rwo", "has no 'rwo'; did you mean 'row'"),
        (f"{FILE}:NOT_A_FUNCTION", "cannot be called"),
        (f"{FILE}:nonsense", r"nonsense\(x, y\) must take .*there is no value for x, y"),
        (str(FILE).replace("user_rewards", "user_reward") + ":row", "mean .*user_rewards.py"),
        ("gsm9k:row", "no module named 'gsm9k'"),
        ("json:dump_it", "has no 'dump_it'; did you mean 'dump"),
    ],
)
def test_missing_functions_are_named_with_the_nearest(function, message):
    with RewardPool(RewardConfig(function=function, num_workers=1)) as pool:
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            pool.check(request("1"))


def test_unknown_built_in_and_bad_kwargs():
    with RewardPool(RewardConfig(function="gsm8", num_workers=1)) as pool:
        with pytest.raises(ValueError, match="did you mean 'gsm8k'"):
            pool.check(request("1"))
    with pytest.raises(ValueError, match="takes no 'methid'; did you mean 'method'"):
        RewardPool(RewardConfig(kwargs={"methid": "strict"}))
    with pytest.raises(
        ValueError, match="num_workers=0 is only for boxed_only, exact, format, gsm8k, zero; 'math'"
    ):
        RewardConfig(function="math", num_workers=0)


def test_broken_and_hanging_modules(tmp_path):
    broken = tmp_path / "broken_rewards.py"
    broken.write_text("def f(solution_str):\n    return 1\n\nf(1, 2)\n")
    with RewardPool(RewardConfig(function=f"{broken}:f", num_workers=1)) as pool:
        with pytest.raises(ValueError, match=r"raised TypeError: .*broken_rewards.py, line 4\)"):
            pool.check(request("1"))
    broken.write_text("import time\ntime.sleep(600)\n")
    config = RewardConfig(function=f"{broken}:f", num_workers=1, start_seconds=0.5)
    with RewardPool(config) as pool:
        with pytest.raises(ValueError, match="took more than reward.start_seconds 0.5"):
            pool.check(request("1"))


def test_quick_built_ins_need_no_processes():
    with RewardPool(RewardConfig()) as pool:
        results = pool.score(requests("47", "so 47.", "48"))
        assert scores(results) == [1, 1, 0]
        assert pool.submit(request("47")).result().score == 1
        with pytest.raises(
            ValueError, match="failed on the first row: ValueError: gsm8k needs a num"
        ):
            pool.check(request("47", ground_truth="north"))


def test_math_gives_up_on_its_own_inside_a_worker():
    config = RewardConfig(function="math", num_workers=1, timeout_seconds=HANG)
    with RewardPool(config) as pool:
        results = pool.score(requests(r"\boxed{47}", r"\boxed{94/2}", r"\boxed{9^{9^{9^{9}}}}"))
    assert scores(results) == [1, 1, 0]
    assert counts(results) == (0, 0)


def test_close_ends_hanging_calls_and_their_children(tmp_path):
    pids = tmp_path / "pids"
    pool = pool_of("row", num_workers=1, timeout_seconds=600)
    future = pool.submit(request(f"spawn {pids}"))
    waiting = pool.submit(request("1"))
    started = until(lambda: pids.exists() and pids.read_text().split())
    pool.close()
    pool.close()
    assert "ended with exit code -9" in future.result().error
    assert waiting.cancelled()
    assert until(lambda: not any(alive(int(pid)) for pid in started))
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(request("1"))


def test_workers_end_with_their_parent(tmp_path):
    pids = tmp_path / "pids"
    script = tmp_path / "parent.py"
    script.write_text(
        "from distflow_jax.rewards.pool import RewardConfig, RewardPool\n"
        "from distflow_jax.rewards.records import RewardRequest\n"
        f"pool = RewardPool(RewardConfig(function={f'{FILE}:row'!r}, num_workers=1,"
        " timeout_seconds=600))\n"
        f"pool.submit(RewardRequest('s', {f'spawn {pids}'!r}, '')).result()\n"
    )
    parent = subprocess.Popen([sys.executable, script])
    started = until(lambda: pids.exists() and pids.read_text().split())
    parent.kill()
    parent.wait()
    assert until(lambda: not any(alive(int(pid)) for pid in started))
