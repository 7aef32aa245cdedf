"""Comparison of a device with the CPU of its machine: the trainer's numbers, and sampled tokens.

Float32 uses the most exact products of the device, so that differences are rounding only. bfloat16
runs as in training, with the attention that is named. Both are compared with float32 on the CPU.
"""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device.decode import Sampler
from device.work import random_sequences
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distflow_jax.batch import Placement, RowShape, to_rows
from distflow_jax.config.algorithm_config import AlgorithmConfig
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.parameters import param_specs
from distflow_jax.parallel.rules import use_mesh
from distflow_jax.rollout.engine.engine import EngineConfig
from distflow_jax.rollout.requests import Response
from distflow_jax.training.attention_choice import AttentionSizes, row_attention
from distflow_jax.training.forward import ForwardConfig, response_logp
from distflow_jax.training.objectives.policy_objective import PolicyBatch, policy_objective

MODEL = DecoderConfig(
    vocab_size=512,
    hidden_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    mlp_size=256,
    tie_embeddings=False,
)
# Largest errors of log-probs, of the loss, of the gradient (relative to its norm), and of perturbed
# logits: the CPU's lead of its own token where the device draws another one. Float32: sums in
# another order. bfloat16 has 8 bits: the errors of a CPU in bfloat16 are 0.1, 2e-6, 0.02, 0.07.
TOLERANCES = {
    "float32": {"logp": 1e-3, "loss": 1e-4, "gradient": 1e-3, "margin": 1e-3},
    "bfloat16": {"logp": 0.25, "loss": 1e-3, "gradient": 0.06, "margin": 0.25},
}
# with entropy, since with one update per batch the policy loss does not depend on the parameters
ALGORITHM = AlgorithmConfig(entropy_coef=0.1)
_ROWS, _LENGTH, _SAMPLES, _PROMPT = 2, 512, 4, 100
_RESPONSE = 40  # sampled tokens
_TEMPERATURES = (0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One compared number."""

    what: str
    error: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether the error is within the tolerance; False for NaN."""
        return self.error <= self.tolerance

    def __str__(self) -> str:
        decision = "ok" if self.holds else "WRONG"
        return f"{decision:5s} {self.what}: {self.error:.2g}, at most {self.tolerance:.2g}"


def check(
    device: jax.Device, attention: str = "auto", decode_attention: str = "auto"
) -> list[Comparison]:
    """All comparisons of a device with this machine's CPU.

    The names are for bfloat16 on the device; what float32 takes is left to auto.
    """
    host = jax.devices("cpu")[0]
    params = _params()
    trained, sampled = _trainer(host, params, "float32"), _sampler(host, params, "float32")
    found = []
    for dtype, tolerances in TOLERANCES.items():
        rows, decode = (attention, decode_attention) if dtype == "bfloat16" else ("auto", "auto")
        errors = _errors(_trainer(device, params, dtype, rows), trained)
        errors |= _token_errors(_sampler(device, params, dtype, decode), sampled)
        for name, error in errors.items():
            kind = name.split()[0]
            found.append(Comparison(f"{dtype} {name}", error, tolerances[kind]))
    return found


def _params() -> dict[str, Any]:
    """Float32 NumPy parameters, larger than at initialisation, so that predictions are sharp."""
    rng, flat = np.random.default_rng(0), {}
    for path, spec in param_specs(MODEL).items():
        noise = rng.standard_normal(spec.shape, np.float32)
        flat[path] = 1 + 0.2 * noise if spec.stddev is None else 0.1 * noise
    return unflatten_dict(flat, sep="/")


def _exact(dtype: str) -> contextlib.AbstractContextManager:
    """Computes float32 products in float32, which is not the default on GPUs and TPUs."""
    exact = jax.default_matmul_precision("highest")
    return exact if dtype == "float32" else contextlib.nullcontext()


# -- the trainer ---------------------------------------------------------------------------------


def _batch() -> PolicyBatch:
    """Rows of two prompts each, whose responses share them; advantages are random."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(8, 36, (2 * _ROWS, _SAMPLES))
    sequences = random_sequences(rng, MODEL.vocab_size, _PROMPT, lengths)
    per_row = 2 * _SAMPLES
    at = tuple(tuple(range(i, i + per_row)) for i in range(0, lengths.size, per_row))
    placement = Placement(RowShape(1, _ROWS, _LENGTH, per_row), (at,), True)
    rows = jax.tree.map(lambda x: x[0], to_rows(sequences, placement))
    advantage = np.where(rows.response_mask, rng.normal(size=rows.tokens.shape), 0)
    return PolicyBatch(rows, advantage.astype(np.float32), None, None, None)


def _trainer(
    device: jax.Device, params: Any, dtype: str, attention: str = "auto"
) -> dict[str, Any]:
    """Log-probs [R, L], loss and gradient of the policy's objective on a device, as NumPy."""
    group = MODEL.num_heads // MODEL.num_kv_heads
    shared = frozenset({"shared prompts"})
    sizes = AttentionSizes(_LENGTH, _LENGTH, _ROWS, group, MODEL.head_dim, dtype, features=shared)
    chosen = row_attention(attention, device.platform, sizes)
    forward = ForwardConfig(
        dtype, 128, "none", attention_block=chosen.block, attention_by=chosen.by
    )
    objective = policy_objective(MODEL, ALGORITHM, forward, max_response=_LENGTH)

    def run(params, batch):
        batch, denominators = objective.whole(batch)
        temperature = jnp.float32(1)

        def loss(params):
            return objective.evaluate(params, batch, denominators, temperature)[0]

        value, gradient = jax.value_and_grad(loss)(params)
        logp, _ = response_logp(params, MODEL, batch.rows, temperature, forward)
        return {"logp": logp, "loss": value, "gradient": gradient}

    mesh = Mesh(np.array([[device]], dtype=object), ("fsdp", "tensor"))
    whole = NamedSharding(mesh, PartitionSpec())
    with _exact(dtype), jax.default_device(device), use_mesh(mesh):
        return jax.device_get(jax.jit(run)(*jax.device_put((params, _batch()), whole)))


def _errors(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, float]:
    def flat(tree):
        return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]).astype(np.float64)

    gradients = flat(found["gradient"]), flat(wanted["gradient"])
    return {
        "logp": float(np.abs(found["logp"] - wanted["logp"]).max()),
        "loss": float(abs(found["loss"] - wanted["loss"])),
        "gradient": float(
            np.linalg.norm(gradients[0] - gradients[1]) / np.linalg.norm(gradients[1])
        ),
    }


