"""Tables of tensor names and parameters, with a check that both sides match one to one.

A family lists one `Weight` per kind of tensor. It holds the reshape and transpose of the tensor, so
the same table loads and saves a model.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from distflow_jax.parsing.one_line import one_line

_MAX_LISTED = 8  # names shown of a long list in an error
_HEADLESS = {r"(?=(embed_tokens|layers|norm)\.)": "model."}  # of models saved without their head

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Weight:
    """One kind of tensor and its parameter: load(x) = x.reshape(split).transpose(axes).

    `source` contains "{layer}" for one tensor per layer, and "{expert}" for one per layer and
    expert; the parameter at `path` stacks these in one or two leading dims. Shapes are those of one
    tensor, in NumPy's order: `source_shape` in the file, `split` with merged dims separated (a
    query's [heads * head_dim, hidden] as [heads, head_dim, hidden]), `shape` in the network:
    `split` transposed, with dims merged that are separate only to be reordered.

    >>> Weight("up", "layers/up", (6, 4), (6, 4), (1, 0), (4, 6)).load(np.zeros((6, 4))).shape
    (4, 6)
    """

    source: str
    path: str
    source_shape: tuple[int, ...]
    split: tuple[int, ...]
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    experts: int = 0  # tensors per layer; 0: one, and no dim of experts in the parameter
    layers: int = 0  # of a tower with layers of its own; 0: as many as the decoder has

    def load(self, array: np.ndarray) -> np.ndarray:
        """Source tensor [source_shape] -> its slice of the parameter [shape]."""
        return array.reshape(self.split).transpose(self.axes).reshape(self.shape)

    def save(self, array: np.ndarray) -> np.ndarray:
        """Inverse of load: [shape] -> [source_shape]."""
        transposed = array.reshape([self.split[axis] for axis in self.axes])
        return transposed.transpose(np.argsort(self.axes)).reshape(self.source_shape)

    def names(self, num_layers: int) -> list[str]:
        """Names of the source tensors of the parameter, ordered by layer, then expert."""
        layers = range((self.layers or num_layers) if "{layer}" in self.source else 1)
        experts = range(self.experts or 1)
        return [self.source.format(layer=layer, expert=e) for layer in layers for e in experts]

    def param_shape(self, num_layers: int) -> tuple[int, ...]:
        """Shape of the whole parameter, layers and experts stacked."""
        layers = (self.layers or num_layers,) if "{layer}" in self.source else ()
        experts = (self.experts,) if self.experts else ()
        return (*layers, *experts, *self.shape)

    def slices(self, array: np.ndarray) -> np.ndarray:
        """The whole parameter as a view [tensors, *shape], in the order of `names`."""
        return array.reshape(-1, *self.shape)


def own_names(found: Mapping[str, T], rules: Mapping[str, str], origin: str) -> dict[str, T]:
    """The tensors by a family's own names.

    `rules` are regular expressions and what they become: the first that matches the start of a name
    replaces it. Raises ValueError if two tensors have the same name then.
    """
    rules = {**rules, **_HEADLESS}
    tensors: dict[str, T] = {}
    for name, tensor in found.items():
        match = next(filter(None, (re.match(rule, name) for rule in rules)), None)
        own = name if not match else match.expand(rules[match.re.pattern]) + name[match.end() :]
        if own in tensors:
            raise ValueError(f"weights of {origin} have {one_line(own)} twice: as {one_line(name)}")
        tensors[own] = tensor
    return tensors


def check_names(
    weights: Sequence[Weight],
    num_layers: int,
    found: Mapping[str, tuple[int, ...]],
    *,
    ignored: Iterable[str] = (),
    origin: str,
) -> None:
    """Raises ValueError unless source tensors and parameters match one to one.

    `found` maps the source's tensor names to their shapes. Names that match a regular expression of
    `ignored` need no parameter. The error lists both names and both shapes.
    """
    # a damaged file may claim 4 billion layers; a list of their names would exhaust the memory
    experts = max(weight.experts for weight in weights)
    if max(num_layers, experts) > len(found):
        raise ValueError(
            f"weights of {origin} do not fit the model's config: it has {num_layers} layers and "
            f"{experts} experts, the files hold {len(found)} tensors"
        )
    unwanted = {name: shape for name, shape in found.items()}
    unset, misfits = [], []
    for weight in weights:
        param = f"{weight.path} {list(weight.param_shape(num_layers))}"
        for name in weight.names(num_layers):
            shape = unwanted.pop(name, None)
            if shape is None:
                unset.append(f"{param} needs {name} {list(weight.source_shape)}")
            elif tuple(shape) != weight.source_shape:
                misfits.append(
                    f"{name} {list(shape)} does not fit {param}, which needs "
                    f"{list(weight.source_shape)}"
                )
    unwanted = {
        name: shape
        for name, shape in unwanted.items()
        if not any(re.search(pattern, name) for pattern in ignored)
    }
    problems = []
    if misfits:
        problems.append("wrong shapes: " + _listed(misfits))
    if unset:
        problems.append("parameters without a tensor: " + _listed(unset))
        if any(text.startswith("head ") for text in unset):
            problems.append("if the head is the embedding, set tie_word_embeddings=true")
    if unwanted:
        extra = [f"{name} {list(shape)}" for name, shape in unwanted.items()]
        problems.append("tensors without a parameter: " + _listed(extra))
        if any(name.endswith(".bias") for name in unwanted):
            problems.append("this family has no such biases")
    if problems:
        raise ValueError(
            f"weights of {origin} do not fit the model's config: {one_line('; '.join(problems))}"
        )


def stacked_arrays(
    weights: Sequence[Weight],
    num_layers: int,
    read: Callable[[str], np.ndarray],
    dtype: np.dtype,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (path, parameter [layers, ...]) one at a time, so that only one is in memory here.

    `read(name)` returns one tensor of the source; it is cast to `dtype` as it is stacked.
    """
    for weight in weights:
        yield weight.path, _stacked(weight, num_layers, read, dtype)


def _stacked(
    weight: Weight, num_layers: int, read: Callable[[str], np.ndarray], dtype: np.dtype
) -> np.ndarray:
    array = np.empty(weight.param_shape(num_layers), dtype)
    for target, name in zip(weight.slices(array), weight.names(num_layers), strict=True):
        target[...] = weight.load(read(name))
        if not np.isfinite(target).all():
            raise ValueError(
                f"tensor {one_line(name)} of the model holds NaN or infinity as {array.dtype}: "
                "fetch or export the model again"
            )
    return array


def unstacked_arrays(
    weights: Sequence[Weight], path: str, array: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Inverse of stacked_arrays for one parameter [layers, ...]: yields (source name, tensor)."""
    for weight in weights:
        if weight.path == path:
            for name, tensor in zip(weight.names(len(array)), weight.slices(array), strict=True):
                yield name, weight.save(tensor)
            return
    raise ValueError(f"the target format has no tensor for parameter {path!r}")


def _listed(items: Sequence[str]) -> str:
    shown = ", ".join(items[:_MAX_LISTED])
    return shown if len(items) <= _MAX_LISTED else f"{shown} and {len(items) - _MAX_LISTED} more"
