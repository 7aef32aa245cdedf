"""Settings of asynchronous steps that a job of several hosts meets; for others see
tests/support/bad_input_cases.py."""

import pytest

from distflow_jax.config.algorithm_config import AlgorithmConfig
from distflow_jax.config.run_config import Config
from distflow_jax.config.stream_config import StreamConfig
from distflow_jax.dag.graph_yaml import load_graph
from distflow_jax.dag.planner import plan
from distflow_jax.layout import Layout
from distflow_jax.stream.checks import Surroundings, check_plan

HOST, MESH = Layout("host"), Layout("mesh", (("fsdp", 2),))
LAYOUTS = {"ACTOR": MESH, "REFERENCE": MESH, "ROLLOUT": HOST, "REWARD": HOST}


@pytest.mark.parametrize("weight_update", ["in_flight", "boundary"])
def test_a_sampler_over_several_hosts_does_not_run_ahead(weight_update):
    made = plan(load_graph("grpo", Config()), LAYOUTS, ("uid", "prompt", "step"))
    one, two = (
        Surroundings(
            AlgorithmConfig(correction="token_tis"),
            sampler_hosts=hosts,
            sampler_part=True,
            own_devices=True,
            offload="none",
            mini_prompts=1,
            stuck_seconds=1800.0,
        )
        for hosts in (1, 2)
    )
    config = StreamConfig(max_staleness=1, weight_update=weight_update)
    check_plan(config, made, one)
    with pytest.raises(
        ValueError, match=r"stream\.max_staleness=1 .* mesh\.rollout_tensor .* over 2 hosts; lower"
    ):
        check_plan(config, made, two)
    check_plan(StreamConfig(), made, two)
