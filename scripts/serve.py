"""Serves a model, or a run's trained weights, over gRPC: JetStream's protocol and a fuller one.

Examples:
  python scripts/serve.py --config=configs/grpo_smollm2.py
  python scripts/serve.py --config=configs/grpo_smollm2.py --run=runs/first --port=9001 \\
      --metrics_port=9101

docs/serving.md describes clients. SIGINT or SIGTERM ends the server: running requests have
--grace_seconds to finish, all others get UNAVAILABLE. There is no authentication: every client that
reaches the port can send requests, and make the server load the weights of any run that it can
read. The default host is reachable from this machine only.
"""

import asyncio
import dataclasses

from absl import flags
from ml_collections import config_flags

from distflow_jax.config.command_line import run_main
from distflow_jax.config.config_dict import from_config_dict
from distflow_jax.config.run_config import Config
from distflow_jax.models.weights.source import open_model
from distflow_jax.observe.memory import GIB, peak_memory_gb
from distflow_jax.programs.units import format_bytes
from distflow_jax.rollout.decode_state import EngineConfig
from distflow_jax.runtime.make_sampler import make_engine
from distflow_jax.runtime.standalone_sampler import answer_sizes, read_weights
from distflow_jax.serving.jetstream import GREEDY, door_config, prepare
from distflow_jax.serving.served_weights import Weights
from distflow_jax.serving.server import Server, ServerConfig, check_addresses, serve_until_signal

CONFIG = config_flags.DEFINE_config_file("config", None, "The run's configuration.")
RUN = flags.DEFINE_string("run", "", "Folder of a run: use its newest weights.")
HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; [::]: all addresses.")
PORT = flags.DEFINE_integer("port", 9000, "Port to listen on; 0: any free one.", 0, 65535)
METRICS_PORT = flags.DEFINE_integer(
    "metrics_port", 0, "Port of Prometheus metrics; 0: none.", 0, 65535
)
SLOTS = flags.DEFINE_integer(
    "slots", None, "Slots of the engine; empty: config.rollout.num_slots.", 1
)
MAX_SAMPLES = flags.DEFINE_integer("max_samples", 64, "Most responses to one request.", 1)
TEMPERATURE = flags.DEFINE_float(
    "temperature", 0.0, "Temperature of JetStream's Decode; 0: greedy.", 0.0
)
TOP_P = flags.DEFINE_float("top_p", 1.0, "Top-p of JetStream's Decode; 1: all tokens.", 0.0, 1.0)
GRACE_SECONDS = flags.DEFINE_float(
    "grace_seconds", 10.0, "Time for running requests to finish after SIGTERM.", 0.0
)
flags.mark_flag_as_required("config")


def main(argv: list[str]) -> int:
    """Loads the model and serves requests until a signal."""
    prepare()  # before jax logs its first line
    if SLOTS.value is not None:
        CONFIG.value.rollout.num_slots = SLOTS.value
    if TOP_P.value == 0:
        raise ValueError("--top_p must be above 0, got 0; use 1 for all tokens")
    config = from_config_dict(Config, CONFIG.value)
    served = ServerConfig(
        model=config.model.source,
        seed=config.seed,
        host=HOST.value,
        port=PORT.value,
        metrics_port=METRICS_PORT.value,
        default_response=config.rollout.max_response_length,
        max_samples=MAX_SAMPLES.value,
        grace_seconds=GRACE_SECONDS.value,
        jetstream=dataclasses.replace(GREEDY, temperature=TEMPERATURE.value, top_p=TOP_P.value),
    )
    check_addresses(served)  # before the model is loaded
    source = open_model(config.model.source, **config.model.options())
    params, step = read_weights(config, source, RUN.value)
    weights = Weights(params, step)
    engine = make_engine(source, config, answer_sizes(config, source, resumable))
    jetstream_engine = make_engine(source, config, answer_sizes(config, source, door_config))

    def load(path: str):
        return read_weights(config, source, path, weights.turns)

    server = Server(served, engine, jetstream_engine, weights, source.tokenizer, load)
    code = asyncio.run(serve_until_signal(server, print_ready))
    print("stopped", flush=True)
    return code


def resumable(sizes: EngineConfig) -> EngineConfig:
    """Lets any sequence be preempted, and resumed after a prefill of its prompt and response."""
    return dataclasses.replace(sizes, max_read=sizes.max_prompt + sizes.max_response)


def print_ready(server: Server) -> None:
    """Prints that the server is ready, with its model, address, sizes and memory."""
    config, sizes = server.config, server.engine.config
    metrics = f", metrics on http://{config.host}:{config.metrics_port}/metrics"
    print(
        f"ready: {config.model} (version {server.version}) on {config.host}:{server.port}, "
        f"{sizes.slots} slots for each of two protocols, prompt {sizes.max_prompt} + response "
        f"{sizes.max_response} tokens, peak memory {format_bytes(peak_memory_gb() * GIB)}"
        f"{metrics if config.metrics_port else ''}",
        flush=True,
    )


if __name__ == "__main__":
    run_main(main)
