"""Foreign engines over the tiny model, on this machine."""

import contextlib

from flax.traverse_util import unflatten_dict

from distflow_jax.models.weights.source import open_model
from distflow_jax.rollout.foreign.foreign_scheduler import ForeignLimits, ForeignScheduler
from distflow_jax.rollout.foreign.http_call import HttpServer
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


def folders_in(place):
    return WeightFolders(place, TINY, TOKENIZER)


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
