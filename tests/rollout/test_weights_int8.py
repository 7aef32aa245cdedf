"""A sampler's weights as int8: what rounding costs, that nothing else changes, what it saves.

Nightly: int8 weights in untied models, stacked layers and bfloat16 products cost rounding and
nothing else.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from support import tiny_sampler
from support.tiny_config import tiny_config
from support.tiny_model import TINY, forward_logp, mesh_of, prompt_of, random_params
from support.tiny_sampler import assert_agree

from distflow_jax import run
from distflow_jax.config.rollout_config import RolloutConfig
from distflow_jax.config.run_config import Config
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.int8 import Int8
from distflow_jax.models.parameters import param_shardings, param_specs
from distflow_jax.models.sampler_layout import SamplerLayout
from distflow_jax.models.weights.source import open_model
from distflow_jax.observe.compilations import Compilations
from distflow_jax.parallel.mesh import replica_mesh, sampler_mesh
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.sizes import derive_sizes
from distflow_jax.planning.sizes_table import describe_sizes
from distflow_jax.report.run_writer import read_metrics
from distflow_jax.resharding.weight_sync import WeightSync, num_bytes
from distflow_jax.rollout.cache_sizing import weight_bytes
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.scheduling.scheduler import run_requests
from distflow_jax.runtime.samplers.standalone_sampler import read_weights

UNTIED = dataclasses.replace(TINY, tie_embeddings=False)
MODELS = pytest.mark.parametrize("model", [TINY, UNTIED], ids=["tied", "untied"])
STOP_IDS = tuple(range(16))
# a quarter of the slots: the fewest that are decoded as few
CONFIG = dataclasses.replace(tiny_sampler.CONFIG, slots=16, weights_dtype="int8")


def kept(model, params, axes=(1, 1), layers="stacked"):
    """Parameters as int8 on a mesh of ("data", "tensor")."""
    mesh = mesh_of(*axes, names=("data", "tensor"))
    placed = jax.device_put(params, param_shardings(model, mesh))
    return SamplerLayout(model, "cpu", layers, "int8").convert_placed(placed)


def restored(model, params):
    """Float32 parameters, each what its int8 stands for."""
    flat = flatten_dict(kept(model, params), sep="/")
    for path, spec in param_specs(model).items():
        if spec.inputs:
            scale = np.expand_dims(np.asarray(flat[path].scale), spec.inputs)
            flat[path] = np.asarray(flat[path].values).astype(np.float32) * scale
        else:
            flat[path] = np.asarray(flat[path])
    return unflatten_dict(flat, sep="/")


# -- rounding --------------------------------------------------------------------------------------


@MODELS
def test_rounding_is_within_half_a_step_of_each_output(model):
    given, got = (
        flatten_dict(random_params(model), sep="/"),
        flatten_dict(kept(model, random_params(model)), sep="/"),
    )
    for path, spec in param_specs(model).items():
        if not spec.inputs:
            np.testing.assert_array_equal(got[path], given[path])
            continue
        values, scale = (np.asarray(x).astype(np.float64) for x in got[path])
        assert got[path].values.dtype == jnp.int8 and got[path].scale.dtype == jnp.float32
        most = np.abs(given[path]).max(spec.inputs)
        np.testing.assert_allclose(scale * 127, most, rtol=1e-6)
        step = np.expand_dims(scale, spec.inputs)
        assert (np.abs(values * step - given[path]) <= 0.50001 * step).all(), path
    rounded = {path for path, spec in param_specs(model).items() if spec.inputs}
    assert {path for path in given if "norm" not in path} == rounded


@MODELS
@pytest.mark.parametrize("axes", [(1, 1), (2, 2)])
def test_layers_apart_are_the_stacked_ones(model, axes):
    """Numbers and layout: a scale lies where its output does."""
    params = random_params(model)
    stacked, apart = (kept(model, params, axes, layers) for layers in ("stacked", "apart"))
    for name, whole in stacked["layers"].items():
        for number, layer in enumerate(apart["layers"]):
            if not isinstance(whole, Int8):
                np.testing.assert_array_equal(layer[name], whole[number])
                continue
            values = np.asarray(whole.values[number])
            order = (2, 0, 1) if name == "output" else (*range(1, values.ndim), 0)
            np.testing.assert_array_equal(layer[name].values, values.transpose(order))
            np.testing.assert_array_equal(layer[name].scale, whole.scale[number])
            of_values, of_scale = (
                x.addressable_shards[0].data.shape for x in (layer[name].values, layer[name].scale)
            )
            assert of_values[: len(of_scale)] == of_scale
    assert apart["layers"][0]["query"].scale.addressable_shards[0].data.shape[0] == 4 // axes[1]
    embedding = apart["embed"]["embedding"]
    assert embedding.scale.addressable_shards[0].data.shape[0] == 320 // axes[1]


# -- the sampler -----------------------------------------------------------------------------------


class Sampler:
    def __init__(self, model=TINY, axes=(1, 1), stop_ids=STOP_IDS, **changes):
        config = dataclasses.replace(CONFIG, **changes)
        self.mesh = mesh_of(*axes, names=("data", "tensor"))
        self.engine = RolloutEngine(model, config, self.mesh, stop_ids=stop_ids, seed=3)

    def responses(self, params):
        """To prompts of many lengths that begin alike, four to each."""
        rng = np.random.default_rng(4)
        start = rng.integers(0, TINY.vocab_size, 16)
        prompts = [
            np.concatenate([start, rng.integers(0, TINY.vocab_size, length)])[-32:]
            for length in (3, 16, 14, 12, 1, 9)
        ]
        requests = [
            GroupRequest(prompt_of(i, x), SamplingParams(4, 20)) for i, x in enumerate(prompts)
        ]
        state = self.engine.init_decode_state()
        _, responses, self.stats = run_requests(self.engine, params, state, requests)
        return responses


def assert_logp(model, params, responses, atol=1e-4):
    for response, wanted in zip(responses, forward_logp(model, params, responses), strict=True):
        np.testing.assert_allclose(response.logp, wanted, atol=atol)


@functools.cache
def plain_responses(model):
    sampler = Sampler(model)
    return sampler.responses(sampler.engine.load_params(random_params(model, 2)))


@pytest.mark.parametrize(
    "model", [TINY, pytest.param(UNTIED, marks=pytest.mark.slow)], ids=["tied", "untied"]
)
def test_log_probs_are_those_of_the_rounded_weights(model):
    params, responses = random_params(model, 2), plain_responses(model)
    assert_logp(model, restored(model, params), responses)
    off = np.concatenate(forward_logp(model, params, responses))
    assert np.abs(off - np.concatenate([r.logp for r in responses])).max() > 0.01  # rounding counts


@pytest.mark.parametrize(
    ("model", "axes", "changes"),
    [
        pytest.param(TINY, (1, 1), {"weights": "turned"}, marks=pytest.mark.slow),
        (TINY, (2, 2), {}),
        pytest.param(UNTIED, (2, 2), {"weights": "stacked"}, marks=pytest.mark.slow),
    ],
)
def test_layers_and_devices_do_not_matter(model, axes, changes):
    sampler = Sampler(model, axes, **changes)
    params = sampler.engine.load_params(random_params(model, 2))
    assert isinstance(params["layers"], dict if changes else list)
    assert_agree(sampler.responses(params), plain_responses(model))


def test_every_way_to_read_and_to_decode():
    """Prompts in pieces and after a common shared prefix, tokens guessed, responses put back."""
    sampler = Sampler(
        stop_ids=(),
        prefill_tokens=16,
        prefix_tokens=16,
        cache_tokens=160,
        max_read=52,
        speculative_tokens=3,
        speculative_ngram=1,
    )
    responses = sampler.responses(sampler.engine.load_params(random_params(TINY, 2)))
    stats = sampler.stats
    assert stats.preempted > 0 and stats.proposed > 0
    assert_logp(TINY, restored(TINY, random_params(TINY, 2)), responses)


@pytest.mark.slow
def test_bfloat16_products_of_int8():
    """No further from the rounded weights than bfloat16 is from its own anyway."""
    off = {}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), random_params(TINY, 2))
    for kind, exact in (("auto", params), ("int8", restored(TINY, params))):
        sampler = Sampler(dtype="bfloat16", weights="stacked", weights_dtype=kind)
        responses = sampler.responses(sampler.engine.load_params(params))
        exact = jax.tree.map(lambda x: x.astype(jnp.float32), exact)
        error = np.concatenate(forward_logp(TINY, exact, responses))
        off[kind] = np.abs(error - np.concatenate([r.logp for r in responses])).mean()
    assert 0 < off["int8"] < 1.5 * off["auto"]


@pytest.mark.parametrize("part", [8, pytest.param(4, marks=pytest.mark.slow)])
def test_a_sync_brings_the_trainers_weights_and_compiles_nothing(part):
    """From a trainer over all devices, or half of them."""
    sampler = Sampler(axes=(4, 2))
    sync = WeightSync(
        param_shardings(TINY, replica_mesh(2)),
        sampler_mesh(2),
        "float32",
        SamplerLayout(TINY, "cpu", "auto", "int8"),
    )
    layout = param_shardings(TINY, mesh_of(part, 1))
    first, second = (jax.device_put(random_params(TINY, seed), layout) for seed in (7, 2))
    weights = sync(first)
    sampler.engine.compile(weights)
    wanted = sampler.engine.load_params(random_params(TINY, 7))
    jax.tree.map(np.testing.assert_array_equal, weights, wanted)
    jax.tree.map(lambda x: x.delete(), weights)
    counter = Compilations()
    responses = sampler.responses(sync(second))
    assert counter.take() == 0, counter.names()
    counter.close()
    assert_agree(responses, plain_responses(TINY))


# -- what it takes ---------------------------------------------------------------------------------


@MODELS
@pytest.mark.parametrize("axes", [(1, 1), (4, 2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_are_those_of_the_arrays(model, axes, dtype):
    held = {}
    for kind in ("auto", "int8"):
        sampler = Sampler(model, axes, dtype=dtype, weights_dtype=kind)
        params = sampler.engine.load_params(random_params(model))
        of_device = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(params))
        assert weight_bytes(model, sampler.engine.config, axes[1]) == of_device
        held[kind] = num_bytes(params)
    specs = param_specs(model).values()
    item = jnp.dtype(dtype).itemsize
    scales = sum(np.prod(s.shape) // np.prod([s.shape[d] for d in s.inputs]) for s in specs)
    norms = sum(np.prod(s.shape) for s in specs if not s.inputs)
    scales -= norms
    assert held["int8"] == (held["auto"] - norms * item) // item + 4 * scales + norms * item


# -- settings --------------------------------------------------------------------------------------


def test_the_setting_reaches_the_engine_and_the_plan():
    model, machine = DecoderConfig(max_position=2048), Machine(1, 1, 1, "gpu", memory=2**34)
    rows = {}
    for kind in ("auto", "int8"):
        config = Config(rollout=RolloutConfig(weights_dtype=kind))
        sizes = derive_sizes(config, model, machine)
        assert sizes.engine.weights_dtype == kind
        table = describe_sizes(sizes, config, model, machine)
        (rows[kind],) = (row[1:] for row in table if row[0] == "sampler's weights")
    assert [rows[kind][0] for kind in rows] == ["bfloat16", "int8"]
    auto, int8 = (float(row[1].removesuffix(" MiB of a device")) for row in rows.values())
    assert 0.5 * auto <= int8 < 0.53 * auto


SMALL = "random:llama?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=512"


@pytest.mark.slow
def test_a_run_trains_on_what_it_samples(tmp_path):
    config = tiny_config(
        f"model.source={SMALL}",
        "rollout.weights_dtype=int8",
        "algorithm.correction=token_tis",
        "training.steps=2",
        "eval.dataset=",
    )
    assert run.train(config, tmp_path / "run") == 0
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        assert row["actor/grad_norm"] > 0
        assert 1e-6 < row["training/rollout_probs_diff_mean"] < 0.01
    assert rows[1]["perf/compilations"] == 0
    # and what it has trained is read as a server or generate.py reads it
    weights, step = read_weights(config, open_model(SMALL), str(tmp_path / "run"))
    assert step == 2 and isinstance(weights["layers"][0]["query"], Int8)
