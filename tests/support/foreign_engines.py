"""Foreign engines over the tiny model, on this machine."""

import contextlib

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from distflow_jax.models.weights.source import open_model
from distflow_jax.parsing.http_call import HttpServer
from distflow_jax.rollout.foreign.foreign_scheduler import ForeignLimits, ForeignScheduler
from distflow_jax.rollout.foreign.openai_engine import OpenAIEngine, OpenAISettings
from distflow_jax.rollout.foreign.sampler_server_engine import SamplerServiceEngine
from distflow_jax.rollout.foreign.weight_folders import WeightFolders
from distflow_jax.serving.client import SamplerClient
from support.tiny_model import TINY
from support.tiny_sampler import TOKENIZER
from support.waiting import HANG

SEED = 3  # of all engines in tests


def limits_of(engine, **changes):
    return ForeignLimits(TINY.vocab_size, frozenset(engine.stop_ids), **changes)


def folders_in(place, model=TINY):
    return WeightFolders(place, model, TOKENIZER)


@contextlib.contextmanager
def openai_scheduler(server, params, place, *, version=0, limits=None, **settings):
    """A scheduler over a CompletionsServer."""
    settings = {"slots": 8, "try_seconds": HANG} | settings
    engine = OpenAIEngine(
        OpenAISettings(HttpServer(server.url), **settings),
        folders_in(place),
        stops=server.engine.stop_ids,
        seed=SEED,
    )
    with contextlib.closing(engine):
        limits = limits_of(server.engine, **(limits or {}))
        yield ForeignScheduler(engine, params, limits, version=version)


@contextlib.contextmanager
def sampler_scheduler(address, own, params, place, *, version=0, **changes):
    """A scheduler over a server of distflow.Sampler, whose engine is `own`."""
    client = SamplerClient(address)
    engine = SamplerServiceEngine(address, client, folders_in(place), try_seconds=HANG)
    with contextlib.closing(engine):
        yield ForeignScheduler(engine, params, limits_of(own, **changes), version=version)


def loaded_folder(engine, folder):
    """An engine's weights of an exported folder."""
    return engine.load_params(unflatten_dict(dict(open_model(folder).params()), sep="/"))


# -- weights that an engine makes of those it was given --------------------------------------------


def step_from(params, size, seed=7):
    """Weights some way from others, as after a training step."""
    draw = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: x + size * np.abs(x).mean() * draw.standard_normal(x.shape).astype(x.dtype),
        params,
    )


def half(given, held):
    """Every other leaf of what was given, in the order of their names."""
    (new, tree), (old, _) = jax.tree.flatten(given), jax.tree.flatten(held)
    pairs = enumerate(zip(new, old, strict=True))
    return tree.unflatten([a if place % 2 else b for place, (a, b) in pairs])


def old_head(given, held):
    """All that was given but the head, as of vLLM's CPU path."""
    return {**given, **{name: held[name] for name in given if "head" in name or "embed" in name}}


FAULTS = {
    "none": lambda given, held: held,
    "half": half,
    "an old head": old_head,
}
