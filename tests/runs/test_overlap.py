"""Reading ahead and scoring early show in the trace and change no number.

Nightly: prefetching and early scoring overlap with other work and change no bit of a number.
"""

import pytest
from support.tiny_config import tiny_config
from support.trace_rules import check_trace

from distflow_jax import run
from distflow_jax.observe.spans import read_trace
from distflow_jax.report.run_writer import read_metrics

pytestmark = pytest.mark.slow  # two whole runs
REWARD = """
import time

def slow(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.005)  # seconds, so that scores are still being made while others are sampled
    return float(any(c.isdigit() for c in solution_str))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{whether things overlap: the run's folder}"""
    folder = tmp_path_factory.mktemp("overlap")
    (folder / "slow_reward.py").write_text(REWARD)
    for on in (True, False):
        config = tiny_config(
            f"reward.function={folder}/slow_reward.py:slow",
            "reward.kwargs={}",
            "reward.num_workers=2",
            f"coordinator.double_buffer={on}",
            f"coordinator.overlap_rewards={on}",
            "eval.dataset=",
            "model.source=random:llama?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=512",
            "rollout.num_slots=16",  # 64 responses: some end long before others begin
            "rollout.tokens_per_call=4",
        )
        assert run.train(config, folder / str(on)) == 0
    return {on: folder / str(on) for on in (True, False)}


def spans_of(folder, name):
    """(start, end) of every span or wait of a name, in microseconds."""
    events = [e for e in read_trace(folder / "trace.json") if e["name"] == name]
    ends = {e["id"]: e["ts"] for e in events if e["ph"] == "e"}
    waits = [(e["ts"], ends[e["id"]]) for e in events if e["ph"] == "b"]
    return [(e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"] + waits


@pytest.mark.parametrize("on", [True, False])
def test_the_trace_is_one_that_viewers_accept(runs, on):
    check_trace(read_trace(runs[on] / "trace.json"))


def overlap(a, b):
    return sum(max(0, min(x[1], y[1]) - max(x[0], y[0])) for x in a for y in b)


def test_numbers_are_the_same_to_the_bit(runs):
    on, off = (read_metrics(runs[x] / "metrics.jsonl") for x in (True, False))
    assert len(on) == len(off) == 3
    for a, b in zip(on, off, strict=True):
        assert {k: v for k, v in a.items() if not k.startswith(("timing", "perf/"))} == {
            k: v for k, v in b.items() if not k.startswith(("timing", "perf/"))
        }


def test_rewards_overlap_with_generation_of_others(runs):
    rollout = spans_of(runs[True], "rollout")
    assert len(spans_of(runs[True], "score")) == 3 * 64
    assert overlap(spans_of(runs[True], "score"), rollout) > 0
    assert not spans_of(runs[False], "score")


def test_prompts_are_read_while_the_step_before_runs(runs):
    first_step = [
        span for name in ("rollout", "actor_train") for span in spans_of(runs[True], name)[:1]
    ]
    start, end = first_step[0][0], first_step[-1][1]
    read = spans_of(runs[True], "read_prompts")
    assert read[1][0] < end  # of step 2, before step 1 has ended
    later = spans_of(runs[False], "read_prompts")
    rollouts = spans_of(runs[False], "rollout")
    assert later[1][0] > rollouts[0][1] and start > read[0][0]
