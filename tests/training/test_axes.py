"""Mesh axes, alone and in combinations drawn at random, change nothing of loss and gradient.

Nightly: every mesh axis, alone and in random combinations, leaves loss and gradient unchanged.
"""

import math

import numpy as np
import pytest
from support.gradients import LENGTH, MODELS, ROWS, assert_same, gradient

AXES = ("data", "fsdp", "expert", "pipeline", "context", "tensor")
DEVICES, COMBINATIONS = 8, 24
MOST = {"pipeline": 4, "tensor": 4, "expert": 8}  # layers, heads, experts


def combination(seed: int) -> tuple[str, dict, dict]:
    """(model, sizes of axes, other choices): all three factors of 2 go to any axis."""
    rng = np.random.default_rng(seed)
    model, axes = str(rng.choice(list(MODELS))), dict.fromkeys(AXES, 1)
    possible = [axis for axis in AXES if axis != "expert" or model == "mixture"]
    for axis in map(str, rng.choice(possible, int(math.log2(DEVICES)))):
        axes["data" if axes[axis] == MOST.get(axis) else axis] *= 2
    rows = ROWS // (axes["data"] * axes["fsdp"] * axes["expert"])
    stages = axes["pipeline"]
    micro = int(rng.choice([n for n in (1, 2, 4, 8) if rows % n == n % stages == 0]))
    options = dict(
        micro=micro,
        microbatches=int(rng.choice([n for n in (2, 4, 8) if micro % n == n % stages == 0] or [0])),
        block=int(rng.choice([0, LENGTH // (2 * axes["context"]) // 2])),
        remat=str(rng.choice(["none", "dots", "attention", "full"])),
        shared=bool(rng.integers(2)),
        keep=bool(rng.integers(2)),
        replay=model == "mixture" and not rng.integers(2),
    )
    rounds = [n for n in (1, 2) if 1 < stages <= 4 // n and options["remat"] != "none"]
    options["repeats"] = int(rng.choice(rounds or [1]))  # of 4 layers
    return model, axes, options


def named(seed: int) -> str:
    model, axes, options = combination(seed)
    sizes = " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1)
    return ", ".join([model, sizes, *(f"{name} {value}" for name, value in options.items())])


# in every test run: a mixture that is replayed, over experts, stages and a row's devices
QUICK = (16,)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, id=named(seed), marks=() if seed in QUICK else pytest.mark.slow)
        for seed in range(COMBINATIONS)
    ],
)
def test_loss_and_gradient_are_those_of_one_device(seed):
    model, axes, options = combination(seed)
    assert math.prod(axes.values()) == DEVICES
    check(model, axes, options)


def check(model, axes, options):
    """Against one device, which has the same rows and nothing else of the options."""
    rows = dict(shared=options["shared"], replay=options["replay"])
    one = gradient(MODELS[model], fsdp=1, tensor=1, **rows)
    assert_same(gradient(MODELS[model], **options, **axes), one)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, axis",
    [(m, axis) for m in ("dense", "mixture") for axis in AXES if (m, axis) != ("dense", "expert")],
)
def test_every_axis_alone(model, axis):
    """As many devices as it takes; a mixture's tokens go through recorded experts."""
    axes = dict.fromkeys(AXES, 1) | {axis: MOST.get(axis, DEVICES)}
    options = dict(micro=axes["pipeline"], remat="full", shared=True, replay=model == "mixture")
    check(model, axes, options)


def test_every_axis_is_drawn():
    drawn = [combination(seed) for seed in range(COMBINATIONS)]
    for axis in AXES:
        assert sum(axes[axis] > 1 for _, axes, _ in drawn) >= 3
    assert {model for model, _, _ in drawn} == set(MODELS)
    assert len({tuple(axes.values()) for _, axes, _ in drawn}) >= 10
    assert {options["replay"] for model, _, options in drawn if model == "mixture"} == {True, False}
