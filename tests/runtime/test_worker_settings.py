"""Settings of a worker: its relay, and engines that cannot see."""

import contextlib

import jax
import numpy as np
import pytest
from support.tiny_model import TINY, random_params

from configs import tiny, vision_tiny
from distflow_jax.config.config_dict import from_config_dict, override
from distflow_jax.config.run_config import Config
from distflow_jax.flow.wire.caller import Caller
from distflow_jax.flow.wire.door import Door
from distflow_jax.flow.workers.home_links import Patience
from distflow_jax.flow.workers.run_token import make_run_token
from distflow_jax.flow.workers.weight_pull import WeightPull, pull_target
from distflow_jax.flow.workers.weight_shelf import WeightShelf
from distflow_jax.models.parameters import abstract_params, param_shardings
from distflow_jax.parallel.mesh import replica_mesh
from distflow_jax.runtime.samplers.foreign_engines import read_engine
from distflow_jax.runtime.samplers.run_worker import run_worker
from distflow_jax.runtime.samplers.weight_relay import Relay


def test_the_second_worker_gets_all_weights_from_the_first(tmp_path):
    token = make_run_token(tmp_path)
    shardings = param_shardings(TINY, replica_mesh(1, jax.devices()[:1]))
    params = jax.device_put(random_params(TINY, 1), shardings)
    target = pull_target(abstract_params(TINY), shardings, "float32")
    shelf = WeightShelf("a run", chunk_bytes=4096)
    with contextlib.ExitStack() as files:

        def opened(thing):
            return files.enter_context(contextlib.closing(thing))

        door = opened(Door("127.0.0.1:0", token, shelf.methods()))
        caller = opened(Caller(f"127.0.0.1:{door.port}", token, "w"))
        relays = [opened(Relay.open("127.0.0.1:0", str(tmp_path), f"w{i}")) for i in range(2)]
        for version in range(2):
            shelf.put(version, params)
            for relay in relays:
                pull = WeightPull([caller], relay.connect, shelf=relay.shelf, relay=relay.address)
                found = pull.pull(version, target, 20, "a run")
                jax.tree.map(np.testing.assert_array_equal, found, params)
        size = sum(x.nbytes for x in jax.tree.leaves(params))
        assert shelf.bytes_served == relays[0].shelf.bytes_served == 2 * size
        assert [relay.shelf.versions for relay in relays] == [[1], [1]]


def test_an_address_that_is_none_is_refused_before_the_run_is_joined():
    with pytest.raises(ValueError, match=r"--listen must be HOST:PORT, got '9100'"):
        run_worker(Config(), "runs/none", None, Patience(1.0, 1.0), listen="9100")


def test_engines_of_other_programs_are_refused_for_a_model_that_sees():
    flags = ["flow.workers=True", "flow.max_lag=1", "algorithm.correction=token_tis"]
    settings = [*flags, "eval.dataset=", "eval.every=0"]
    config = from_config_dict(Config, override(vision_tiny.get_config(), settings))
    foreign = read_engine("openai:http://127.0.0.1:1", "")
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:1 gets token ids alone, .* --engine=own"):
        run_worker(config, "runs/none", None, Patience(1.0, 1.0), foreign=foreign)


@pytest.mark.parametrize("nodes", [(), ("rollout", "reward")])
def test_a_worker_without_room_for_a_prompt_and_a_response_is_refused_before_it_joins(nodes):
    flags = ["flow.workers=True", "flow.max_lag=1", "algorithm.correction=token_tis"]
    settings = [*flags, "eval.dataset=", "eval.every=0", "rollout.cache_tokens=64"]
    config = from_config_dict(Config, override(tiny.get_config(), settings))
    with pytest.raises(ValueError, match=r"rollout\.cache_tokens 64 leaves .* use at least"):
        run_worker(config, "runs/none", None, Patience(1.0, 1.0), nodes=nodes)


@pytest.mark.parametrize(
    "nodes, changed, message",
    [
        (["rewrd"], {}, r"--nodes=rewrd names 'rewrd', and dag 'grpo' .*did you mean 'reward'"),
        (["actor_train"], {}, "--nodes=actor_train .* model 'actor', which this run trains"),
        (["reward"], {"listen": "127.0.0.1:0"}, "--nodes=reward names no node that samples, and"),
        (["reward"], {"environment": "calculator"}, "adds the rewards of rollout.environment"),
    ],
)
def test_nodes_that_a_worker_cannot_run_are_refused_before_it_joins(nodes, changed, message):
    flags = ["flow.workers=True", "flow.max_lag=1", "algorithm.correction=token_tis"]
    flags += ["eval.dataset=", "eval.every=0"]
    flags += [f"rollout.environment={changed['environment']}"] if "environment" in changed else []
    config = from_config_dict(Config, override(tiny.get_config(), flags))
    listen = changed.get("listen", "")
    with pytest.raises(ValueError, match=message):
        run_worker(config, "runs/none", None, Patience(1.0, 1.0), nodes=nodes, listen=listen)
