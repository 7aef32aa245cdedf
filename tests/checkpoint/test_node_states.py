"""States of nodes in checkpoints: the same value and type come back, and others are refused."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_config import tiny_config

from distflow_jax import run
from distflow_jax.checkpoint.node_states import encoded, from_json, to_json
from distflow_jax.report.run_writer import read_metrics

STATES = [
    3,
    2**60,
    0.1,
    True,
    "text",
    None,
    np.float32(0.1),
    jnp.int32(7),
    jnp.bfloat16(1.5),
    np.arange(6, dtype=np.int64).reshape(2, 3),
    jnp.linspace(0, 1, 5, dtype=jnp.float32),
    {"n": 1, "of": [np.float32(2), (jnp.ones(2), "b")]},
]


def same(one, two):
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[k], two[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(two) and all(map(same, one, two))
    if hasattr(one, "dtype"):
        return one.dtype == two.dtype and np.array_equal(np.asarray(one), np.asarray(two))
    return type(one) is type(two) and one == two


@pytest.mark.parametrize("state", STATES, ids=str)
def test_a_state_comes_back_as_it_was(state):
    kept = json.loads(json.dumps(to_json([encoded("n", state)] * 2)))
    assert all(same(state, from_json("n", kept, p, count)) for count in (1, 3) for p in range(1))


def test_states_of_processes_are_their_own():
    kept = json.loads(json.dumps(to_json([encoded("n", x) for x in (1, 2.5)])))
    assert [from_json("n", kept, p, 2) for p in range(2)] == [1, 2.5]
    with pytest.raises(ValueError, match="node 'n' keeps a state .* is of 2 processes: .* not 3"):
        from_json("n", kept, 0, 3)


def test_a_number_of_an_older_checkpoint_is_a_float32():
    assert same(np.float32(0.25), from_json("n", 0.25, 0, 1))


@pytest.mark.parametrize("state", [{1: 2}, {1, 2}, np.zeros(10_001), np.array([None]), object()])
def test_others_are_refused(state):
    with pytest.raises(ValueError, match="node 'n' returned a state of type .*: return numbers"):
        encoded("n", state)


FUNCTIONS = """
import jax.numpy as jnp

def count(state, fields, options):
    return (jnp.int32(0) if state is None else state) + 1, {}, {}

def mean(state, fields, options):
    lengths = [len(x) for x in fields["response"]]
    state = state or {"seen": 0, "mean": 0.0}
    seen = state["seen"] + len(lengths)
    mean = state["mean"] + (sum(lengths) - len(lengths) * state["mean"]) / seen
    return {"seen": seen, "mean": mean}, {}, {"count/mean": mean, "count/seen": seen}

def odd(state, fields, options):
    return {"a": object()}, {}, {}
"""
GRAPH = """
name: counted
base: sft
nodes:
- {id: count, role: ACTOR, type: COMPUTE, fn: "FILE:count", reads: [rows], writes: []}
- {id: mean, role: REWARD, type: COMPUTE, fn: "FILE:mean", reads: [response], writes: []}
"""
SETTINGS = [
    "model.source=random:llama?hidden=32&layers=1&heads=2&kv_heads=1&mlp=32&vocab=300",
    *("eval.dataset=", "training.row_tokens=128", "checkpoint.every=1"),
    *("data.max_prompt_length=96", "rollout.max_response_length=8", "observe.trace=False"),
]


def config_of(folder, steps, text=GRAPH):
    file = folder / "counting_states.py"
    file.write_text(FUNCTIONS)
    graph = folder / "counted.yaml"
    graph.write_text(text.replace("FILE", str(file)))
    settings = [*SETTINGS, f"dag={graph}", f"training.steps={steps}"]
    return tiny_config(*settings)


def test_a_run_goes_on_with_the_states_of_its_nodes(tmp_path):
    assert run.train_here(config_of(tmp_path, 4), tmp_path / "whole") == run.EXIT_DONE
    for steps in (2, 4):
        assert run.train_here(config_of(tmp_path, steps), tmp_path / "two") == run.EXIT_DONE
    whole, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "two"))
    for key in ("count/mean", "count/seen", "actor/nll"):
        found = [[row[key] for row in rows if row["step"]] for rows in (whole, two)]
        assert found[0] == found[1] and len(found[0]) == 4, key


def test_a_state_that_checkpoints_cannot_keep_ends_the_run_in_its_first_step(tmp_path):
    config = config_of(tmp_path, 3, GRAPH.replace("FILE:mean", "FILE:odd"))
    with pytest.raises(ValueError, match="node 'mean' returned a state of type object"):
        run.train_here(config, tmp_path / "run")
    assert not list((tmp_path / "run" / "checkpoints").glob("[0-9]*"))
