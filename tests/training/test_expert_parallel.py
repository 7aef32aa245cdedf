"""Experts that devices share: where weights and tokens lie, and sizes that cannot be.

That losses and gradients are one device's is in test_balance_loss.py, of a single layer in
models/test_moe.py.
"""

import dataclasses
import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support.tiny_model import TINY, mesh_of

from distflow_jax.batch import Rows
from distflow_jax.config.mesh_config import MeshConfig
from distflow_jax.config.rollout_config import RolloutConfig
from distflow_jax.config.run_config import Config
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.parameters import param_shardings
from distflow_jax.parallel.mesh import role_mesh
from distflow_jax.parallel.rules import rows_spec
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.sizes import derive_sizes
from distflow_jax.programs import hlo
from distflow_jax.stages.predictions import make_logp
from distflow_jax.training.forward import ForwardConfig
from distflow_jax.training.state import sharded_params
from distflow_jax.training.update import UpdateShape

MOE = dataclasses.replace(TINY, mlp_size=24, num_experts=6, experts_per_token=2)
MIXTURE = dataclasses.replace(DecoderConfig(), hidden_size=192, num_experts=6, experts_per_token=2)


def test_experts_are_divided_and_the_rest_has_copies():
    mesh = mesh_of(2, 2, expert=2)
    assert mesh.axis_names == ("fsdp", "expert", "tensor")
    layers = param_shardings(MOE, mesh)["layers"]
    assert layers["gate"].spec == PartitionSpec(None, "expert", "fsdp", "tensor")
    assert layers["down"].spec == PartitionSpec(None, "expert", "tensor", "fsdp")
    assert layers["query"].spec == PartitionSpec(None, "fsdp", "tensor", None)
    assert rows_spec(mesh) == PartitionSpec(None, ("fsdp", "expert"))
    with pytest.raises(ValueError, match=r"mesh axis expert=4 does not divide experts=6; use exp"):
        param_shardings(MOE, mesh_of(2, 1, expert=4))


def test_weights_stay_and_tokens_go_to_them():
    """Read from the compiled forward pass: no device ever has another's experts."""
    length, rows, mesh = 176, 8, mesh_of(2, 1, expert=2)
    forward = ForwardConfig(logp_chunk=16, remat="none")
    logp = make_logp(shape=UpdateShape(mesh, 1, 40), model=MOE, forward=forward)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=jax.sharding.NamedSharding(mesh, rows_spec(mesh))
        ),
        rows_like(rows, length, 5),
    )
    text = logp.lower(sharded_params(MOE, mesh), abstract, np.float32(1)).compile().as_text()
    kinds = "|".join(hlo.COLLECTIVES)
    sizes = [
        [int(n) for n in dims.split(",") if n]
        for given in re.findall(rf"= (.*?) (?:{kinds})(?:-start)?\(", text)
        for dims in re.findall(r"\w\[([\d,]*)\]", given)
    ]
    # the two devices of a group have a row each, and both get both
    assert [2, length, MOE.hidden_size] in sizes
    own = sorted([3, MOE.hidden_size, MOE.mlp_size])  # gathered over fsdp, of half the experts
    assert any(sorted(n for n in dims if n > 1) == own for dims in sizes)
    for dims in sizes:
        assert not (MOE.num_experts in dims and MOE.mlp_size in dims), dims


def rows_like(rows, length, sequences):
    token, sequence = (np.zeros((1, rows, n), np.int32) for n in (length, sequences))
    mask, valid = token > 0, sequence > 0
    return Rows(*[token] * 4, mask, sequence, sequence, sequence, valid=valid, length=sequence)


# -- config ----------------------------------------------------------------------------------------


def sizes_of(model=MIXTURE, devices=12, **mesh):
    config = Config(mesh=MeshConfig(**mesh), rollout=RolloutConfig(num_slots=48))
    return derive_sizes(config, model, Machine(1, devices, devices, "cpu"))


def test_each_device_has_rows_of_its_own():
    sizes = sizes_of(devices=12, expert=3, tensor=2)
    assert (sizes.mesh.fsdp, sizes.mesh.expert, sizes.mesh.ranks) == (2, 3, 6)
    assert sizes.micro_rows * sizes.mesh.ranks == 6
    assert sizes.mesh.describe()[0] == "fsdp 2 x expert 3 x tensor 2"
    roles = {"CRITIC": {"expert": 2, "fsdp": 4}}
    eight = sizes_of(devices=8, expert=2, roles=roles)
    assert eight.mesh_of("CRITIC").layout.axes == (("fsdp", 4), ("expert", 2), ("tensor", 1))
    assert role_mesh(eight.mesh).shape == {"fsdp": 4, "expert": 2, "tensor": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(expert=4), r"mesh.expert=4 does not divide the model's 6 experts; use 3 \(or any"),
        (dict(expert=12), r"mesh.expert=12 does not .* use 6 \(or any of \[1, 2, 3, 6\]\)"),
        (dict(expert=5), r"expert must be one of \[1, 2, 3, 4, 6, 12\], and fsdp what is left"),
        (dict(expert=2, model=DecoderConfig()), "mesh.expert=2 is for a mixture .* use 1, and fs"),
        (dict(roles={"ACTOR": {"expert": 4}}), "does not divide the model's 6 experts; use 3"),
    ],
)
def test_sizes_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        sizes_of(**options)
