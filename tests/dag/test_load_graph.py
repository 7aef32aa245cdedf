"""Graphs are found by name, and the built-in ones plan with every choice of what they may read."""

import dataclasses

import numpy as np
import pytest
from support.graph_text import read_graph, write_graph
from support.paths import ROOT

from distflow_jax.config.algorithm_config import AlgorithmConfig, PreferenceConfig
from distflow_jax.config.run_config import Config, CriticConfig
from distflow_jax.config.training_config import TrainingConfig
from distflow_jax.dag.graph import DATA, Graph
from distflow_jax.dag.graph_yaml import built_in, load_graph
from distflow_jax.dag.planner import plan
from distflow_jax.layout import Layout
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.plan_run import make_plan, settle
from distflow_jax.planning.sizes import derive_sizes
from distflow_jax.stages.registry import resolve

MESH, HOST = Layout("mesh", (("fsdp", 8),)), Layout("host")
LAYOUTS = dict.fromkeys(("ACTOR", "CRITIC", "REFERENCE", "REWARD MODEL_TRAIN"), MESH)
LAYOUTS |= {"REWARD": HOST, "ROLLOUT": HOST}
NAMES = sorted(built_in())
SIZES = derive_sizes(Config(), DecoderConfig(max_position=2048), Machine(1, 1, 1, "cpu"))


def ids(graph):
    return {node.id for node in graph.nodes}


