"""A custom environment: a wrong answer is answered with a hint, and the model may try again.

    python scripts/train.py --config=configs/tiny.py --workdir=/tmp/second_try \
        --config.rollout.environment=configs/examples/second_try.py:SecondTry \
        --config.rollout.max_response_length=64 --config.rollout.turn_length=24 \
        --config.rollout.max_turns=3 --config.reward.function=zero --config.reward.kwargs="{}"
"""

from distflow_jax.environments.environment import Turn


class SecondTry:
    """Reward 1 for a right answer in the first turn, times `later` for each further turn."""

    def __init__(self, tokenizer, *, later: float = 0.5):
        self._tokenizer, self._later = tokenizer, later
        self._answer, self._worth = "", 1.0

    def reset(self, prompt):
        """Keeps the right answer; adds no text before the first turn."""
        self._answer = str(prompt.ground_truth)

    def step(self, tokens, text):
        """Compares the turn with the right answer."""
        if text.strip() == self._answer:
            return Turn(reward=self._worth, done=True)
        self._worth *= self._later
        hint = self._tokenizer.encode_turn("No. Answer with just the number.")
        return Turn(hint, logged={"wrong": 1})
