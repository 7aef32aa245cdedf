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

from distflow_jax.rollout.decode_state import EngineConfig
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.scheduling.scheduler import Scheduler, run_requests

sys.path.insert(0, str(ROOT / "benchmarks"))
import streaming  # noqa: E402
import streaming_model  # noqa: E402
from asynchronous import budgets, far_tables  # noqa: E402
from asynchronous.engine import DecodeCosts, DrawnLengths, SimulatedEngine  # noqa: E402
from asynchronous.lanes import Lane  # noqa: E402

WORKLOADS = (*streaming_model.WORKLOADS, streaming_model.SLOW_REWARDS)
OTHERS = [w for w in WORKLOADS if w.name not in ("heavy-2", "fixed-2")]
COSTS = DecodeCosts(step=1e-5, slot=1e-6)
TOKEN, STOP = 7, 3


def engine_of(lengths, *, devices=2, slots=8):
    config = EngineConfig(
        slots=slots, max_prompt=16, max_response=40, tokens_per_call=4, page_size=16, group_size=4
    )
    return SimulatedEngine(
        TINY,
        config,
        jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor")),
        stop_ids=(STOP,),
        token=TOKEN,
        lane=Lane(devices),
        costs=COSTS,
        lengths=lengths,
    )


def requests_of(prompts, samples, limit=40):
    return [
        GroupRequest(prompt_of(i, np.arange(1, 3 + i)), SamplingParams(samples, limit))
        for i in range(prompts)
    ]


@pytest.mark.parametrize(
    "workload",
    [*("heavy-2", "fixed-2"), *(pytest.param(w.name, marks=pytest.mark.slow) for w in OTHERS)],
)
def test_the_model_gives_the_figures_of_the_script(workload):
    (of_model,) = (w for w in WORKLOADS if w.name == workload)
    for (name, schedule, staleness), (figure, split) in streaming.FIGURES.items():
        if name == workload:
            speed, devices = streaming_model.predict(of_model, schedule, staleness)
            assert speed == pytest.approx(figure, abs=0.015)
            assert devices == split


def test_no_schedule_of_the_model_is_above_its_bound():
    for workload in streaming_model.WORKLOADS[::2]:
        costs = streaming_model.Costs.of(workload, draws=40, seed=3)
        for schedule, staleness in (
            ("boundary", 1),
            ("in_flight", 2),
            ("partial_batches", 2),
            ("shared", 1),
        ):
            shared = schedule == "shared"
            bound = streaming_model.synchronous(workload, costs, 10)
            bound /= streaming_model.least_seconds(costs, costs.tokens, shared_devices=shared)
            # steps of 10 runs have other tokens than the mean
            assert streaming_model.predict(workload, schedule, staleness, steps=10)[0] < 1.1 * bound


def test_a_budget_steadies_the_rollouts_of_the_model():
    """By the 3x that the script asks of a run, with the groups that the budget has tokens for."""
    workload = streaming_model.WORKLOADS[0]
    tokens = round(streaming_model.BUDGET * streaming_model.Costs.of(workload).tokens)
    without, budget = (streaming_model.rollouts(workload, 2, 40, budget=n)[4:] for n in (0, tokens))
    varies = [streaming_model.variation([r.seconds for r in made]) for made in (without, budget)]
    assert varies[0] > budgets.LEAST_GAIN * varies[1]
    assert 0.9 * streaming_model.PROMPTS < np.mean([r.groups for r in budget])


def test_partial_batches_of_the_model_train_every_token_once():
    """For any minimum of tokens per partial batch, and sooner than the undivided step."""
    workload, steps = streaming_model.WORKLOADS[0], 4
    costs = streaming_model.Costs.of(workload, draws=3)
    spent = []

    class Counted:
        """Costs that note what is trained."""

        weight_update, reward = costs.weight_update, costs.reward

        def training(self, tokens, devices):
            spent[-1] += tokens
            return costs.training(tokens, devices)

    seconds = []
    for least in (streaming_model.AT_ONCE, 8000, 0):
        spent.append(0)
        found = streaming_model.in_flight(workload, Counted(), 4, 1, steps, partial_batch=least)
        seconds.append(found)
    assert spent[0] == spent[1] == spent[2] > 0
    assert seconds[0] > seconds[1] and seconds[0] > seconds[2]


