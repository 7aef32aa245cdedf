"""Prompts in a global order that is the same for any number of processes."""

import dataclasses
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.config.data_config import DataConfig
from distflow_jax.data.encoded_rows import (
    EncodedRows,
    PromptEncoder,
    TokenLimits,
    rows_in_limit,
)
from distflow_jax.data.example import Dataset
from distflow_jax.data.prompt_assignment import LengthEstimates, deal
from distflow_jax.images.picture_files import ImageSource
from distflow_jax.images.placing import SeeingTokenizer, read_images


@dataclasses.dataclass(frozen=True)
class SamplerShare:
    """This process's sampler among those of the job, which divide the prompts."""

    index: int = 0
    count: int = 1
    hosts: int = 1  # processes of each sampler, which read the same prompts
    in_turn: bool = False  # each counter goes to sampler `counter % count`, whatever its length


class Loader:
    """Issues prompts by a global counter: step k takes counters [(k - 1) B, k B).

    The counter alone decides which row comes: epoch e is counters [e N, (e + 1) N), shuffled by
    (seed, e) over the N rows left after the overlong ones are gone. A step's prompts are
    distributed over the samplers by the expected length of their responses (prompt_assignment.py),
    and a process reads only those of its sampler. Neither the order nor the number of steps depends
    on the number of processes.

    Iterating yields step after step from `position` on, forever or to the end of `config.epochs`
    (its last prompts are left out where they fill no whole step).

    Attributes:
      position: counter of the next prompt.
      sees: whether the model takes images.
      dropped: number of rows that `overlong="drop"` left out.
      dropped_for: the same by reason: "prompt", "images" (its text alone would fit), "answer".
      rows: int64 [N], the rows of the data set that are issued.
      lengths: expected response lengths by row of the data set; `observe` feeds them.
      spreads: 1 + the expected spread of scores by row; `observe_scores` feeds them.
    """

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: PromptEncoder,
        config: DataConfig,
        *,
        seed: int,
        share: SamplerShare | None = None,
        answers: int = 0,
        max_answer: int = 0,
        observed_staleness: int = 1,
    ):
        """`tokenizer` is a SeeingTokenizer where the model takes images. `answers`: answers read
        from each row (1: `chosen`; 2: `rejected` too), of up to `max_answer` tokens each.
        `observed_staleness`: see LengthEstimates."""
        self._max_answer = max_answer
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._config = config
        self._seed = seed
        self._share = share or SamplerShare()
        self.sees = isinstance(tokenizer, SeeingTokenizer)
        self.position = 0
        self._encoded = EncodedRows(dataset, tokenizer, answers, config.train_on)
        self.lengths = LengthEstimates(len(dataset), observed_staleness)
        self.spreads = LengthEstimates(len(dataset), observed_staleness)
        most = TokenLimits(config.max_prompt_length, max_answer, config.overlong)
        self.rows, self.dropped_for = rows_in_limit(self._encoded, most)
        self.dropped = len(dataset) - len(self.rows)
        order = grain.MapDataset.range(len(self.rows))
        if config.shuffle:
            # Grain shuffles epoch e by seed + e. Hashed first, neighbouring seeds share no epochs.
            order = order.shuffle(seed=int(np.random.SeedSequence(seed).generate_state(1)[0]))
        self._order = order.repeat(config.epochs or None)
        if len(self._order) < config.prompts_per_step:
            raise ValueError(
                f"{dataset.name} gives {len(self._order)} prompts in {config.epochs} epochs, fewer "
                f"than data.prompts_per_step {config.prompts_per_step}; lower that, or raise "
                "data.epochs (0 is no limit)"
            )

    def __iter__(self) -> Iterator[list[Prompt]]:
        return self

    def __next__(self) -> list[Prompt]:
        count = self._config.prompts_per_step
        if self.position + count > len(self._order):
            raise StopIteration
        counters = range(self.position, self.position + count)
        step, rows = self.position // count + 1, np.array([self.row(c) for c in counters])
        expected = self.lengths.expected(step, rows)
        spread = self.spreads.expected(step, rows) - 1
        if self._share.in_turn:
            samplers = range(self._share.count)
            share = [
                [i for i in range(count) if counters[i] % len(samplers) == s] for s in samplers
            ]
        else:
            share = deal(expected.tolist(), self._share.count, least=self._share.hosts)
        # by counter, as rows are assigned; a sampler takes the longest expected first by itself
        drafts = [
            self._draft(counters[i], float(expected[i]), float(spread[i]))
            for i in sorted(share[self._share.index])
        ]
        prompts = self._with_images(drafts)
        self.position += count
        return prompts

    def observe(self, step: int, counter: np.ndarray, length: np.ndarray) -> None:
        """Records the response lengths of a finished step, int [N], over all processes."""
        counters, which = np.unique(counter, return_inverse=True)
        mean = np.bincount(which, length) / np.bincount(which)
        rows = np.array([self.row(int(c)) for c in counters], np.int64)
        self.lengths.observe(step, rows, mean)

    def observe_scores(self, step: int, counter: np.ndarray, score: np.ndarray) -> None:
        """Records how far the scores of a finished step's groups lie apart, float64 [N] with the
        counters, int [N], over all processes. NaN: not scored."""
        scored = ~np.isnan(score)
        counters, which = np.unique(counter[scored], return_inverse=True)
        low, high = np.full(len(counters), np.inf), np.full(len(counters), -np.inf)
        np.minimum.at(low, which, score[scored])
        np.maximum.at(high, which, score[scored])
        rows = np.array([self.row(int(c)) for c in counters], np.int64)
        self.spreads.observe(step, rows, 1 + high - low)

    def __len__(self) -> int:
        """Prompts until `config.epochs` end."""
        return len(self._order)

    def row(self, counter: int) -> int:
        """Row of the data set that this counter issues."""
        return int(self.rows[self._order[counter]])

    def place(self, row: int) -> str:
        """The place of a row of the data set in messages."""
        return self._dataset.place(row)

    def epoch(self, counter: int) -> float:
        """Passes over the data before this counter."""
        return counter / len(self.rows)

    @property
    def num_steps(self) -> int | None:
        """Whole steps in `config.epochs`, None without an end."""
        return len(self._order) // self._config.prompts_per_step if self._config.epochs else None

    def state(self, position: int) -> dict[str, Any]:
        """The loader's state for a checkpoint, JSON-able.

        Args:
          position: counter after the last prompt that was *trained* on, which lies behind
            `self.position` while prompts are prefetched.
        """
        step = position // self._config.prompts_per_step
        estimates = {"lengths": self.lengths.state(step), "spreads": self.spreads.state(step)}
        made_by = getattr(self._dataset, _MADE_BY, "")
        return {"position": position, _MADE_BY: made_by, **estimates, **self._identity()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues at a state's position.

        Raises:
          ValueError: the state belongs to other data, or to another order of the data.
        """
        for key, here in self._identity().items():
            if state.get(key) != here:
                raise ValueError(
                    f"the checkpoint was trained on other data: {key} was {state.get(key)!r} and "
                    f"is {here!r} for {self._dataset.name}; {_fix(self._dataset, state)}, "
                    "or start in a new --workdir"
                )
        self.position = int(state["position"])
        self.lengths.restore(state["lengths"])
        if "spreads" in state:  # checkpoints of older versions have none
            self.spreads.restore(state["spreads"])

    def _identity(self) -> dict[str, Any]:
        return {
            "fingerprint": self._dataset.fingerprint,
            "num_prompts": len(self.rows),
            "rows_crc": zlib.crc32(self.rows.tobytes()),  # another limit may drop other rows
            "seed": self._seed,
            "shuffle": self._config.shuffle,
        }

    def prompt(self, counter: int) -> Prompt:
        """The prompt that a counter issues."""
        (prompt,) = self._with_images([self._draft(counter)])
        return prompt

    def _with_images(self, drafts: list[tuple[Prompt, Sequence[ImageSource]]]) -> list[Prompt]:
        """Prompts with their images, which are read together."""
        if not any(sources for _, sources in drafts):
            return [prompt for prompt, _ in drafts]
        assert isinstance(self._tokenizer, SeeingTokenizer)  # EncodedRows has refused others
        images = read_images([sources for _, sources in drafts], self._tokenizer.layout)
        return [
            dataclasses.replace(prompt, images=found)
            for (prompt, _), found in zip(drafts, images, strict=True)
        ]

    def _draft(
        self, counter: int, expected_length: float = 0.0, expected_spread: float = 0.0
    ) -> tuple[Prompt, Sequence[ImageSource]]:
        """(the prompt that a counter issues, the images that it still lacks)."""
        row = self.row(counter)
        example = self._dataset[row]
        images, patch = example.images, None
        if images:
            placed, cut = self._encoded.place(row).last(self._config.max_prompt_length)
            text, tokens, images = placed.text, placed.tokens, images[cut:]
            patch = placed.patch if images else None
            answers, masks = self._encoded.answers(row), ()
        else:
            text, tokens, answers, masks = self._encoded.tokens(row)
        if example.label is not None:
            answers += self._encoded.answers(self._other_row(counter, example.prompt))
        prompt = Prompt(
            counter=counter,
            row=row,
            tokens=np.asarray(tokens[-self._config.max_prompt_length :], np.int32),
            text=text,
            data_source=example.data_source,
            ground_truth=example.ground_truth,
            extra_info=example.extra_info,
            expected_length=expected_length,
            answers=tuple(answer[: self._max_answer] for answer in answers),
            answer_masks=tuple(mask[: self._max_answer] for mask in masks),
            expected_spread=expected_spread,
            patch=patch,
            label=example.label,
            messages=None if isinstance(example.prompt, str) else [*example.prompt],
        )
        return prompt, images

    def _other_row(self, counter: int, prompt: Any) -> int:
        """The row whose answer an unpaired row of a step is compared with: the next in the step,
        in a circle, that has another prompt; without any the next."""
        count = self._config.prompts_per_step
        first = counter - counter % count
        others = [self.row(first + (counter + i) % count) for i in range(1, count)]
        different = (row for row in others if self._dataset[row].prompt != prompt)
        return next(different, others[0])


def describe_dropped(reasons: Mapping[str, int]) -> str:
    """The line about rows that were left out, `Loader.dropped_for`; by reason if images are one.

    >>> describe_dropped({"prompt": 1, "images": 2})
    '3 overlong prompts were dropped: 1 by their text, 2 by their images'
    """
    line = f"{sum(reasons.values())} overlong prompts were dropped"
    if "images" not in reasons:
        return line
    words = {"prompt": "by their text", "images": "by their images", "answer": "by an answer"}
    return f"{line}: {', '.join(f'{count} {words[why]}' for why, count in reasons.items())}"


_MADE_BY = "made_by"  # attribute of a data set, and key of a loader's state


def _fix(dataset: Dataset, state: Mapping[str, Any]) -> str:
    """The way back to the data that a loader's state belongs to."""
    now, restore = getattr(dataset, _MADE_BY, ""), "restore the data and the data config"
    if not now or state.get(_MADE_BY) == now:
        return restore
    if before := state.get(_MADE_BY):
        return f"it was made by {before}, and {now} is installed: pip install {before}"
    return f"{restore}, or the version of before where another than {now} was installed"
