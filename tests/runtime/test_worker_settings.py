"""Settings of a worker: nodes, room, and engines that cannot see."""

import pytest
from support.tiny_config import tiny_config

from configs import vision_tiny
from distflow_jax.config.config_dict import from_config_dict, override
from distflow_jax.config.run_config import Config
from distflow_jax.runtime.samplers.foreign_engines import read_engine
from distflow_jax.runtime.samplers.run_worker import run_worker
from distflow_jax.stream.links.buffer_links import Patience

FOREIGN = read_engine("openai:http://127.0.0.1:1", "")


def test_engines_of_other_programs_are_refused_for_a_model_that_sees():
    flags = ["stream.workers=True", "stream.max_staleness=1", "algorithm.correction=token_tis"]
    settings = [*flags, "eval.dataset=", "eval.every=0"]
    config = from_config_dict(Config, override(vision_tiny.get_config(), settings))
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:1 gets token ids alone, .* --engine=own"):
        run_worker(config, "runs/none", None, Patience(1.0, 1.0), foreign=FOREIGN)


@pytest.mark.parametrize("nodes", [(), ("rollout", "reward")])
def test_a_worker_without_room_for_a_prompt_and_a_response_is_refused_before_it_joins(nodes):
    flags = ["stream.workers=True", "stream.max_staleness=1", "algorithm.correction=token_tis"]
    settings = [*flags, "eval.dataset=", "eval.every=0", "rollout.cache_tokens=64"]
    config = tiny_config(*settings)
    with pytest.raises(ValueError, match=r"rollout\.cache_tokens 64 leaves .* use at least"):
        run_worker(config, "runs/none", None, Patience(1.0, 1.0), nodes=nodes)


@pytest.mark.parametrize(
    "nodes, changed, message",
    [
        (["rewrd"], {}, r"--nodes=rewrd names 'rewrd', but dag 'grpo' .*did you mean 'reward'"),
        (["actor_train"], {}, "--nodes=actor_train .* model 'actor', which this run trains"),
        (
            ["environment"],
            {},
            "--nodes=environment .* there is no environment to run",
        ),
        (["reward"], {"foreign": FOREIGN}, "--nodes=reward names no node that samples, and"),
    ],
)
def test_nodes_that_a_worker_cannot_run_are_refused_before_it_joins(nodes, changed, message):
    flags = ["stream.workers=True", "stream.max_staleness=1", "algorithm.correction=token_tis"]
    flags += ["eval.dataset=", "eval.every=0"]
    config = tiny_config(*flags)
    foreign = changed.get("foreign")
    with pytest.raises(ValueError, match=message):
        run_worker(config, "runs/none", None, Patience(1.0, 1.0), nodes=nodes, foreign=foreign)
