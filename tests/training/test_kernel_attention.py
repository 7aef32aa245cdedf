"""The kernels of GPUs and TPUs, interpreted, in the trainer: gradients are those of the mask.

Nightly: gradients through the GPU and TPU kernels equal those of the mask.
"""

import pytest
from support.gradients import assert_same, gradient
from support.tiny_model import WINDOWED


@pytest.mark.parametrize(
    ("by", "axes"),
    [
        ("tpu", dict(fsdp=1, tensor=1, context=2, remat="attention", block=32)),
        pytest.param(
            "gpu", dict(fsdp=1, tensor=2, data=2, context=2, block=32), marks=pytest.mark.slow
        ),
        # 2 key/value heads, repeated for 4 devices
        pytest.param("tpu", dict(fsdp=2, tensor=4, remat="full", block=64), marks=pytest.mark.slow),
        pytest.param(
            "gpu",
            dict(fsdp=1, tensor=1, pipeline=2, micro=2, block=64, remat="dots"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "tpu", dict(fsdp=2, tensor=1, pipeline=2, micro=2, block=64), marks=pytest.mark.slow
        ),
    ],
)
def test_gradients_are_those_of_the_mask(by, axes, interpreted):
    assert_same(gradient(by=by, **axes), gradient(fsdp=1, tensor=1))


@pytest.mark.slow
@pytest.mark.parametrize("by", ["gpu", "tpu"])
def test_windows_reach_over_parts(by, interpreted):
    one = gradient(WINDOWED, fsdp=1, tensor=1)
    assert_same(gradient(WINDOWED, by=by, fsdp=1, tensor=1, context=2, block=16), one)
