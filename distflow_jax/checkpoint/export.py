"""Export of a model of a run's checkpoint, or of a model source as it is.

No accelerator is needed: parameters are read on the CPU, one at a time.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import SingleDeviceSharding

from distflow_jax.checkpoint.adapters import adapters_of
from distflow_jax.checkpoint.checkpointer import ArrayTable, Checkpointer
from distflow_jax.checkpoint.trained_weights import chosen_model, is_scalar, models_of
from distflow_jax.config.upkeep_config import CheckpointConfig
from distflow_jax.models.decoder_config import (
    DecoderConfig,
    ScalarModel,
    adapted,
    scalar_model,
    without_adapters,
)
from distflow_jax.models.lora import is_adapter, lora_of, merged_one
from distflow_jax.models.parameters import Network, param_specs
from distflow_jax.models.weights.hf_folder import Export
from distflow_jax.models.weights.peft_folder import Adapters
from distflow_jax.models.weights.source import ModelSource, open_model
from distflow_jax.parsing.json_text import read_json_object

_MAX_LISTED = 4  # parameters named in an error
# keys of `model` in config.json, and of open_model
_OPTIONS = ("yarn_factor", "yarn_positions", "vision")


@dataclasses.dataclass(frozen=True)
class RunExport:
    """A model of a run. `adapters`: those of a model trained with them, merged in `export`."""

    export: Export
    model: str  # its state key
    step: int
    adapters: Adapters | None = None


def source_export(spec: str) -> Export:
    """The model of a source. Raises ValueError for a random one, which has no weights yet."""
    source = open_model(spec)
    if source.params() is None:
        raise ValueError(
            f"{spec} has no weights to export: a run draws them at its start; export a run instead"
        )
    return Export(source.config, source.tokenizer, source.params, source.tokenizer_folder)


def untied(export: Export) -> Export:
    """The model with a head of its own, which has the values of the embedding.

    For engines that do not load the head of a model with tied embeddings anew. Raises ValueError
    for a model whose embedding is not its head.
    """
    network = export.network
    if not isinstance(network, DecoderConfig) or not network.tie_embeddings:
        raise ValueError("--untie is for a model with tied embeddings; this one has another head")

    def params() -> Iterator[tuple[str, np.ndarray]]:
        for path, value in export.params():
            yield path, value
            if path == "embed/embedding":
                yield "head", value.T

    return dataclasses.replace(
        export, network=dataclasses.replace(network, tie_embeddings=False), params=params
    )


def run_export(
    workdir: pathlib.Path, *, step: int | None = None, model: str = "", source: str = ""
) -> RunExport:
    """Finds a model in a run's folder; reads no weights yet.

    Args:
      workdir: the run's folder.
      step: step of the checkpoint; None is the newest.
      model: key of a trained model; "" is "actor", or the only one that there is.
      source: source of network and tokenizer; "" is the one that the run's config.json names.

    Raises:
      FileNotFoundError, ValueError: no such run, checkpoint or model (the message names those that
        exist), or the source has other shapes.
    """
    folder = workdir / "checkpoints"
    if not folder.is_dir():
        raise FileNotFoundError(f"{workdir} holds no checkpoints/: is it the --workdir of a run?")
    checkpointer = Checkpointer(folder, CheckpointConfig())
    try:
        contents = checkpointer.contents(step)
    finally:
        checkpointer.close()
    step, models = contents.step, models_of(contents.arrays)
    key = chosen_model(model, models, f"checkpoint {step} of {workdir}")
    opened = _source_of_run(workdir, source)
    lora = adapters_of(contents, key, workdir)
    network = scalar_model(opened.config) if is_scalar(models[key]) else opened.config
    saved = network if lora is None else adapted(network, lora)
    _check_shapes(models[key], saved, f"model {key!r} of {workdir} at step {step}", opened.spec)

    def params() -> Iterator[tuple[str, np.ndarray]]:
        return _read(folder, step, key, saved)

    def adapters() -> Iterator[tuple[str, np.ndarray]]:
        with _reading(folder, step, key, saved) as read:
            paths = [path for path in param_specs(saved) if is_adapter(path)]
            yield from ((path, read(path)) for path in paths)

    export = Export(network, opened.tokenizer, params, opened.tokenizer_folder)
    found = None if lora is None else Adapters(saved, opened.spec, adapters)
    return RunExport(export, key, step, found)


def _source_of_run(workdir: pathlib.Path, spec: str) -> ModelSource:
    """The run's initial model, with the run's YaRN settings; `spec` overrides its source."""
    path = workdir / "config.json"
    try:
        config = read_json_object(path)["model"]
        named = config["source"]
        options = {key: config[key] for key in _OPTIONS if key in config}
        cache = config.get("cache_dir") or None
    except (OSError, ValueError, KeyError, TypeError) as error:
        if spec:
            return open_model(spec)
        raise ValueError(f"{path} is not a run's config ({error}): give --source too") from error
    if spec:
        return open_model(spec, **options)
    try:
        return open_model(named, cache_dir=cache, **options)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"the initial model of {workdir} was not found: {error}. Give its source now with "
            "--source"
        ) from error


def _check_shapes(
    saved: ArrayTable, network: DecoderConfig | ScalarModel, which: str, spec: str
) -> None:
    wanted = {path: list(parameter.shape) for path, parameter in param_specs(network).items()}
    found = {path: list(shape) for path, (shape, _) in saved.items()}
    differing = [
        f"{path} {found.get(path, 'missing')}, there {wanted.get(path, 'none')}"
        for path in sorted(wanted.keys() | found.keys())
        if wanted.get(path) != found.get(path)
    ]
    if differing:
        more = f" and {len(differing) - _MAX_LISTED} more" if len(differing) > _MAX_LISTED else ""
        raise ValueError(
            f"{which} has another shape than {spec}: {'; '.join(differing[:_MAX_LISTED])}{more}. "
            "Give the source of its initial model with --source"
        )


def _read(
    folder: pathlib.Path, step: int, key: str, network: Network
) -> Iterator[tuple[str, np.ndarray]]:
    """(path, float32 array) of each parameter, read one at a time; adapters are merged."""
    lora = lora_of(network)
    with _reading(folder, step, key, network) as read:
        for path in param_specs(without_adapters(network)):
            yield path, read(path) if lora is None else merged_one(read, path, lora.scale)


@contextlib.contextmanager
def _reading(
    folder: pathlib.Path, step: int, key: str, network: Network
) -> Iterator[Callable[[str], np.ndarray | None]]:
    """A function: path -> float32 array; None for a parameter that the network does not have."""
    checkpointer, specs = Checkpointer(folder, CheckpointConfig()), param_specs(network)
    unverified = [step]  # until the first reading, which verifies all files

    def read(path):
        if path not in specs:
            return None
        verify = bool(unverified)
        unverified.clear()
        on_host = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        wanted = jax.ShapeDtypeStruct(specs[path].shape, np.float32, sharding=on_host)
        tree = {key: {"params": unflatten_dict({path: wanted}, sep="/")}}
        _, arrays, _ = checkpointer.restore(step, tree, partial=True, verify=verify)
        return np.asarray(flatten_dict(arrays[key]["params"], sep="/")[path])

    try:
        yield read
    finally:
        checkpointer.close()
