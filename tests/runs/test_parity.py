"""One step is the same on 1 device, and on 8 in 1, 2, 4 and 8 processes, within rounding.

The tolerances and their reason: float32 sums in another order. 1e-5 of the norm is some hundred
roundings; a missing all-reduce, a doubled row or a denominator per device is off by 10 % and more.

Nightly: one step on 8 devices in 1 to 8 processes, over every axis, and cut into partial batches,
gives one device's gradients, metrics and tokens.
"""

import functools
import json
import os
import pickle

import numpy as np
import pytest
from support import haste
from support.paths import ROOT
from support.programs import finished

WORKER = "tests/support/parity_worker.py"
NEAR_TIE = 1e-4  # lead of the best over the second-best perturbed logit


def run(out, batch, *, devices=1, processes=1, overrides=(), partial_batches=0):
    arguments = [WORKER, f"--out={out}", f"--batch={batch}", f"--partial_batches={partial_batches}"]
    arguments += [f"--override={o}" for o in overrides]
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    env = haste.environment(devices if processes == 1 else None) | {"PYTHONPATH": path}
    if processes > 1:
        launch = ["scripts/launch_local.py", f"--processes={processes}"]
        arguments = [*launch, f"--devices_per_process={devices // processes}", "--", *arguments]
    finished(*arguments, env=env)
    return load(out)


