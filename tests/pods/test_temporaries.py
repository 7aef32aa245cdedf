"""Temporaries by formulas, beside those of programs that libtpu compiled.

Nightly: on every mesh, with every policy of what is kept, and for models of all sizes.
"""

import dataclasses

import pytest
from support.paths import ROOT

from configs import qwen3_30b_a3b, qwen25_1_5b, qwen25_3b, qwen25_7b, qwen25_32b
from distflow_jax.config.config_dict import from_config_dict
from distflow_jax.config.graph_settings import with_values
from distflow_jax.config.run_config import Config
from distflow_jax.models.weights.source import open_shapes
from distflow_jax.planning.plan_run import plan_run
from distflow_jax.pods.pod_plan import plan_on
from distflow_jax.pods.topology import open_topology
from distflow_jax.training import forward

REMAT, ROWS = "training.remat", "training.micro_batch_rows"


def mesh(fsdp, tensor=1, **others):
    sizes = {"data": 1, "fsdp": fsdp, "tensor": tensor} | others
    return {f"mesh.{axis}": size for axis, size in sizes.items()}


SMALL, LARGE = (qwen25_1_5b, "v5e-8,2k"), (qwen25_7b, "v5p-8,2k")
LONG, MIXTURE = (qwen25_7b, "v5p-128,8k"), (qwen3_30b_a3b, "v5p-128,8k")
# Temporaries and gradients of `actor_train` that `plan.py --only=actor_train` found with libtpu
# 0.0.42.1 on a v5p (the first: on a v5e), in GiB. Programs do not depend on the number of chips of
# another kind, so these are planned for GPUs, which need no libtpu
COMPILED = [
    (SMALL, 8, mesh(8), 6.08),
    (SMALL, 4, mesh(4), 8.79),
    (SMALL, 4, mesh(4) | {REMAT: "dots"}, 11.01),
    (SMALL, 4, mesh(4) | {REMAT: "none"}, 17.58),
    (SMALL, 4, mesh(4) | {ROWS: 16}, 9.76),
    (SMALL, 4, mesh(4) | {ROWS: 16, REMAT: "attention"}, 11.94),
    (SMALL, 4, mesh(2, 2) | {REMAT: "dots"}, 8.56),
    (LARGE, 4, mesh(4), 29.21),
    (LARGE, 4, mesh(4) | {ROWS: 8, REMAT: "dots"}, 48.81),
    (LARGE, 8, mesh(8) | {ROWS: 16, REMAT: "dots", "data.prompts_per_step": 64}, 34.3),
    (LONG, 8, mesh(2, 4) | {REMAT: "dots", "data.prompts_per_step": 16}, 23.87),
    (MIXTURE, 16, mesh(4, expert=4) | {"data.prompts_per_step": 32}, 44.24),
    ((qwen25_3b, "rtx4090-1,2k"), 4, {"mesh.data": 4, "data.prompts_per_step": 32}, 2.26),
    ((qwen25_7b, "v5e-256,8k"), 256, mesh(16, 4, data=4), 4.81),
    ((qwen25_32b, "v5p-128,8k"), 64, mesh(16, 4) | {REMAT: "dots"}, 35.06),
]


# in every test run: each third, a mixture among them
OFTEN = [
    pytest.param(*one, marks=[pytest.mark.slow] * (index % 3 != 2))
    for index, one in enumerate(COMPILED)
]


@pytest.mark.parametrize(("preset", "devices", "values", "compiled"), OFTEN)
def test_training_takes_about_what_was_compiled(preset, devices, values, compiled, monkeypatch):
    # they were compiled with chunks of logits as CPUs have them
    monkeypatch.setattr(forward, "_ACCELERATOR_TOKENS", forward._LOGITS_TOKENS)
    monkeypatch.setattr(forward, "_LOGITS_SHARE", 2**30)
    module, choice = preset
    name = module.__name__.rpartition(".")[2]
    config = from_config_dict(Config, module.get_config(choice))
    source = {"model.source": str(ROOT / "configs" / "shapes" / name), "mesh.chip": ""}
    source |= {REMAT: "full", ROWS: 0}
    pod = open_topology(f"gpu:{-(-devices // 8)}x{min(devices, 8)}")
    planned = plan_run(with_values(config, source | values), pod.machine, open_source=open_shapes)
    plan = plan_on(pod, dataclasses.replace(planned, devices=pod.devices), compiled=False)
    (update,) = [s for s in plan.memory.segments if s.trains]
    assert 0.85 < (update.gradients + update.temporaries) / 2**30 / compiled < 1.4
