"""The subcommand evaluate."""

import contextlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

from distflow_jax.cluster import processes
from distflow_jax.commands.join_job import join_job
from distflow_jax.config.config_dict import from_config_dict
from distflow_jax.config.run_config import Config
from distflow_jax.data.step_columns import entries_of_host, uid_column
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.plan_run import (
    open_configured,
    open_environments,
    settled_config,
)
from distflow_jax.planning.run_data import load_eval_prompts, prompt_encoder, sampler_share
from distflow_jax.planning.sizes import derive_sizes
from distflow_jax.programs.program_cache import kept_programs
from distflow_jax.programs.text_table import text_table
from distflow_jax.report.json_lines import write_atomic
from distflow_jax.rewards.pool import RewardPool
from distflow_jax.rewards.prompt_requests import trial_request
from distflow_jax.rollout.requests import SamplingParams
from distflow_jax.runtime.run_files import evaluation_lines
from distflow_jax.runtime.samplers.standalone_sampler import open_answerer
from distflow_jax.stages.evaluate import Evaluation, validation_metrics


def checked(options: SimpleNamespace) -> Config:
    """The config. Raises ValueError or FileNotFoundError for flags that do not fit."""
    config = settled_config(from_config_dict(Config, options.config), options.chosen)
    if not config.eval.dataset:
        raise ValueError("config.eval.dataset is empty: name a data set, such as a .jsonl file")
    return config


def main(options: SimpleNamespace) -> int:
    """Samples responses, scores them, prints and writes the metrics."""
    config = checked(options)
    join_job(options)
    source = open_configured(config)
    machine = Machine.current()
    sizes = derive_sizes(config, source.config, machine)
    hosts = sizes.sampler_hosts
    encoder = prompt_encoder(source, config.data.image_tokens)
    prompts = load_eval_prompts(config, encoder, sampler_share(sizes, machine))
    with RewardPool(config.reward, config.sandbox) as rewards, contextlib.ExitStack() as files:
        files.enter_context(kept_programs(config.compilation_cache))
        rewards.check(trial_request(prompts[0]))
        environments = open_environments(config, encoder, prompts[0], files)
        model = open_answerer(config, source, options.run)
        evaluation = Evaluation(
            model.engine,
            source.tokenizer,
            rewards,
            prompts,
            SamplingParams.of_evaluation(config.eval, config.rollout.max_response_length),
            entries_of_host(uid_column(prompts, 1), processes.process_index() % hosts, hosts),
            environments,
        )
        _, episodes = evaluation.answer(model.state)
        scored = evaluation.score(episodes)
        metrics = validation_metrics(scored, config.eval.num_samples, rewards)
        lines = evaluation_lines(scored)
    if processes.process_index() == 0:
        _report(options, config, model.step, metrics, lines)
    processes.shutdown()
    return 0


def _report(
    options: SimpleNamespace,
    config: Config,
    step: int,
    metrics: Mapping[str, float],
    lines: Sequence[str],
) -> None:
    """Prints the metrics as a table, and writes them with every response to --out."""
    counts = {n for n in metrics if n.endswith(("/num_prompts", "/errors", "/timeouts"))}
    rows = [(n, f"{x:.0f}" if n in counts else f"{x:.4f}") for n, x in metrics.items()]
    weights = f"{options.run} at step {step}" if options.run else config.model.source
    print(f"data      {config.eval.dataset}\nmodel     {weights}\n")
    print(text_table([("metric", "value"), *rows]))
    if options.out:
        report = {
            "model": config.model.source,
            "run": options.run,
            "step": step,
            "dataset": config.eval.dataset,
            "metrics": metrics,
            "records": list(map(json.loads, lines)),
        }
        pathlib.Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(options.out, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        print(f"\nwrote {options.out}")
