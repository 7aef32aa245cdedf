"""The table of stages: a builder is handed the record that its signature names."""

import dataclasses
import typing

import pytest

from distflow_jax.dag.graph import Node
from distflow_jax.stages.registry import NAMED, OBJECTIVES, STAGES, context_of, first_state_of
from distflow_jax.stages.stage_context import (
    ComputeContext,
    ModelContext,
    NodeContext,
    SamplingContext,
    TrainContext,
)

KINDS = [*STAGES.values(), *OBJECTIVES.values(), *NAMED.values()]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.build.__name__)
def test_a_builder_takes_the_record_of_its_kind(kind):
    for function in (kind.build, kind.first_state):
        if function is not None:
            assert typing.get_type_hints(function)["context"] is kind.context


@pytest.mark.parametrize("record", [SamplingContext, ComputeContext, ModelContext, TrainContext])
def test_a_record_is_frozen_and_begins_with_the_node(record):
    assert issubclass(record, NodeContext) and record.__dataclass_params__.frozen
    assert [field.name for field in dataclasses.fields(record)][:2] == ["node", "prefix"]


def test_the_record_follows_from_the_type_of_the_node():
    for (role, kind), stage in STAGES.items():
        expected = {
            "COMPUTE": ComputeContext,
            "MODEL_INFERENCE": SamplingContext if role == "ROLLOUT" else ModelContext,
            "MODEL_TRAIN": TrainContext,
        }
        assert stage.context is expected[kind]


def test_a_function_of_the_users_takes_no_record():
    node = Node("mine", "REWARD", "COMPUTE", fn="module:function")
    assert context_of(node) is None and first_state_of(node, None) is None
