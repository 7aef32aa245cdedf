"""Layout and number format of a sampler's weights."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.int8 import Int8, quantise
from distflow_jax.models.matmul_layouts import Turned, resolve_layout
from distflow_jax.models.parameters import ParamSpec, param_specs
from distflow_jax.parallel.rules import sharding

# matrices with the hidden dim first; XLA keeps those of keys and values in order anyway
_TURNED = {"head", *(f"layers/{name}" for name in ("query", "gate", "up"))}


class SamplerLayout:
    """Conversion of trained parameters to a sampler's layout and number format.

    `weights` is one of matmul_layouts.WEIGHTS, for a sampler on `platform`. `dtype` is "auto" (the
    parameters' own) or "int8", with a scale for each output (int8.py); norms, biases and routers
    are never quantised.
    """

    def __init__(self, model: DecoderConfig, platform: str, weights: str, dtype: str = "auto"):
        layout = resolve_layout(weights, platform)
        apart = layout == "apart"
        self._forms = {
            path: _Form(
                spec,
                int8=dtype == "int8" and bool(spec.inputs),
                turned=apart and path != "embed/embedding",
                marked=layout == "turned" and path in _TURNED,
                by_layer=apart and path.startswith("layers/"),
            )
            for path, spec in param_specs(model).items()
        }

    def convert(self, params: dict[str, Any]) -> dict[str, Any]:
        """Converts all or some of the parameters; traceable.

        `params` has stacked layers, any number of them; "apart" makes them a list of dicts.
        """
        return _collected(
            {p: self._forms[p].convert(x) for p, x in flatten_dict(params, sep="/").items()}
        )

    def convert_placed(self, params: dict[str, Any]) -> dict[str, Any]:
        """Converts parameters on their own mesh, one at a time, removing each from `params`."""
        mesh, converted = params["final_norm"].sharding.mesh, {}
        for path, form in self._forms.items():
            *groups, name = path.split("/")
            group = functools.reduce(dict.__getitem__, groups, params)
            converted[path] = _program(form, mesh)(group.pop(name))
        return _collected(converted)

    def specs(self, mesh: Mesh, dtype: str) -> dict[str, Any]:
        """ShapeDtypeStructs with shardings of all converted parameters on a mesh.

        `dtype` is that of parameters that are not quantised.
        """
        return _collected({p: form.spec(mesh, dtype) for p, form in self._forms.items()})

    def layouts(self, mesh: Mesh) -> dict[str, Any]:
        """Shardings of all converted parameters on a mesh."""
        return jax.tree.map(lambda spec: spec.sharding, self.specs(mesh, "float32"))


@dataclasses.dataclass(frozen=True)
class _Form:
    """Layout of one parameter.

    `turned`: outputs before inputs. `marked`: the same, and wrapped in Turned. `by_layer`: a list
    with one array per layer.
    """

    param: ParamSpec
    int8: bool
    turned: bool
    marked: bool
    by_layer: bool

    def convert(self, x: jax.Array) -> Any:
        if self.int8:
            x = Int8(*quantise(x, self.param.inputs))
        if not self.by_layer:
            return self._turn(x)
        count = len(jax.tree.leaves(x)[0])
        return [self._turn(jax.tree.map(lambda x, i=i: x[i], x)) for i in range(count)]

    def spec(self, mesh: Mesh, dtype: str) -> Any:
        own, order = self._own, self._order

        def one(dims, dtype):
            axes, shape = tuple(own.axes[d] for d in dims), tuple(own.shape[d] for d in dims)
            layout = sharding(mesh, axes, shape)
            return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=layout)

        found = one(order, dtype)
        if self.int8:
            found = Int8(one(order, "int8"), one(self._outputs, "float32"))
        if self.marked:
            return Turned(found)
        return [found] * self.param.shape[0] if self.by_layer else found

    @property
    def _own(self) -> ParamSpec:
        """Spec of one array: of a single layer if the layers are apart."""
        spec = self.param
        if not self.by_layer:
            return spec
        inputs = tuple(d - 1 for d in spec.inputs)
        return dataclasses.replace(spec, shape=spec.shape[1:], axes=spec.axes[1:], inputs=inputs)

    @property
    def _outputs(self) -> tuple[int, ...]:
        own = self._own
        return tuple(d for d in range(len(own.shape)) if d not in own.inputs)

    @property
    def _order(self) -> tuple[int, ...]:
        own = self._own
        order = tuple(range(len(own.shape)))
        return self._outputs + own.inputs if self.turned or self.marked else order

    def _turn(self, x: Any) -> Any:
        if isinstance(x, Int8):
            turned = Int8(x.values.transpose(self._order), x.scale)
        else:
            turned = x.transpose(self._order)
        return Turned(turned) if self.marked else turned


@functools.cache
def _program(form: _Form, mesh: Mesh) -> Callable[[jax.Array], Any]:
    layouts = jax.tree.map(lambda spec: spec.sharding, form.spec(mesh, "float32"))
    return jax.jit(form.convert, out_shardings=layouts)


def _collected(flat: dict[str, Any]) -> dict[str, Any]:
    """{path: array} -> nested dicts; lists, one entry per layer, become one list of dicts."""
    lists = {path: x for path, x in flat.items() if isinstance(x, list)}
    tree = unflatten_dict({path: x for path, x in flat.items() if path not in lists}, sep="/")
    if lists:
        names = [path.removeprefix("layers/") for path in lists]
        tree["layers"] = [
            dict(zip(names, each, strict=True)) for each in zip(*lists.values(), strict=True)
        ]
    return tree
