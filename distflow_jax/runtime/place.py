"""The place of a run in its data, which its source of samples moves on and checkpoints keep."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from distflow_jax.config.run_config import Config
from distflow_jax.data.loader import Loader
from distflow_jax.parsing.setting_checks import refuse


@dataclasses.dataclass
class Place:
    """The data that steps have taken so far."""

    batch: int  # prompts of a step
    batches: int = 0  # of the loader that were used: one a step, or as many as a region took
    # first prompt that no step looked at, where samplers run ahead; None: all of `batches` were
    counter: int | None = None
    # account of tokens over all processes, see Token account, where no samples are saved that bring
    # one; None: samplers never ran ahead
    account: dict[str, int] | None = None

    @classmethod
    def restored(
        cls, info: Mapping[str, Any], step: int, config: Config, loader: Loader
    ) -> "Place":
        """The place in a checkpoint of `step`, to which the loader is set. ValueError if the run
        would train prompts twice."""
        check_place(info, step, config)
        loader.restore(info["loader"])
        batch, ahead = config.data.prompts_per_step, config.stream.ahead
        return cls(
            batch,
            loader.position // batch,
            # otherwise steps take whole batches, as the loader gives them
            info.get("counter") if ahead else None,
            info.get("account", info.get("ledger")),  # its name before
        )

    def look_at(self, counter: int) -> None:
        """Notes the first prompt that no step has looked at."""
        self.counter, self.batches = counter, -(-counter // self.batch)

    @property
    def position(self) -> int:
        """Counter of the first prompt that no step looked at."""
        return self.batches * self.batch if self.counter is None else self.counter

    @property
    def loader_position(self) -> int:
        """Counter after the last whole batch that the run trained on."""
        return self.position // self.batch * self.batch

    def facts(self, loader: Loader) -> dict[str, Any]:
        """Its part of a checkpoint."""
        return {
            "loader": loader.state(self.loader_position),
            "counter": self.counter,
            "account": self.account,
        }


# {what holds, see `check_place`: the message}
_MOVED = {
    "unordered": "the checkpoint of step {step} may have trained prompts before others with lower "
    "counters, as stream.round_tokens did, which was removed: some would be trained twice; start "
    "in a new --workdir",
    "split": "data.prompts_per_step={batch}: the checkpoint of step {step} has trained on "
    "{position} prompts, which are no whole number of such batches, so some would be trained on "
    "twice; give the number of before, or start in a new --workdir",
    "amid !ahead": "the checkpoint of step {step} stands amid a batch, before prompt {counter}: "
    "with stream.max_staleness=0 steps take whole batches, so prompts from {first} on would be "
    "trained on twice; give stream.max_staleness again, or start in a new --workdir",
    "counted ahead elsewhere": "data.prompts_per_step={batch}: the checkpoint of step {step} had "
    "another number, by which its batch began at prompt {position}; give that again, or start in a "
    "new --workdir",
}


def check_place(info: Mapping[str, Any], step: int, config: Config) -> None:
    """Raises ValueError if the run would train on prompts again, or not begin its next batch where
    the checkpoint's did. Steps of a region end amid a batch.
    """
    counter, batch = info.get("counter"), config.data.prompts_per_step
    position = int(info["loader"]["position"])
    first = position if counter is None else counter // batch * batch
    whole_batches = counter is None or not config.stream.ahead
    holds = {
        "ahead": config.stream.ahead,
        "unordered": info.get("begun") is not None,
        "counted": counter is not None,
        "split": whole_batches and position % batch,
        "amid": counter is not None and counter > first,
        "elsewhere": position != first,
    }
    facts = {"step": step, "batch": batch, "counter": counter, "position": position}
    refuse(_MOVED, holds, first=first, **facts)
