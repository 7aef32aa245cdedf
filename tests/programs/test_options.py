"""Options for XLA: those that it knows are passed on, others are left out and said."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distflow_jax.programs import options


def test_this_version_of_xla_knows_all_of_this_platform():
    platform = jax.default_backend()
    for sampler, table in ((False, options.OF_ALL), (True, options.OF_SAMPLERS)):
        wanted = table.get(platform, {})
        assert options.compiler_options(platform, sampler=sampler) == wanted


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads the programs of CPUs")
def test_on_cpus_no_library_takes_sums():
    def softmax(x, w):
        y = jnp.exp(x @ w)
        return y / y.sum(-1, keepdims=True)

    x, w = (jnp.asarray(np.random.default_rng(0).normal(size=(256, 256)), jnp.float32),) * 2
    program = jax.jit(softmax).lower(x, w).compile(compiler_options=options.compiler_options("cpu"))
    assert " reduce(" in program.as_text()
    np.testing.assert_allclose(program(x, w), jax.nn.softmax(x @ w), rtol=1e-5)


def test_what_xla_does_not_know_is_left_out_and_said(monkeypatch, caplog):
    known = dict(options.OF_ALL.get("cpu", {}))
    monkeypatch.setattr(options, "OF_ALL", {"cpu": known | {"xla_of_another_version": 1}})
    with caplog.at_level(logging.INFO, "distflow_jax"):
        assert options.compiler_options("cpu") == known
    assert "XLA does not take the option xla_of_another_version=1" in caplog.text


def test_a_platform_without_options():
    assert options.compiler_options("tpu") == {}
