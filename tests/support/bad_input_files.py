"""Files of a user, with their mistakes, and a config that opens in no time."""

import json

import numpy as np
import safetensors.numpy

from distflow_jax.dag.graph_yaml import load_graph
from distflow_jax.models.tokenizer import Tokenizer
from support.graph_text import write_graph

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
        time.sleep(600)

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
    "renamed.jsonl": '{"q": "1 + 1?", "a": "2"}\n' * 40,
    "other_columns.jsonl": QUESTION + '{"qestion": "1 + 1?", "answer": "2"}\n',
    "empty_truth.jsonl": '{"prompt": "1 + 1?", "answer": "2"}\n{"prompt": "2?", "answer": " "}\n',
    "table.csv": "question,answer\n",
}

GRAPH = write_graph(load_graph("grpo").settle({}))
GRAPHS = {  # file -> (text of the built-in graph, what stands there instead)
    "good.yaml": ("name: grpo", "name: mine"),
    "field.yaml": ("reads: [uid, prompt, response, finished]", "reads: [uid, prompt, respons]"),
    "columns.yaml": ("reads: [score, rows]", "reads: [score, response_mask]"),
    "cycle.yaml": ("reads: [uid, prompt]", "reads: [uid, prompt]\n  deps: [actor_train]"),
    "syntax.yaml": ("nodes:", "nodes: ["),
    "critic.yaml": ("role: REWARD", "role: CRITIC"),
    "stage.yaml": ("type: MODEL_INFERENCE", "type: COMPUTE"),
    "fn.yaml": ("role: REWARD", "role: REWARD\n  fn: configs.tiny:get_confg"),
    "reads.yaml": ("rollout_logp, advantage]", "rollout_logp]"),
    "writes.yaml": ("writes: [score]", "writes: [score, grade]"),
    "option.yaml": ("type: MODEL_TRAIN", "type: MODEL_TRAIN\n  options: {objectiv: policy}"),
    "option_type.yaml": ("role: ROLLOUT", "role: ROLLOUT\n  options: {greedy: 'no'}"),
    "within.yaml": ("role: REWARD", "role: REWARD\n  options: {a: 'x${algorithm.kl_coef}'}"),
    "untrained.yaml": ("type: MODEL_TRAIN", "type: MODEL_INFERENCE"),
    "fn_file.yaml": ("role: REWARD", "role: REWARD\n  fn: {dir}/rewrds.py:good"),
    "sampler.yaml": ("role: ROLLOUT", "role: ROLLOUT\n  model: student"),
}


def write_files(path):
    """Fills a folder with all that the cases name as {dir}/FILE."""
    for name, content in DATA.items():
        (path / name).write_text(content)
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
    (path / "nothing").mkdir()


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
