"""Every built-in graph trains: its own objective moves the right way within 20 steps.

The task is one that a random model can learn at once: to write digits. Runs are those of a user,
`scripts/train.py` with configs/tiny.py, on one device.

Nightly: every built-in graph improves its own objective within 20 steps.
"""

import json
import os
import pathlib
import random

import numpy as np
import pytest
from support import haste
from support.documented import unexplained_metrics
from support.programs import train
from support.run_folders import json_lines
from support.trace_rules import check_trace

from distflow_jax.dag.graph_yaml import built_in

STEPS = 20
# graph -> metric, whether it rises, and by how much the last five steps differ from the first at
# least
EXPECTED = {
    **dict.fromkeys(built_in(), ("critic/score/mean", 1, 0.05)),
    **dict.fromkeys(("dpo", "orpo", "kto"), ("rewards/margins", 1, 0.05)),
    "reward_model": ("reward_model/accuracy", 1, 0.1),
    "sft": ("actor/nll", -1, 1.0),
    "configs/examples/brevity.yaml": ("critic/score/mean", 1, 0.05),
    # its scores are of the best and the worst of each group
    "online_dpo": ("critic/score/max", 1, 0.05),
}
# in every test run, on a model that compiles soon; the others: `make test-nightly`
QUICK = {"grpo"}
QUICK_MODEL = "random:llama?hidden=64&layers=1&heads=4&kv_heads=2&mlp=128&vocab=512"


def write_pairs(path: pathlib.Path) -> None:
    """Pairs in which the better answer is of digits."""
    rng = random.Random(0)
    with path.open("w") as file:
        for _ in range(400):
            good, bad = ("".join(rng.choices(s, k=6)) for s in ("0123456789", "abcdefghij"))
            row = {"prompt": f"say {rng.randrange(100)}:", "chosen": good, "rejected": bad}
            file.write(json.dumps(row) + "\n")


def settings(name: str, folder: pathlib.Path) -> dict[str, object]:
    """Settings that differ from configs/tiny.py."""
    changed = {"dag": name, "training.steps": STEPS, "eval.dataset": "", "checkpoint.every": STEPS}
    if name in ("dpo", "orpo", "kto", "reward_model"):
        write_pairs(folder / "pairs.jsonl")
        changed["data.train"] = folder / "pairs.jsonl"
    elif name != "sft":
        changed |= {"reward.function": "tests/support/user_rewards.py:digits", "reward.kwargs": {}}
        changed["data.train"] = "task:arithmetic?operands=2&operators=+&digits=1-9"
    if name in QUICK:
        changed |= {"model.source": QUICK_MODEL, "training.optimizer.lr": 3e-3}
    if name in ("gspo", "remax"):  # a narrow clip; a baseline of one sample: both slow
        changed["training.optimizer.lr"] = 3e-3
    return changed


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in EXPECTED],
)
def test_its_objective_moves_the_right_way(name, tmp_path):
    changed = [f"{key}={value}" for key, value in settings(name, tmp_path).items()]
    whole = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    train(tmp_path / "run", changed, env=haste.environment() if name in QUICK else whole)
    rows = json_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == STEPS
    assert not any(row["perf/compilations"] for row in rows[1:])
    check_trace(json.loads((tmp_path / "run" / "trace.json").read_text()))
    assert unexplained_metrics(tmp_path / "run") <= {"brevity/weight"}
    metric, sign, least = EXPECTED[name]
    values = [row[metric] for row in rows]
    assert sign * (np.mean(values[-5:]) - values[0]) >= least, values
