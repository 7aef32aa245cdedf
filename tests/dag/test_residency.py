"""The models on the devices during each node of a plan, and those waiting on the host."""

import pytest

from distflow_jax.config.run_config import Config
from distflow_jax.dag.graph_yaml import load_graph
from distflow_jax.dag.planner import plan
from distflow_jax.dag.residency import EVALUATE, UPDATE_WEIGHTS, describe, plan_residency
from distflow_jax.layout import Layout

HOST = Layout("host")
SAMPLERS = {"rollout": "actor"}


def mesh(submesh=None):
    return Layout("mesh", (("fsdp", 2), ("tensor", 1)), submesh)


def layouts(**roles):
    common = dict.fromkeys(("ACTOR", "CRITIC", "REFERENCE"), mesh())
    return common | {"ROLLOUT": HOST, "REWARD": HOST} | roles


def ppo(**roles):
    graph = load_graph("ppo", Config()).settle({"actor_train": ["old_logp", "ref_logp"]})
    return plan(graph, layouts(**roles), {"uid", "prompt"})


def test_nothing_is_used_that_is_not_there():
    """Walks two steps by their residencies: at each node the devices have just what it uses."""
    built = ppo()
    residencies = plan_residency(built, SAMPLERS)
    order = [UPDATE_WEIGHTS, *(t.node.id for t in built.tasks if t.node.id in residencies)]
    there = set()
    for name in order * 2:
        one = residencies[name]
        if there:  # prefetched; the first node of all finds nothing
            assert one.uses <= there
        there |= one.uses | one.replaces
        assert there == one.uses | one.replaces
        there = (there - one.evict) | one.prefetch


def test_moments_are_there_for_the_update_alone_and_the_sampler_for_sampling():
    residencies = plan_residency(ppo(), SAMPLERS)
    with_moments = {n for n, r in residencies.items() if "moments" in {what for _, what in r.uses}}
    assert with_moments == {"actor_train", "critic_train"}
    samples = {n for n, s in residencies.items() if ("rollout", "cache") in s.uses}
    assert samples == {"rollout", EVALUATE}
    assert residencies["rollout"].evict == residencies["rollout"].uses


def test_what_the_next_node_uses_too_stays():
    built = plan(load_graph("grpo", Config()), layouts(), {"uid", "prompt"})
    residencies = plan_residency(built, SAMPLERS)
    remaining = residencies["actor_train"].uses - residencies["actor_train"].evict
    assert remaining == {("actor", "params")}  # they go to the sampler


def test_models_on_other_devices_do_not_make_room():
    built = ppo(ACTOR=mesh((0, 4)), REFERENCE=mesh((0, 4)), CRITIC=mesh((4, 6)))
    residencies = plan_residency(built, SAMPLERS)
    # on its own devices the critic's next use is its update
    assert residencies["values"].evict == set()
    assert residencies["values"].prefetch == {("critic", "moments")}
    assert residencies["reference"].evict == {("reference", "params")}
    # the sampler has all devices
    assert {("critic", "params"), ("critic", "moments")} <= residencies["critic_train"].evict


def test_a_region_keeps_its_sampler_from_round_to_round():
    built = plan(load_graph("dapo", Config()), layouts(), {"uid", "prompt"})
    one = plan_residency(built, SAMPLERS)["rollout"]
    assert not one.evict and not one.prefetch


def test_a_part_is_another_layout_and_plans_without_one_stay_what_they_were():
    whole, part = ppo(), ppo(CRITIC=mesh((4, 8)), ACTOR=mesh((0, 4)), REFERENCE=mesh((0, 4)))
    assert '"submesh"' not in whole.to_json()
    assert '"submesh":[4,8]' in part.to_json()
    assert whole.digest != part.digest
    other = ppo(CRITIC=mesh((4, 6)), ACTOR=mesh((0, 4)), REFERENCE=mesh((0, 4)))
    assert other.digest != part.digest
    assert "fsdp 2 x tensor 1 on devices 4:8" in part.describe()


def test_parts_that_overlap_are_refused():
    with pytest.raises(ValueError, match="on devices 3:6.*'old_logp' on devices 0:4.* neither"):
        ppo(CRITIC=mesh((3, 6)), ACTOR=mesh((0, 4)), REFERENCE=mesh((6, 8)))
    with pytest.raises(ValueError, match="all devices.* neither the same nor apart"):
        ppo(CRITIC=mesh((4, 8)))


def test_the_table_has_a_line_for_each():
    residencies = plan_residency(ppo(), SAMPLERS)
    lines = describe(residencies).splitlines()
    # further lines of a cell that wraps begin with spaces
    firsts = [line.split()[0] for line in lines[4:] if not line.startswith(" ")]
    assert firsts == list(residencies)
    assert any("actor moments," in line for line in lines)
