"""Low-rank adapters: the same network, only they are trained, and out they go as PEFT's.

Nightly: a run trains only its adapters, resumes to the same end, and writes PEFT's files.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax.traverse_util import flatten_dict
from support.programs import finished
from support.tiny_config import tiny_config
from support.tiny_model import TINY, mesh_of, mini_batch, random_params, random_samples, rows_of

from distflow_jax import run
from distflow_jax.batch import RowShape
from distflow_jax.checkpoint.export import run_export
from distflow_jax.config.algorithm_config import AlgorithmConfig
from distflow_jax.config.training_config import LORA_TARGETS, LoraConfig, OptimizerConfig
from distflow_jax.models import lora
from distflow_jax.models.decoder_config import adapted, scalar_model, without_adapters
from distflow_jax.models.parameters import completed, init_params, param_shardings, param_specs
from distflow_jax.models.weights.hf_folder import Export, write_hf_folder
from distflow_jax.models.weights.peft_folder import write_peft_folder
from distflow_jax.models.weights.source import open_model
from distflow_jax.parallel.mesh import replica_mesh
from distflow_jax.report.run_writer import read_metrics
from distflow_jax.resharding.weight_sync import WeightSync
from distflow_jax.training.forward import ForwardConfig, response_logp
from distflow_jax.training.objectives.policy_objective import PolicyBatch, policy_objective
from distflow_jax.training.optimizer import make_optimizer
from distflow_jax.training.state import init_state
from distflow_jax.training.update import UpdateShape, accumulate_gradients, make_update

LORA = LoraConfig(rank=4, alpha=6.0)
ADAPTED = adapted(TINY, LORA)
FORWARD = ForwardConfig(logp_chunk=16)
ONE = np.float32(1)


@pytest.fixture(scope="module")
def batch():
    rows, _ = rows_of(random_samples(0, groups=3, size=3), RowShape(1, 4, 64, 4), shared=True)
    rows = mini_batch(rows)
    advantage = np.random.default_rng(1).normal(size=rows.tokens.shape).astype(np.float32)
    return PolicyBatch(rows, jnp.where(rows.response_mask, advantage, 0), None, None, None)


def logp(network, params, rows):
    run = jax.jit(lambda params: response_logp(params, network, rows, ONE, FORWARD)[0])
    return np.asarray(run(params))


def merged64(params, scale):
    flat = {path: np.asarray(x, np.float64) for path, x in flatten_dict(params, sep="/").items()}
    plain = [path for path in flat if not lora.is_adapter(path)]
    return {path: lora.merged_one(flat.get, path, scale) for path in plain}


@pytest.mark.parametrize("targets", [LORA_TARGETS, ("value",), ("output", "down")])
def test_a_model_with_adapters_is_the_one_they_are_merged_into(batch, targets):
    network = adapted(TINY, LoraConfig(4, 6.0, targets))
    params = random_params(network)
    ours = logp(network, params, batch.rows)
    plain = lora.merged(params, 6.0 / 4)
    assert flatten_dict(plain, sep="/").keys() == param_specs(TINY).keys()
    np.testing.assert_allclose(ours, logp(TINY, plain, batch.rows), atol=2e-5)
    assert np.abs(ours - logp(TINY, random_params(TINY), batch.rows)).max() > 0.1
    # eq. 3 of the paper, layer by layer: W x + scale B (A x)
    a, b = (np.float64(params["layers"][targets[-1] + end]) for end in (lora.A, lora.B))
    weight, a = np.float64(params["layers"][targets[-1]]), a.reshape(2, -1, 4)
    x = np.random.default_rng(0).normal(size=a.shape[1])
    for layer in range(TINY.num_layers):
        flat = weight[layer].reshape(len(x), -1)
        want = x @ flat + 1.5 * (x @ a[layer]) @ b[layer].reshape(4, -1)
        got = merged64(params, 1.5)[f"layers/{targets[-1]}"][layer].reshape(len(x), -1)
        np.testing.assert_allclose(x @ got, want, rtol=1e-12)


def test_at_birth_adapters_change_nothing(batch):
    mesh = mesh_of(2, 2)
    base = init_params(TINY, 0, param_shardings(TINY, mesh))
    params = completed(base, ADAPTED, 0, mesh)
    frozen = lora.divide(ADAPTED, params)[1]
    assert all(x is y for x, y in zip(*map(jax.tree.leaves, (base, frozen)), strict=True))
    flat = flatten_dict(params, sep="/")
    for name in LORA_TARGETS:
        a, b = (flat[f"layers/{name}{end}"] for end in (lora.A, lora.B))
        assert not b.any()
        inputs = np.prod(a.shape[1:-1])
        np.testing.assert_allclose(np.std(a), (3 * inputs) ** -0.5, rtol=0.15)
    np.testing.assert_array_equal(logp(ADAPTED, params, batch.rows), logp(TINY, base, batch.rows))


def test_gradients_are_those_of_the_merged_weights_by_the_chain_rule(batch):
    """dA = s dW B^T and dB = s A^T dW, for all weights of a model."""
    params, scale = random_params(ADAPTED), LORA.scale
    shape = UpdateShape(mesh_of(1, 1), 2, 14)

    def gradient(network, params):
        objective = policy_objective(network, AlgorithmConfig(), FORWARD, max_response=14)
        take = jax.jit(
            lambda p: accumulate_gradients(p, batch, ONE, shape=shape, objective=objective)[0]
        )
        return {k: np.float64(x) for k, x in flatten_dict(take(params), sep="/").items()}

    ours, whole = gradient(ADAPTED, params), gradient(TINY, lora.merged(params, scale))
    assert ours.keys() == {p for p in param_specs(ADAPTED) if lora.is_adapter(p)}
    flat = {path: np.float64(x) for path, x in flatten_dict(params, sep="/").items()}
    for name in LORA_TARGETS:
        path = f"layers/{name}"
        a, b = (flat[path + end] for end in (lora.A, lora.B))
        a2, b2 = a.reshape(2, -1, 4), b.reshape(2, 4, -1)
        d = whole[path].reshape(2, a2.shape[1], -1)
        for end, want in ((lora.A, d @ b2.transpose(0, 2, 1)), (lora.B, a2.transpose(0, 2, 1) @ d)):
            got = ours[path + end].reshape(want.shape)
            error = np.linalg.norm(got - scale * want) / np.linalg.norm(want)
            assert error < 1e-5, (name, end, error)


@pytest.mark.parametrize("axes", [(1, 1), (2, 2)])
def test_an_update_trains_nothing_else(batch, axes):
    mesh, optimizer = mesh_of(*axes), make_optimizer(OptimizerConfig(lr=1e-2), 1)
    params = jax.device_put(random_params(ADAPTED), param_shardings(ADAPTED, mesh))
    before = {path: np.array(x) for path, x in flatten_dict(params, sep="/").items()}
    state = init_state(params, ADAPTED, optimizer, mesh)
    adapters = sum(x.size for path, x in before.items() if lora.is_adapter(path))
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert sum(x.size for x in moments) == 2 * adapters
    objective = policy_objective(ADAPTED, AlgorithmConfig(), FORWARD, max_response=14)
    update = make_update(
        optimizer, lambda _: 1e-2, shape=UpdateShape(mesh, 2, 14), objective=objective
    )
    state, metrics = update(state, jax.tree.map(lambda x: x[None], batch), np.int32(0), ONE)
    assert metrics["actor/grad_norm"] > 0 and not metrics["training/nonfinite"]
    for path, x in flatten_dict(state.params, sep="/").items():
        changed = (np.asarray(x) != before[path]).any()
        assert changed == lora.is_adapter(path), path


def test_a_scalar_model_trains_its_head_too():
    network = adapted(scalar_model(TINY), LORA)
    trained = {path for path in param_specs(network) if lora.is_trained(network, path)}
    adapters = {f"trunk/layers/{name}{end}" for name in LORA_TARGETS for end in (lora.A, lora.B)}
    assert trained == adapters | {"head"}
    assert without_adapters(network) == scalar_model(TINY)
    params = random_params(network)
    parts = lora.divide(network, params)
    assert flatten_dict(lora.join(*parts), sep="/").keys() == flatten_dict(params, sep="/").keys()


def test_the_sampler_gets_merged_weights():
    mesh = mesh_of(4, 2)
    params = jax.device_put(random_params(ADAPTED), param_shardings(ADAPTED, mesh))
    local = mesh_of(4, 2, ("data", "tensor"))
    sync = WeightSync(
        param_shardings(TINY, replica_mesh(2)),
        local,
        "float32",
        prepare=lambda params: lora.merged(params, LORA.scale),
    )
    weights = flatten_dict(sync(params), sep="/")
    for path, want in merged64(params, LORA.scale).items():
        np.testing.assert_allclose(weights[path], want, atol=1e-6, err_msg=path)


# -- a run ---------------------------------------------------------------------------------

SPEC = "random:llama?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=512&max_position=256"


def train(folder, steps, *more):
    settings = [f"model.source={SPEC}", f"training.steps={steps}", "checkpoint.every=1"]
    settings += ["lora.rank=4", "lora.alpha=6", "dag=ppo", "rollout.max_response_length=8"]
    settings += ["data.max_prompt_length=96", "eval.dataset=", "algorithm.kl_coef=0.1"]
    settings += ["training.optimizer.lr=0.01", *more]
    config = tiny_config(*settings)
    assert run.train(config, folder) == 0


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """Two steps of PPO with adapters."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    train(folder, 2)
    return folder


