"""Settings of asynchronous steps that a job of several hosts meets; for others see
tests/support/bad_input_cases.py."""

import pytest

from distflow_jax.algorithms.algorithm_config import AlgorithmConfig
from distflow_jax.config.run_config import Config
from distflow_jax.dag.load_graph import load_graph
from distflow_jax.dag.planner import plan
from distflow_jax.layout import Layout
from distflow_jax.stream.stream_checks import check_stream
from distflow_jax.stream.stream_config import StreamConfig

HOST, MESH = Layout("host"), Layout("mesh", (("fsdp", 2),))
LAYOUTS = {"ACTOR": MESH, "REFERENCE": MESH, "ROLLOUT": HOST, "REWARD": HOST}


@pytest.mark.parametrize("weight_update", ["in_flight", "boundary"])
def test_a_sampler_over_several_hosts_does_not_run_ahead(weight_update):
    made = plan(load_graph("grpo", Config()), LAYOUTS, ("uid", "prompt", "step"))
    algorithm = AlgorithmConfig(correction="token_tis")
    facts = {"own_devices": True, "offload": "none", "group_tokens": 1}
    config = StreamConfig(max_staleness=1, weight_update=weight_update)
    check_stream(config, made, algorithm, sampler_hosts=1, **facts)
    with pytest.raises(
        ValueError,
        match=r"stream\.max_staleness=1 needs samplers of one host, but mesh\.rollout_tensor "
        r"spreads a sampler over 2; use a smaller one, or max_staleness=0",
    ):
        check_stream(config, made, algorithm, sampler_hosts=2, **facts)
    check_stream(StreamConfig(), made, algorithm, sampler_hosts=2, **facts)
