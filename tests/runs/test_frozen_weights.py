"""Matrices that no update changes are stored in the compute dtype, which changes no number of a run
whose weights have that dtype, as those of published models.

Nightly: the numbers.
"""

import jax
import jax.numpy as jnp
import pytest
from flax.traverse_util import flatten_dict
from support.tiny_config import tiny_config

from distflow_jax import run
from distflow_jax.models import lora
from distflow_jax.models.decoder_config import adapted
from distflow_jax.planning import run_models
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.plan_run import plan_run
from distflow_jax.report.run_writer import read_metrics
from distflow_jax.runtime.build import trace
from distflow_jax.training.state import TrainState

RUN = (
    "training.steps=2",
    "training.compute_dtype=bfloat16",
    "algorithm.kl_coef=0.1",
    "lora.rank=4",
    "eval.dataset=",
)
# what the numbers of a run are, not its clock
NUMBERS = ("actor/", "critic/", "training/", "response_length/", "reward/")


def numbers_of(workdir, *assignments):
    run.train(tiny_config(*RUN, *assignments), workdir)
    return [
        {name: value for name, value in row.items() if name.startswith(NUMBERS)}
        for row in read_metrics(workdir / "metrics.jsonl")
    ]


STORED = run_models.as_stored


def wide(params, *model, **how):
    """Float32 arrays of the same values."""

    def one(x):
        is_spec = isinstance(x, jax.ShapeDtypeStruct)
        return x.update(dtype=jnp.float32) if is_spec else x.astype(jnp.float32)

    return jax.tree.map(one, STORED(params, *model, **how))


@pytest.mark.slow
def test_numbers_are_those_of_float32(tmp_path, monkeypatch):
    for settings in ((), ("lora.rank=0",)):
        short = numbers_of(tmp_path / f"short{len(settings)}", *settings)
        with monkeypatch.context() as patch:
            patch.setattr(run_models, "as_stored", wide)
            assert numbers_of(tmp_path / f"float32{len(settings)}", *settings) == short
        assert len(short) == 2 and all(len(row) > 10 for row in short)


def test_only_matrices_that_stay_are_short():
    planned = plan_run(tiny_config(*RUN), Machine.current())
    network = adapted(planned.source.config, planned.config.lora)
    states = [s for p in trace(planned).values() for s in p.given_states.values()]
    state = next(state for state in states if isinstance(state, TrainState))
    for path, spec in flatten_dict(state.params, sep="/").items():
        stays = not lora.is_trained(network, path) and "norm" not in path
        assert spec.dtype == (jnp.bfloat16 if stays else jnp.float32), path
