"""What a user gets wrong is said in one line that names the value and the fix, before any work."""

import json
import os
import re
import subprocess
import sys
import types

import numpy as np
import pytest
import safetensors.numpy
from support.bad_input_cases import (
    DATA_CASES,
    ENVIRONMENTS,
    GRAPH_CASES,
    KEYS_AND_TYPES,
    MODEL_CASES,
    REWARD_CASES,
    SIZES,
)
from support.graph_text import write_graph
from support.paths import ROOT

from configs import tiny
from distflow_jax import run
from distflow_jax.config.config_dict import from_config_dict, override
from distflow_jax.config.run_config import Config
from distflow_jax.dag.load_graph import load_graph
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.observe.compilations import Compilations
from distflow_jax.planning.plan_run import prepare

# few rows, so that opening the data takes no time; no worker processes without a reward of its own
QUICK = [
    "data.train=task:arithmetic?size=32",
    "eval.dataset=task:arithmetic?size=32&held_out=1",
    "eval.num_prompts=8",
    "reward.function=exact",
    "reward.kwargs={}",
]

REWARDS = """
import os, time

def good(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0

def raises(data_source, solution_str, ground_truth, extra_info=None):
    return {"47": 1.0}["no such answer"]

def hangs(solution_str):
    time.sleep(600)

def dies(solution_str):
    os._exit(3)

def says(solution_str):
    return "good"

def nan(solution_str):
    return float("nan")

def nonsense(x, y):
    return 1.0
"""

GAME = """
import time

class Game:
    def __init__(self, tokenizer, *, level=1):
        self.level = level

    def reset(self, prompt):
        return 1 / (9 - self.level) and ""

    def step(self, tokens, text):
        pass

class Slow(Game):
    def reset(self, prompt):
        time.sleep(1)

class Half:
    def __init__(self, tokenizer):
        pass

    def reset(self, prompt):
        pass
"""

QUESTION = '{"question": "1 + 1?", "answer": "2"}\n'
DATA = {
    "good.jsonl": QUESTION * 40,
    "broken.jsonl": QUESTION * 3 + "{oops\n",
    "no_answer.jsonl": QUESTION + '{"question": "1 + 1?"}\n',
    "renamed.jsonl": '{"q": "1 + 1?", "a": "2"}\n' * 40,
    "other_columns.jsonl": QUESTION + '{"qestion": "1 + 1?", "answer": "2"}\n',
    "number.jsonl": QUESTION + '\n{"question": 7, "answer": "2"}\n',
    "messages.jsonl": '{"prompt": [{"role": "user"}]}\n',
    "no_truth.jsonl": '{"prompt": "1 + 1?", "reward_model": {"style": "rule"}}\n',
    "empty.jsonl": "\n",
    "latin.jsonl": b'{"question": "\xe9t\xe9", "answer": "2"}\n',
    "not_a.parquet": "question,answer\n",
    "table.csv": "question,answer\n",
}

