"""The package's own engine behind the protocol of foreign ones, in this process."""

import dataclasses

from distflow_jax.batch import Prompt
from distflow_jax.rollout.decode_state import longest_read
from distflow_jax.rollout.foreign.engine_protocol import Answer, Status
from distflow_jax.rollout.foreign.sampler_server_engine import runs_of_samples
from distflow_jax.rollout.requests import GroupRequest
from distflow_jax.rollout.scheduling.scheduler import Scheduler


class InProcessEngine:
    """A Scheduler over a RolloutEngine as a foreign engine; rounds run within `results`.

    Noise has the keys that it has without the protocol, so tokens are the same.
    """

    name = "the engine of this process"
    updates_in_flight = True

    def __init__(self, engine):
        self.slots = engine.max_concurrent_decodes
        self.longest_prompt = longest_read(engine.config)
        self._engine, self._scheduler = engine, None
        self._answers = []

    def submit(self, requests):
        for run in runs_of_samples(requests):
            first, numbers = run[0], {request.sample: request.id for request in run}
            prompt = Prompt(first.counter, first.counter, first.tokens, "", "", None, {})
            sampling = dataclasses.replace(first.sampling, num_samples=len(run))
            group = GroupRequest(prompt, sampling, first_sample=first.sample, begun=first.begun)

            def keep(response, numbers=numbers):
                self._answers.append(
                    Answer(
                        numbers[response.sample],
                        response.tokens.tolist(),
                        response.logp.tolist(),
                        response.finished,
                        response.version.tolist(),
                    )
                )

            self._scheduler.submit(group, keep)

    def results(self, seconds):
        if self._scheduler is not None and not self._answers:
            self._scheduler.step()
        found, self._answers = self._answers, []
        return found

    def load(self, params, version, *, cache="keep"):
        placed = self._engine.load_params(params)
        if self._scheduler is None:
            self._scheduler = Scheduler(self._engine, placed, version=version)
        else:
            self._scheduler.load(placed, version, cache=cache)

    def status(self):
        return Status("this process", self.slots, 0.0)

    def close(self):
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = None
