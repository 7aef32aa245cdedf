"""The subcommand serve."""

import asyncio
import dataclasses
import logging
from types import SimpleNamespace

from distflow_jax.config.config_dict import from_config_dict
from distflow_jax.config.run_config import Config
from distflow_jax.images.placing import SeeingTokenizer
from distflow_jax.models.weights.source import ModelSource
from distflow_jax.observe.memory import GIB, peak_memory_gb
from distflow_jax.planning.plan_run import open_configured, settled_config
from distflow_jax.planning.run_data import prompt_encoder
from distflow_jax.programs.program_cache import kept_programs
from distflow_jax.programs.units import format_bytes
from distflow_jax.rollout.decode_state import EngineConfig
from distflow_jax.runtime.make_engine import make_engine
from distflow_jax.runtime.samplers.standalone_sampler import answer_sizes, read_weights
from distflow_jax.serving.access import Access, read_access
from distflow_jax.serving.messages import SERVICE
from distflow_jax.serving.served_weights import Weights
from distflow_jax.serving.server import Server, ServerConfig, check_addresses, serve_until_signal

try:
    from distflow_jax.serving import jetstream

    NO_JETSTREAM = ""
except ImportError as missing:
    if missing.name != "jetstream":
        raise
    NO_JETSTREAM = str(missing)

log = logging.getLogger("distflow_jax")


def main(options: SimpleNamespace) -> int:
    """Loads the model and serves requests until a signal."""
    if options.top_p == 0:
        raise ValueError("--top_p must be above 0, got 0; use 1 for all tokens")
    config = served_config(options)
    served = ServerConfig(
        model=config.model.source,
        seed=config.seed,
        host=options.host,
        port=options.port,
        metrics_port=options.metrics_port,
        default_response=config.rollout.max_response_length,
        max_samples=options.max_samples,
        grace_seconds=options.grace_seconds,
        access=_access(options),
    )
    check_addresses(served)  # before the model is loaded
    source = open_configured(config)
    with kept_programs(config.compilation_cache):
        code = _serve(served, config, source, options)
    print("stopped", flush=True)
    return code


def _serve(
    served: ServerConfig, config: Config, source: ModelSource, options: SimpleNamespace
) -> int:
    params, step = read_weights(config, source, options.run)
    weights = Weights(params, step)
    engine = make_engine(source, config, answer_sizes(config, source, resumable))
    others = []
    if NO_JETSTREAM:
        log.warning("JetStream's protocol is not served: %s", NO_JETSTREAM)
    else:
        sizes = answer_sizes(config, source, jetstream.service_config)
        sampling = dataclasses.replace(
            jetstream.GREEDY, temperature=options.temperature, top_p=options.top_p
        )
        beside = make_engine(source, config, sizes)
        others = [jetstream.JetStreamProtocol(beside, weights, source.tokenizer, sampling)]

    def load(path: str):
        return read_weights(config, source, path, weights.turns)

    encoder = prompt_encoder(source, config.data.image_tokens)
    seeing = encoder if isinstance(encoder, SeeingTokenizer) else None
    server = Server(served, engine, weights, source.tokenizer, load, others=others, seeing=seeing)
    return asyncio.run(serve_until_signal(server, print_ready))


def served_config(options: SimpleNamespace) -> Config:
    """The config with the settings of its graph; --slots has precedence, as --config.KEY has."""
    chosen = set(options.chosen)
    if options.slots is not None:
        options.config.rollout.num_slots = options.slots
        chosen.add("rollout.num_slots")
    return settled_config(from_config_dict(Config, options.config), chosen)


def _access(options: SimpleNamespace) -> Access:
    """The token and certificate of a server, and the folders that weights may come from."""
    access = read_access(
        options.token_file, options.tls_cert, options.tls_key, options.load_folders
    )
    if options.load_folders or not options.run:
        return access
    # the run that is served may go on, and so may its weights here
    return dataclasses.replace(access, load_folders=(options.run,))


def resumable(sizes: EngineConfig) -> EngineConfig:
    """Lets any sequence be preempted, and resumed after a prefill of its prompt and response.

    None waits for an environment: all slots decode.
    """
    longest = sizes.max_prompt + sizes.max_response
    return dataclasses.replace(sizes, slots=sizes.decode_slots, lanes=0, max_read=longest)


def print_ready(server: Server) -> None:
    """Prints that the server is ready, with its model, address, sizes and memory."""
    config, sizes = server.config, server.engine.config
    metrics = f", metrics on http://{config.host}:{config.metrics_port}/metrics"
    of = "each of two protocols" if server.others else SERVICE
    print(
        f"ready: {config.model} (version {server.version}) on {config.host}:{server.port},\n"
        f"  {sizes.slots} slots for {of}, prompt {sizes.max_prompt} + response "
        f"{sizes.max_response} tokens,\n  peak memory {format_bytes(peak_memory_gb() * GIB)}"
        f"{metrics if config.metrics_port else ''}",
        flush=True,
    )