GRAPH = write_graph(load_graph("grpo").settle({}))
GRAPHS = {  # file -> (text of the built-in graph, what stands there instead)
    "good.yaml": ("name: grpo", "name: mine"),
    "role.yaml": ("role: REWARD", "role: REWRD"),
    "key.yaml": ("role: REWARD", "role: REWARD\n  typo: 1"),
    "dep.yaml": ("deps: [rollout]", "deps: [rolout]"),
    "field.yaml": ("reads: [uid, prompt, response, finished]", "reads: [uid, prompt, respons]"),
    "columns.yaml": ("reads: [score, rows]", "reads: [score, response_mask]"),
    "cycle.yaml": ("reads: [uid, prompt]", "reads: [uid, prompt]\n  deps: [actor_train]"),
    "syntax.yaml": ("nodes:", "nodes: ["),
    "critic.yaml": ("role: REWARD", "role: CRITIC"),
    "stage.yaml": ("type: MODEL_INFERENCE", "type: COMPUTE"),
    "fn.yaml": ("role: REWARD", "role: REWARD\n  fn: configs.tiny:get_confg"),
    "reads.yaml": ("rollout_logp, advantage]", "rollout_logp]"),
    "writes.yaml": ("writes: [score]", "writes: [score, grade]"),
    "untrained.yaml": ("type: MODEL_TRAIN", "type: MODEL_INFERENCE"),
    "fn_file.yaml": ("role: REWARD", "role: REWARD\n  fn: {dir}/rewrds.py:good"),
    "sampler.yaml": ("role: ROLLOUT", "role: ROLLOUT\n  model: student"),
    "empty.yaml": (GRAPH, "\n"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("user")
    for name, content in DATA.items():
        (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for name, (old, new) in GRAPHS.items():
        assert GRAPH.count(old)
        (path / name).write_text(GRAPH.replace(old, new.replace("{dir}", str(path)), 1))
    of_critic = "name: odd\nbase: ppo\nnodes:\n- {id: rollout, role: ROLLOUT, "
    of_critic += "type: MODEL_INFERENCE, model: critic, reads: [uid, prompt], "
    of_critic += "writes: [response, response_mask, rollout_logp, version, finished]}\n"
    (path / "samples_critic.yaml").write_text(of_critic)
    until = "name: odd\nbase: dapo\nnodes: []\nregions:\n- {nodes: [rollout, reward], "
    (path / "until.yaml").write_text(until + "until: informativ, max_rounds: 2}\n")
    (path / "rewards.py").write_text(REWARDS)
    (path / "game.py").write_text(GAME)
    (path / "imports.py").write_text("\nimport surely_not_installed_anywhere\n")
    (path / "syntax.py").write_text("def f(:\n    pass\n")
    write_model(path / "misfit")
    (path / "truncated.gguf").write_bytes(b"GGUF")
    (path / "text.bin").write_text("these are no weights")
    (path / "nothing").mkdir()
    return path


def write_model(path):
    """A Hugging Face folder whose embedding is narrower than its config says."""
    path.mkdir()
    settings = {
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    (path / "config.json").write_text(json.dumps(settings))
    (path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    Tokenizer.byte_level(300).backend.save(str(path / "tokenizer.json"))
    tensors = {
        "model.embed_tokens.weight": np.zeros((300, 16), np.float32),
        "model.layers.0.self_attn.q_norm.weight": np.zeros(8, np.float32),
    }
    safetensors.numpy.save_file(tensors, path / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def compiled():
    counter = Compilations()
    yield counter
    counter.close()


def refusal(assignments, folder, compiled, start=prepare):
    """The one line with which a run refuses to start; nothing was compiled until then."""
    compiled.take()
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        texts = [text.replace("{dir}", str(folder)) for text in [*QUICK, *assignments.split(" ; ")]]
        start(from_config_dict(Config, override(tiny.get_config(), [t for t in texts if t])))
    message = str(caught.value).replace(str(folder), "{dir}")
    assert "\n" not in message
    assert compiled.take() == 0
    return message


@pytest.mark.parametrize(
    "assignments, message",
    [
        *KEYS_AND_TYPES,
        *ENVIRONMENTS,
        *SIZES,
        *GRAPH_CASES,
        *DATA_CASES,
        *MODEL_CASES,
        *REWARD_CASES,
    ],
)
def test_it_is_said_in_one_line(folder, compiled, assignments, message):
    assert message in refusal(assignments, folder, compiled)


@pytest.mark.parametrize(
    "workdir, reason",
    [
        ("/proc/no_such_process/run", "No such file or directory"),
        ("{dir}/table.csv/run", "Not a directory"),
        ("{dir}/table.csv", "Not a directory"),
    ],
)
def test_an_unwritable_workdir(folder, compiled, workdir, reason):
    def start(config):
        run.train(config, workdir.replace("{dir}", str(folder)))

    message = refusal("", folder, compiled, start)
    assert message.startswith(f"cannot write to --workdir '{workdir}' ({reason}); choose")


def test_a_function_finds_its_file_beside_a_module_of_the_same_name(folder, monkeypatch):
    """A user's file may be called like any module; neither hides the other."""
    (folder / "json.py").write_text("import dataclasses\n\ndef mine():\n    pass\n")
    other = types.ModuleType("rewards")
    monkeypatch.setitem(sys.modules, "rewards", other)
    with pytest.raises(ValueError, match="must return a Graph, got NoneType"):
        prepare(
            from_config_dict(Config, override(tiny.get_config(), [f"dag={folder}/json.py:mine"]))
        )
    assert sys.modules["json"] is json and sys.modules["rewards"] is other


# -- through the scripts --------------------------------------------------------------------------

SCRIPT_CASES = [
    ("train", "--config.trainin.steps=3", "did you mean config.training.steps?"),
    ("train", "--config.data.prompts_per_step=15 --config.training.mini_batches=2", "use 14 or 16"),
    ("train", "--config.reward.function={dir}/rewards.py:raises", "rewards.py, line"),
    ("train", "--workdir=/proc/run", "cannot write to --workdir '/proc/run'"),
    ("plan", "--devices=8 --processes=3", "--devices=8 is not divisible by --processes=3"),
    ("plan", "--sweep", "--sweep needs a pod: give --topology"),
    ("plan", "--only=actor_train", "chooses programs to compile for one TPU --topology"),
    ("evaluate", "--out={dir}/table.csv/out.json", "choose another folder"),
    ("generate", "", "give either --prompt or --file"),
    ("generate", "--prompt=x --config.data.max_prompt_length=10", "prompt 1 has 20 tokens, above"),
]


@pytest.fixture(scope="module")
def scripts_done(folder):
    """(script, arguments) -> its end; two at a time."""
    done, running, left = {}, {}, [case[:2] for case in SCRIPT_CASES]
    while left or running:
        while left and len(running) < 2:
            script, arguments = left.pop()
            command = [sys.executable, str(ROOT / "scripts" / f"{script}.py")]
            command += [f"--config={ROOT}/configs/tiny.py", *(f"--config.{q}" for q in QUICK)]
            if script == "train":
                command.append(f"--workdir={folder}/run")
            running[script, arguments] = subprocess.Popen(
                [*command, *arguments.replace("{dir}", str(folder)).split()],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"XLA_FLAGS": ""},
            )
        case, process = next(iter(running.items()))
        del running[case]
        stdout, stderr = process.communicate(timeout=120)
        done[case] = (process.returncode, stdout, stderr.replace(str(folder), "{dir}"))
    return done


@pytest.mark.parametrize("script, arguments, message", SCRIPT_CASES)
def test_a_script_ends_with_code_2_and_one_line(scripts_done, script, arguments, message):
    code, stdout, stderr = scripts_done[script, arguments]
    assert (code, stdout) == (2, ""), stderr
    assert re.fullmatch(r"error: [^\n]*\n", stderr)
    assert message in stderr
