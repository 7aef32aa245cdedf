"""The samplers of a run: started once, given new weights after each update, and evaluated."""

import jax

from distflow_jax.dag.residency import EVALUATE, UPDATE_WEIGHTS
from distflow_jax.data.step_columns import entries_of_host, uid_column
from distflow_jax.observe.phases import Phases
from distflow_jax.planning.plan_run import PreparedRun
from distflow_jax.rollout.requests import SamplingParams
from distflow_jax.rollout.sampler import SamplerState, update_weights
from distflow_jax.runtime.build import Runtime
from distflow_jax.runtime.run_state import RunState
from distflow_jax.stages.evaluate import Evaluation, Scored


def load_samplers(prepared: PreparedRun, runtime: Runtime, state: RunState, phases: Phases) -> None:
    """First weights for every sampler, and their programs compiled; updates `state`, and the memory
    that is needed. Collective. ValueError if that is more than there is."""
    engine, compiled = runtime.engine, False
    if engine is None:
        return
    with runtime.offload.staying(UPDATE_WEIGHTS, state.models):
        for key, policy in prepared.own_samplers.items():
            params = state.policy_params(policy)
            with phases.span("update_weights"):
                weights = runtime.sync(params)
            state.models[key] = SamplerState(weights, state.step, engine.init_decode_state())
            if not compiled:  # all samplers of a run share one engine
                with phases.span("compile_sampler"):
                    engine.compile(weights)
                    needed = engine.programs.temporaries(weights)
                    sync = runtime.sync.temporaries(params)
                    runtime.compiled = runtime.compiled.with_sampler(needed, sync)
            compiled = True
    runtime.compiled.check()


def sync_weights(
    prepared: PreparedRun, runtime: Runtime, state: RunState, version: int, phases: Phases
) -> None:
    """Brings its policy's weights after `version` steps to each sampler. Collective."""
    samplers, models = prepared.own_samplers, state.models
    if all(models[key].version == version for key in samplers):
        return
    with phases.span("update_weights"), runtime.offload.staying(UPDATE_WEIGHTS, models):
        for key, policy in samplers.items():
            params = state.policy_params(policy)
            models[key] = update_weights(models[key], runtime.sync, params, version)
        jax.block_until_ready([models[key].params for key in samplers])


def evaluate_sampler(prepared: PreparedRun, runtime: Runtime, state: RunState) -> list[Scored]:
    """Scored responses to this process's evaluation prompts, from the sampler's weights."""
    sampler, evaluation = next(iter(prepared.own_samplers)), evaluation_of(prepared, runtime)
    with runtime.offload.staying(EVALUATE, state.models):
        state.models[sampler], episodes = evaluation.answer(
            state.models[sampler], runtime.contexts.on_evaluated
        )
        return evaluation.score(episodes)


def evaluation_of(prepared: PreparedRun, runtime: Runtime) -> Evaluation:
    """How this process evaluates its sampler."""
    config, prompts = prepared.config, prepared.eval_prompts
    return Evaluation(
        runtime.engine,
        prepared.source.tokenizer,
        prepared.rewards,
        prompts,
        SamplingParams.of_evaluation(config.eval, config.rollout.max_response_length),
        entries_of_host(uid_column(prompts, 1), runtime.member, runtime.hosts),
        prepared.environments,
    )
