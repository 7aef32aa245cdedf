"""The processes of a run compare the user's own files, and name those that differ."""

import sys

import pytest

from distflow_jax.cluster import own_code, processes
from distflow_jax.config.config_dict import from_config_dict, override
from distflow_jax.config.run_config import Config
from distflow_jax.config.shipped import open_config
from distflow_jax.planning import plan_run
from distflow_jax.planning.machine import Machine

GRAPH = """
name: own
base: grpo
nodes:
- id: bonus
  role: REWARD
  type: COMPUTE
  fn: "{fn}"
  deps: [reward]
  reads: [score]
  writes: [bonus]
"""


@pytest.fixture
def files(tmp_path):
    for name in ("rewards", "stages", "tools", "graphs"):
        (tmp_path / f"{name}.py").write_text("def f(*args):\n    return args\n")
    return tmp_path


def test_all_that_config_and_plan_name(files):
    graph = files / "own.yaml"
    graph.write_text(GRAPH.format(fn=f"{files}/stages.py:f"))
    settings = [f"dag={graph}", f"reward.function={files}/rewards.py:f", "eval.dataset="]
    config = from_config_dict(Config, override(open_config("tiny"), settings))
    planned = plan_run.plan_run(config, Machine(1, 1, 1, "cpu"))
    found = plan_run.own_code_table(planned.config, planned.plan)
    assert found.keys() == {f"{files}/rewards.py", f"{files}/stages.py"}
    (files / "stages.py").write_text("def f(*args):\n    return args[:1]\n")
    again = plan_run.own_code_table(planned.config, planned.plan)
    assert [name for name in found if found[name] != again[name]] == [f"{files}/stages.py"]


def test_a_prepared_run_compares_them(files, monkeypatch):
    compared = {}
    monkeypatch.setattr(processes, "check_agreement", compared.update)
    settings = [f"reward.function={files}/rewards.py:f", "reward.num_workers=1"]
    config = from_config_dict(Config, override(open_config("tiny"), settings))
    reward = "def f(data_source, solution_str, ground_truth, **kwargs):\n    return 1.0\n"
    (files / "rewards.py").write_text(reward)
    plan_run.prepare(config).rewards.close()
    assert compared["files"].keys() == {f"{files}/rewards.py"}


def test_modules_count_with_their_package(files, monkeypatch):
    package = files / "own_package_of_a_test"
    (package / "deep").mkdir(parents=True)
    for name in ("__init__.py", "score.py", "deep/help.py"):
        (package / name).write_text("def f(*args):\n    return args\n")
    (files / "own_module_of_a_test.py").write_text("x = 1\n")
    monkeypatch.setattr(sys, "path", [str(files), *sys.path])
    found = own_code.hashes_of([f"{package.name}.score:f", "own_module_of_a_test:f"])
    names = {f"{package.name}/{name}" for name in ("__init__.py", "score.py", "deep/help.py")}
    assert found.keys() == names | {"own_module_of_a_test.py"}
    several = own_code.hashes_of([f"{package}/score.py:f,g", f"{package.name}.score:f,g"])
    assert several.keys() == names | {f"{package}/score.py"}


def test_other_texts_are_no_code(files):
    texts = ["", "grpo", "gsm8k", "distflow_jax.rewards.zero:f", "see: this", "math:", "a b:c"]
    assert own_code.hashes_of([*texts, f"{files}/none.py:f", "no_such_module_here:f"]) == {}
