"""Our own engine behind the protocol of foreign ones, in this process."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from distflow_jax.batch import Prompt
from distflow_jax.rollout.decode_state import longest_read
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.foreign.engine_protocol import Answer, EngineRequest, Failure, Status
from distflow_jax.rollout.requests import GroupRequest, Response
from distflow_jax.rollout.scheduling.scheduler import Scheduler


def runs_of_samples(requests: Sequence[EngineRequest]) -> Iterator[list[EngineRequest]]:
    """Requests for one prompt as lists whose samples follow each other, alike in all else.

    A response that has begun stands alone.
    """
    run: list[EngineRequest] = []
    for request in sorted(requests, key=lambda entry: entry.sample):
        if run and not _follows(request, run[-1]):
            yield run
            run = []
        run.append(request)
    if run:
        yield run


def _follows(request: EngineRequest, last: EngineRequest) -> bool:
    if request.begun or last.begun:
        return False
    return (request.sample, request.sampling) == (last.sample + 1, last.sampling)


class InProcessEngine:
    """A Scheduler over a RolloutEngine as a foreign engine; rounds run within `results`.

    Noise has the keys that it has without the protocol, so tokens are the same.
    """

    name = "the engine of this process"
    swaps_in_flight = True

    def __init__(self, engine: RolloutEngine):
        self.slots = engine.max_concurrent_decodes
        self.longest_prompt = longest_read(engine.config)
        self._engine, self._scheduler = engine, None
        self._answers: list[Answer | Failure] = []

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """See ForeignEngine."""
        for run in runs_of_samples(requests):
            first, numbers = run[0], {request.sample: request.id for request in run}
            prompt = Prompt(first.counter, first.counter, first.tokens, "", "", None, {})
            sampling = dataclasses.replace(first.sampling, num_samples=len(run))
            group = GroupRequest(prompt, sampling, first_sample=first.sample, begun=first.begun)

            def keep(response: Response, numbers=numbers) -> None:
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

    def results(self, seconds: float) -> list[Answer | Failure]:
        """See ForeignEngine; a round takes as long as it takes."""
        if self._scheduler is not None and not self._answers:
            self._scheduler.step()
        found, self._answers = self._answers, []
        return found

    def load(self, params: Any, version: int, *, cache: str = "keep") -> None:
        """See ForeignEngine."""
        placed = self._engine.load_params(params)
        if self._scheduler is None:
            self._scheduler = Scheduler(self._engine, placed, version=version)
        else:
            self._scheduler.load(placed, version, cache=cache)

    def status(self) -> Status:
        """See ForeignEngine."""
        return Status("this process", self.slots, 0.0)

    def close(self) -> None:
        """See ForeignEngine."""
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = None