def test_a_reward_that_takes_its_time_makes_the_synchronous_step_longer():
    lengths = np.full(streaming_model.SLOTS, 10)
    seconds = np.zeros(len(lengths))
    seconds[7] = 5.0
    plain = streaming_model.generation(lengths)
    assert streaming_model.generation(lengths, seconds) == pytest.approx(plain + 5.0)
    drawn = streaming_model.SLOW_REWARDS.rewards(np.random.default_rng(0), 100_000, 2.0)
    assert drawn.mean() == pytest.approx(2.0, rel=0.03) and drawn.min() > 0
    workers, count = streaming_model.Workers(), 4 * streaming_model.REWARD_WORKERS
    assert workers.last(np.zeros(count), np.full(count, 0.5)) == 4 * 0.5  # one after the other


def test_goals_are_those_of_all_workloads_at_a_small_staleness(capsys):
    def cell(workload, schedule, staleness, speed, seconds=1.0):
        names = ("workload", "schedule", "staleness", "speed", "seconds")
        return dict(zip(names, (workload, schedule, staleness, speed, seconds), strict=True))

    names = [w.name for w in streaming_model.WORKLOADS]
    slow = [cell(name, "partial_batches", 1, 1.2) for name in names]
    assert streaming.reaches_goals(slow[1:])  # of some workloads there is nothing to say
    assert not streaming.reaches_goals(slow)
    late = [cell(name, "partial_batches", 4, 3.0) for name in names]
    assert not streaming.reaches_goals(slow + late)
    fast = [cell(name, "partial_batches", 2, 1.6) for name in names[1:]] + [
        cell(names[0], "partial_batches", 2, 2.1)
    ]
    assert streaming.reaches_goals(slow + fast)
    assert "mean 1.68x (goal 1.59), best 2.10x (goal 2.03)" in capsys.readouterr().out
    rewards = [
        cell("heavy-2", "partial_batches", 2, 2.0),
        cell("rewards-2", "partial_batches", 2, 2.0, 1.04),
    ]
    assert streaming.hides_rewards(rewards)
    assert not streaming.hides_rewards([rewards[0], rewards[1] | {"seconds": 1.06}])
    streaming.print_ablation([*slow, *fast], names)
    table = capsys.readouterr().out
    assert "| + partial batches |" in table and "| + staleness 2 | 2.10 |" in table


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


def test_a_response_beyond_the_limit_is_cut():
    engine = engine_of(lambda counter, sample: 30)
    _, responses, _ = run_requests(engine, {}, engine.init_decode_state(), requests_of(1, 2, 12))
    assert [(len(r.tokens), r.finished) for r in responses] == [(12, False)] * 2


@pytest.mark.parametrize("devices", [1, 4])
def test_decode_steps_take_the_seconds_of_their_active_slots(devices):
    """Two responses of 3 and 9 tokens: 9 steps, of which three have two active slots."""
    engine = engine_of(lambda counter, sample: (3, 9)[sample], devices=devices)
    run_requests(engine, {}, engine.init_decode_state(), requests_of(1, 2))
    wanted = 9 * COSTS.step + (3 * 2 + 6) * COSTS.slot / devices
    assert engine._lane.busy["decode"] == pytest.approx(wanted)


