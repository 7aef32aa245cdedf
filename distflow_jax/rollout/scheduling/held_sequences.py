"""Held sequences: responses that have ended and keep their slots for a further turn."""

from collections.abc import Sequence

import numpy as np

from distflow_jax.images.turn_images import TurnImages, joined
from distflow_jax.rollout.decode_state import check_length, longest_read
from distflow_jax.rollout.engine.slot_commands import Injection
from distflow_jax.rollout.requests import Partial
from distflow_jax.rollout.scheduling.sequences import SlotSequence
from distflow_jax.rollout.scheduling.step_loop import StepLoop


class HeldSequences:
    """Extends and releases sequences of requests with `GroupRequest.hold`."""

    def __init__(self, loop: StepLoop):
        self._loop = loop

    def extend(
        self,
        group_id: int,
        sample: int,
        tokens: Sequence[int],
        limit: int,
        shown: TurnImages | None = None,
    ) -> None:
        """Adds `tokens` (a tool's answer) to a held sequence and runs it again.

        `limit`: longest response allowed, in tokens, earlier turns included. `shown`: images among
        the tokens; the sequence is then read again with its prompt, as after a long answer. Raises
        ValueError where the sequence is not held or nothing would be left to sample.
        """
        slot, sequence = self._find(group_id, sample)
        config = self._loop.engine.config
        self._loop.stalled = False
        before = sequence.partial.tokens
        fed = np.concatenate([before, np.asarray(tokens, np.int32)])
        if len(fed) >= limit or limit > config.max_response:
            raise ValueError(
                f"a response of {len(before)} tokens with {len(tokens)} more leaves nothing to "
                f"sample: limit {limit}, and the engine's {config.max_response}"
            )
        # the last token sampled has not been fed yet
        queue = [*map(int, before[-1:]), *map(int, tokens)]
        # a slot is fed ids alone
        fits = 0 < len(queue) <= config.max_forced and shown is None
        if not fits:
            whole = len(sequence.partial.request.prompt.tokens) + len(fed)
            check_length(whole, longest_read(config))
        request = sequence.partial.request.with_limit(limit)
        images = joined([(len(before), sequence.partial.shown), (len(tokens), shown)])
        sequence.partial, sequence.logits_by = Partial(request, sample, fed, shown=images), None
        sequence.tokens = len(fed)
        if fits:
            begun = request.begun
            self._loop.slots.inject(Injection(slot, queue, begun + limit, begun + len(fed)))
        else:
            self._loop.preempt(slot)

    def release(self, group_id: int, sample: int) -> None:
        """Frees the slot of a held sequence. Raises ValueError where it is not held."""
        slot, sequence = self._find(group_id, sample)
        self._loop.vacate(slot)
        self._loop.finish(sequence.group)

    def _find(self, group_id: int, sample: int) -> tuple[int, SlotSequence]:
        for slot, sequence in self._loop.slots.sequences.items():
            wanted = sequence.group.id == group_id and sequence.partial.sample == sample
            if wanted and sequence.ended:
                return slot, sequence
        raise ValueError(f"response {sample} of request {group_id} is not held")
