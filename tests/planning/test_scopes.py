"""The check of scopes: a node that reads across groups is found, on the host and on meshes."""

import pytest
from support.doc_blocks import blocks
from support.paths import ROOT
from support.scope_check import check_scopes

from configs import tiny
from distflow_jax.config.config_dict import from_config_dict, override
from distflow_jax.config.run_config import Config
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.plan_run import open_loader, plan_run

FUNCTIONS = """
import jax.numpy as jnp
import numpy as np

from distflow_jax.algorithms.packed import per_token

calls = 0

def brief(state, fields, options):
    return state, {"mine": fields["score"] / [1 + len(r) for r in fields["response"]]}, {"a/b": 1.0}

def centred(state, fields, options):
    score, (_, group) = fields["score"], np.unique(fields["uid"][:, 0], return_inverse=True)
    mean = np.bincount(group, score) / np.bincount(group)
    return state, {"mine": score - mean[group]}, {}

def whitened(state, fields, options):
    return state, {"mine": fields["score"] - fields["score"].mean()}, {}

def ranked(state, fields, options):
    return state, {"mine": fields["score"] + np.arange(len(fields["score"]))}, {}

def changed(state, fields, options):
    fields["score"] -= fields["score"].max()
    return state, {"mine": fields["score"]}, {}

def noisy(state, fields, options):
    return state, {"mine": fields["score"] + np.random.random(len(fields["score"]))}, {}

def counting(state, fields, options):
    return (state or 0) + 1, {"mine": fields["score"]}, {}

def failing(state, fields, options):
    return state, {"mine": fields["no_such"]}, {}

def short(state, fields, options):
    return state, {"mine": fields["score"][1:]}, {}

def on_mesh(state, fields, options):
    rows = fields["rows"]
    scores = per_token(fields["score"], rows.segment)
    return state, {"mine": jnp.where(rows.response_mask, scores, 0.0)}, {}

def on_mesh_whitened(state, fields, options):
    rows, score = fields["rows"], fields["score"]
    mean = score.mean(where=rows.valid)
    return state, {"mine": jnp.where(rows.valid, score - mean, 0.0)}, {}
"""
NODE = """
name: mine
base: grpo
nodes:
- id: mine
  role: {role}
  type: COMPUTE
  scope: {scope}
  fn: mine.py:{function}
  deps: [reward]
  reads: [{reads}, score]
  writes: [mine]
"""


def findings(folder, dag):
    config = from_config_dict(Config, override(tiny.get_config(), [f"dag={folder}/{dag}"]))
    run = plan_run(config, Machine.current())
    return check_scopes(run, open_loader(run).prompt)


def find(folder, function, scope):
    role, reads = ("ACTOR", "rows") if "mesh" in function else ("REWARD", "uid, response")
    (folder / "mine.py").write_text(FUNCTIONS)
    text = NODE.format(function=function, scope=scope, role=role, reads=reads)
    (folder / "mine.yaml").write_text(text)
    (found,) = findings(folder, "mine.yaml")
    return found


@pytest.mark.parametrize(
    "function, scope, needs",
    [
        ("brief", "sample", "sample"),
        ("brief", "batch", "sample"),
        ("centred", "group", "group"),
        ("centred", "sample", "group"),
        ("whitened", "group", "batch"),
        ("whitened", "batch", "batch"),
        ("ranked", "group", "batch"),
        ("changed", "group", "batch"),
        ("on_mesh", "sample", "sample"),
        ("on_mesh_whitened", "group", "batch"),
    ],
)
def test_the_scope_that_a_node_needs(tmp_path, function, scope, needs):
    found = find(tmp_path, function, scope)
    assert found.needs == needs
    order = ("sample", "group", "batch")
    assert found.is_wrong == (order.index(scope) < order.index(needs))
    said = found.describe()
    assert f":{function}) has scope {scope}" in said
    assert said.endswith(f": give it scope {needs}") == found.is_wrong
    if found.is_wrong:
        assert "'mine' of a response to prompt " in said and "changes with the other" in said


@pytest.mark.parametrize(
    "function, words",
    [
        ("noisy", "gives other results for the same fields a second time"),
        ("counting", "keeps a state: give it scope batch"),
        ("failing", r"KeyError: 'no_such' \(line \d+\)"),
        ("short", "'mine' has 63 entries for 64 responses|'mine' has 31 entries for 32 responses"),
    ],
)
def test_functions_that_cannot_be_checked(tmp_path, function, words):
    with pytest.raises(ValueError, match=words):
        find(tmp_path, function, "group")


def test_a_state_needs_the_batch(tmp_path):
    found = find(tmp_path, "counting", "batch")
    assert (found.needs, found.is_wrong) == ("batch", False)
    assert found.describe().endswith("has scope batch, which it needs: it keeps a state")


def test_nodes_of_the_guides(tmp_path):
    """Nodes of docs/tasks.md, in which one reads what another one writes on the mesh."""
    files = [b for b in blocks(ROOT / "docs" / "tasks.md") if b.title.startswith("kl_advantage")]
    for block in files:
        (tmp_path / block.title).write_text(block.text)
    found = findings(tmp_path, "kl_advantage.yaml")
    assert [(f.node.id, f.needs, f.is_wrong) for f in found] == [
        ("kl", "sample", False),
        ("advantage", "group", False),
    ]


def test_a_graph_without_functions_of_ones_own():
    config = from_config_dict(Config, tiny.get_config())
    run = plan_run(config, Machine.current())
    with pytest.raises(ValueError, match="'grpo' has no node of type COMPUTE with a function of"):
        check_scopes(run, open_loader(run).prompt)
