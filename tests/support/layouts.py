"""Layouts of the roles, for tests that plan a graph without devices."""

from distflow_jax.layout import Layout

HOST, MESH = Layout("host"), Layout("mesh", (("fsdp", 4), ("tensor", 2)))
LAYOUTS = {
    "ACTOR": MESH,
    "CRITIC": Layout("mesh", (("fsdp", 8),)),
    "REFERENCE": MESH,
    "ROLLOUT": HOST,
    "REWARD": HOST,
    "REWARD MODEL_INFERENCE": MESH,
}
