"""Self-check and trial of attention before step 1, on this CPU as if it were an accelerator.

Nightly: the check tells right from wrong in float32 as in bfloat16.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from support.tiny_model import WINDOWED

from distflow_jax.config.run_config import Config
from distflow_jax.models.attention import masked_attention
from distflow_jax.models.grouped_matmul import RAGGED_DOT
from distflow_jax.models.grouped_trial import try_products
from distflow_jax.models.kernels import library_attention
from distflow_jax.models.kernels.implementation_trial import Tried, fastest
from distflow_jax.models.kernels.library_attention import BY_MASK, BY_SEGMENTS
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.plan_run import plan_run
from distflow_jax.rollout.decode_state import EngineConfig
from distflow_jax.rollout.sampler_trial import try_decode, try_prefill
from distflow_jax.runtime import settled_implementations
from distflow_jax.runtime.settled_implementations import settle_implementations
from distflow_jax.training.attention_choice import RowAttention
from distflow_jax.training.forward import ForwardConfig
from distflow_jax.training.row_trial import try_rows

BLOCKS = RowAttention("blocks", 64, "loops", "")
MASKED = RowAttention("masked", 0, "loops", "")
SPLASH = RowAttention("splash", 0, "splash", "")
ENGINE = EngineConfig(slots=8, max_prompt=16, max_response=100, page_size=16, prefill_tokens=64)


def without_mask(q, k, v, mask):
    return masked_attention(q, k, v, jnp.ones_like(mask))


def raises(q, k, v, mask):
    raise NotImplementedError("compute capability 7.0 is too old\nmore")


@pytest.fixture
def libraries(monkeypatch):
    splash = functools.partial(library_attention.splash_attention, interpret=True)
    monkeypatch.setitem(BY_SEGMENTS, "splash", splash)
    monkeypatch.setitem(BY_MASK, "cudnn", without_mask)
    monkeypatch.setitem(BY_MASK, "tokamax", raises)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_rows_of_the_runs_kind_tell_right_from_wrong(dtype, libraries):
    wrong = [RowAttention(name, 0, name, "") for name in ("cudnn", "tokamax")]
    forward = ForwardConfig(dtype)
    for shared, right in ((True, [BLOCKS, MASKED]), (False, [SPLASH])):
        found = try_rows([*right, *wrong], WINDOWED, forward, row_tokens=128, shared=shared)
        for one in right:
            assert found[one.name].seconds > 0 and not found[one.name].failure
        assert found["cudnn"].failure.startswith("it differs from float32 by")
        said = "NotImplementedError: compute capability 7.0 is too old"
        assert found["tokamax"] == Tried(0.0, said)


def test_segments_without_shared_prompts_are_found_wrong_where_prompts_are_shared(libraries):
    found = try_rows([SPLASH], WINDOWED, ForwardConfig(), row_tokens=128, shared=True)
    assert "it differs from float32" in found["splash"].failure


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_and_prefill(dtype, libraries):
    config = dataclasses.replace(ENGINE, dtype=dtype)
    assert try_decode(("reference", "pages"), WINDOWED, config) == {"reference": Tried(0.0)}
    assert try_prefill(("loops",), WINDOWED, config) == {}
    found = try_prefill(("loops", "cudnn"), WINDOWED, config)
    assert found["loops"].seconds > 0 and "it differs" in found["cudnn"].failure


def test_the_fastest_of_those_that_no_process_finds_wrong():
    one = {"a": Tried(2e-3), "b": Tried(1e-3), "c": Tried(1e-4)}
    other = {"a": Tried(2e-3), "b": Tried(3e-3), "c": Tried(0.0, "it differs")}
    assert fastest("x", [one, one])[0] == "c"
    name, why = fastest("x", [one, other])
    assert name == "a"
    assert why == (
        "agrees with float32 here; fastest of a trial: a 2 ms, b 3 ms; not c: it differs"
    )
    wrong = dict.fromkeys("ab", Tried(0.0, "too old"))
    with pytest.raises(ValueError, match="x: nothing serves these devices; not a: too old"):
        fastest("x", [one | wrong, {k: one[k] for k in "ab"} | {"c": Tried(0.0, "no")}])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_grouped_products_tell_right_from_wrong(dtype, monkeypatch):
    def of_whole_groups(x, weight, sizes, dims, **options):  # as if rows were spread evenly
        even = jnp.full_like(sizes, len(x) // len(sizes))
        return jax.lax.ragged_dot_general(x, weight, even, dims, **options)

    monkeypatch.setitem(RAGGED_DOT, "tokamax", of_whole_groups)
    found = try_products(("ragged_dot", "blocks", "tokamax"), 64, (4, 16, 8), dtype)
    for name in ("ragged_dot", "blocks"):
        assert found[name].seconds > 0 and not found[name].failure
    assert "it differs from float32" in found["tokamax"].failure


LLAMA = "random:llama?hidden=32&layers=1&heads=4&kv_heads=2&mlp=64&vocab=300&max_position=512"
MIXTURE = LLAMA.replace("llama", "qwen3_moe") + "&experts=4&active=2"


def planned(platform, model=LLAMA):
    config = Config()
    model = dataclasses.replace(config.model, source=model)
    run = plan_run(dataclasses.replace(config, model=model), Machine.current())
    run.machine = dataclasses.replace(run.machine, platform=platform)
    return run


def with_cudnn_first(run):
    cudnn = RowAttention("cudnn", 0, "cudnn", "of the whole row")
    blocks = BLOCKS._replace(block=32, why="of 32 tokens")
    return dataclasses.replace(run.sizes, attention=cudnn, other_attentions=(blocks,))


def test_a_run_takes_the_best_says_why_and_keeps_it_when_it_resumes(
    libraries, tmp_path, monkeypatch
):
    run = planned("gpu")
    planned_sizes = run.sizes = with_cudnn_first(run)
    settle_implementations(run, tmp_path)
    assert (run.sizes.forward.attention_by, run.sizes.forward.attention_block) == ("loops", 32)
    table = {name: (value, why) for name, value, why in run.table()}
    value, why = table["attention in rows"]
    assert value == "blocks" and "of 32 tokens; agrees with float32" in why and "not cudnn" in why
    chosen, run.sizes = run.sizes, planned_sizes
    with monkeypatch.context() as patch:
        patch.setattr(settled_implementations, "try_rows", None)  # a second trial would fail
        settle_implementations(run, tmp_path)
    assert run.sizes == chosen
    run.sizes = dataclasses.replace(planned_sizes, other_attentions=(MASKED,))
    settle_implementations(run, tmp_path)
    assert run.sizes.attention.name == "masked"


def test_a_mixture_multiplies_by_the_best_products(monkeypatch):
    def wrong(*arguments, **options):
        raise NotImplementedError("no instruction")

    monkeypatch.setitem(RAGGED_DOT, "ragged_dot", wrong)
    run = planned("gpu", MIXTURE)
    run.sizes = dataclasses.replace(run.sizes, products=("blocks", "ragged_dot"))
    settle_implementations(run)
    assert run.source.config.grouped_product == run.sizes.product == "blocks"
    table = {name: (value, why) for name, value, why in run.table()}
    value, why = table["grouped products"]
    assert value == "blocks" and "not ragged_dot: NotImplementedError: no instruction" in why


def test_a_cpu_tries_nothing():
    run = planned("cpu")
    before = run.sizes
    settle_implementations(run)
    assert run.sizes is before