def load(out):
    grads = dict(np.load(out / "grads.npz"))
    metrics = json.loads((out / "metrics.json").read_text())
    responses = {}
    for part in sorted(out.glob("responses-*.pkl")):
        share = pickle.loads(part.read_bytes())
        assert not responses.keys() & share.keys(), "a response was sampled twice"
        responses |= share
    return grads, metrics, responses


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Of a model, by the overrides that name it: its batch, and what one device gives."""

    @functools.cache
    def of(*model):
        folder = tmp_path_factory.mktemp("parity")
        batch = folder / "batch.pkl"
        return batch, run(folder / "single", batch, overrides=model)

    return of


# its update goes through the experts that the sampler recorded
MIXTURE = (
    "model.source=random:qwen3_moe?hidden=64&layers=2&heads=4&kv_heads=2&mlp=32&experts=8&active=3"
    "&vocab=512&max_position=512",
    "training.router_replay=True",
    "training.balance_coef=0.01",
)
REFERENCE = "mesh.roles={'REFERENCE': {'tensor': 2}}"
# prompts with pictures of many sizes; Gemma 3 and towers of text models have them in one size
SHOWN = ("data.train=task:shapes?ask=count&sides=24-64", "data.max_prompt_length=160")
_SEEING = (
    "model.source=random:{}?hidden=64&layers=4&heads=4&kv_heads=2&mlp=96&vocab=272"
    "&max_position=1024&vision_hidden=32&vision_layers=2&vision_heads=4&patch=4"
)
QWEN = (_SEEING.format("qwen2_5_vl"), *SHOWN)
GEMMA = (_SEEING.format("gemma3") + "&image=32&window=24&full_every=2", *SHOWN)
SEEING_MIXTURE = (
    *MIXTURE,
    "model.vision=random:siglip?hidden=32&layers=2&heads=4&patch=4&image=32",
    *SHOWN,
)
TINIER = ("model.source=random:llama?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=512",)
LAYOUTS = {
    "2 processes x 2 devices, a model of two layers": dict(
        devices=4, processes=2, model=TINIER, overrides=["mesh.tensor=2"]
    ),
}

SLOW = {
    "2 processes x 4 devices": dict(devices=8, processes=2, overrides=["mesh.tensor=2"]),
    "data 2 x fsdp 2 x tensor 2": dict(
        devices=8, overrides=["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"]
    ),
    "data 2 x context 2 x tensor 2": dict(
        devices=8, overrides=["mesh.data=2", "mesh.context=2", "mesh.tensor=2"]
    ),
    "2 processes x 4 devices, fsdp 2 x pipeline 2 x tensor 2": dict(
        devices=8, processes=2, overrides=["mesh.pipeline=2", "mesh.tensor=2"]
    ),
    "4 processes x 2 devices, layers over 2 of them, reference fsdp 4": dict(
        devices=8,
        processes=4,
        overrides=[
            "mesh.pipeline=4",
            "training.pipeline_microbatches=8",
            "mesh.roles={'REFERENCE': {'tensor': 2}}",
        ],
    ),
    "4 processes x 2 devices, a row over 2 of them, reference over 1": dict(
        devices=8,
        processes=4,
        overrides=["mesh.context=4", "mesh.roles={'REFERENCE': {'tensor': 2}}"],
    ),
    "2 processes x 4 devices, data 2 x fsdp 4, reference data 4 x tensor 2": dict(
        devices=8,
        processes=2,
        overrides=["mesh.data=2", "mesh.roles={'REFERENCE': {'data': 4, 'tensor': 2}}"],
    ),
    "4 processes x 2 devices, sampler over 2 hosts, reference fsdp 4": dict(
        devices=8, processes=4, overrides=["mesh.rollout_tensor=4", REFERENCE]
    ),
    "8 processes, tensor and sampler over 2 of them": dict(
        devices=8, processes=8, overrides=["mesh.tensor=2", "mesh.rollout_tensor=2"]
    ),
    "1 process, in 16 partial batches": dict(partial_batches=16),
    "2 processes x 1 device, in 5 partial batches": dict(devices=2, processes=2, partial_batches=5),
    "4 processes x 1 device, in 3 partial batches": dict(devices=4, processes=4, partial_batches=3),
    "a mixture, 2 processes x 2 devices, experts over both, in 4 partial batches": dict(
        devices=4, processes=2, model=MIXTURE, partial_batches=4, overrides=["mesh.expert=4"]
    ),
    "a mixture, 2 processes x 4 devices, layers over both": dict(
        devices=8,
        processes=2,
        model=MIXTURE,
        overrides=["mesh.pipeline=2", "mesh.context=2", "mesh.tensor=2"],
    ),
    "a mixture, 2 processes x 4 devices, expert 2 x pipeline 2 x tensor 2": dict(
        devices=8,
        processes=2,
        model=MIXTURE,
        overrides=["mesh.expert=2", "mesh.pipeline=2", "mesh.tensor=2"],
    ),
    "images, 4 processes x 2 devices, layers and widths over 2 of them, in 3 partial batches": dict(
        devices=8,
        processes=4,
        model=QWEN,
        overrides=["mesh.pipeline=2", "mesh.tensor=2"],
        partial_batches=3,
    ),
    "images, 2 processes x 2 devices, a row over both, reference over 1": dict(
        devices=4, processes=2, model=QWEN, overrides=["mesh.context=4", REFERENCE]
    ),
    "images both ways, context 2 x tensor 2": dict(
        devices=4, model=GEMMA, overrides=["mesh.context=2", "mesh.tensor=2"]
    ),
    "images both ways, 2 processes x 2 devices, layers over both": dict(
        devices=4, processes=2, model=GEMMA, overrides=["mesh.pipeline=4"]
    ),
    "images, a mixture, 2 processes x 2 devices, experts over both": dict(
        devices=4, processes=2, model=SEEING_MIXTURE, overrides=["mesh.expert=4"]
    ),
}


def distance(found, wanted, names):
    """|found - wanted| / |wanted| over the parameters of these names."""
    difference = np.sqrt(sum(np.sum((found[k] - wanted[k]) ** 2.0) for k in names))
    norm = np.sqrt(sum(np.sum(wanted[k] ** 2.0) for k in names))
    assert norm > 0
    return difference / norm


def check_moved_images(metrics):
    """Pictures move where rows do, at most one copy of each for a data rank."""
    moved, copies = metrics["perf/image_bytes_moved"], metrics["perf/image_bytes"]
    assert moved > 0 or not metrics["perf/anything_moves"]
    assert moved <= copies * metrics["perf/data_ranks"]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW)]
)
def test_one_step_agrees(single, layout, tmp_path):
    options = dict((LAYOUTS | SLOW)[layout])
    model = options.pop("model", ())
    overrides = [*model, *options.pop("overrides", ())]
    batch, (grads, metrics, responses) = single(*model)
    new_grads, new_metrics, new_responses = run(tmp_path, batch, overrides=overrides, **options)

    assert new_grads.keys() == grads.keys()
    assert distance(new_grads, grads, grads) < 1e-5
    tower = [name for name in grads if name.startswith("vision.")]
    assert bool(tower) == ("images" in layout)
    if tower:  # a small part of the norm of all
        assert distance(new_grads, grads, tower) < 1e-5
        check_moved_images(new_metrics)

    assert new_metrics.keys() == metrics.keys()
    assert ("actor/router_mismatch" in metrics) == (model in (MIXTURE, SEEING_MIXTURE))
    for name, value in metrics.items():
        if not name.startswith(("perf/", "timing", "global_seqlen/balanced")):  # ranks differ
            assert new_metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name

    assert new_responses.keys() == responses.keys()
    compared = 0
    for uid, (tokens, margin) in responses.items():
        other, _ = new_responses[uid]
        ties = np.flatnonzero(margin < NEAR_TIE)
        end = ties[0] if len(ties) else len(tokens)
        compared += end
        np.testing.assert_array_equal(other[:end], tokens[:end])
    assert compared > 0.5 * sum(len(tokens) for tokens, _ in responses.values())
