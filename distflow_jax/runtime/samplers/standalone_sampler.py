"""A model that answers, without training: for scripts/evaluate.py, generate.py and serve.py."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from distflow_jax.checkpoint.trained_weights import read_trained
from distflow_jax.config.run_config import Config
from distflow_jax.models.parameters import param_specs
from distflow_jax.models.weights.load_params import load_or_init_params
from distflow_jax.models.weights.source import ModelSource, open_model
from distflow_jax.parallel import mesh as mesh_lib
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.sizes import Sizes, derive_sizes
from distflow_jax.rollout.decode_state import EngineConfig
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.sampler import SamplerState
from distflow_jax.runtime.make_engine import make_engine, make_sync


@dataclasses.dataclass
class Answerer:
    """An engine with weights, ready to answer."""

    source: ModelSource
    engine: RolloutEngine
    state: SamplerState
    step: int  # training step of the weights; 0: the source's own


def open_answerer(config: Config, source: ModelSource, run: str = "") -> Answerer:
    """The model of `source`, with the newest checkpoint's weights of the run in folder `run`.

    Raises FileNotFoundError if that folder holds no checkpoint.
    """
    weights, step = read_weights(config, source, run)
    engine = make_engine(source, config, answer_sizes(config, source))
    return Answerer(source, engine, SamplerState(weights, step, engine.init_decode_state()), step)


def answer_sizes(
    config: Config,
    source: ModelSource,
    change: Callable[[EngineConfig], EngineConfig] = lambda engine: engine,
) -> Sizes:
    """The config's sizes on this machine, for a sampler that nothing trains on.

    It records no experts, whatever the config. `change` may alter the engine's sizes.
    """
    sizes = derive_sizes(config, source.config, Machine.current())
    engine = dataclasses.replace(sizes.engine, record_experts=False)
    return dataclasses.replace(sizes, engine=change(engine))


def read_weights(
    config: Config,
    source: ModelSource,
    run: str = "",
    turn: contextlib.AbstractContextManager | None = None,
) -> tuple[Any, int]:
    """(weights in the sampler's layout and dtype, training step) of `source`, or of `run`.

    `run` is the folder of a run (its newest checkpoint), RUN/checkpoints/STEP, or a model folder as
    scripts/export.py writes it, of step 0. A run's policy is the actor, or the only one. `turn` is
    held around the program that reshards: where others run programs on these devices meanwhile, all
    devices must get them in one order. FileNotFoundError if there is no such checkpoint, ValueError
    if it is of another model.
    """
    sizes = derive_sizes(config, source.config, Machine.current())
    mesh = mesh_lib.role_mesh(sizes.mesh)
    step = 0
    if run and is_export(pathlib.Path(run)):
        params = load_or_init_params(_same_model(run, source), config.seed, mesh)
    elif run:
        step, params = read_trained(pathlib.Path(run), "", source.config, mesh)
    else:
        params = load_or_init_params(source, config.seed, mesh)
    with turn or contextlib.nullcontext():
        weights = make_sync(source, config, sizes)(params)
        return jax.block_until_ready(weights), step


def is_export(folder: pathlib.Path) -> bool:
    """Whether a folder holds a model's files, rather than a run."""
    return not (folder / "checkpoints").is_dir() and any(folder.glob("*.safetensors"))


def _same_model(folder: str, source: ModelSource) -> ModelSource:
    """The model of a folder. ValueError if its parameters have other shapes than `source`'s."""
    found = open_model(folder)
    shapes, wanted = (
        {path: spec.shape for path, spec in param_specs(model.config).items()}
        for model in (found, source)
    )
    wrong = sorted(p for p in shapes.keys() | wanted.keys() if shapes.get(p) != wanted.get(p))
    if wrong:
        raise ValueError(
            f"{folder} holds another model than {source.spec}: {wrong[0]} has the shape "
            f"{shapes.get(wrong[0])}, not {wanted.get(wrong[0])}"
        )
    return found
