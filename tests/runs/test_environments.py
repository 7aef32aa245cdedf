"""A run whose responses are in turns: an environment from configs/examples, two steps.

Nightly: the score of a run is the reward function's plus the environment's, in training and in
evaluation; turns of two nodes that sample ahead are kept apart. A run whose calls fail ends with
the cause, whether it samples ahead or not.
"""

import contextlib
import json
import re

import numpy as np
import pytest
from support.documented import unexplained_metrics
from support.paths import ROOT
from support.run_folders import json_lines
from support.text_tables import cells_of
from support.tiny_config import tiny_config
from support.waiting import HANG

from distflow_jax import run
from distflow_jax.batch import Prompt
from distflow_jax.environments import handle
from distflow_jax.environments.handle import check_environments
from distflow_jax.environments.registry import CallLimits, Environments
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.sizes import derive_sizes
from distflow_jax.report.run_writer import read_metrics

TURNS = [
    "rollout.environment=configs/examples/second_try.py:SecondTry",
    "rollout.max_response_length=96",
    "rollout.turn_length=24",
    "rollout.max_turns=3",
    "reward.function=zero",
    "reward.kwargs={}",
]


def config_of(*assignments):
    return tiny_config(*TURNS, *assignments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a run; its vocabulary is small, so that a model of noise ends one turn in fifteen."""
    path = tmp_path_factory.mktemp("turns")
    config = config_of(
        "model.source=random:llama?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=259",
        "training.steps=2",
        "eval.temperature=1.0",
    )
    assert run.train(config, path) == 0
    return path


def test_its_metrics(folder):
    assert unexplained_metrics(folder) == {"environment/wrong"}  # of its own
    first, *steps = read_metrics(folder / "metrics.jsonl")
    assert "val-core/arithmetic/reward/mean@1" in first and len(steps) == 2
    for metrics in steps:
        turns = metrics["environment/turns/mean"]
        assert 1 < turns < metrics["environment/turns/max"] <= 3
        shares = {k: v for k, v in metrics.items() if k.startswith("environment/ended/")}
        assert sum(shares.values()) == pytest.approx(1) and len(shares) == 4
        assert shares["environment/ended/turn_length"] > 0.5
        infra = {k: v for k, v in metrics.items() if k.startswith("environment/infra/")}
        assert len(infra) == 6 and not any(infra.values())
        assert metrics["environment/observation_tokens"] > 0
        # noise is never right: whatever was shown to the environment was wrong, and the last turns
        # of the others were cut
        cut = shares["environment/ended/turn_length"] + shares["environment/ended/response_length"]
        assert turns - cut <= metrics["environment/wrong"] < turns
        assert metrics["reward/environment"] == metrics["critic/score/max"] == 0
        assert 0 < metrics["perf/slots_busy_share"] <= 1
        assert metrics["perf/trajectories/tool_seconds"] > 0
        assert metrics["perf/trajectories/slot_seconds"] >= 0
        # sampler and trainer mean the same tokens, at the same places
        assert metrics["training/rollout_probs_diff_max"] < 1e-4
    assert steps[1]["perf/compilations"] == 0


def test_its_samples(folder):
    """Nothing but what was sampled, and after the end of a turn what the environment said."""
    samples = json_lines(folder / "samples" / "1.jsonl")
    said = "<|im_end|>\n<|im_start|>user\nNo. Answer with just the number.<|im_end|>\n"
    said += "<|im_start|>assistant\n"
    several = 0
    for sample in samples:
        assert sample["environment_reward"] == 0 and not sample["finished"]
        assert sample["response_length"] <= 96
        turns = sample["response"].split(said)
        # a turn of noise may hold the byte, but not the whole of what was said
        assert len(turns) <= 3
        several += len(turns) > 1
    assert several
    assert len(samples) == 64


def test_its_plan(folder):
    sizes = (folder / "plan.txt").read_text()
    assert re.search(r"decode slots +32 ", sizes) and re.search(r"trajectories +64 +maximum", sizes)
    reads = cells_of((folder / "plan.txt").read_text(), ["node", "reads", "from", "move"])
    fields = "environment_reward, finished, response"
    assert ["reward", fields, "rollout", "stay on host"] in reads


@pytest.mark.slow
def test_what_an_environment_gives_is_the_score(tmp_path):
    """Score = function + environment, in training and in evaluation, and greedy baselines too."""
    file = tmp_path / "generous.py"
    file.write_text(
        "from distflow_jax.environments.environment import Turn\n"
        "class Generous:\n"
        "    def __init__(self, tokenizer, *, worth): self.worth = worth\n"
        "    def reset(self, prompt): return ''\n"
        "    def step(self, tokens, text): return Turn(reward=self.worth, done=True)\n"
    )
    config = config_of(
        "model.source=random:llama?hidden=32&layers=1&heads=4&kv_heads=2&mlp=64&vocab=259",
        f"rollout.environment={file}:Generous",
        "rollout.environment_kwargs={'worth': 2.5}",
        "rollout.turn_length=0",
        "reward.function=exact",
        "training.steps=1",
        "dag=remax",
        "eval.temperature=1.0",
    )
    assert run.train(config, tmp_path / "run") == 0
    evaluated, metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    samples = [
        json.loads(line)
        for line in (tmp_path / "run" / "samples" / "1.jsonl").read_text().splitlines()
    ]
    given = np.array([s["rollout_environment_reward"] for s in samples])
    ended = np.array([s["finished"] for s in samples])
    assert 0 < ended.sum() < len(ended)
    np.testing.assert_array_equal(given, np.where(ended, 2.5, 0.0))
    np.testing.assert_array_equal([s["score"] for s in samples], given)  # noise is never exact
    assert metrics["rollout/environment/ended/done"] == pytest.approx(ended.mean())
    assert "greedy_rollout/environment/turns/mean" in metrics
    mean = evaluated["val-core/arithmetic/reward/mean@1"]
    assert mean % (2.5 / 16) == pytest.approx(0) and mean >= 0


@pytest.mark.slow
def test_fewer_slots_than_trajectories_sample_the_same_with_adapters(tmp_path):
    """In step 2 the adapters are no identity any more; pages are for a few responses."""
    samples = {}
    for slots, pages in ((64, 0), (8, 64 * 8 * 6)):
        config = config_of(
            "model.source=random:llama?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=259",
            "lora.rank=4",
            "training.optimizer.lr=0.01",
            "training.steps=2",
            "eval.dataset=",
            f"rollout.num_slots={slots}",
            f"rollout.cache_tokens={pages}",
        )
        assert run.train_here(config, tmp_path / str(slots)) == run.EXIT_DONE
        for step in (1, 2):
            lines = (tmp_path / str(slots) / "samples" / f"{step}.jsonl").read_text().splitlines()
            samples[slots, step] = [json.loads(line)["response"] for line in lines]
    rows = [metrics for metrics in read_metrics(tmp_path / "8" / "metrics.jsonl")]
    assert rows[-1]["training/rollout_probs_diff_max"] < 1e-4
    for step in (1, 2):
        same = np.mean([a == b for a, b in zip(samples[64, step], samples[8, step], strict=True)])
        assert same > 0.9, step  # near-ties apart


@pytest.mark.slow
def test_turns_of_two_nodes_that_sample_ahead_are_kept_apart(tmp_path):
    """Sampled and greedy responses to a prompt share a TurnDriver (environments/multiturn.py)."""
    config = config_of(
        "model.source=random:llama?hidden=32&layers=1&heads=4&kv_heads=2&mlp=64&vocab=259",
        "dag=remax",
        "stream.max_staleness=1",
        "algorithm.correction=token_tis",
        "rollout.num_samples=2",
        "training.steps=2",
        "eval.dataset=",
    )
    assert run.train_here(config, tmp_path) == run.EXIT_DONE
    steps = [metrics for metrics in read_metrics(tmp_path / "metrics.jsonl") if metrics["step"]]
    assert len(steps) == 2
    for metrics in steps:
        assert metrics["rollout/environment/turns/mean"] > 1
        for node in ("rollout", "greedy_rollout"):
            assert metrics[f"{node}/environment/infra/raised"] == 0
    # tokens stand in the conversations that gave them: the weights of step 1 are the sampler's
    assert steps[0]["training/rollout_probs_diff_max"] < 1e-4


SHAKY = """
import random

from configs.examples.second_try import SecondTry

RANDOM = random.Random(0)


class Shaky(SecondTry):
    def __init__(self, tokenizer, *, rate):
        super().__init__(tokenizer)
        self.rate = rate

    def reset(self, prompt):
        super().reset(prompt)
        if RANDOM.random() < self.rate:
            raise ConnectionError("the sandbox is gone")

    async def step(self, tokens, text):
        turn = super().step(tokens, text)
        if RANDOM.random() < self.rate:
            raise ConnectionError("the sandbox is gone")
        return turn
"""


def shaky(folder, rate, *assignments):
    (folder / "shaky.py").write_text(SHAKY)
    return config_of(
        "model.source=random:llama?hidden=32&layers=1&heads=4&kv_heads=2&mlp=64&vocab=259",
        f"rollout.environment={folder}/shaky.py:Shaky",
        f"rollout.environment_kwargs={{'rate': {rate}}}",
        "training.steps=2",
        "eval.dataset=",
        *assignments,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "ahead", [[], ["stream.max_staleness=1", "algorithm.correction=token_tis"]]
)
def test_a_run_has_no_failed_response_if_a_fifth_of_the_calls_fail(tmp_path, ahead):
    assert run.train_here(shaky(tmp_path, 0.2, *ahead), tmp_path / "run") == run.EXIT_DONE
    for metrics in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        assert metrics["environment/infra/raised"] > 5
        assert metrics["environment/infra/unscored"] == 0
        assert metrics["training/rollout_probs_diff_max"] < 1e-4 or metrics["step"] == 2
    samples = (tmp_path / "run" / "samples" / "2.jsonl").read_text().splitlines()
    assert len(samples) == 64
    assert all(json.loads(sample)["score"] == 0 for sample in samples)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ahead", [[], ["stream.max_staleness=1", "algorithm.correction=token_tis"]]
)
def test_a_run_ends_with_the_cause_if_most_calls_fail(tmp_path, monkeypatch, ahead):
    monkeypatch.setattr(handle, "PAUSE", 0.0)
    config = shaky(tmp_path, 0.6, *ahead)
    with pytest.raises(RuntimeError, match="rollout.max_infra_rate=0.5: mend it") as told:
        run.train_here(config, tmp_path / "run")
    assert "Shaky' failed (raised " in str(told.value)
    assert "ConnectionError: the sandbox is gone" in str(told.value)


MODEL = DecoderConfig(
    vocab_size=300, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_size=96
)


def test_the_sampler_can_read_the_longest_response_again():
    engine = derive_sizes(config_of(), MODEL, Machine(1, 1, 1, "cpu")).engine
    assert (engine.max_prompt, engine.max_response, engine.max_read) == (128, 96, 128 + 95)


def test_samplers_of_several_hosts_have_no_environments():
    with pytest.raises(ValueError, match="mesh.rollout_tensor=4 spreads a sampler over 2; use at"):
        derive_sizes(config_of("mesh.rollout_tensor=4"), MODEL, Machine(4, 8, 2, "cpu"))


def test_the_environment_that_the_documentation_shows(tmp_path):
    text = (ROOT / "docs" / "environments.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    file = tmp_path / "guess.py"
    file.write_text(code)
    tokenizer = Tokenizer.byte_level(300)
    environments = Environments(f"{file}:Guess", {"highest": 10}, tokenizer, calls=CallLimits(HANG))
    prompt = Prompt(0, 0, np.zeros(1, np.int32), "", "", "7", {})
    with contextlib.closing(environments):
        check_environments(environments, prompt)
    guess = environments.make()
    guess.reset(prompt)
    told = environments.observed(guess.step(tokenizer.encode("5"), "5"))
    assert tokenizer.decode(told.tokens) == "\nuser\nhigher\nassistant\n"
    assert told.logged == {"hints": 1} and not told.done
    assert environments.observed(guess.step(tokenizer.encode("7"), "7")).reward == 0.8
