"""Optimizer steps: mini-batches and epochs, schedule, decay, the guard against non-finite steps.

Nightly: no program of an update gathers a row's tokens, with experts or on fsdp alone.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding, PartitionSpec
from support.tiny_model import TINY, mesh_of, mini_batch, random_params, random_samples, rows_of

from distflow_jax.algorithms.masked import masked_sum
from distflow_jax.algorithms.packed import per_token
from distflow_jax.batch import RowShape, sequence_field
from distflow_jax.config.algorithm_config import AlgorithmConfig
from distflow_jax.config.run_config import Config
from distflow_jax.config.training_config import OptimizerConfig, TrainingConfig
from distflow_jax.dag.graph import When
from distflow_jax.models.parameters import param_shardings
from distflow_jax.observe.compilations import Compilations
from distflow_jax.planning.run_models import optimizer_of
from distflow_jax.programs.jaxpr_flops import matmul_flops
from distflow_jax.stages.predictions import make_logp
from distflow_jax.training.expert_balance import balanced
from distflow_jax.training.forward import ForwardConfig
from distflow_jax.training.objectives.policy_objective import PolicyBatch, policy_objective
from distflow_jax.training.optimizer import learning_rate, make_optimizer
from distflow_jax.training.state import abstract_state, init_state
from distflow_jax.training.update import UpdateShape, make_update

MINI_BATCHES, EPOCHS, STEPS = 2, 2, 4
OPTIMIZER = OptimizerConfig(lr=3e-3, schedule="cosine", warmup_steps=1, weight_decay=0.1)
FORWARD = ForwardConfig(logp_chunk=16)
OBJECTIVE = policy_objective(TINY, AlgorithmConfig(), FORWARD, max_response=14)
TEMPERATURE = np.float32(1)
SHAPE = RowShape(MINI_BATCHES, 8, 64, 4)


class Trainer:
    """One compiled update and what it needs; `batch` has a signal, so that parameters move."""

    def __init__(self):
        self.mesh = mesh_of(1, 1)
        shape = UpdateShape(self.mesh, 2, 14)
        self.optimizer = make_optimizer(OPTIMIZER, STEPS)
        self.schedule = learning_rate(OPTIMIZER, STEPS)
        self.logp = make_logp(shape=shape, model=TINY, forward=FORWARD)
        self.update = make_update(self.optimizer, self.schedule, shape=shape, objective=OBJECTIVE)
        samples = random_samples(0, groups=4, size=4)
        self.rows, placement = rows_of(samples, SHAPE, shared=True)
        score = np.random.default_rng(1).normal(size=len(samples))
        score = jnp.asarray(sequence_field(placement, score))
        spread = jax.vmap(per_token)(score, jnp.asarray(self.rows.segment))
        self.advantage = np.where(self.rows.response_mask, spread, 0)

    def state(self):
        params = jax.device_put(random_params(TINY), param_shardings(TINY, self.mesh))
        return init_state(params, TINY, self.optimizer, self.mesh)

    def batch(self, params):
        old = self.logp(params, self.rows, TEMPERATURE)
        return PolicyBatch(self.rows, self.advantage, np.asarray(old), old, None)

    def run(self, state, batch):
        """All mini-batches and epochs; the metrics of every update."""
        metrics = []
        for _ in range(EPOCHS):
            for index in range(MINI_BATCHES):
                state, new = self.update(state, batch, np.int32(index), TEMPERATURE)
                metrics.append(jax.device_get(new))
        return state, metrics


def choosing(updates, trainer, proximal="recomputed"):
    """An update whose metric `current` is the sum of the log-probs that tokens are chosen by."""
    algorithm = AlgorithmConfig(policy_loss="kl_cov", kl_cov_share=0.5, proximal=proximal)
    objective = policy_objective(TINY, algorithm, FORWARD, max_response=14)

    def evaluate(params, batch, denominators, temperature):
        loss, metrics = objective.evaluate(params, batch, denominators, temperature)
        current = masked_sum(batch.current_logp, batch.rows.response_mask)
        return loss, metrics | {"sum": metrics["sum"] | {"current": current}}

    return make_update(
        trainer.optimizer,
        trainer.schedule,
        shape=UpdateShape(trainer.mesh, 2, 14),
        objective=dataclasses.replace(objective, evaluate=evaluate),
        num_updates=updates,
    )


@pytest.mark.parametrize("proximal", ["recomputed", "rollout"])
def test_tokens_are_chosen_by_the_policy_before_each_update(trainer, proximal):
    """The first update takes the old log-probs and makes no pass: any number would do. All later
    ones, of further epochs too, take those of the policy that the updates before have made. Without
    recomputed old log-probs the first one does, too."""
    update = choosing(MINI_BATCHES * EPOCHS, trainer, proximal)
    state = trainer.state()
    old = np.asarray(trainer.logp(state.params, trainer.rows, TEMPERATURE)) - np.float32(0.25)
    batch = trainer.batch(state.params)._replace(old_logp=old)
    mask = trainer.rows.response_mask
    for index in range(MINI_BATCHES * EPOCHS):
        mini = index % MINI_BATCHES
        logp = np.asarray(trainer.logp(state.params, trainer.rows, TEMPERATURE))
        known = index == 0 and proximal == "recomputed"
        wanted = (old if known else logp)[mini][mask[mini]].sum()
        state, metrics = update(state, batch, np.int32(index), TEMPERATURE)
        np.testing.assert_allclose(metrics["current"], wanted, rtol=1e-5)
    assert np.abs(logp - old - 0.25)[mask].max() > 1e-3  # the policy has moved
    assert update._cache_size() == 1


def test_choosing_costs_a_forward_pass_of_each_update_but_the_first(trainer):
    """And nothing of a loss that does not choose, nor where a batch gets one update."""
    batch = trainer.batch(trainer.state().params)
    one = jax.tree.map(lambda x: x[:1], batch)

    def flops(update, batch):
        found = matmul_flops(update.trace(trainer.state(), batch, np.int32(0), TEMPERATURE).jaxpr)
        assert found.unbounded == ()
        return found.total

    plain = flops(trainer.update, batch)
    assert flops(choosing(1, trainer), one) == plain
    forward = matmul_flops(
        trainer.logp.trace(trainer.state().params, one.rows, TEMPERATURE).jaxpr
    ).total
    for updates in (2, 4):
        more = updates * flops(choosing(updates, trainer), batch) - updates * plain
        assert more == pytest.approx((updates - 1) * forward, rel=1e-9)


@pytest.fixture(scope="module")
def trainer():
    return Trainer()


@pytest.fixture(scope="module")
def trained(trainer):
    """(state, batch, metrics) after all updates, and how much was compiled after the first."""
    state = trainer.state()
    batch = trainer.batch(state.params)
    state, first = trainer.update(state, batch, np.int32(0), TEMPERATURE)
    counter = Compilations()
    state, _ = trainer.run(trainer.state(), batch)
    state, metrics = trainer.run(trainer.state(), batch)
    compiled = counter.take(), counter.names()
    counter.close()
    np.testing.assert_equal(metrics[0], jax.device_get(first))
    return state, batch, metrics, compiled


def host(tree):
    return jax.tree.map(np.array, jax.device_get(tree))


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_several_updates_of_one_batch(trained):
    state, _, metrics, _ = trained
    assert int(state.count) == STEPS == len(metrics)
    assert [m["training/nonfinite"] for m in metrics] == [0] * STEPS
    for m in metrics:
        assert all(np.isfinite(x) for x in m.values()) and m["actor/grad_norm"] > 0
    # the first update meets the policy that gave old_logp, later ones what it has become
    assert abs(metrics[0]["actor/ppo_kl"]) < 1e-6 and metrics[0]["actor/pg_clipfrac"] == 0
    assert abs(metrics[2]["actor/ppo_kl"]) > 1e-4 and metrics[2]["actor/pg_clipfrac"] > 0
    # the same mini-batch again, after learning from it
    assert metrics[2]["actor/pg_loss"] < metrics[0]["actor/pg_loss"]


def test_second_run_compiles_nothing(trained):
    assert trained[3][0] == 0, trained[3][1]


def test_learning_rate_of_every_update_is_reported(trained):
    _, _, metrics, _ = trained
    wanted = [OPTIMIZER.lr / 2]  # warm-up of one step: the first already learns
    wanted += [OPTIMIZER.lr * (1 + np.cos(np.pi * i / (STEPS - 1))) / 2 for i in range(STEPS - 1)]
    np.testing.assert_allclose([m["actor/lr"] for m in metrics], wanted, rtol=1e-6)


def test_learning_rate_zero_changes_nothing(trainer, trained):
    """Behind the end of the cosine the rate is exactly 0."""
    params = host(trained[0].params)
    state = trainer.state()
    state.params = jax.device_put(params, param_shardings(TINY, trainer.mesh))
    # counters of optax and ours moved to the end of the run
    state = jax.tree.map(lambda x: x + STEPS if x.dtype == jnp.int32 and x.ndim == 0 else x, state)
    batch = trainer.batch(state.params)
    for index in (0, 1, 0):
        state, metrics = trainer.update(state, batch, np.int32(index), TEMPERATURE)
        assert metrics["actor/lr"] == 0 and metrics["actor/grad_norm"] > 0
        assert metrics["actor/pg_clipfrac"] == 0 and metrics["actor/pg_clipfrac_lower"] == 0
        # old_logp comes from another compiled program: equal up to the last bits
        assert abs(metrics["actor/ppo_kl"]) < 1e-6
        assert metrics["rollout_corr/log_ratio_abs_max"] < 1e-4
    assert_same(host(state.params), params)


def test_one_update_per_batch_has_ratio_exactly_one(trainer):
    """Without old_logp the policy itself is the old one."""
    rows = mini_batch(trainer.rows)
    batch = PolicyBatch(rows, trainer.advantage[0], None, None, None)
    batch, denominators = OBJECTIVE.whole(batch)
    evaluate = jax.jit(OBJECTIVE.evaluate)
    loss, metrics = evaluate(random_params(TINY), batch, denominators, TEMPERATURE)
    for name in ("actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"):
        assert metrics["sum"][name] == 0
    mask = np.asarray(rows.response_mask)
    np.testing.assert_allclose(loss, -trainer.advantage[0][mask].mean(), rtol=1e-5)


def test_a_step_whose_tokens_are_all_rejected_leaves_the_state_as_it_was(trainer):
    """Moments of earlier steps would move the weights on, and the KL would pull at them."""
    algorithm = AlgorithmConfig(
        kl_coef=0.1, rejection="token_k1", rejection_low=0.5, rejection_high=2.0
    )
    update = make_update(
        trainer.optimizer,
        trainer.schedule,
        shape=UpdateShape(trainer.mesh, 2, 14),
        objective=policy_objective(TINY, algorithm, FORWARD, max_response=14),
    )
    state = trainer.state()
    batch = trainer.batch(state.params)
    batch = batch._replace(ref_logp=batch.rollout_logp - np.float32(0.1))
    state, metrics = update(state, batch, np.int32(0), TEMPERATURE)
    assert int(state.count) == 1 and metrics["rollout_corr/kept_weight_max"] == 1
    before = host(state)
    far = batch._replace(rollout_logp=batch.rollout_logp + np.float32(3))
    state, metrics = update(state, far, np.int32(1), TEMPERATURE)
    assert metrics["rollout_corr/kept_weight_max"] == 0 and metrics["training/nonfinite"] == 0
    assert_same(host(state), before)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_non_finite_step_leaves_the_state_as_it_was(trainer, trained, poison):
    _, batch, metrics, _ = trained
    state, _ = trainer.update(trainer.state(), batch, np.int32(0), TEMPERATURE)
    before = host(state)
    advantage = trainer.advantage.copy()
    advantage[1, *np.argwhere(trainer.rows.response_mask[1])[3]] = poison
    bad = batch._replace(advantage=advantage)
    state, reported = trainer.update(state, bad, np.int32(1), TEMPERATURE)
    assert reported["training/nonfinite"] == 1
    assert not np.isfinite(reported["actor/grad_norm"] + reported["actor/loss"])
    assert_same(host(state), before)
    # and the run goes on as if that batch had never come
    state, after = trainer.update(state, batch, np.int32(1), TEMPERATURE)
    assert_same(jax.device_get(after), metrics[1])
    assert int(state.count) == 2


def test_gradient_norm_is_clipped():
    grads = {"w": jnp.full((4,), 100.0)}
    config = OptimizerConfig(lr=1.0, clip_norm=0.5, b1=0.0, b2=0.0, eps=1e3)
    optimizer = make_optimizer(config, 1)
    updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(grads), grads)
    # with eps far above the gradient Adam is the gradient / eps: 0.5 / sqrt(4) is left of 100
    np.testing.assert_allclose(updates["w"], -0.25 / 1e3, rtol=1e-3)


def test_weight_decay_skips_norms_and_biases():
    params = random_params(dataclasses.replace(TINY, attention_bias=True, qk_norm=True))
    config = OptimizerConfig(lr=0.1, weight_decay=0.5)
    optimizer = make_optimizer(config, 1)

    @jax.jit
    def step(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        updates, _ = optimizer.update(zeros, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    new = flatten_dict(step(params), sep="/")
    vectors = {"attention_norm", "mlp_norm", "query_norm", "key_norm"}
    vectors |= {"query_bias", "key_bias", "value_bias"}
    vectors = {f"layers/{name}" for name in vectors} | {"final_norm"}
    assert vectors < new.keys()
    for path, old in flatten_dict(params, sep="/").items():
        factor = 1 if path in vectors else 1 - 0.1 * 0.5
        np.testing.assert_allclose(new[path], factor * old, rtol=1e-6, err_msg=path)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("warm", [0, 3])
def test_schedule(schedule, warm):
    share = 0.1 if schedule == "cosine" else 0.0
    config = OptimizerConfig(lr=2.0, schedule=schedule, warmup_steps=warm, min_lr_ratio=share)
    rate = learning_rate(config, 10)
    got = [float(rate(i)) for i in range(12)]
    rise = [2.0 * (i + 1) / (warm + 1) for i in range(warm)]
    rest = [2.0] * (12 - warm)
    if schedule == "cosine":
        share = np.minimum(np.arange(12 - warm) / (10 - warm), 1)
        rest = 2.0 * (0.1 + 0.9 * (1 + np.cos(np.pi * share)) / 2)
    np.testing.assert_allclose(got, [*rise, *rest], rtol=1e-5)
    assert min(got) > 0


@pytest.mark.parametrize(
    ("when", "updates"), [(When(), 80), (When(after=20), 40), (When(every=5), 16)]
)
def test_the_cosine_ends_with_the_last_step_that_trains(when, updates):
    """A critic's warm-up, and a model that is trained now and then, take steps off the curve."""
    optimizer = OptimizerConfig(lr=2.0, schedule="cosine", min_lr_ratio=0.1)
    training = TrainingConfig(steps=40, mini_batches=2, optimizer=optimizer)
    _, rate = optimizer_of(Config(training=training), "ACTOR", when)
    assert rate(updates - 1) > rate(updates) == pytest.approx(0.2)


