"""Options for XLA: those that it knows are passed on, others are left out and said."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from support.accelerators import needs_libtpu

from distflow_jax.pods.topology import open_topology
from distflow_jax.programs import xla_options

HERE = Mesh(np.array(jax.devices()[:1]), ("x",))


def test_this_version_of_xla_knows_all_of_this_platform():
    for sampler in (False, True):
        wanted = xla_options.wanted_options(jax.default_backend(), HERE.size, sampler=sampler)
        assert xla_options.compiler_options(HERE, sampler=sampler) == wanted


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads the programs of CPUs")
def test_on_cpus_no_library_takes_sums():
    def softmax(x, w):
        y = jnp.exp(x @ w)
        return y / y.sum(-1, keepdims=True)

    x, w = (jnp.asarray(np.random.default_rng(0).normal(size=(256, 256)), jnp.float32),) * 2
    program = (
        jax.jit(softmax).lower(x, w).compile(compiler_options=xla_options.compiler_options(HERE))
    )
    assert " reduce(" in program.as_text()
    np.testing.assert_allclose(program(x, w), jax.nn.softmax(x @ w), rtol=1e-5)


def test_what_xla_does_not_know_is_left_out_and_said(monkeypatch, caplog):
    known = dict(xla_options.OF_ALL.get("cpu", {}))
    monkeypatch.setattr(xla_options, "OF_ALL", {"cpu": known | {"xla_of_another_version": 1}})
    with caplog.at_level(logging.DEBUG, "distflow_jax"):
        assert xla_options.compiler_options(HERE) == known
    assert "XLA does not take the option xla_of_another_version=1" in caplog.text


@pytest.mark.parametrize("platform", ["gpu", "cuda", "tpu"])
def test_collectives_of_training_programs_hide_behind_work(platform):
    more = (
        xla_options.wanted_options(platform, 8).keys()
        - xla_options.wanted_options(platform, 1).keys()
    )
    assert more and all(name.startswith("xla_") for name in more)
    alone, several = (xla_options.wanted_options(platform, n, sampler=True) for n in (1, 8))
    assert alone == several


def test_this_version_of_xla_knows_those_of_gpus():
    # XLA:CPU shares its flags with XLA:GPU
    (device,) = HERE.devices.flat
    told = xla_options.OF_SAMPLERS["gpu"] | xla_options.OF_COLLECTIVES["gpu"]
    known = {name for name, value in told.items() if xla_options._known(device, name, value)}
    older = {name for name in told if name.startswith("xla_gpu_enable_pipelined_")}
    newer = {name for name in told if name.startswith("xla_gpu_pipeline_")}
    assert len(older) == len(newer) == 3
    assert known - older - newer == told.keys() - older - newer
    assert known & (older | newer) in (older, newer)


@needs_libtpu
def test_this_version_of_libtpu_knows_those_of_tpus():
    pod = Mesh(np.array(open_topology("v5p:2x2x1").devices), ("x",))
    assert xla_options.compiler_options(pod) == xla_options.OF_COLLECTIVES["tpu"]


def test_what_a_person_sets_wins(monkeypatch):
    name = "xla_gpu_enable_latency_hiding_scheduler"
    assert xla_options.wanted_options("gpu", 8)[name] is True
    monkeypatch.setenv("XLA_FLAGS", f"--xla_some_other=1 --{name}=false")
    assert name not in xla_options.wanted_options("gpu", 8)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_enable_async_all_to_all")
    assert "xla_tpu_enable_async_all_to_all" not in xla_options.wanted_options("tpu", 8)


def test_platforms_without_options():
    assert xla_options.wanted_options("tpu", 1) == {}
    assert xla_options.describe({}) == "none"
    assert xla_options.describe({"a": 1, "b": True}) == "a=1 b=True"
