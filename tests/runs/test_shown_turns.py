"""A run whose environment shows pictures: the example's game, the same numbers on both sides.

Nightly: a run that is shown pictures in turns has one position on both sides, and resumes bit for
bit, ahead too.
"""

import shutil

import numpy as np
import pytest
from support.documented import unexplained_metrics
from support.run_folders import json_lines

import distflow_jax as df
from configs.examples import grid_walk
from distflow_jax.data.dataset import open_dataset
from distflow_jax.data.drawn.walk import STEPS, Board
from distflow_jax.environments.environment import Turn
from distflow_jax.report.run_writer import read_metrics

MODEL = (
    "random:{family}?hidden=64&layers=2&heads=4&kv_heads=2&mlp=96&vocab=272&max_position=1024"
    "&vision_hidden=32&vision_layers=2&vision_heads=2&patch=8"
)
SETTINGS = {
    "model.source": MODEL.format(family="smolvlm") + "&image=48",
    "mesh.devices": "0:1",
    "data.prompts_per_step": 4,
    "rollout.num_slots": 64,
    "rollout.turn_length": 32,  # one turn of noise in nine ends
    "rollout.environment": "test_shown_turns:AnyTurn",
    "rollout.prefill_tokens": 64,
    "rollout.max_turns": 3,
    "eval.dataset": "",
    "training.optimizer.lr": 0.0,
    "checkpoint.every": 100,
}
AHEAD = {
    "stream.max_staleness": 1,
    "stream.weight_update": "boundary",
    "mesh.roles": {"ROLLOUT": {"devices": "1:2"}},
    "algorithm.correction": "token_tis",
}


class AnyTurn(grid_walk.GridWalk):
    """The game, with a step for every turn: a model of noise names none."""

    def step(self, tokens, text):
        steps = list(STEPS)
        turn = super().step(tokens, steps[int(tokens[0]) % 4])
        return Turn(turn.observation, turn.reward, False, turn.logged)


def train(folder, steps, **settings):
    changes = SETTINGS | {"training.steps": steps} | settings
    config = df.load_config("configs/examples/grid_walk.py", changes)
    df.train(config, str(folder))
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["step"]]


def check(rows):
    for metrics in rows:
        assert metrics["environment/infra/raised"] == metrics["environment/infra/timed_out"] == 0
        assert metrics["training/rollout_probs_diff_max"] < 1e-4
        # of turns, beside those of prompts
        assert metrics["rollout/images_encoded"] > metrics["data/images"] == 4
        assert metrics["perf/images_encoded"] > 4
        assert metrics["environment/steps"] > 0
    assert [metrics["perf/compilations"] for metrics in rows[1:]] == [0] * (len(rows) - 1)


@pytest.mark.slow
def test_a_run_sees_the_pictures_of_later_turns(tmp_path):
    rows = train(tmp_path / "run", 2)
    check(rows)
    assert unexplained_metrics(tmp_path / "run") <= {"environment/steps", "environment/arrived"}
    samples = json_lines(tmp_path / "run" / "samples" / "1.jsonl")
    assert len(samples) == 64 and all("response_images" not in sample for sample in samples)
    assert max(sample["environment_reward"] for sample in samples) > 0
    plan = (tmp_path / "run" / "plan.txt").read_text()
    assert "response_images" in plan


def test_the_board_of_the_example():
    data = open_dataset("task:walk?cells=3&sides=48")
    example = data[5]
    board = Board.of(example.extra_info["objects"])
    assert board.objects == example.extra_info["objects"]
    assert board.after(example.ground_truth).distance == board.distance - 1
    pixels = example.images[0].pixels()
    game = grid_walk.GridWalk(None)
    game._board, game._ground = board, tuple(map(int, pixels[1, 1]))
    np.testing.assert_array_equal(np.array(game.picture()), pixels)
    assert Board(3, (0, 0), (2, 2)).after("up").dot == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_go_on_behind_the_picture_of_a_later_turn(tmp_path, family):
    check(train(tmp_path / "run", 2, **{"model.source": MODEL.format(family=family)}))


@pytest.mark.slow
@pytest.mark.parametrize("stream", [{}, AHEAD])
def test_a_run_that_is_shown_pictures_resumes(tmp_path, stream):
    """Images of responses that wait for their step are in the checkpoint. Bit for bit, but for
    samplers that run ahead: which responses they decode together follows from when the environment
    answers (docs/asynchronous.md)."""
    changes = {"checkpoint.every": 2, "training.optimizer.lr": 1e-3, **stream}
    whole = train(tmp_path / "whole", 4, **changes)
    # as a kill before the second checkpoint leaves it: a run that ends at step 2 begins no more
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "4")
    cut = train(tmp_path / "cut", 4, **changes)
    named = ("actor/loss", "actor/grad_norm", "critic/score/mean", "perf/images_encoded")
    for step in (3, 4):
        one, two = ([m for m in x if m["step"] == step][-1] for x in (whole, cut))
        one, two = ([of[name] for name in named] for of in (one, two))
        assert one == (pytest.approx(two, rel=1e-5, abs=1e-7) if stream else two)
    assert whole[-1]["actor/grad_norm"] > 0
