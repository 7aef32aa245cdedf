"""FLOPs of a jaxpr against formulas of the work that is executed."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from support.tiny_model import mesh_of
from support.training_programs import MIXTURE, executed_flops, flops_again, trace

from distflow_jax.programs.bounded_loops import bounded_loop
from distflow_jax.programs.jaxpr_flops import matmul_flops


def flops(f, *args):
    return matmul_flops(jax.jit(f).trace(*args).jaxpr)


def ones(*shape):
    return jnp.ones(shape, jnp.float32)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("logp", {}),
        ("logp", {"chunk": 64}),
        ("logp", {"fsdp": 2, "tensor": 2}),
        ("values", {}),
        ("update", {"remat": "none"}),
        ("update", {"remat": "dots"}),
        ("update", {"remat": "attention"}),
        ("update", {"remat": "full"}),
        ("update", {"remat": "full", "fsdp": 2, "tensor": 2}),
    ],
)
def test_trainers_programs_cost_what_they_execute(kind, options):
    found = matmul_flops(trace(kind, **options).jaxpr)
    wanted = executed_flops(kind, remat=options.get("remat", "full"))
    assert found.unbounded == ()
    assert found.total == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("logp", {}),
        ("logp", {"expert": 2}),
        ("update", {"remat": "none"}),
        ("update", {"remat": "full"}),
        ("update", {"remat": "full", "expert": 2}),
    ],
)
def test_of_a_mixture_the_experts_that_tokens_go_through_count(kind, options):
    """Also where devices share the experts, each with room for the tokens of all."""
    found = matmul_flops(trace(kind, model=MIXTURE, **options).jaxpr)
    wanted = executed_flops(kind, model=MIXTURE, **({"remat": "full"} | options))
    assert found.unbounded == ()
    assert found.total == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize("remat", ["dots", "attention"])
def test_attention_by_tiles_is_not_computed_again(remat):
    """Its output and log-sum-exps are kept; the backward pass recomputes scores anyway."""
    kept, found = (matmul_flops(trace("update", remat=r, block=32).jaxpr) for r in ("none", remat))
    assert found.total - kept.total == flops_again(remat, scores=False)


def test_product():
    assert flops(jnp.dot, ones(3, 5), ones(5, 7)).total == 2 * 3 * 5 * 7
    batched = flops(lambda a, b: jnp.einsum("bij,bkj->bik", a, b), ones(4, 3, 5), ones(4, 7, 5))
    assert batched.total == 2 * 4 * 3 * 5 * 7


def test_ragged_product_and_its_gradients():
    x, w, sizes = ones(12, 8), ones(3, 8, 5), jnp.array([3, 4, 5])
    once = 2 * 12 * 8 * 5

    def loss(x, w):
        return jnp.square(jax.lax.ragged_dot(x, w, sizes)).sum()

    assert flops(loss, x, w).total == once
    assert flops(jax.value_and_grad(loss, argnums=(0, 1)), x, w).total == 3 * once


def test_loops_and_branches():
    x, product = ones(4, 4), 2 * 4**3

    def scanned(x):
        return jax.lax.scan(lambda x, _: (x @ x, None), x, length=7)[0]

    def bounded(x, n):
        return bounded_loop(n, lambda _, x: scanned(x), x, most=6)

    def either(x):
        return jax.lax.cond(x.sum() > 0, scanned, lambda x: x @ x, x)

    assert flops(scanned, x).total == 7 * product
    assert flops(bounded, x, jnp.int32(1)).total == 6 * 7 * product
    assert flops(either, x).total == 7 * product


def test_a_loop_without_a_bound_is_named_and_counted_once():
    x = ones(4, 4)

    def f(x):
        with jax.named_scope("search"):
            return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ x, x)

    found = flops(lambda x, n: bounded_loop(n, lambda _, x: f(x), x, most=3), x, jnp.int32(1))
    assert found.total == 3 * 2 * 4**3
    assert found.unbounded == ("at_most_3/while/search/while",)


def test_devices_of_a_shard_map_add_up():
    spec = PartitionSpec("fsdp", "tensor")
    f = jax.shard_map(lambda x: x @ x.T, mesh=mesh_of(2, 2), in_specs=spec, out_specs=spec)
    # on each of the 4 devices [2, 3] @ [3, 2]
    assert flops(f, ones(4, 6)).total == 4 * 2 * 2 * 3 * 2