def test_a_suspended_response_goes_on_where_it_was():
    engine = engine_of(lambda counter, sample: 10)
    scheduler = Scheduler(engine, {}, version=1)
    scheduler.submit(requests_of(1, 1)[0])
    scheduler.step()
    partials = scheduler.export()
    assert 0 < len(partials[0].tokens) < 10
    state = scheduler.close()
    scheduler = Scheduler(engine, {}, version=2, state=state)
    scheduler.restore(partials)
    found = []
    while scheduler.busy:
        found += scheduler.step()
    (response,) = found
    assert len(response.tokens) == 10 and set(response.version) == {1, 2}


def quickly(folder, *flags):
    """The measurements of a short run of the script."""
    path = folder / "found.json"
    finished("benchmarks/streaming.py", "--quick", *flags, f"--json={path}")
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.multiprocess
def test_every_part_runs_on_this_machine(tmp_path):
    """Two processes, of which each step takes groups of bounded age; the numbers mean nothing."""
    flags = ["--beside-others", "--cells=fixed-2,heavy-2,rewards-2"]
    flags += ["--schedules=boundary-1,in_flight-2,shared-1,partial_batches-2"]
    found = quickly(tmp_path, *flags)
    cells = [(x["workload"], x["schedule"], x["staleness"]) for x in found]
    assert cells == [
        ("fixed-2", "boundary", 1),
        ("fixed-2", "in_flight", 2),
        ("fixed-2", "partial_batches", 2),
        ("heavy-2", "boundary", 1),
        ("heavy-2", "in_flight", 2),
        ("heavy-2", "partial_batches", 2),
        ("heavy-2", "shared", 1),
        ("rewards-2", "partial_batches", 2),
    ]
    for x in found:
        assert x["age_max"] <= x["staleness"] and 0 < x["exposed_swap"] < x["seconds"]
        assert 0 < x["own_cpu"] and 0 <= x["idle_samplers"] < 1 and not x["compilations"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_rollouts_with_a_budget_run_on_this_machine(tmp_path):
    """Dropped samples are counted on any machine; the seconds of four steps mean nothing."""
    without, budget = quickly(tmp_path, "--budget")
    assert without["thrown_away"] == budget["thrown_away"] == 0
    assert without["groups"] == streaming_model.PROMPTS >= budget["groups"] > 0
    assert without["beyond"] == 0 <= budget["beyond"]


def far(speeds, rate, *, workload="mild-2"):
    return {
        "workload": workload,
        "speeds": speeds,
        "rate": rate,
        "seconds": 100 / rate,
        "own_cpu": 0.2,
        "compilations": 0,
    }


def test_runs_with_workers_are_compared_with_what_their_goal_names():
    inside = {"workload": "heavy-2", "rate": 100.0, "seconds": 1.0, "own_cpu": 0.1}
    inside |= {"compilations": 0}
    runs = [
        inside,
        far((1.0, 1.0), 96.0, workload="heavy-2"),
        far((1.0, 1.0), 90.0, workload="heavy-2"),
        far((2.0,), 20.0),
        far((1.0,), 10.0),
        far((2.0, 1.0), 26.0),
        far((2.0, 1.0), 28.0),
    ]
    found = far_tables.compared(runs, 0.5, "own_cpu")
    ratios = [x["ratio"] and round(x["ratio"], 3) for x in found]
    assert ratios == [None, 0.96, 0.9, None, None, 0.867, 0.933]
    assert [i for i, x in enumerate(found) if x["problems"]] == [2, 5]
    (refused,) = far_tables.compared([inside], 0.05, "own_cpu")
    assert refused["problems"] == ["refused: CPU 10%"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_workers_of_two_speeds_sample_on_this_machine(tmp_path):
    """Worker processes join one run after the other; the seconds of two steps mean nothing."""
    found = quickly(tmp_path, "--beside-others", "--workers=uneven")
    assert [x["speeds"] for x in found] == [[2.0], [1.0], [2.0, 1.0]]
    for x in found:
        assert x["age_max"] <= x["staleness"] and x["rate"] > 0 and not x["compilations"]
