"""Samplers with a thread of their own beside all that reads arrays, while threads switch at each
chance: no array is read that another thread donates (docs/architecture.md, "Threads and arrays").

Nightly: of 40 starts beside busy samplers none dies, and no array is read that a sampler donates,
in every mode of weight updates.
"""

import contextlib
import json
import threading
import time

import pytest
from support.tiny_config import SMALL_AHEAD, tiny_config

from distflow_jax import run
from distflow_jax.environments.episode_sampler import EpisodeSampler
from distflow_jax.observe.memory import peak_memory_gb
from distflow_jax.parallel import host_memory
from distflow_jax.report.run_writer import read_metrics
from distflow_jax.run import open_run
from distflow_jax.runtime.recorder import Recorder

SMALL = (
    *SMALL_AHEAD,
    "rollout.max_response_length=48",
    "rollout.tokens_per_call=1",  # a program each: the state is donated as often as possible
    "training.row_tokens=1024",
    "training.steps=2",
    "mesh.devices=0:4",
    "mesh.roles={'ROLLOUT': {'devices': '4:8'}}",
    "stream.max_staleness=2",
    "eval.num_prompts=4",
)
READS = 200  # of which some 2 to 20 fail where the sampler goes on meanwhile
STARTS = 40


def config_of(*assignments):
    return tiny_config(*SMALL, *assignments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("eval.every=1", "checkpoint.every=1"),
        ("eval.every=1", "stream.weight_update=boundary"),
        ("stream.cache=recompute", "dag=ppo"),
        ("stream.partial_batches=ready", "stream.partial_batch_rows=8"),
    ],
    ids=" ".join,
)
def test_readers_of_all_arrays_find_the_sampler_at_rest(
    tmp_path, monkeypatch, caplog, eager_threads, flags
):
    """Beside checkpoints, evaluations and weights on their way; and a metric that cannot be read is
    left out of the run."""
    live, read, runs = host_memory.live_bytes, [], []
    looked, ended = threading.Event(), set()

    @contextlib.contextmanager
    def opened(*parts):
        with open_run(*parts) as made:
            runs.append(made)
            assert not made.state.models.keys() & made.prepared.own_samplers.keys()  # its thread's
            yield made

    def round(self):
        if ended >= set(range(8)) and not looked.is_set():  # those of the first step are there
            time.sleep(0.2)  # so that it is at work when the readers come
        found = its_round(self)
        ended.update(counter for (counter, _), _ in found)
        return found

    its_round = EpisodeSampler.round
    monkeypatch.setattr(EpisodeSampler, "round", round)

    def often():
        looked.set()
        assert runs[-1].source.producer.requests.busy  # or there was nothing to fear
        for _ in range(READS):
            read.append((live(), sum(host_memory.bytes_by_kind().values()), peak_memory_gb()))
        raise RuntimeError("Array has been deleted")

    monkeypatch.setattr(run, "open_run", opened)
    monkeypatch.setattr(host_memory, "live_bytes", often)
    assert run.train_here(config_of(*flags), tmp_path) == 0
    assert len(read) == READS and len({sizes[:2] for sizes in read}) == 1
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if row["step"]]
    assert [row["step"] for row in rows] == [1, 2]
    assert "perf/memory_live_planned_gb" in rows[0] and "perf/memory_live_gb" not in rows[0]
    told = [r for r in caplog.messages if "perf/memory_live_gb is not measured" in r]
    assert told == ["perf/memory_live_gb is not measured: RuntimeError: Array has been deleted"]
    for step in (1, 2):
        lines = (tmp_path / "samples" / f"{step}.jsonl").read_text().splitlines()
        uids = [json.loads(line)["uid"] for line in lines]
        first = 8 * (step - 1)
        assert uids == [[first + prompt, sample] for prompt in range(8) for sample in range(4)]


@pytest.mark.slow
def test_first_steps_end(tmp_path, monkeypatch, eager_threads):
    """Of many starts beside busy samplers none dies. runtime/run_description.py would break it, or
    whatever else reads arrays after a step."""

    class Ended(Exception):
        """The first step has been recorded."""

    record = Recorder.step

    def recorded(self, metrics, stragglers):
        assert metrics["perf/memory_live_gb"] > 0
        record(self, metrics, stragglers)
        raise Ended

    monkeypatch.setattr(Recorder, "step", recorded)
    for start in range(STARTS):
        weight_update = ("in_flight", "boundary")[start % 2]
        with pytest.raises(Ended):
            run.train_here(
                config_of("eval.dataset=", f"stream.weight_update={weight_update}"),
                tmp_path / str(start),
            )
