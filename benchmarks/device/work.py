"""Sizes of the timed work, the configs of the runs that contain it, and its random inputs."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from distflow_jax.batch import Sequences
from distflow_jax.config.data_config import DataConfig, RewardConfig
from distflow_jax.config.rollout_config import RolloutConfig
from distflow_jax.config.run_config import Config, ModelSourceConfig
from distflow_jax.config.stream_config import StreamConfig
from distflow_jax.config.training_config import TrainingConfig
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.parameters import param_shardings, param_specs

RESERVED_IDS = 3  # prompts and responses hold none of the first ids


@dataclasses.dataclass(frozen=True)
class Work:
    """Sizes, in tokens unless stated otherwise."""

    row_tokens: int = 4096
    prompt: int = 512  # of an update's rows and of decoding
    # an update
    rows: int = 16  # per device, each with one prompt and one response
    micro_rows: tuple[int, ...] = (4, 1)  # per device at a time; each number is a variant
    most_rows: int = 64  # per device at a time, where the most that fit are looked for
    # decoding
    slots: int = 256  # per device
    decoded: int = 512  # per response
    # responses per prompt, in decoding and in a whole step
    samples: int = 16
    # a whole step
    prompts: int = 32
    response: int = 512  # limit, which random weights nearly always reach
    steps: int = 4  # not counting the first
    repeats: int = 3  # of all other measurements
    attention: str = "auto"  # training.attention
    decode_attention: str = "auto"  # rollout.attention

    def on(self, devices: int) -> "Work":
        """The work of `devices` devices together."""
        micro = tuple(devices * n for n in self.micro_rows)
        return dataclasses.replace(
            self,
            rows=devices * self.rows,
            micro_rows=micro,
            most_rows=devices * self.most_rows,
            slots=devices * self.slots,
        )


QUICK = Work(
    row_tokens=256,
    prompt=32,
    rows=4,
    micro_rows=(2, 1),
    most_rows=4,
    slots=8,
    decoded=32,
    samples=4,
    prompts=2,
    response=16,
    steps=2,
    repeats=2,
)


def update_run(model: str, work: Work, micro_rows: int, remat: str) -> Config:
    """A run whose update has `work.rows` rows, each filled by a prompt and one response."""
    return Config(
        model=ModelSourceConfig(model),
        data=DataConfig(prompts_per_step=work.rows // 2, max_prompt_length=work.prompt),
        rollout=RolloutConfig(
            num_samples=2, max_response_length=work.row_tokens - work.prompt, num_slots=8
        ),
        training=TrainingConfig(
            row_tokens=work.row_tokens,
            micro_batch_rows=micro_rows,
            remat=remat,
            attention=work.attention,
        ),
    )


def step_run(model: str, work: Work, micro_rows: int, staleness: int = 0) -> Config:
    """GRPO on additions: `work.steps` steps after the first, one update each, no KL.

    `staleness`: stream.max_staleness; above 0 unfinished responses continue in the next step.
    """
    return Config(
        model=ModelSourceConfig(model),
        data=DataConfig(prompts_per_step=work.prompts),
        rollout=RolloutConfig(
            num_samples=work.samples,
            max_response_length=work.response,
            num_slots=work.prompts * work.samples,
            attention=work.decode_attention,
        ),
        stream=StreamConfig(max_staleness=staleness),
        # a digit anywhere counts: random weights sample one now and then
        reward=RewardConfig(function="pattern", kwargs={"pattern": ".*[0-9].*"}),
        training=TrainingConfig(
            steps=1 + work.steps,
            row_tokens=work.row_tokens,
            micro_batch_rows=micro_rows,
            attention=work.attention,
        ),
    )


def random_params(config: DecoderConfig, dtype: str, mesh: Mesh) -> dict[str, Any]:
    """Parameters drawn on the device in their final dtype, so that nothing larger is allocated."""
    layout, placed = flatten_dict(param_shardings(config, mesh), sep="/"), {}
    for index, (path, spec) in enumerate(param_specs(config).items()):

        @functools.partial(jax.jit, out_shardings=layout[path])
        def make(key, spec=spec):
            if spec.stddev is None:
                return jnp.ones(spec.shape, dtype)
            return jax.random.normal(key, spec.shape, dtype) * jnp.asarray(spec.stddev, dtype)

        placed[path] = make(jax.random.fold_in(jax.random.key(0), index))
    return unflatten_dict(placed, sep="/")


def random_ids(rng: np.random.Generator, vocab: int, *shape: int) -> np.ndarray:
    """Ids of tokens, int32 of this shape."""
    return rng.integers(RESERVED_IDS, vocab, shape, dtype=np.int32)


def random_sequences(
    rng: np.random.Generator, vocab: int, prompt: int, lengths: np.ndarray
) -> Sequences:
    """Responses of these lengths, int [groups, samples], to a prompt of `prompt` ids for each
    group."""
    groups, samples = lengths.shape
    prompts = random_ids(rng, vocab, groups, prompt)
    return Sequences(
        group=[i // samples for i in range(lengths.size)],
        member=[i % samples for i in range(lengths.size)],
        prompt=[prompts[i // samples] for i in range(lengths.size)],
        response=[random_ids(rng, vocab, size) for size in lengths.flat],
        response_mask=[np.ones(size, bool) for size in lengths.flat],
    )
