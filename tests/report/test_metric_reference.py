"""The table of metrics: one entry per name, and every name that the code writes has one."""

import ast
import re

import pytest
from support.paths import ROOT

from distflow_jax.config.config_dict import to_config_dict, unknown_key
from distflow_jax.config.run_config import Config
from distflow_jax.report.metric_reference import find_metric, metric_table

ENTRIES = [metric for section in metric_table().values() for metric in section]
GROUPS = {metric.name.split("/")[0] for metric in ENTRIES} - {"{actor,critic,reward_model}"}
FREE = {"reward/{name}", "environment/{name}", "timing_s/{node}", "perf/idle/{node}"}


def spelled(name):
    """All names that an entry stands for; a free {word} becomes x."""
    found = re.search(r"\{([^{}]*)\}", name)
    if not found:
        return [name]
    choices = found[1].split(",") if "," in found[1] else ["x"]
    return [y for x in choices for y in spelled(name[: found.start()] + x + name[found.end() :])]


@pytest.mark.parametrize("metric", ENTRIES, ids=lambda metric: metric.name)
def test_every_name_of_an_entry_finds_it(metric):
    assert all(find_metric(name) is metric for name in spelled(metric.name))
    assert metric.meaning and not metric.meaning.endswith(".")


def test_a_name_with_its_node_before_it_is_found():
    assert find_metric("judge/reward/errors") is find_metric("reward/errors")
    assert find_metric("brevity/weight") is None


def written_in_the_code():
    """Names of metrics that stand in the code as a constant."""
    form = re.compile(rf"(?:{'|'.join(map(re.escape, GROUPS))})/[\w/]+\w")
    found = set()
    for path in sorted((ROOT / "distflow_jax").rglob("*.py")):
        if "report" in path.relative_to(ROOT).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Dict):
                found |= {
                    key.value
                    for key in node.keys
                    if isinstance(key, ast.Constant)
                    and isinstance(key.value, str)
                    and form.fullmatch(key.value)
                }
    return sorted(found)


def test_every_name_in_the_code_has_an_entry_of_its_own():
    names = written_in_the_code()
    assert len(names) > 50
    missing = [n for n in names if find_metric(n) is None or find_metric(n).name in FREE]
    assert not missing


def test_texts_name_keys_that_the_config_has():
    config = to_config_dict(Config())
    sections = "|".join(name for name in config if name not in ("seed", "dag"))
    form = re.compile(rf"\b(?:{sections})\.\w+(?:\.\w+)*")
    for metric in ENTRIES:
        for key in form.findall(f"{metric.meaning} {metric.bad}"):
            assert not unknown_key(config, key), (metric.name, key)
