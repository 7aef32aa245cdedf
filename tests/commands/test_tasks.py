"""The ten tasks of docs/tasks.md, followed to the letter: files are written, commands typed.

Nightly: the ten tasks of docs/tasks.md, followed to the letter; the last one in transformers (`make
setup-torch`).
"""

import json
import os
import re
import shutil
import subprocess

import pytest
from support.doc_blocks import blocks, commands
from support.follow_page import follow, place
from support.paths import ROOT

from distflow_jax.report.run_writer import read_metrics

PAGE = ROOT / "docs" / "tasks.md"
SECTIONS = re.findall(r"^## (\d+\. .*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
TORCH = "in an environment with torch"


def shown(heading):
    """The blocks of a section, without those for another environment."""
    return [b for b in blocks(PAGE) if b.heading == heading and b.title != TORCH]


def rows(folder, name):
    """Metrics of the steps of a run."""
    return [r for r in read_metrics(folder / "runs" / name / "metrics.jsonl") if r["step"]]


def own_reward(folder, printed):
    found = rows(folder, "own_reward")
    assert found[-1]["critic/score/mean"] > found[0]["critic/score/mean"]
    assert all(0 <= row["reward/share"] <= 1 for row in found)
    assert any(name.startswith("val-core/") for name in found[-1])


def dapo(folder, printed):
    config = json.loads((folder / "runs/dapo/config.json").read_text())
    assert config["algorithm"]["clip_high"] == 0.3
    assert config["algorithm"]["aggregation"] == "token-mean"
    found = rows(folder, "dapo")
    assert all(row["training/sampling_rounds"] >= 1 for row in found)
    assert all(row["reward/overlong_penalty"] <= 0 for row in found)


def nodes_of_my_own(folder, printed):
    found = rows(folder, "kl_advantage")
    assert len(found) == 3 and all(row["actor/grad_norm"] > 0 for row in found)
    assert found[0]["my/kl"] == pytest.approx(0, abs=1e-4)  # the policy is the reference still
    assert found[-1]["my/kl"] != found[0]["my/kl"]
    plan = json.loads((folder / "runs/kl_advantage/plan.json").read_text())
    assert any("kl" in names for names in plan["segments"]) and "tensor 2" in printed[-1]


def ppo(folder, printed):
    first, *rest = rows(folder, "ppo")
    assert "actor/pg_loss" not in first and all("actor/pg_loss" in row for row in rest)
    assert all("critic/vf_explained_var" in row for row in rest)


def tool(folder, printed):
    found = rows(folder, "tools")
    assert all(row["environment/infra/raised"] == 0 for row in found)
    assert all(row["environment/tool_calls"] > 0.3 for row in found)
    score = [row["critic/score/mean"] for row in found]
    assert sum(score[-5:]) > sum(score[:5])
    last = (folder / "runs/tools/samples/20.jsonl").read_text()
    assert "<tool>Peru</tool>" in last and "<result>Lima</result>" in last


def chain(folder, printed):
    losses = [row["actor/nll"] for row in rows(folder, "sft")]
    assert losses[-1] < losses[0]
    config = json.loads((folder / "runs/after_sft/config.json").read_text())
    assert config["model"]["source"] == "exports/sft"
    # what was learned came along: a random model writes a digit in one of four responses
    assert rows(folder, "after_sft")[0]["critic/score/mean"] > 0.4


def pairs(folder, printed):
    assert rows(folder, "dpo")[-1]["rewards/margins"] > 0


def moved(folder, printed):
    assert [row["step"] for row in rows(folder, "moved")] == [1, 2, 3, 4, 5]


def notebook(folder, printed):
    (row,) = rows(folder, "notebook")
    assert row["actor/grad_norm"] >= 0
    assert json.loads((folder / "exports/smollm2/config.json").read_text())["hidden_size"] == 576


def torch(folder, printed):
    assert {"config.json", "tokenizer.json"} <= {
        p.name for p in (folder / "exports/exported").iterdir()
    }
    interpreter = os.environ.get("DISTFLOW_TORCH_PYTHON", ROOT / ".venv-torch/bin/python")
    found = shutil.which(interpreter)
    if found is None:
        pytest.skip("no environment with torch and transformers: `make setup-torch` makes one")
    (block,) = [b for b in blocks(PAGE) if b.title == TORCH]
    for command in commands(block.text):
        done = subprocess.run([found, *command[1:]], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.strip(), done.stderr


HOLDS = [own_reward, dapo, nodes_of_my_own, ppo, tool, chain, pairs, moved, notebook, torch]


def test_there_are_ten():
    assert [int(heading.split(".")[0]) for heading in SECTIONS] == list(range(1, 11))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("heading, holds", list(zip(SECTIONS, HOLDS, strict=True)), ids=SECTIONS)
def test_it_does_what_it_says(heading, holds, tmp_path):
    holds(tmp_path, follow(shown(heading), place(tmp_path)))
