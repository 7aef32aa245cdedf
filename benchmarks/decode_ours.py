"""Our side of benchmarks/decode.py: the engine, and the machine's ceilings measured next to it.

B slots, D hidden, N heads, K key/value heads, H head dim, F mlp, V vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh
from peers.decode_turns import Case, Decoder, clocked, serve

from distflow_jax.batch import Prompt
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.matmul_layouts import by_output
from distflow_jax.models.parameters import param_shardings, param_specs
from distflow_jax.models.weights.load_params import load_or_init_params
from distflow_jax.models.weights.source import open_model
from distflow_jax.observe.compilations import Compilations
from distflow_jax.observe.memory import peak_memory_gb
from distflow_jax.rollout.engine.engine import EngineConfig, RolloutEngine
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.scheduling.scheduler import run_requests

MEASURED_SECONDS = 0.5  # per measurement of a ceiling
COPIED_BYTES = {"cpu": 256 << 20, "gpu": 1 << 30, "tpu": 1 << 30}  # beyond every cache


def random_params(config: DecoderConfig, dtype: str, mesh: Mesh) -> dict[str, Any]:
    """Parameters drawn on the device in their final dtype, so that nothing larger is allocated."""
    layout, placed = flatten_dict(param_shardings(config, mesh), sep="/"), {}
    for index, (path, spec) in enumerate(param_specs(config).items()):

        @functools.partial(jax.jit, out_shardings=layout[path])
        def make(key, spec=spec):
            if spec.stddev is None:
                return jnp.ones(spec.shape, dtype)
            return jax.random.normal(key, spec.shape, dtype) * jnp.asarray(spec.stddev, dtype)

        placed[path] = make(jax.random.fold_in(jax.random.key(0), index))
    return unflatten_dict(placed, sep="/")


# -- ceilings of the machine --------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=3)
def product_chain(
    params: dict[str, Any],
    x_BD: jax.Array,
    steps: jax.Array,
    product: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Runs only the matrix products of `steps` decode steps, one after another.

    Each product depends on the previous one, by additions that are elementwise over [B, D].
    `params["layers"]` is a list: a scan over stacked layers copies each layer's weights before it
    multiplies, which on CPU costs 1.6 times the CPU-seconds at batch 16.
    """

    def layer(x, w):
        q = product(x, w["query"])
        kv = product(x, w["key"]) + product(x, w["value"])
        q = q + jnp.tile(kv, (1, q.shape[1] // kv.shape[1]))
        x = x + product(q, w["output"])
        x = x + product(product(x, w["gate"]) * product(x, w["up"]), w["down"])
        size = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(size + jnp.asarray(1e-6, x.dtype))

    def step(_, x):
        for weights in params["layers"]:
            x = layer(x, weights)
        logits = product(x, params["table"])
        return x + jnp.tanh(jnp.max(logits, axis=-1, keepdims=True)).astype(x.dtype)

    return jax.lax.fori_loop(0, steps, step, x_BD)


@functools.partial(jax.jit, static_argnums=1)
def matrices(params: dict[str, Any], turned: bool) -> dict[str, Any]:
    """Stacked parameters as a list of matrices per layer: [inputs, outputs], or `turned`."""
    width = params["embed"]["embedding"].shape[1]

    def matrix(name, x):
        x = x.reshape(-1, width) if name in ("output", "down") else x.reshape(width, -1)
        return x.T if turned else x

    vectors = ("norm", "bias")
    products = {name: x for name, x in params["layers"].items() if not name.endswith(vectors)}
    count = len(products["query"])
    layers = [{name: matrix(name, x[i]) for name, x in products.items()} for i in range(count)]
    table = params["head"] if "head" in params else params["embed"]["embedding"].T
    return {"layers": layers, "table": table.T if turned else table}


@functools.partial(jax.jit, donate_argnums=0)
def copy_chain(buffer: jax.Array, steps: jax.Array) -> jax.Array:
    """Reads and writes the buffer `steps` times."""
    return jax.lax.fori_loop(0, steps, lambda _, x: x + jnp.ones((), x.dtype), buffer)


class Ceilings:
    """Rates of the model's products alone, and of copying memory.

    Products are computed as x @ w with weights [inputs, outputs], and "turned", with the weights on
    the left as in our sampler on CPUs. The faster form depends on the platform.
    """

    def __init__(self, params: dict[str, Any], slots: int):
        embedding = params["embed"]["embedding"]
        device = jax.local_devices()[0]
        self._params, self._slots = params, slots
        x = np.random.default_rng(0).standard_normal((slots, embedding.shape[1]), np.float32)
        self._x = jax.device_put(x.astype(embedding.dtype), device)
        self._count = COPIED_BYTES[device.platform] // 4
        self._held: Any = None
        self._ways = {
            "products": (functools.partial(matrices, params, False), self._plain),
            "turned_products": (functools.partial(matrices, params, True), self._turned),
            "copies": (lambda: jnp.zeros(self._count, jnp.float32), self._copies),
        }
        self._steps = dict.fromkeys(self._ways, 1)
        for name, (make, run) in self._ways.items():
            self._held = make()
            run()  # compiles
            while (seconds := clocked(run)[1]) < MEASURED_SECONDS / 4:
                self._steps[name] *= 2
            self._steps[name] = max(1, round(self._steps[name] * MEASURED_SECONDS / seconds))
        self._held = None  # not needed while the engine decodes

    def _plain(self) -> None:
        self._multiply("products", jnp.matmul)

    def _turned(self) -> None:
        self._multiply("turned_products", by_output)

    def _multiply(self, name: str, product: Callable[..., jax.Array]) -> None:
        steps = np.int32(self._steps[name])
        product_chain(self._held, self._x, steps, product).block_until_ready()

    def _copies(self) -> None:
        self._held = copy_chain(self._held, np.int32(self._steps["copies"]))
        self._held.block_until_ready()

    def measure(self) -> dict[str, float]:
        """Tokens/s of the products at this batch, and bytes/s of a copy, read plus written."""
        seconds = {}
        for name, (make, run) in self._ways.items():
            self._held = jax.block_until_ready(make())
            seconds[name] = clocked(run)[1] / self._steps[name]
            self._held = None
        return {
            "products_tokens_per_s": self._slots / seconds["products"],
            "turned_products_tokens_per_s": self._slots / seconds["turned_products"],
            "copy_bytes_per_s": 2 * 4 * self._count / seconds["copies"],
        }


def least_bytes(config: DecoderConfig, params: dict[str, Any], case: Case) -> float:
    """Bytes that the decode steps of a round must read: the weights, and each slot's used cache.

    For a case whose responses all run at once with one length n: n - 1 steps, the i-th over
    prompt + i tokens. A prompt that several slots share counts for each of them.
    """
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    if not config.tie_embeddings:
        weights -= params["embed"]["embedding"].nbytes  # a lookup reads B rows of it
    itemsize = params["embed"]["embedding"].dtype.itemsize
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize
    steps = case.limits[0] - 1
    cached = steps * case.prompt_length + steps * (steps - 1) / 2
    return steps * weights + case.responses * per_token * cached


# -- the engine ----------------------------------------------------------------------------------


class Engine:
    """An engine of a case's sizes, driven by run_requests."""

    def __init__(
        self,
        model: DecoderConfig,
        params: dict[str, Any],
        options: dict[str, Any],
        compilations: Compilations,
        mesh: Mesh,
        case: Case,
    ):
        self.case, self.model, self.compilations = case, model, compilations
        response = max(max(case.limits), case.capacity - case.prompt_length)
        config = EngineConfig(
            slots=case.slots,
            max_prompt=case.prompt_length,
            max_response=response,
            tokens_per_call=options["tokens_per_call"],
            page_size=options["page_size"],
            group_size=case.samples,
            dtype=options["dtype"],
        )
        self.engine = RolloutEngine(model, config, mesh, stop_ids=(), seed=0)
        self.given, self.params = params, self.engine.load_params(params)
        self.engine.compile(self.params)
        self.state = self.engine.init_decode_state()
        self.device_peak_gb = 0.0
        self.ceilings: Ceilings | None = None

    def warm_up(self, ids: np.ndarray) -> None:
        """Runs all programs that `compile` has compiled, and then prepares the ceilings."""
        self.decode(ids, tuple(min(limit, 4) for limit in self.case.limits))
        self.device_peak_gb = peak_memory_gb()
        self.ceilings = Ceilings(self.given, self.case.slots)

    def decode(self, ids: np.ndarray, limits: tuple[int, ...]) -> int:
        """Submits all requests at once; a free slot is refilled."""
        n = self.case.samples
        requests = []
        for i, row in enumerate(ids):
            (limit,) = set(limits[i * n : (i + 1) * n])  # one limit for all samples of a request
            # in the given order, as if the lengths were unknown
            place = float(len(ids) - i)
            prompt = Prompt(i, i, row, "", "random", "", {}, expected_length=place)
            requests.append(GroupRequest(prompt, SamplingParams(n, limit)))
        self.state, responses, _ = run_requests(self.engine, self.params, self.state, requests)
        assert [len(r.tokens) for r in responses] == list(limits)
        return sum(len(r.tokens) for r in responses)

    def measures(self) -> dict[str, Any]:
        """Ceilings, bytes that decode must read, and compilations since the last call."""
        record: dict[str, Any] = {"compilations": self.compilations.take()}
        record |= self.ceilings.measure()
        if self.case.fixed:
            record["least_bytes"] = least_bytes(self.model, self.given, self.case)
        return record

    def peak_gb(self) -> float:
        """Peak memory: of this process on CPU, otherwise of the device before the ceilings ran.

        A device's peak cannot be reset. Sizes are static: few tokens need as much memory as many.
        """
        cpu = jax.default_backend() == "cpu"
        return peak_memory_gb() if cpu else self.device_peak_gb


def open_side(options: dict[str, Any]) -> Callable[[Case], Decoder]:
    """Loads the weights on the first device. Raises ValueError if the platform is not available."""
    if options["platform"] == "cpu":
        jax.config.update("jax_platforms", "cpu")
    if jax.default_backend() != options["platform"]:
        raise ValueError(
            f"--platform={options['platform']}, but JAX finds {jax.default_backend()}: install its "
            "JAX wheel for that platform, or choose another --platform"
        )
    mesh = Mesh(np.array(jax.local_devices()[:1], dtype=object).reshape(1, 1), ("data", "tensor"))
    if options["model"]:
        source = open_model(options["model"])
        model, params = source.config, load_or_init_params(source, 0, mesh)
    else:
        shape = {name: v for name, v in options["shape"].items() if name != "rope_scaling"}
        model = DecoderConfig(**shape)
        params = random_params(model, options["dtype"], mesh)
    compilations = Compilations()
    return lambda case: Engine(model, params, options, compilations, mesh, case)


if __name__ == "__main__":
    serve(open_side)
