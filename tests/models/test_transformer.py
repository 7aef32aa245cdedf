"""The decoder: parameters, layouts, rotary positions, and its answers against others' code."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.sharding import PartitionSpec
from support.paths import TESTS
from support.tiny_model import (
    TINY,
    mesh_of,
    mini_batch,
    prompt_of,
    random_params,
    rows_of,
    values_of,
)

from distflow_jax.batch import RowShape, Samples
from distflow_jax.data.step_columns import uid_column
from distflow_jax.models import rope
from distflow_jax.models.attention import masked_attention
from distflow_jax.models.decoder_config import DecoderConfig, Llama3Scaling
from distflow_jax.models.families.gguf_config import rope_divisors
from distflow_jax.models.parameters import (
    abstract_params,
    init_params,
    num_params,
    param_shardings,
    place_params,
)
from distflow_jax.models.transformer import Decoder, bind, params_of
from distflow_jax.parallel.rules import partition_spec, rows_spec, use_mesh
from distflow_jax.training.forward import ForwardConfig, packed_hidden

GOLDEN = TESTS / "golden" / "smollm2.json"
# what the golden model is not: untied, with scaled rotary positions
SCALING = Llama3Scaling(factor=8.0, original_max_position=64)
OTHER = DecoderConfig(
    vocab_size=40,
    hidden_size=32,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    mlp_size=48,
    rope_theta=500.0,
    rope_scaling=SCALING,
    tie_embeddings=False,
)


# -- parameters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_names_and_shapes(tied):
    config = DecoderConfig(
        vocab_size=11, hidden_size=6, num_layers=5, num_heads=4, num_kv_heads=2, head_dim=8,
        mlp_size=7, tie_embeddings=tied,
    )  # fmt: skip
    wanted = {
        "embed/embedding": (11, 6),
        "layers/attention_norm": (5, 6),
        "layers/query": (5, 6, 4, 8),
        "layers/key": (5, 6, 2, 8),
        "layers/value": (5, 6, 2, 8),
        "layers/output": (5, 4, 8, 6),
        "layers/mlp_norm": (5, 6),
        "layers/gate": (5, 6, 7),
        "layers/up": (5, 6, 7),
        "layers/down": (5, 7, 6),
        "final_norm": (6,),
    }
    if not tied:
        wanted["head"] = (6, 11)
    abstract = flatten_dict(abstract_params(config), sep="/")
    assert {path: x.shape for path, x in abstract.items()} == wanted
    assert {x.dtype for x in abstract.values()} == {jnp.dtype("float32")}
    assert num_params(config) == sum(int(np.prod(shape)) for shape in wanted.values())
    born = jax.eval_shape(lambda: params_of(Decoder(config, rngs=nnx.Rngs(0))))
    assert {path: x.shape for path, x in flatten_dict(born, sep="/").items()} == wanted
    given = random_params(config)
    bound = params_of(bind(config, given))
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, bound, given))


def test_values_at_birth_do_not_depend_on_the_mesh():
    trees = [
        init_params(TINY, 3, param_shardings(TINY, mesh_of(*axes))) for axes in ((1, 1), (4, 2))
    ]
    one, eight = (flatten_dict(tree, sep="/") for tree in trees)
    for path, value in one.items():
        np.testing.assert_array_equal(value, eight[path], err_msg=path)
    assert len(eight["layers/query"].sharding.device_set) == 8
    assert eight["layers/query"].addressable_shards[0].data.shape == (2, 16, 2, 16)
    for path, value in one.items():  # and no two parameters are alike
        deviation = np.std(value, axis=tuple(range(1, value.ndim))).min()
        assert deviation == 0 if "norm" in path else 0.005 < deviation < 0.025, path
    assert not np.array_equal(one["layers/key"], one["layers/value"])


def test_place_params_puts_every_shard_in_its_place():
    arrays = flatten_dict(random_params(TINY), sep="/")
    shardings = param_shardings(TINY, mesh_of(2, 4))
    placed = flatten_dict(place_params(TINY, arrays.items(), shardings), sep="/")
    for path, value in arrays.items():
        np.testing.assert_array_equal(placed[path], value)
    with pytest.raises(ValueError, match="lack the parameters .*final_norm"):
        place_params(TINY, [x for x in arrays.items() if x[0] != "final_norm"], shardings)
    with pytest.raises(ValueError, match=r"final_norm have shape \(3,\), expected \(64,\)"):
        place_params(TINY, [("final_norm", np.zeros(3))], shardings)


# -- layouts ---------------------------------------------------------------------------------------


def test_few_key_value_heads_are_copied():
    axes, shape = ("layers", "hidden", "kv_heads", "head_dim"), (2, 64, 2, 16)
    assert partition_spec(mesh_of(2, 4), axes, shape) == PartitionSpec(None, "fsdp", None, None)
    assert partition_spec(mesh_of(4, 2), axes, shape) == PartitionSpec(None, "fsdp", "tensor", None)
    query = param_shardings(TINY, mesh_of(2, 4))["layers"]["query"]
    assert query.spec == PartitionSpec(None, "fsdp", "tensor", None)


def test_copies_of_parameters_and_rows_over_all_ranks():
    mesh = mesh_of(2, 2, data=2)
    query = param_shardings(TINY, mesh)["layers"]["query"]
    assert query.spec == PartitionSpec(None, "fsdp", "tensor", None)
    rows = ("data", "fsdp")
    assert partition_spec(mesh, ("batch", "length"), (8, 5)) == PartitionSpec(rows, None)
    assert rows_spec(mesh) == PartitionSpec(None, rows)
    assert rows_spec(mesh_of(4, 2)) == PartitionSpec(None, "fsdp")
    # a lone prompt is read by every rank alike; packed rows are a multiple of the ranks
    assert partition_spec(mesh, ("batch", "length"), (2, 5)) == PartitionSpec(None, None)
    message = r"mesh axes data=2 x fsdp=2 do not divide rows=6; use a product of 3 \(or any of"
    with pytest.raises(ValueError, match=message):
        partition_spec(mesh, ("rows", "length"), (6, 5))
    sampler = mesh_of(4, 2, names=("data", "tensor"))
    assert partition_spec(sampler, ("batch", "heads"), (8, 4)) == PartitionSpec("data", "tensor")


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ((1, 3), "mesh axis tensor=3 does not divide .*=.*; use tensor="),
        ((1, 8), "mesh axis tensor=8 does not divide heads=4; use tensor=4"),
        ((5, 1), "mesh axis fsdp=5 does not divide embedding=64; use fsdp=4"),
    ],
)
def test_sizes_that_do_not_divide_are_named(axes, message):
    with pytest.raises(ValueError, match=message):
        param_shardings(TINY, mesh_of(*axes))


# -- rotary positions ------------------------------------------------------------------------------


def llama3_frequencies(theta, head_dim, scaling):
    """Band by band, as the released Llama 3.1 code has it."""
    out = []
    for i in range(head_dim // 2):
        f = theta ** (-2 * i / head_dim)
        wavelength = 2 * np.pi / f
        if wavelength > scaling.original_max_position / scaling.low_freq_factor:
            f = f / scaling.factor
        elif wavelength > scaling.original_max_position / scaling.high_freq_factor:
            smooth = scaling.original_max_position / wavelength - scaling.low_freq_factor
            smooth /= scaling.high_freq_factor - scaling.low_freq_factor
            f = (1 - smooth) * f / scaling.factor + smooth * f
        out.append(f)
    return np.array(out)


@pytest.mark.parametrize("scaling", [Llama3Scaling(), Llama3Scaling(32.0), SCALING])
@pytest.mark.parametrize("theta", [500.0, 500_000.0])
def test_scaled_frequencies(scaling, theta):
    got = rope.inverse_frequencies(64, theta, scaling)
    plain = rope.inverse_frequencies(64, theta)
    np.testing.assert_allclose(got, llama3_frequencies(theta, 64, scaling), rtol=1e-6)
    # and the reader of GGUF's rope_freqs goes by the same rule
    np.testing.assert_allclose(plain / got, rope_divisors(scaling, theta, 32), rtol=1e-6)
    if theta > 1000:
        assert got[0] == plain[0] and np.isclose(got[-1] * scaling.factor, plain[-1])


def test_rotation_turns_by_position_and_keeps_products():
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(1, 1, 1, 16)).astype(np.float32) for _ in range(2))
    frequencies = rope.inverse_frequencies(16, 100.0)

    def at(x, position):
        return np.asarray(rope.rotate(x, rope.rotary_tables(jnp.array([[position]]), frequencies)))

    np.testing.assert_array_equal(at(q, 0), q)
    np.testing.assert_allclose(np.linalg.norm(at(q, 9)), np.linalg.norm(q), rtol=1e-6)
    # only the distance matters
    near, far = (np.sum(at(q, t + 5) * at(k, t)) for t in (0, 40))
    np.testing.assert_allclose(near, far, rtol=1e-4, atol=1e-4)
    assert abs(near - np.sum(at(q, 6) * at(k, 0))) > 1e-3
    # split-half form: element i turns with element i + H/2
    unit = np.zeros((1, 1, 1, 16), np.float32)
    unit[..., 0] = 1
    turned = at(unit, 1)[0, 0, 0]
    np.testing.assert_allclose(turned[[0, 8]], [np.cos(1), np.sin(1)], rtol=1e-6)


# -- answers ---------------------------------------------------------------------------------------


def numpy_logits(config, params, tokens):
    """The network in float64 NumPy, one token and one head at a time: [T, V]."""
    p = {path: np.asarray(x, np.float64) for path, x in flatten_dict(params, sep="/").items()}
    half, groups = config.head_dim // 2, config.num_heads // config.num_kv_heads
    frequencies = llama3_frequencies(config.rope_theta, config.head_dim, config.rope_scaling)

    def norm(x, scale):
        return x / np.sqrt(np.mean(x**2) + config.norm_eps) * scale

    def rotated(x, position):
        pairs = (x[:half] + 1j * x[half:]) * np.exp(1j * position * frequencies)
        return np.concatenate([pairs.real, pairs.imag])

    x = [p["embed/embedding"][token] for token in tokens]
    for layer in range(config.num_layers):
        w = {path[7:]: v[layer] for path, v in p.items() if path.startswith("layers/")}
        h = [norm(v, w["attention_norm"]) for v in x]
        for head in range(config.num_heads):
            own = head // groups
            q = [rotated(v @ w["query"][:, head], t) for t, v in enumerate(h)]
            k = [rotated(v @ w["key"][:, own], t) for t, v in enumerate(h)]
            values = [v @ w["value"][:, own] for v in h]
            for t in range(len(x)):
                score = np.array([q[t] @ k[s] for s in range(t + 1)]) / config.head_dim**0.5
                weight = np.exp(score - score.max())
                mix = sum(a * v for a, v in zip(weight / weight.sum(), values, strict=False))
                x[t] = x[t] + mix @ w["output"][head]
        for t in range(len(x)):
            v = norm(x[t], w["mlp_norm"])
            gate = v @ w["gate"]
            x[t] = x[t] + (gate / (1 + np.exp(-gate)) * (v @ w["up"])) @ w["down"]
    return np.stack([norm(v, p["final_norm"]) @ p["head"] for v in x])


def jax_logits(config, params, tokens, mesh):
    """The same through the decoder, [T, V]."""
    length = len(tokens)
    causal = jnp.tril(jnp.ones((1, length, length), bool))

    @jax.jit
    def run(params):
        with use_mesh(mesh):
            decoder = bind(config, params)
            hidden, _ = decoder.hidden(
                tokens[None],
                jnp.arange(length, dtype=jnp.int32)[None],
                lambda q, k, v, _: (masked_attention(q, k, v, causal), None),
            )
            return jnp.einsum("TD,VD->TV", hidden[0], decoder.head_weight())

    return np.asarray(run(jax.device_put(params, param_shardings(config, mesh))))


def test_logits_match_plain_numpy():
    params = random_params(OTHER, 5)
    tokens = np.random.default_rng(6).integers(0, OTHER.vocab_size, 20).astype(np.int32)
    expected = numpy_logits(OTHER, params, tokens)
    assert expected.std() > 0.3
    for axes in ((1, 1), (4, 2)):
        got = jax_logits(OTHER, params, tokens, mesh_of(*axes))
        np.testing.assert_allclose(got, expected, atol=1e-4)


def test_answers_as_transformers_does(smollm2):
    """Greedy tokens and log-probs of the real model, all prompts in one packed forward pass.

    1e-3 is some ten times what two float32 implementations of 30 layers differ by.
    """
    entries = json.loads(GOLDEN.read_text())["entries"]
    assert len(entries) >= 10
    prompts = [prompt_of(i, entry["prompt_ids"]) for i, entry in enumerate(entries)]
    answers = [np.array(entry["tokens"], np.int32) for entry in entries]
    masks = [np.ones(len(a), bool) for a in answers]
    samples = Samples(prompts, uid_column(prompts, 1), answers, masks)
    rows, placement = rows_of(samples, RowShape(1, 4, 256, 14), shared=False)
    place = np.argwhere(rows.response_mask[0])
    model, mesh = smollm2.config, mesh_of(1, 1)

    @jax.jit
    def run(params, rows):
        hidden, weight = packed_hidden(params, model, rows, ForwardConfig())
        row, column = place.T
        logits = hidden[row, rows.previous[row, column]] @ weight.T
        chosen = jnp.take_along_axis(logits, rows.tokens[row, column][:, None], axis=1)[:, 0]
        logp = chosen - jax.nn.logsumexp(logits, axis=-1)
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        out = jnp.zeros(rows.tokens.shape, jnp.float32).at[row, column].set(logp)
        return out, jnp.zeros(rows.tokens.shape, jnp.int32).at[row, column].set(best)

    params = place_params(model, smollm2.params(), param_shardings(model, mesh))
    logp, best = (np.asarray(x)[None] for x in run(params, mini_batch(rows)))
    for entry, mine, chosen in zip(
        entries,
        values_of(samples, placement, logp),
        values_of(samples, placement, best),
        strict=True,
    ):
        assert chosen.tolist() == entry["tokens"], entry["prompt"]
        assert np.abs(mine - entry["logp"]).max() <= 1e-3, entry["prompt"]
