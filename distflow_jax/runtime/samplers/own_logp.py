"""Log-probs of this machine, to hold those of an engine of another program against."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distflow_jax.batch import Placement, Rows, RowShape, Sequences, from_token_field, to_rows
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.rollout.foreign.weight_probe import PROMPT_TOKENS, TOKENS, OwnLogp
from distflow_jax.training.forward import ForwardConfig, response_logp

_TOKENS = PROMPT_TOKENS + TOKENS  # of a row


def own_logp(network: DecoderConfig, temperature: float) -> OwnLogp:
    """The log-probs of responses by weights in the form of training, adapters merged.

    `temperature`: that engines sample at; those at 0 are of temperature 1.
    """
    config, divisor = ForwardConfig(logp_chunk=TOKENS), jnp.float32(temperature or 1.0)

    @jax.jit
    def logp(params: Any, rows: Rows) -> jax.Array:
        return response_logp(params, network, rows, divisor, config)[0]

    def own(
        params: Any, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        count = len(prompts)
        masks = [np.ones(len(response), bool) for response in responses]
        sequences = Sequences(range(count), [0] * count, prompts, responses, masks)
        at = (tuple((place,) for place in range(count)),)
        placement = Placement(RowShape(1, count, _TOKENS, 1), at, shared=False)
        rows = jax.tree.map(lambda x: x[0], to_rows(sequences, placement))
        found = from_token_field(sequences, placement, np.asarray(logp(params, rows))[None])
        return [found[place] for place in range(count)]

    return own
