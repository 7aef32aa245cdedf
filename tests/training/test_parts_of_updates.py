"""An optimizer step in partial batches is the step at once: gradient, metrics and new state, on any
mesh.

The same of every entry of the algorithm's tables: test_policy_objective.py, test_objectives.py.

Nightly: partial batches add up to the step at once on meshes with every axis, for mixtures with a
balance loss and adapters.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.gradients import (
    ALGORITHM,
    LENGTH,
    MODELS,
    ROWS,
    TEMPERATURE,
    assert_same,
    distance,
    params_of,
)
from support.partial_batches import cut, of_rows
from support.tiny_model import TINY, mesh_of, mini_batch, random_params, random_samples, rows_of

from distflow_jax.batch import RowShape, Samples
from distflow_jax.config.algorithm_config import AlgorithmConfig
from distflow_jax.config.training_config import OptimizerConfig
from distflow_jax.models.parameters import param_shardings
from distflow_jax.observe.compilations import Compilations
from distflow_jax.parallel.rules import use_mesh
from distflow_jax.training.expert_balance import balanced
from distflow_jax.training.forward import ForwardConfig
from distflow_jax.training.objectives.policy_objective import PolicyBatch, policy_objective
from distflow_jax.training.optimizer import learning_rate, make_optimizer
from distflow_jax.training.state import init_state
from distflow_jax.training.update import (
    UpdateShape,
    accumulate,
    accumulate_gradients,
    accumulator_specs,
    divide,
    empty,
    finish,
    make_update,
    with_sums,
)

GROUPS = 6
SAMPLES = random_samples(5, groups=GROUPS, size=5, prompt=(3, 30), response=(1, 40))
FORWARD = ForwardConfig(logp_chunk=16)


def some(part_G):
    """The samples of some groups."""
    chosen = [i for i, p in enumerate(SAMPLES.prompt) if part_G[p.counter]]
    lists = ([x[i] for i in chosen] for x in (SAMPLES.prompt, SAMPLES.response))
    prompts, responses = lists
    masks = [SAMPLES.response_mask[i] for i in chosen]
    return Samples(prompts, SAMPLES.uid[chosen], responses, masks)


def batch_of(samples, ranks):
    """Rows with fields that depend on the tokens alone, wherever they lie."""
    rows, _ = rows_of(samples, RowShape(1, ROWS, LENGTH, 8), shared=True, ranks=ranks)
    rows = mini_batch(rows)
    mask, number = rows.response_mask, rows.tokens.astype(jnp.float32)
    advantage = jnp.where(mask, jnp.sin(number), 0.0)
    ref_logp = jnp.where(mask, -1.0 - number % 7, 0.0)
    return PolicyBatch(rows, advantage, None, None, ref_logp)


class Step:
    """Programs of one optimizer step, at once and in partial batches, without its optimizer."""

    def __init__(self, model, micro=1, **axes):
        self.mesh = mesh_of(**{"fsdp": 1, "tensor": 1, **axes})
        self.shape = shape = UpdateShape(self.mesh, micro, 40)
        objective = policy_objective(model, ALGORITHM, FORWARD, max_response=40)
        self.objective = balanced(objective, 0.1 if model.num_experts else 0.0)
        self.params = jax.device_put(params_of(model), param_shardings(model, self.mesh))
        given = {"shape": shape, "objective": self.objective}
        self.batch = batch_of(SAMPLES, shape.ranks)
        self.specs = specs = accumulator_specs(self.params, self.batch, **given)
        layouts = jax.tree.map(lambda x: x.sharding, specs)
        self.begin = self.jit(lambda: empty(specs), layouts)
        self.add = self.jit(
            lambda params, sums, batch: accumulate(params, sums, batch, TEMPERATURE, **given),
            layouts,
        )
        self.divide = self.jit(lambda sums: divide(sums, self.objective))
        self.at_once = self.jit(
            lambda params, batch: accumulate_gradients(params, batch, TEMPERATURE, **given)
        )

    def jit(self, function, layouts=None):
        quick = {"xla_backend_optimization_level": 0}

        @functools.partial(jax.jit, compiler_options=quick, out_shardings=layouts)
        def run(*arguments):
            with use_mesh(self.mesh):
                return function(*arguments)

        return run

    def in_partial_batches(self, batches):
        """(gradient, metrics) on the host."""
        sums = self.begin()
        for batch in batches:
            sums = self.add(self.params, sums, batch)
        assert self.add._cache_size() == 1  # nothing recompiles
        return jax.device_get(self.divide(sums))


@pytest.mark.parametrize(
    "model, axes",
    [
        ("mixture", dict(micro=2)),
        ("dense", dict(fsdp=2, tensor=2)),
        ("mixture", dict(fsdp=2, tensor=1)),
        ("mixture", dict(fsdp=1, tensor=1, expert=2)),
        ("mixture", dict(pipeline=2, micro=2)),
        ("adapters", dict(data=2)),
        ("adapters", dict(pipeline=2, micro=2)),
        ("dense", dict(context=2)),
        ("mixture", dict(context=2)),
    ],
)
@pytest.mark.slow
def test_partial_batches_add_up_to_the_step(model, axes):
    """Of rows that stay as they are within 1e-6; of groups, each partial batch packed by itself,
    within 1e-5. A mixture has a gradient for each of its two denominators."""
    step = Step(MODELS[model], **axes)
    whole, ranks = step.batch, step.shape.ranks
    wanted = jax.device_get(step.at_once(step.params, whole))
    nothing = of_rows(whole, np.zeros(ROWS, bool))
    for seed, partial_batches in enumerate((1, 2, 5, 16)):
        parts = cut(seed, ROWS, partial_batches=partial_batches)
        found = step.in_partial_batches([of_rows(whole, part_R) for part_R in parts])
        assert_same(found, wanted)
        assert distance(found[0], wanted[0]) < 1e-6
        groups = cut(seed, GROUPS, partial_batches=partial_batches)
        packed = [batch_of(some(part), ranks) if part.any() else nothing for part in groups]
        assert_same(step.in_partial_batches(packed), wanted)
    assert len(step.specs.gradients) == (2 if model == "mixture" else 1)


OPTIMIZER = OptimizerConfig(lr=3e-3, schedule="cosine", weight_decay=0.1)


class Trainer:
    """Whole optimizer steps of a small model: at once, and in partial batches."""

    def __init__(self, fsdp=1):
        self.mesh = mesh_of(fsdp, 1)
        self.optimizer = make_optimizer(OPTIMIZER, 3)
        given = {
            "shape": UpdateShape(self.mesh, 1, 40),
            "objective": policy_objective(TINY, ALGORITHM, FORWARD, max_response=40),
        }
        schedule = learning_rate(OPTIMIZER, 3)
        self.update = make_update(self.optimizer, schedule, **given)
        self.batch = batch_of(SAMPLES, fsdp)
        self.specs = accumulator_specs(self.state().params, self.batch, **given)
        layouts = jax.tree.map(lambda x: x.sharding, self.specs)
        self.begin = jax.jit(lambda: empty(self.specs), out_shardings=layouts)

        @functools.partial(jax.jit, donate_argnums=1, out_shardings=layouts)
        def add(params, sums, batch):
            with use_mesh(self.mesh):
                return accumulate(params, sums, batch, TEMPERATURE, **given)

        @functools.partial(jax.jit, donate_argnums=0)
        def end(state, sums):
            with use_mesh(self.mesh):
                step = self.optimizer, schedule, given["objective"]
                return finish(with_sums(state, sums), *step)

        self.add, self.end = add, end

    def state(self):
        params = jax.device_put(random_params(TINY), param_shardings(TINY, self.mesh))
        return init_state(params, TINY, self.optimizer, self.mesh)

    def at_once(self, state):
        whole = jax.tree.map(lambda x: x[None], self.batch)
        return self.update(state, whole, np.int32(0), TEMPERATURE)

    def in_partial_batches(self, state, batches):
        sums = self.begin()
        for batch in batches:
            before, sums = sums, self.add(state.params, sums, batch)
            assert all(x.is_deleted() for x in jax.tree.leaves(before.gradients))
        return self.end(state, sums)


@pytest.fixture(scope="module")
def trainer():
    return Trainer()


def partial_batches_of(batch, seed, partial_batches):
    return [of_rows(batch, part_R) for part_R in cut(seed, ROWS, partial_batches=partial_batches)]


def host(tree):
    return jax.tree.map(np.array, jax.device_get(tree))


def test_states_and_metrics_are_those_of_steps_at_once(trainer):
    """Three steps, each with another number of partial batches; the programs of the first serve
    all."""
    state, other = trainer.state(), trainer.state()
    counter = None
    for seed, partial_batches in enumerate((3, 1, 16)):
        batches = partial_batches_of(trainer.batch, seed, partial_batches)
        other, wanted = trainer.at_once(other)
        if seed == 1:
            counter = Compilations()
        state, metrics = trainer.in_partial_batches(state, batches)
        assert metrics.keys() == wanted.keys() and metrics["training/nonfinite"] == 0
        for name, value in wanted.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
        assert_same((host(state.params), {}), (host(other.params), {}))
    assert int(state.count) == 3
    assert counter.take() == 0, counter.names()
    counter.close()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_partial_batch_that_is_not_finite_spoils_its_step(trainer, poison):
    """And that step alone: the state is what it was, bit for bit, and the next one trains it."""
    state = trainer.state()
    before = host(state)
    batches = partial_batches_of(trainer.batch, 3, 4)
    bad = max(range(4), key=lambda i: int(batches[i].rows.response_mask.sum()))
    place = tuple(np.argwhere(np.asarray(batches[bad].rows.response_mask))[2])
    batches[bad] = batches[bad]._replace(advantage=batches[bad].advantage.at[place].set(poison))
    state, metrics = trainer.in_partial_batches(state, batches)
    assert metrics["training/nonfinite"] == 1
    assert not np.isfinite(metrics["actor/grad_norm"] + metrics["actor/loss"])
    jax.tree.map(np.testing.assert_array_equal, host(state), before)
    state, metrics = trainer.in_partial_batches(state, partial_batches_of(trainer.batch, 3, 4))
    assert metrics["training/nonfinite"] == 0 and int(state.count) == 1


def test_a_step_without_sequences_changes_nothing(trainer):
    state = trainer.state()
    before = host(state)
    nothing = of_rows(trainer.batch, np.zeros(ROWS, bool))
    state, metrics = trainer.in_partial_batches(state, [nothing, nothing])
    assert metrics["training/nonfinite"] == 0 and metrics["actor/loss"] == 0
    jax.tree.map(np.testing.assert_array_equal, host(state), before)


def test_accumulators_are_as_large_as_the_plan_says():
    """One gradient, divided as the parameters, and a few numbers."""
    trainer = Trainer(fsdp=2)
    state = trainer.state()
    specs, sums = trainer.specs, trainer.begin()

    def told(x):
        return x.shape, x.dtype, x.sharding.shard_shape(x.shape)

    assert jax.tree.map(told, specs) == jax.tree.map(told, sums)
    (gradient,) = sums.gradients.values()
    for x, param in zip(jax.tree.leaves(gradient), jax.tree.leaves(state.params), strict=True):
        assert x.sharding.is_equivalent_to(param.sharding, x.ndim)
    assert sum(x.size for x in jax.tree.leaves(dataclasses.replace(sums, gradients={}))) < 64


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"policy_loss": "kl_cov"}, "policy_loss='kl_cov' chooses among all response tokens"),
        (
            {"correction": "token_tis", "correction_batch_normalize": True},
            "correction_batch_normalize=True divides weights by their mean",
        ),
    ],
)
def test_objectives_that_see_the_whole_step_are_refused(options, reason):
    objective = policy_objective(TINY, AlgorithmConfig(**options), FORWARD, max_response=40)
    shape = UpdateShape(mesh_of(1, 1), 1, 40)
    with pytest.raises(ValueError, match=f"{reason}.*; use stream.partial_batches='off'"):
        accumulator_specs(None, None, shape=shape, objective=objective)
