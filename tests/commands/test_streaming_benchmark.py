"""benchmarks/streaming.py: its model, its simulated devices, and all parts on this machine.

Nightly: every schedule of the benchmark of asynchronous steps runs on simulated devices, in two
processes.
"""

import json
import sys

import jax
import numpy as np
import pytest
from support.paths import ROOT
from support.programs import finished
from support.tiny_model import TINY, prompt_of

from distflow_jax.pods.schedules import SYNCHRONOUS, Decode
from distflow_jax.rollout.decode_state import EngineConfig
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.scheduling.scheduler import run_requests

sys.path.insert(0, str(ROOT / "benchmarks"))
import streaming_model  # noqa: E402
from asynchronous import results  # noqa: E402
from asynchronous.engine import DrawnLengths, Lane, SimulatedEngine  # noqa: E402

COSTS = Decode(step=1e-5, slot=1e-6, prompt=1e-4)
TOKEN, STOP = 7, 3


def engine_of(lengths, *, slots=8):
    config = EngineConfig(
        slots=slots, max_prompt=16, max_response=40, tokens_per_call=4, page_size=16, group_size=4
    )
    return SimulatedEngine(
        TINY,
        config,
        jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor")),
        stop_ids=(STOP,),
        token=TOKEN,
        lane=Lane(2),
        costs=COSTS,
        lengths=lengths,
    )


def requests_of(prompts, samples, limit=40):
    return [
        GroupRequest(prompt_of(i, np.arange(1, 3 + i)), SamplingParams(samples, limit))
        for i in range(prompts)
    ]


def test_a_workload_costs_what_its_name_says():
    """Generation over training in the best synchronous layout; all schedules have its lengths."""
    for workload in streaming_model.WORKLOADS[::3]:
        work, generation = streaming_model.work_of(workload), streaming_model.generation(workload)
        training = streaming_model.mean_tokens(workload) * work.token / streaming_model.DEVICES
        assert generation / training == pytest.approx(workload.ratio)
        drawn = DrawnLengths(workload.lengths, 0, streaming_model.SAMPLES)
        lengths, rewards = work.draw(5)
        assert lengths.tolist() == [drawn(5, sample) for sample in range(streaming_model.SAMPLES)]
        assert (rewards.mean() > 0) == (workload.reward > 0)


def test_every_schedule_has_layouts_that_divide_the_devices():
    for schedule in (SYNCHRONOUS, *streaming_model.SCHEDULES.values()):
        for layout in streaming_model.layouts(schedule):
            assert layout.samplers % layout.width == layout.samplers % layout.engines == 0
            used = layout.samplers + layout.trainers * schedule.own_devices
            assert used == streaming_model.DEVICES


def test_a_cell_is_judged_by_the_model_and_the_machine():
    base = {"seconds": 2.0, "modelled": 2.0}
    found = {"own_cpu": 0.1, "machine_cpu": 0.6, "compilations": 0, "modelled": 1.0}
    near = results.judged(found | {"seconds": 1.04}, base, "own_cpu")
    assert not near["problems"] and near["figure"] == 2.0 and near["speed"] == 2.0 / 1.04
    far = results.judged(found | {"seconds": 1.06}, base, "own_cpu")
    assert far["problems"] == ["off the model by +6%"]
    refused = results.judged(found | {"seconds": 1.0}, base, "machine_cpu")
    assert refused["problems"] == ["refused: CPU 60%"]


def test_responses_end_at_lengths_of_their_uids():
    draw = DrawnLengths(lambda rng, n: rng.integers(1, 40, n), seed=5, n=4)
    engine = engine_of(draw)
    _, responses, stats = run_requests(engine, {}, engine.init_decode_state(), requests_of(5, 4))
    assert len(responses) == 20 and stats.tokens == sum(len(r.tokens) for r in responses)
    for response in responses:
        wanted = draw(response.prompt.counter, response.sample)
        assert len(response.tokens) == wanted and response.finished
        assert response.tokens.tolist() == [TOKEN] * (wanted - 1) + [STOP]
    again = DrawnLengths(lambda rng, n: rng.integers(1, 40, n), seed=5, n=4)
    assert [again(4, s) for s in range(4)] == [draw(4, s) for s in range(4)]


def test_decode_steps_take_the_seconds_of_their_active_slots():
    """Two responses of 3 and 9 tokens: 9 steps, of which three have two active slots."""
    engine = engine_of(lambda counter, sample: (3, 9)[sample])
    run_requests(engine, {}, engine.init_decode_state(), requests_of(1, 2))
    wanted = COSTS.prompt + 9 * COSTS.step + (3 * 2 + 6) * COSTS.slot
    assert engine._lane.busy["decode"] == pytest.approx(wanted)


def quickly(folder, *flags):
    """The measurements of a short run of the script."""
    path = folder / "found.json"
    finished("benchmarks/streaming.py", "--quick", *flags, f"--json={path}")
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.multiprocess
def test_every_part_runs_on_this_machine(tmp_path):
    """Two processes, of which each step takes groups of bounded age; the numbers mean nothing."""
    flags = ["--beside-others", "--cells=fixed-2,rewards-2"]
    flags += ["--schedules=boundary-1,in_flight-2,shared-1,partial_batches-2"]
    found = quickly(tmp_path, *flags)
    cells = [(x["workload"], x["schedule"], x["staleness"]) for x in found]
    schedules = [("synchronous", 0), ("boundary", 1), ("in_flight", 2)]
    schedules += [("shared", 1), ("partial_batches", 2)]
    names = ("fixed-2", "rewards-2")
    assert cells == [(name, *schedule) for name in names for schedule in schedules]
    for x in found:
        assert x["age_max"] <= x["staleness"] and x["modelled"] > 0
        assert 0 < x["own_cpu"] and 0 <= x["idle_samplers"] < 1 and not x["compilations"]


def run(rate, cpu=0.2):
    return {"rate": rate, "seconds": 100 / rate, "own_cpu": cpu, "compilations": 0}


def test_runs_with_workers_are_compared_with_what_their_goal_names():
    for rates, ratio in (((100, 96), 0.96), ((20, 10, 28), 0.933)):
        *alone, last = results.compared([run(rate) for rate in rates], "own_cpu")
        assert last["ratio"] == pytest.approx(ratio, abs=1e-3) and not last["problems"]
        assert not any("ratio" in one for one in alone)
    for rates in ((100, 90), (20, 10, 26)):
        found = results.compared([run(rate) for rate in rates], "own_cpu")
        assert [len(one["problems"]) for one in found] == [0] * (len(rates) - 1) + [1]
    busy, _ = results.compared([run(100, 0.6), run(100)], "own_cpu")
    assert busy["problems"] == ["refused: CPU 60%"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_workers_of_two_speeds_sample_on_this_machine(tmp_path):
    """Worker processes join one run after the other; the seconds of two steps mean nothing."""
    found = quickly(tmp_path, "--beside-others", "--workers=uneven")
    assert [x["speeds"] for x in found] == [[2.0], [1.0], [2.0, 1.0]]
    for x in found:
        assert x["age_max"] <= x["staleness"] and x["rate"] > 0 and not x["compilations"]
