"""Graphs are found by name, and the built-in ones plan with every choice of their parameters."""

import itertools

import pytest

from distflow_jax.dag.graph import Graph
from distflow_jax.dag.pipelines import grpo, load_graph
from distflow_jax.dag.planner import plan
from distflow_jax.types import Layout

MESH, HOST = Layout("mesh", (("fsdp", 8),)), Layout("host")
LAYOUTS = {"ACTOR": MESH, "REFERENCE": MESH, "REWARD": HOST, "ROLLOUT": HOST}
PARAMS = {"use_reference": True, "recompute_old_logp": False}


@pytest.mark.parametrize(
    "use_reference, recompute", list(itertools.product([False, True], repeat=2))
)
def test_grpo_plans(use_reference, recompute):
    graph = load_graph("grpo", use_reference=use_reference, recompute_old_logp=recompute)
    ids = [task.node.id for task in plan(graph, LAYOUTS, {"prompt"}).tasks]
    assert ("reference" in ids, "old_logp" in ids) == (use_reference, recompute)
    assert ids[0] == "rollout" and ids[-1] == "actor_train"
    update = next(node for node in graph.nodes if node.id == "actor_train")
    assert ("ref_logp" in update.reads, "old_logp" in update.reads) == (use_reference, recompute)
    assert Graph.from_yaml(graph.to_yaml()) == graph


def test_a_graph_comes_from_a_file_or_a_function(tmp_path):
    expected = grpo(**PARAMS)
    text = tmp_path / "my.yaml"
    text.write_text(expected.to_yaml())
    code = tmp_path / "my.py"
    code.write_text(
        "from distflow_jax.dag.pipelines import grpo\n"
        "def mine(use_reference):\n    return grpo(use_reference, False)\n"
        "def greedy(**params):\n    return grpo(**params)\n"
        "def wrong():\n    return 3\n"
    )
    assert load_graph(str(text), **PARAMS) == expected
    assert load_graph(f"{code}:mine", **PARAMS) == expected
    assert load_graph(f"{code}:greedy", **PARAMS) == expected
    assert load_graph("distflow_jax.dag.pipelines:grpo", **PARAMS) == expected
    with pytest.raises(ValueError, match="must return a Graph, got int"):
        load_graph(f"{code}:wrong")
    with pytest.raises(ValueError, match="has no 'mime'; did you mean 'mine'"):
        load_graph(f"{code}:mime")


@pytest.mark.parametrize(
    "name, error, message",
    [
        ("grop", ValueError, "unknown pipeline 'grop' .*did you mean 'grpo'"),
        ("missing.yaml", FileNotFoundError, "missing.yaml"),
        ("missing.py:f", FileNotFoundError, "missing.py"),
        ("no_such_module:f", ValueError, "path/to/file.py:function"),
        ("grpo", ValueError, "needs a value for use_reference, recompute_old_logp"),
    ],
)
def test_what_cannot_be_found_is_named(name, error, message):
    with pytest.raises(error, match=message):
        load_graph(name)


def test_a_module_that_cannot_be_imported_says_why_and_where(tmp_path, monkeypatch):
    (tmp_path / "broken_pipeline.py").write_text("\nimport surely_not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    for place in ("broken_pipeline", tmp_path / "broken_pipeline.py"):
        with pytest.raises(ValueError, match="surely_not_installed_anywhere.*py, line 2") as caught:
            load_graph(f"{place}:f")
        assert "\n" not in str(caught.value)
