"""A training that another program drives: prompts and samples come from here, not from the run.

python configs/examples/outside.py /tmp/outside
"""

import itertools
import random
import sys

import distflow_jax as df
from distflow_jax.batch import Prompt
from distflow_jax.models.weights.source import open_model
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.scheduling.scheduler import Scheduler
from distflow_jax.runtime.make_engine import make_engine
from distflow_jax.runtime.samplers.standalone_sampler import answer_sizes
from distflow_jax.service.trainer import Trainer

OVERRIDES = {"stream.workers": True, "stream.max_staleness": 1, "eval.dataset": ""}


def questions():
    """Additions, from anywhere."""
    while True:
        a, b = random.randrange(100), random.randrange(100)
        yield {"prompt": f"{a} + {b} =", "ground_truth": str(a + b), "data_source": "additions"}


def main(workdir: str, overrides: dict) -> None:
    """Trains configs/tiny.py on the questions, by responses that are sampled here."""
    config = df.load_config("tiny", OVERRIDES | {"training.steps": 5} | overrides)
    source = open_model(config["model.source"])
    engine = make_engine(source, config.config, answer_sizes(config.config, source))
    trainer = Trainer(config.config, workdir, chosen=config.chosen)
    trainer.init_engines()
    prompts, batch = questions(), config["data.prompts_per_step"]
    trainer.put_prompts_data(list(itertools.islice(prompts, 2 * batch)))  # max_staleness + 1 steps
    held, scheduler = -1, None
    while weights := trainer.weight_sync_notify(held):
        held, params = weights.version, engine.load_params(weights.params)
        scheduler = scheduler or Scheduler(engine, params)
        scheduler.load(params, held)
        trainer.put_prompts_data(list(itertools.islice(prompts, batch)))
        while (data := trainer.get_experience_data(["uid", "prompt"])) and data["uid"]:
            for (counter, sample), tokens in zip(data["uid"], data["prompt"], strict=True):
                prompt = Prompt(counter, counter, tokens, "", "", None, {})
                one = SamplingParams(1, trainer.sampling.limit, trainer.sampling.temperature)
                scheduler.submit(GroupRequest(prompt, one, first_sample=sample))
            while scheduler.busy:
                if done := scheduler.step():
                    uid = [(r.prompt.counter, r.sample) for r in done]
                    tokens, logp = [r.tokens for r in done], [r.logp for r in done]
                    columns = {"uid": uid, "response": tokens, "rollout_logp": logp}
                    trainer.put_experience_data(columns)
    trainer.close()


if __name__ == "__main__":
    main(sys.argv[1], {})