def test_the_built_in_graphs_are_those_of_the_readme():
    assert set(NAMES) == {
        *("grpo", "ppo", "dapo", "rloo", "reinforce_plus_plus", "remax", "gspo", "cpgd"),
        *("online_dpo", "dpo", "orpo", "kto", "reward_model", "sft"),
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_built_in_graph_settles_plans_and_survives_yaml(name):
    config, graph = settle(Config(dag=name))
    assert graph.name == name
    result = plan(graph, LAYOUTS, DATA[graph.data])
    assert {task.node.id for task in result.tasks} == ids(graph)
    assert read_graph(write_graph(graph)) == graph
    assert any(task.node.type == "MODEL_TRAIN" for task in result.tasks)


@pytest.mark.parametrize("name", ["grpo", "rloo", "gspo", "dapo", "ppo", "remax"])
@pytest.mark.parametrize(
    "changes, extra",
    [
        ({}, set()),
        ({"algorithm": {"kl_coef": 0.1}}, {"reference"}),
        ({"training": {"mini_batches": 2}}, {"old_logp"}),
        ({"algorithm": {"kl_coef": 0.1, "kl_in_reward": True}}, {"reference", "old_logp"}),
    ],
)
def test_what_may_be_read_comes_only_where_it_is_needed(name, changes, extra):
    sections = {"algorithm": AlgorithmConfig, "training": TrainingConfig}
    given = {key: sections[key](**values) for key, values in changes.items()}
    _, graph = settle(Config(dag=name, **given))
    assert ids(graph) & {"reference", "old_logp"} == extra
    read = {field for node in graph.nodes for field in node.reads.values()}
    assert ("ref_logp" in read, "old_logp" in read) == tuple(
        node in extra for node in ("reference", "old_logp")
    )


@pytest.mark.parametrize("name", ["dpo", "orpo", "online_dpo"])
@pytest.mark.parametrize("loss", ["dpo", "ipo", "orpo"])
def test_a_reference_is_there_where_the_loss_of_pairs_reads_it(name, loss):
    given = Config(dag=name, preference=PreferenceConfig(loss))
    config, graph = settle(given, chosen={"preference.loss"})
    assert config.preference.loss == loss
    assert ("reference" in ids(graph)) == (loss != "orpo")


def test_a_graph_of_pairs_without_the_reference_that_its_loss_reads(tmp_path):
    text = """
    name: bare
    data: preferences
    nodes:
    - {id: train, role: ACTOR, type: MODEL_TRAIN, reads: [rows], options: {objective: preference}}
    """
    (tmp_path / "bare.yaml").write_text(text)
    assert ids(settle(Config(dag=f"{tmp_path}/bare.yaml", preference=PreferenceConfig("orpo")))[1])
    with pytest.raises(ValueError, match="reads no 'ref_logp', but preference.loss='ipo' needs it"):
        settle(Config(dag=f"{tmp_path}/bare.yaml", preference=PreferenceConfig("ipo")))


def test_settings_hold_unless_somebody_chose_otherwise():
    config, _ = settle(Config(dag="dapo"))
    assert (config.algorithm.clip_high, config.algorithm.aggregation) == (0.28, "token-mean")
    chosen = Config(dag="dapo", algorithm=AlgorithmConfig(clip_high=0.3))
    assert settle(chosen)[0].algorithm.clip_high == 0.3
    default, _ = settle(Config(dag="dapo"), chosen={"algorithm.clip_high"})
    assert default.algorithm.clip_high is None
    again, _ = settle(config)
    assert again == config  # a config that was written down is read back as it was


def test_a_graph_takes_values_from_the_config():
    warm = Config(dag="ppo", critic=CriticConfig(warmup=7))
    (train,) = (node for node in settle(warm)[1].nodes if node.id == "actor_train")
    assert train.condition.after == 7
    text = "name: g\nnodes:\n- {id: a, role: ACTOR, type: COMPUTE, options: {x: '${%s}'}}\n"
    assert read_graph(text % "algorithm.advantage", warm).nodes[0].options == {"x": "grpo"}
    with pytest.raises(ValueError, match="no 'warmpu' there .did you mean 'warmup'"):
        read_graph(text % "critic.warmpu", warm)
    with pytest.raises(ValueError, match="is a section of the config; name a value in it: warmup"):
        read_graph(text % "critic", warm)
    with pytest.raises(ValueError, match="no config was given"):
        read_graph(text % "critic.warmup")


def test_a_reference_sees_the_settings_of_the_graph_that_holds_it(tmp_path):
    path = tmp_path / "warm.yaml"
    path.write_text("name: warm\nbase: ppo\nsettings: {critic.warmup: 7}\n")
    for config, after in (
        (Config(dag=str(path)), 7),  # the node is in the base, the setting on top of it
        (Config(dag=str(path), critic=CriticConfig(warmup=3)), 3),
    ):
        config, graph = settle(config)
        (train,) = (node for node in graph.nodes if node.id == "actor_train")
        assert config.critic.warmup == train.condition.after == after


def test_a_function_that_makes_a_graph_is_called_once(tmp_path):
    code = tmp_path / "counted.py"
    code.write_text(
        "import dataclasses\n"
        "from distflow_jax.dag.graph_yaml import load_graph\n"
        "calls = []\n"
        "def mine(config):\n"
        "    calls.append(config)\n"
        "    settings = {'algorithm.clip_high': len(calls) / 10}\n"
        "    return dataclasses.replace(load_graph('grpo', config), settings=settings)\n"
    )
    config, graph = settle(Config(dag=f"{code}:mine"))
    assert config.algorithm.clip_high == graph.settings["algorithm.clip_high"] == 0.1


def test_a_graph_on_top_of_another_replaces_adds_and_merges(tmp_path):
    base = tmp_path / "base.yaml"
    base.write_text(
        "name: base\nsettings: {seed: 1, algorithm.lam: 0.9}\nnodes:\n"
        "- {id: a, role: ROLLOUT, type: COMPUTE, writes: [x]}\n"
        "- {id: b, role: REWARD, type: COMPUTE, deps: [a], reads: [x]}\n"
    )
    top = tmp_path / "top.yaml"
    top.write_text(
        "name: top\nbase: base.yaml\nsettings: {seed: 2}\nnodes:\n"
        "- {id: b, role: REWARD, type: COMPUTE, deps: [a], reads: [x], writes: [y]}\n"
        "- {id: c, role: REWARD, type: COMPUTE, deps: [b], reads: [y]}\n"
    )
    graph = load_graph(str(top))
    assert [node.id for node in graph.nodes] == ["a", "b", "c"]
    assert graph.nodes[1].writes == {"y": "y"}
    assert dict(graph.settings) == {"seed": 2, "algorithm.lam": 0.9}
    for line, message in (
        ("base: grop", "there is no built-in graph 'grop' .did you mean 'grpo'"),
        ("base: [grpo]", "base must be the name of a graph or a file"),
        ("base: nowhere.yaml", "nowhere.yaml does not exist"),
    ):
        top.write_text(f"name: top\n{line}\n")
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            load_graph(str(top))


def test_a_graph_comes_from_a_file_or_a_function(tmp_path):
    expected = load_graph("grpo")
    text = tmp_path / "my.yaml"
    text.write_text(write_graph(expected))
    code = tmp_path / "my.py"
    code.write_text(
        "from distflow_jax.dag.graph_yaml import load_graph\n"
        "import dataclasses\n"
        "def mine():\n    return load_graph('grpo')\n"
        "def named(config):\n"
        "    return dataclasses.replace(load_graph('grpo'), name=f'seed{config.seed}')\n"
        "def wrong():\n    return 3\n"
    )
    assert load_graph(str(text)) == expected
    assert load_graph(f"{code}:mine") == expected
    assert load_graph(f"{code}:named", Config(seed=5)) == dataclasses.replace(
        expected, name="seed5"
    )
    with pytest.raises(ValueError, match="must return a Graph, got int"):
        load_graph(f"{code}:wrong")
    with pytest.raises(ValueError, match="has no 'mime'; did you mean 'mine'"):
        load_graph(f"{code}:mime")


@pytest.mark.parametrize(
    "name, error, message",
    [
        ("grop", ValueError, "unknown graph 'grop' .*did you mean 'grpo'"),
        ("missing.yaml", FileNotFoundError, "missing.yaml"),
        ("missing.py:f", FileNotFoundError, "missing.py"),
        ("no_such_module:f", ValueError, "path/to/file.py:function"),
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


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"algorithm.clip_hihg": 1.0}, "unknown key config.algorithm.clip_hihg .did you mean"),
        ({"algorithm": 1}, "algorithm is a section of the config"),
        ({"seed": "one"}, "config.seed must be an integer, got 'one'"),
        ({"algorithm.lam": 2.0}, "algorithm.lam must be from 0 to 1, got 2.0"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path, settings, message):
    path = tmp_path / "g.yaml"
    path.write_text(write_graph(dataclasses.replace(load_graph("grpo"), settings=settings)))
    with pytest.raises(ValueError, match=message):
        settle(Config(dag=str(path)))


def test_a_graph_that_lacks_what_the_config_needs_says_so(tmp_path):
    whole = load_graph("grpo")
    nodes = [
        dataclasses.replace(node, may_read=()) if node.id == "actor_train" else node
        for node in whole.nodes
    ]
    path = tmp_path / "g.yaml"
    path.write_text(write_graph(Graph("bare", nodes)))
    for config, message in (
        (Config(dag=str(path), algorithm=AlgorithmConfig(kl_coef=0.1)), "reads no 'ref_logp', but"),
        (Config(dag=str(path), training=TrainingConfig(epochs=2)), "gets 2 optimizer steps"),
        (Config(dag="grpo", algorithm=AlgorithmConfig(advantage="gae")), "reads no 'value', but"),
    ):
        with pytest.raises(ValueError, match=message):
            settle(config)


def test_the_example_of_a_node_of_ones_own_runs():
    config, graph = settle(Config(dag="configs/examples/brevity.yaml"))
    tasks = plan(graph, LAYOUTS, DATA[graph.data]).tasks
    assert [t.node.id for t in tasks] == [
        "rollout",
        "reward",
        "brevity",
        "advantage",
        "actor_train",
    ]
    node = tasks[2].node
    stage = resolve([node])["brevity"](None)
    fields = {"response": [np.zeros(8), np.zeros(0)], "score": np.array([1, 1], np.float32)}
    _, written, _ = stage(None, fields, dict(node.options))
    assert written["short_score"].tolist() == [0.5, 1.0]


def test_a_mistake_in_a_file_names_file_node_and_field(tmp_path):
    text = (ROOT / "configs/examples/brevity.yaml").read_text()
    (tmp_path / "brevity.py").write_text("def brevity(state, fields, options): pass\n")
    path = tmp_path / "mine.yaml"
    for old, new, message in (
        ("score: short_score", "score: shrot_score", "reads 'shrot_score'.*short_score"),
        ("deps: [reward]", "deps: [reward, adv]", "node 'brevity': unknown dep 'adv'"),
        ("brevity.py:brevity", "brevity.py:brevty", "node 'brevity'.*did you mean 'brevity'"),
        ("writes: [advantage]", "writes: [advantages]", "node 'advantage'.*writes advantage: add"),
    ):
        path.write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=f"mine.yaml.*{message}"):
            config, graph = settle(Config(dag=str(path)))
            make_plan(config, graph, SIZES)
