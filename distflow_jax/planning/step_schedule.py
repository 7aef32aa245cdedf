"""The steps of a run that an evaluation, a checkpoint or a file of samples follows."""

import dataclasses

from distflow_jax.config.run_config import Config


@dataclasses.dataclass(frozen=True)
class StepSchedule:
    """The periods of a run's config, in steps. A period of 0 leaves the last step to evaluations,
    and none to files of samples."""

    steps: int  # of the whole run
    eval_every: int | None  # None: the run has nothing to evaluate, or no sampler
    evaluates_untrained: bool
    checkpoint_every: int
    samples_every: int

    @classmethod
    def of(cls, config: Config, *, has_sampler: bool) -> "StepSchedule":
        """The schedule of a config."""
        evaluates = bool(config.eval.dataset) and has_sampler
        return cls(
            steps=config.training.steps,
            eval_every=config.eval.every if evaluates else None,
            evaluates_untrained=evaluates and config.eval.before_training,
            checkpoint_every=config.checkpoint.every,
            samples_every=config.observe.samples_every,
        )

    def evaluates_first(self, step: int) -> bool:
        """Whether the untrained weights are evaluated in this step."""
        return self.evaluates_untrained and step == 1

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation follows a step; one follows the last."""
        return self.eval_every is not None and self._due(step, self.eval_every)

    def evaluates_version(self, version: int) -> bool:
        """Whether the weights after `version` steps are evaluated; 0: the untrained ones."""
        return self.evaluates(version) if version else self.evaluates_untrained

    def saves(self, step: int) -> bool:
        """Whether a checkpoint follows a step that ends as planned; one follows the last."""
        return self._due(step, self.checkpoint_every)

    def coming(self, step: int) -> tuple[int, int]:
        """(evaluations after a step, checkpoints after it and its own), in constant time."""
        evaluations = 0 if self.eval_every is None else self._due_from(step + 1, self.eval_every)
        return evaluations, self._due_from(step, self.checkpoint_every)

    def writes_samples(self, step: int) -> bool:
        """Whether the responses of a step are written."""
        return _multiple(step, self.samples_every)

    def _due(self, step: int, every: int) -> bool:
        return step == self.steps or _multiple(step, every)

    def _due_from(self, first: int, every: int) -> int:
        """The number of steps from `first` on that are due."""
        if first > self.steps:
            return 0
        multiples = self.steps // every - (first - 1) // every if every > 0 else 0
        return multiples + (not _multiple(self.steps, every))


def _multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
