"""Attention of libraries in the trainer: gradients are those of the mask, on every mesh it serves.

cuDNN's arguments are given to XLA, splash attention is interpreted.

Nightly: cuDNN on fsdp and tensor, splash attention on one device.
"""

import functools

import pytest
from support.gradients import assert_same, gradient
from support.tiny_model import WINDOWED

from distflow_jax.models.kernels import library_attention
from distflow_jax.models.kernels.library_attention import BY_MASK, BY_SEGMENTS


@pytest.fixture(autouse=True)
def on_this_cpu(monkeypatch):
    splash = functools.partial(library_attention.splash_attention, interpret=True)
    monkeypatch.setitem(BY_SEGMENTS, "splash", splash)
    cudnn = functools.partial(library_attention.cudnn_attention, implementation="xla")
    monkeypatch.setitem(BY_MASK, "cudnn", cudnn)


@pytest.mark.parametrize(
    "axes",
    [
        dict(fsdp=1, tensor=1, context=2),
        pytest.param(dict(fsdp=2, tensor=2), marks=pytest.mark.slow),
    ],
)
def test_rows_with_shared_prompts_and_windows_by_cudnn(axes):
    found = gradient(WINDOWED, by="cudnn", **axes)
    assert_same(found, gradient(WINDOWED, fsdp=1, tensor=1))


@pytest.mark.parametrize(
    "axes",
    [pytest.param(dict(fsdp=1, tensor=1), marks=pytest.mark.slow), dict(fsdp=2, tensor=2)],
)
def test_layers_with_and_without_windows_by_splash_attention(axes):
    found = gradient(WINDOWED, by="splash", shared=False, remat="attention", **axes)
    assert_same(found, gradient(WINDOWED, shared=False, fsdp=1, tensor=1))
