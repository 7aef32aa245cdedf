"""Evaluates a model, or a run's trained weights, on a data set; writes JSON.

Examples:
  python scripts/evaluate.py --config=configs/grpo_smollm2.py --out=base.json
  python scripts/evaluate.py --config=configs/grpo_smollm2.py --run=runs/first --out=trained.json \\
      --config.eval.num_samples=8 --config.eval.temperature=1.0

The data set is config.eval.dataset. The JSON holds mean@N (accuracy if scores are 0 or 1), its
standard error, best@N, maj@N, and every response.
"""

import json
import pathlib
import tempfile

from absl import flags
from ml_collections import config_flags

from distflow_jax.config.command_line import define_job_flags, find_job, run_main
from distflow_jax.config.config_dict import from_config_dict
from distflow_jax.config.run_config import Config
from distflow_jax.data.step_columns import entries_of_host, uid_column
from distflow_jax.models.weights.source import open_model
from distflow_jax.parallel import processes
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.plan_run import load_eval_prompts, open_environments
from distflow_jax.planning.sizes import derive_sizes
from distflow_jax.report.run_writer import write_atomic
from distflow_jax.rewards.pool import RewardPool
from distflow_jax.rewards.prompt_requests import trial_request
from distflow_jax.runtime.standalone_sampler import open_answerer
from distflow_jax.stages.evaluate import evaluate, records, validation_metrics

CONFIG = config_flags.DEFINE_config_file("config", None, "The run's configuration.")
RUN = flags.DEFINE_string("run", "", "Folder of a run: use its newest weights.")
OUT = flags.DEFINE_string("out", "", "JSON file to write; empty: only print the metrics.")
define_job_flags()
flags.mark_flag_as_required("config")


def main(argv: list[str]) -> int:
    """Samples responses, scores them, prints and writes the metrics."""
    config = from_config_dict(Config, CONFIG.value)
    if not config.eval.dataset:
        raise ValueError("config.eval.dataset is empty: name a data set, such as a .jsonl file")
    processes.initialize(find_job())
    if OUT.value:
        check_out(pathlib.Path(OUT.value))
    source = open_model(config.model.source, **config.model.options())
    machine = Machine.current()
    sizes = derive_sizes(config, source.config, machine)
    hosts = sizes.sampler_hosts
    prompts = load_eval_prompts(config, source, sizes, machine)
    with RewardPool(config.reward) as rewards:
        rewards.check(trial_request(prompts[0]))
        environments = open_environments(config, source, prompts[0])
        model = open_answerer(config, source, RUN.value)
        _, scored = evaluate(
            model.engine,
            model.state,
            source.tokenizer,
            rewards,
            prompts,
            config.eval.sampling_params(config.rollout.max_response_length),
            own=entries_of_host(uid_column(prompts, 1), processes.process_index() % hosts, hosts),
            environments=environments,
        )
        metrics = validation_metrics(scored, config.eval.num_samples)
    for name, value in metrics.items():
        print(f"{name} {value:.4f}")
    if OUT.value and processes.process_index() == 0:
        report = {
            "model": config.model.source,
            "run": RUN.value,
            "step": model.step,
            "dataset": config.eval.dataset,
            "metrics": metrics,
            "records": records(scored),
        }
        write_atomic(OUT.value, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    processes.shutdown()
    return 0


def check_out(path: pathlib.Path) -> None:
    """Raises ValueError, before any sampling, if the report cannot be written to `path`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(
            f"cannot write --out {str(path)!r} ({error.strerror}); choose another folder"
        ) from error
    if path.is_dir():
        raise ValueError(f"--out {str(path)!r} is a folder; name a .json file")


if __name__ == "__main__":
    run_main(main)