# -- the sampler ---------------------------------------------------------------------------------


def _sampler(
    device: jax.Device, params: Any, dtype: str, attention: str = "auto"
) -> dict[float, list[Response]]:
    """Responses by temperature: several to each of some prompts, over several pages."""
    mesh = Mesh(np.array([[device]], dtype=object), ("data", "tensor"))
    config = EngineConfig(
        slots=4 * _SAMPLES,
        max_prompt=_PROMPT,
        max_response=_RESPONSE,
        tokens_per_call=8,
        page_size=16 if device.platform != "tpu" else 128,
        group_size=_SAMPLES,
        dtype=dtype,
        attention=attention,
    )
    with _exact(dtype), jax.default_device(device):
        sampler = Sampler(MODEL, config, mesh, jax.device_put(params, device))
        return {t: sampler.sample(2, _RESPONSE, t) for t in _TEMPERATURES}


def _token_errors(
    found: dict[float, list[Response]], wanted: dict[float, list[Response]]
) -> dict[str, float]:
    """The CPU's lead of its own tokens where others were drawn, and errors of log-probs before
    that; tokens after it have other distributions."""
    errors = {}
    for temperature, theirs in wanted.items():
        margins, logps = [0.0], [0.0]
        for mine, own in zip(found[temperature], theirs, strict=True):
            same = np.cumprod(mine.tokens == own.tokens).sum()
            margins += own.margin[same : same + 1].tolist()
            logps += np.abs(mine.logp[:same] - own.logp[:same]).tolist()
        name = "at temperature 0" if temperature == 0 else "of sampled tokens"
        errors[f"margin {name}"] = max(margins)
        if temperature:
            errors[f"logp {name}"] = max(logps)
    return errors