@pytest.mark.slow
def test_a_run_that_goes_on_ends_where_an_undisturbed_one_does(workdir, tmp_path):
    for steps in (1, 2):
        train(tmp_path / "run", steps)
    ours, whole = (dict(run_export(f).export.params()) for f in (tmp_path / "run", workdir))
    for path, array in whole.items():
        np.testing.assert_array_equal(ours[path], array, err_msg=path)


@pytest.mark.slow
def test_a_run_with_adapters(workdir):
    rows = [row for row in read_metrics(workdir / "metrics.jsonl") if row["step"]]
    assert len(rows) == 2
    for row in rows:
        assert row["actor/grad_norm"] > 0 and row["critic/grad_norm"] > 0
        # the sampler had the trainer's weights: merged or not, the same log-probs
        assert row["training/rollout_probs_diff_max"] < 1e-5
    # the reference is what adapters are added to, and stays what it was
    assert rows[0]["actor/kl_loss"] < 1e-6 < 1e-5 < rows[1]["actor/kl_loss"]


@pytest.mark.slow
def test_its_weights_go_out_merged_and_its_adapters_as_pefts(workdir, tmp_path):
    found = run_export(workdir)
    base = open_model(SPEC).config
    assert found.export.network == base
    write_hf_folder(tmp_path / "merged", found.export)
    write_peft_folder(tmp_path / "adapter", found.adapters)
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == [
        "SHA256SUMS",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (settings["peft_type"], settings["r"], settings["lora_alpha"]) == ("LORA", 4, 6.0)
    modules = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert set(settings["target_modules"]) == modules
    adapter = safetensors.numpy.load_file(tmp_path / "adapter/adapter_model.safetensors")
    tensors = safetensors.numpy.load_file(tmp_path / "merged/model.safetensors")
    first = safetensors_of(init_params(base, 0, param_shardings(base, mesh_of(1, 1))), tmp_path)
    seen = set()
    for name, weight in tensors.items():
        module = "base_model.model." + name.removesuffix(".weight")
        a, b = (adapter.get(f"{module}.lora_{which}.weight") for which in "AB")
        if a is None:
            np.testing.assert_array_equal(weight, first[name])
            continue
        seen |= {f"{module}.lora_{which}.weight" for which in "AB"}
        assert a.shape == (4, weight.shape[1]) and b.shape == (weight.shape[0], 4)
        assert a.any() and b.any()
        np.testing.assert_allclose(weight, first[name] + 1.5 * b @ a, atol=1e-6, err_msg=name)
    assert seen == adapter.keys() and len(seen) == 2 * 7 * 2


@pytest.mark.slow
def test_the_script_writes_adapters(workdir, tmp_path):
    out = tmp_path / "adapter"
    flags = (f"--workdir={workdir}", "--adapter", f"--out={out}", "--dtype=bfloat16")
    done = finished("scripts/export.py", *flags)
    assert "wrote the adapters of actor of" in done.stdout and "as bfloat16" in done.stdout
    assert (out / "adapter_config.json").is_file()


def safetensors_of(params, folder):
    """The tensors of Hugging Face's form of these parameters."""
    source = open_model(SPEC)
    arrays = {path: np.asarray(x) for path, x in flatten_dict(params, sep="/").items()}
    export = Export(source.config, source.tokenizer, lambda: iter(arrays.items()))
    write_hf_folder(folder / "first", export)
    return safetensors.numpy.load_file(folder / "first/model.safetensors")


@pytest.mark.slow
def test_adapters_of_a_critic_are_not_written_alone(workdir, tmp_path):
    found = run_export(workdir, model="critic")
    assert dict(found.export.params()).keys() == param_specs(found.export.network).keys()
    with pytest.raises(ValueError, match="export it merged, without --adapter"):
        write_peft_folder(tmp_path / "out", found.adapters)


# -- mistakes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"targets": ("q_proj",)}, "lora.targets must be some of query, key, .* got .'q_proj',."),
        ({"targets": ()}, "lora.targets must be some of"),
        ({"targets": ("query", "query")}, "each once"),
    ],
)
def test_bad_settings_name_the_key(fields, message):
    with pytest.raises(ValueError, match=message):
        LoraConfig(4, **fields)


def test_a_rank_above_the_models_width():
    with pytest.raises(ValueError, match="lora.rank=65 must be from 1 to 64"):
        adapted(TINY, LoraConfig(65))
    assert adapted(TINY, LoraConfig(0)) == TINY == dataclasses.replace(TINY, lora=None)


@pytest.mark.slow
def test_a_run_does_not_go_on_with_another_scale(workdir):
    config = (workdir / "config.json").read_bytes()
    with pytest.raises(ValueError, match="lora.alpha was 6.0 and is 64.0. Use the config it was"):
        train(workdir, 3, "lora.alpha=64")
    assert (workdir / "config.json").read_bytes() == config
