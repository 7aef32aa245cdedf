"""The work of benchmarks/grpo_step.py by TRL's GRPOTrainer and transformers' generation, on a CPU.

PYTHONPATH=benchmarks python -m peers.trl_grpo --steps=8 --beta=0.04

Needs a separate environment (benchmarks/peers/requirements-trl.txt). Prints one line of JSON per
step, in the format of grpo_step.py, which starts it with --paced to alternate with it.
"""

import argparse
import tempfile
from typing import Any

import torch
from datasets import Dataset
from peers.paced import StepClock
from peers.work import HEAD_DIM, MODELS, as_text, end_ids, lower_half, parse_arguments, prompt_ids
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer


def ends_of(args: argparse.Namespace) -> list[int]:
    """Ids that end a response; where there is none, the first id that a model cannot draw."""
    vocab = MODELS[args.model]["vocab"]
    return end_ids(vocab, args.eos_frac) or [vocab]


def make_tokenizer(args: argparse.Namespace) -> PreTrainedTokenizerFast:
    """Every id is one character; 0 pads."""
    ids = {as_text([i]): i for i in range(MODELS[args.model]["vocab"] + 1)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=as_text([2])))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=as_text([0]), eos_token=as_text(ends_of(args)[-1:])
    )


def make_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """A Llama with random weights, float32, every matrix N(0, 0.02)."""
    shape = MODELS[args.model]
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape["vocab"],
            hidden_size=shape["hidden"],
            intermediate_size=shape["mlp"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["heads"],
            num_key_value_heads=shape["kv_heads"],
            head_dim=HEAD_DIM,
            max_position_embeddings=args.prompt_length + args.new_tokens,
            rms_norm_eps=1e-5,
            tie_word_embeddings=args.model == "135m",
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=ends_of(args),
        )
    )


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of GRPOConfig: those that the work asks for, then TRL's defaults or the fastest
    that its documents have for a CPU."""
    responses = args.prompts * args.samples
    work = {
        "num_generations": args.samples,
        "generation_batch_size": responses,
        "max_completion_length": args.new_tokens,
        "max_steps": args.steps,
        "learning_rate": args.lr,
        "lr_scheduler_type": "constant",
        "beta": args.beta,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    default = 8  # per_device_train_batch_size; the rest of the batch is accumulated
    if args.defaults:
        steps = max(1, responses // default)
        return work | {"gradient_accumulation_steps": steps}
    return work | {
        "per_device_train_batch_size": responses,
        "gradient_checkpointing": False,
        "bf16": False,
        "max_grad_norm": 0.0,
    }


class Turns(TrainerCallback):
    """Clocks of the trainer's steps."""

    def __init__(self, clock: StepClock):
        self._clock = clock

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Starts the clocks; responses are sampled after this."""
        self._clock.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Reports the step."""
        self._clock.end()


def main() -> None:
    args = parse_arguments(__doc__)
    torch.manual_seed(0)
    vocab, ends, clock = MODELS[args.model]["vocab"], ends_of(args), StepClock(args.paced)
    rows = [{"prompt": as_text(ids)} for batch in prompt_ids(args) for ids in batch]

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        """Share of ids in the lower half of the vocabulary, up to the end of a response."""
        found = []
        for ids in completion_ids:
            length = next((i for i, x in enumerate(ids) if x in ends), len(ids))
            clock.add("tokens", length)
            found.append(lower_half(ids[:length], vocab))
        return found

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=make_model(args),
            reward_funcs=reward,
            args=GRPOConfig(output_dir=folder, **settings(args)),
            train_dataset=Dataset.from_list(rows),
            processing_class=make_tokenizer(args),
            callbacks=[Turns(clock)],
        )
        # without gradient, so that sampling and scores alone count
        trainer._generate_and_score_completions = clock.timed(
            "rollout_s", trainer._generate_and_score_completions, lambda out: None
        )
        trainer.train()


if __name__ == "__main__":
    main()