MOE = dataclasses.replace(TINY, mlp_size=32, num_experts=6, experts_per_token=2)


@pytest.mark.parametrize(
    "model, fsdp, tensor",
    [
        pytest.param(TINY, 8, 1, marks=pytest.mark.slow),
        (TINY, 4, 2),
        pytest.param(MOE, 4, 2, marks=pytest.mark.slow),
    ],
)
def test_rows_are_never_gathered(model, fsdp, tensor):
    """Parameters are, layer by layer; fields of the batch stay with the rank that has the rows.

    Of the residual stream the devices of a tensor group have parts: of the one row of their own.
    """
    length, sequences = 88, 7  # sizes that no parameter has
    mesh = mesh_of(fsdp, tensor)
    shape = UpdateShape(mesh, 1, 14)
    forward = ForwardConfig(logp_chunk=8)
    objective = policy_objective(model, AlgorithmConfig(), forward, max_response=14)
    objective = balanced(objective, 0.01)
    optimizer = make_optimizer(OPTIMIZER, STEPS)
    schedule = learning_rate(OPTIMIZER, STEPS)
    update = make_update(optimizer, schedule, shape=shape, objective=objective)
    logp = make_logp(shape=shape, model=model, forward=forward)
    samples = random_samples(0, groups=8, size=4)
    rows, placement = rows_of(samples, RowShape(1, 16, length, sequences), shared=True, ranks=8)
    layout = NamedSharding(mesh, PartitionSpec(None, "fsdp"))

    def abstract(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)

    token = jax.ShapeDtypeStruct(rows.tokens.shape, np.float32, sharding=layout)
    rows = jax.tree.map(abstract, rows)
    state = abstract_state(model, optimizer, mesh)
    batch = PolicyBatch(rows, token, token, token, None)
    programs = {
        "update": update.lower(state, batch, np.int32(0), TEMPERATURE),
        "logp": logp.lower(state.params, rows, TEMPERATURE),
    }
    for name, program in programs.items():
        gathered = re.findall(r"= \(?\w+\[([\d,]*)\]\S* all-gather", program.compile().as_text())
        assert gathered, name  # of parameters: the search finds what there is
        own = {f"1,{length},{model.hidden_size}"} if tensor > 1 else set()
        for dims in set(gathered) - own:
            assert not {length, sequences} & set(map(int, filter(None, dims.split(",")))), name
