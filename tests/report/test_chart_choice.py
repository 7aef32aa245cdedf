"""The charts that come first are those of what a plan trains."""

import json

import pytest

from distflow_jax.report.chart_choice import main_charts
from distflow_jax.report.json_lines import json_line
from distflow_jax.report.read_run import read_run
from distflow_jax.report.sections.chart_data import chart_data

# one row with a metric of every kind
ROW = dict.fromkeys(
    [
        *("actor/pg_loss", "actor/loss", "actor/nll", "actor/entropy", "actor/grad_norm"),
        *("critic/score/mean", "critic/vf_loss", "critic/vf_explained_var", "critic/grad_norm"),
        *("rewards/accuracies", "rewards/margins", "reward_model/loss", "reward_model/accuracy"),
        *("reward_model/grad_norm", "response_length/mean", "val-core/x/reward/mean@1"),
        *("perf/throughput", "timing_s/step", "perf/cpu_seconds"),
    ],
    1.0,
)


def plan(*nodes):
    """plan.json of nodes (role, type, objective or None)."""
    made = [
        {"id": str(i), "role": r, "type": t, "options": {"objective": o} if o else {}}
        for i, (r, t, o) in enumerate(nodes)
    ]
    return json.dumps({"tasks": [{"node": node, "depth": 0} for node in made], "segments": []})


ROLLOUT = ("ROLLOUT", "MODEL_INFERENCE", None)
REFERENCE = ("REFERENCE", "MODEL_INFERENCE", None)
PLANS = {
    "dpo": plan(REFERENCE, ("ACTOR", "MODEL_TRAIN", "preference")),
    "kto": plan(REFERENCE, ("ACTOR", "MODEL_TRAIN", "kto")),
    "online dpo": plan(ROLLOUT, REFERENCE, ("ACTOR", "MODEL_TRAIN", "preference")),
    "sft": plan(("ACTOR", "MODEL_TRAIN", "sft")),
    "grpo": plan(ROLLOUT, ("ACTOR", "MODEL_TRAIN", None)),
    "ppo": plan(ROLLOUT, ("CRITIC", "MODEL_TRAIN", None), ("ACTOR", "MODEL_TRAIN", None)),
    "reward model": plan(("REWARD", "MODEL_TRAIN", None)),
}
EXPECTED = {
    "dpo": ["actor/loss", "rewards/accuracies", "rewards/margins", "val-core/x/reward/mean@1"],
    "kto": ["actor/loss", "rewards/margins", "val-core/x/reward/mean@1", "actor/grad_norm"],
    "online dpo": ["critic/score", "val-core/x/reward/mean@1", "actor/loss"],
    "sft": ["actor/nll", "actor/loss", "actor/entropy", "val-core/x/reward/mean@1"],
    "grpo": ["critic/score", "val-core/x/reward/mean@1", "actor/pg_loss", "actor/entropy"],
    "ppo": [
        *("critic/score", "val-core/x/reward/mean@1", "actor/pg_loss", "actor/entropy"),
        *("critic/vf_loss", "critic/vf_explained_var"),
    ],
    "reward model": ["reward_model/loss", "reward_model/accuracy", "val-core/x/reward/mean@1"],
}


def charts(folder, tree, row=ROW):
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1} | row) + "\n")
    (folder / "plan.json").write_text(tree)
    return main_charts(read_run(folder))


@pytest.mark.parametrize("graph", PLANS)
def test_the_first_charts_are_of_what_the_plan_trains(tmp_path, graph):
    found = charts(tmp_path, PLANS[graph])
    assert found[: len(EXPECTED[graph])] == EXPECTED[graph]
    assert len(found) == len(set(found))
    model = {"reward model": "reward_model"}.get(graph, "actor")
    assert f"{model}/grad_norm" in found
    assert ("critic/vf_loss" in found) == (graph == "ppo")
    assert ("response_length" in found) == (ROLLOUT[0] in PLANS[graph])
    assert found[-1] == "timing_s/step"


def test_charts_without_variation_come_last(tmp_path):
    rows = [
        ROW | {"step": step, "actor/entropy": step, "perf/cpu_seconds": step} for step in (1, 2)
    ]
    rows[1] |= {"actor/grad_norm": float("nan"), "val-core/y/reward/mean@1": 1.0}
    (tmp_path / "metrics.jsonl").write_text("".join(json_line(row) + "\n" for row in rows))
    (tmp_path / "plan.json").write_text(PLANS["grpo"])
    found = read_run(tmp_path)
    # a single evaluation and what is not finite are worth a look
    moving = ["val-core/y/reward/mean@1", "actor/entropy", "actor/grad_norm"]
    assert main_charts(found)[:4] == [*moving, "critic/score"]
    titles = [chart["title"] for chart in chart_data(found)["charts"] if not chart["main"]]
    assert titles[0] == "perf/cpu_seconds" and titles[1:] == sorted(titles[1:])


@pytest.mark.parametrize("tree", ["", "{}", '{"tasks": [{"node": 7}]}', '{"tasks": 3}'])
def test_without_a_plan_all_objectives_have_charts(tmp_path, tree):
    assert {"actor/pg_loss", "rewards/accuracies", "actor/nll"} < set(charts(tmp_path, tree))


def test_a_metric_with_its_node_before_it_is_a_main_one(tmp_path):
    row = {"second/actor/pg_loss": 1.0, "second/other": 1.0}
    assert charts(tmp_path, PLANS["grpo"], row) == ["second/actor/pg_loss"]
