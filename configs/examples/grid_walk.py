"""A game that is shown and not told: a dot walks to a square, and sees the board after each step.

    python scripts/train.py --config=configs/examples/grid_walk.py --workdir=runs/grid_walk

`task:walk` draws the first board, from the seed and the row; the environment draws the next ones.
"""

import PIL.Image
import PIL.ImageDraw
from ml_collections import ConfigDict

from distflow_jax.config.config_dict import to_config_dict
from distflow_jax.config.run_config import Config
from distflow_jax.data.drawn.walk import STEPS, Board
from distflow_jax.environments.environment import Shown, Turn

SIDE = 48  # pixels of a picture


def get_config() -> ConfigDict:
    """8 boards x 16 walks on a random model of 1 M parameters that sees, up to 5 steps each."""
    config = to_config_dict(Config())
    config.model.source = (
        "random:smolvlm?hidden=128&layers=4&heads=4&kv_heads=2&mlp=384&vocab=272&max_position=1024"
        "&vision_hidden=96&vision_layers=3&vision_heads=4&patch=8&image=48"
    )
    config.data.train = f"task:walk?cells=3&sides={SIDE}&question=Step"
    config.data.prompts_per_step = 8
    config.data.max_prompt_length = 96
    config.rollout.environment = "configs/examples/grid_walk.py:GridWalk"
    config.rollout.num_samples = 16
    config.rollout.num_slots = 64
    config.rollout.turn_length = 8
    config.rollout.max_turns = 5
    config.rollout.max_response_length = 192
    config.rollout.tokens_per_call = 4
    config.reward.function = "zero"  # the environment gives everything
    config.training.steps = 200
    config.training.row_tokens = 512
    config.training.optimizer.lr = 1e-3
    config.eval.dataset = f"task:walk?cells=3&sides={SIDE}&question=Step&held_out=1"
    config.eval.num_prompts = 32
    config.eval.max_response_length = 192
    config.checkpoint.every = 50
    return config


class GridWalk:
    """Reward 1 on the square, `nearer` for each step towards it, and `move` for each step.

    A turn that names no step ends the walk.
    """

    def __init__(self, tokenizer, *, move: float = 0.1, nearer: float = 0.2):
        self._move, self._nearer = move, nearer
        self._board = Board(2, (0, 0), (1, 1))
        self._ground = (255, 255, 255)

    def reset(self, prompt):
        """Takes the board of the row, whose picture is in the prompt already."""
        self._board = Board.of(prompt.extra_info["objects"])
        self._ground = tuple(map(int, prompt.images[0].pixels[1, 1]))  # beside the corner's line

    def step(self, tokens, text):
        """Moves the dot by the first letter of a turn, and shows where it is then."""
        step = next((step for step in STEPS if text.strip()[:1].lower() == step[0]), None)
        if step is None:
            return Turn(done=True, logged={"steps": 0})
        before, self._board = self._board, self._board.after(step)
        nearer = self._board.distance < before.distance
        reward = self._move + self._nearer * nearer
        if not self._board.distance:
            return Turn(reward=reward + 1.0, done=True, logged={"steps": 1, "arrived": 1})
        shown = Shown("<image>Step", [self.picture()], role="user")
        return Turn(shown, reward=reward, logged={"steps": 1})

    def picture(self) -> PIL.Image.Image:
        """The board as it is now."""
        picture = PIL.Image.new("RGB", (SIDE, SIDE), self._ground)
        self._board.paint(PIL.ImageDraw.Draw(picture), SIDE, SIDE)
        return picture
