"""A whole run on two processes gives the metrics of the same run on one, whatever its graph.

The model has 40,000 parameters and is compiled in a hurry: what is compared are processes.

Nightly: every built-in graph gives the same metrics on two processes as on one.
"""

import pytest
from support.documented import unexplained_metrics
from support.programs import train
from support.run_folders import json_lines

from distflow_jax.dag.graph_yaml import built_in
from distflow_jax.report.run_writer import read_metrics

SMALL = [
    "model.source=random:llama?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=512",
    "data.prompts_per_step=8",
]
SLOTS = "rollout.num_slots=16"
OF_DATA = {f"dag={name}" for name in ("sft", "dpo", "orpo", "kto", "reward_model")}  # none samples
SHORT = ["training.steps=2", "eval.dataset="]


def run(workdir, overrides, processes=0):
    slots = [] if OF_DATA & set(overrides) else [SLOTS]
    train(workdir, [*SMALL, *slots, *overrides], processes=processes, devices=2)
    return read_metrics(workdir / "metrics.jsonl")


def check_samples(one, two):
    """Files of samples hold the same responses, wherever these were sampled and scored."""
    names = sorted(path.name for path in (one / "samples").iterdir())
    assert names == sorted(path.name for path in (two / "samples").iterdir())
    for name in names:
        a, b = (json_lines(folder / "samples" / name) for folder in (one, two))
        uids = [record["uid"] for record in a if "uid" in record]
        assert uids == sorted(uids) and (uids or name.startswith("eval-"))
        assert [record["prompt"] for record in a] == [record["prompt"] for record in b]
        assert uids == [record["uid"] for record in b if "uid" in record]
        for x, y in zip(a, b, strict=True):
            assert x.keys() == y.keys()
            if name in ("1.jsonl", "eval-0.jsonl"):  # by weights that are equal to the bit
                got, wanted = ({n: v for n, v in r.items() if n != "advantage"} for r in (y, x))
                assert got == wanted
                got, wanted = (r.get("advantage") or 0.0 for r in (y, x))
                assert got == pytest.approx(wanted, rel=1e-3, abs=1e-4)


def check_equal(folder, overrides, of_two=()):
    """Runs both; returns the metrics of the run on one process and of that on two."""
    one = run(folder / "one", overrides)
    two = run(folder / "two", [*overrides, *of_two], processes=2)
    assert not unexplained_metrics(folder / "two")
    check_samples(folder / "one", folder / "two")
    # or equality would say little
    assert any(value > 0 for name, value in one[-1].items() if name.endswith("/grad_norm"))
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            if not name.startswith(("timing", "perf/", "global_seqlen/balanced")):
                # later steps start from weights that differ in the last bits
                assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-4), (a["step"], name)
    return one, two


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_with_evaluations_and_checkpoints(tmp_path):
    for rows in check_equal(tmp_path, []):
        assert [row["step"] for row in rows] == [0, 1, 2, 3]
        # different lengths at every step, an evaluation and checkpoints: nothing compiles anew
        assert [row["perf/compilations"] for row in rows[2:]] == [0, 0]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_rounds_of_a_sampler_that_the_processes_share(tmp_path):
    """A region whose prompts both hosts of a sampler hold, each answering for a half of them."""
    overrides = [*SHORT, "dag=dapo"]
    for rows in check_equal(tmp_path, overrides, ["mesh.rollout_tensor=4"]):
        assert [row["perf/compilations"] for row in rows[1:]] == [0]
        assert any(row["training/sampling_rounds"] > 1 for row in rows)
        assert all(row["training/groups_missing"] == 0 for row in rows)
        assert all(row["actor/grad_norm"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", sorted(set(built_in()) - {"grpo"}))
def test_every_graph(tmp_path, name):
    for rows in check_equal(tmp_path, [*SHORT, f"dag={name}"]):
        assert [row["perf/compilations"] for row in rows[1:]] == [0]


CHOOSY = """
from distflow_jax.environments.environment import Turn


class Choosy:
    def __init__(self, tokenizer):
        pass

    def reset(self, prompt):
        if prompt.counter % 5 == 3:
            raise ConnectionError("no sandbox for this row")

    async def step(self, tokens, text):
        if tokens.sum() % 2:
            raise ConnectionError("odd")
        return Turn("go on", reward=float(tokens[0]))
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_failures_of_environments_are_agreed_on(tmp_path):
    """A process draws anew what its environments have lost; the others neither wait nor differ."""
    (tmp_path / "choosy.py").write_text(CHOOSY)
    overrides = [
        *SHORT,
        "model.source=random:llama?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=259",
        f"rollout.environment={tmp_path}/choosy.py:Choosy",
        "rollout.max_infra_rate=1.0",
        "rollout.max_response_length=96",
        "rollout.turn_length=32",
    ]
    for rows in check_equal(tmp_path, overrides):
        for row in rows:
            assert row["environment/infra/unscored"] >= 4
            assert row["environment/infra/redrawn"] >= 8 * row["environment/infra/unscored"]
