"""The work of benchmarks/grpo_step.py by google-tunix with its vanilla engine.

python benchmarks/peers/tunix_grpo.py --steps=8 --beta=0.04

Needs a separate environment (benchmarks/peers/requirements.txt). Prints one line of JSON per step,
in the format of grpo_step.py, which starts it with --paced to alternate with it. Phases are timed
by blocking on the results of generate, reference log-probs and update; in Tunix's colocated mode
they run one after the other anyway.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from paced import report, wait_for_turn
from tunix.models.llama3 import model as llama3
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout

VOCAB = 512
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CharacterTokenizer:
    """Every id is one character, so that encode and decode are exact inverses. 0 pads, 1 ends."""

    first = 0x4E00  # CJK: printable, and never stripped

    def encode(self, text: str, **_: Any) -> list[int]:
        """Text -> ids."""
        return [ord(c) - self.first for c in text]

    def decode(self, ids: Any, **_: Any) -> str:
        """Ids -> text."""
        return "".join(chr(self.first + int(i)) for i in ids)

    def pad_id(self) -> int:
        """Id of padding."""
        return 0

    def eos_id(self) -> int:
        """The tokenizer's end token; the end tokens of a response are set in the rollout config."""
        return 1

    def bos_id(self) -> None:
        """No first token."""
        return None


class StepTimer:
    """Splits the learner's loop into steps, which begin with the sampling of responses."""

    def __init__(self, paced: bool):
        self.paced = paced
        self.phases: dict[str, float] = {}
        self.compilations = 0
        self.count = 0
        self.began: tuple[float, float] | None = None  # wall, CPU
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration: float, **_: Any) -> None:
        self.compilations += event == COMPILE_EVENT

    def begin(self) -> None:
        """Ends the previous step, waits for its turn, and starts the clocks."""
        self.end()
        if self.paced:
            wait_for_turn()
        self.began = time.perf_counter(), time.process_time()

    def end(self) -> None:
        """Reports the current step, if there is one."""
        if self.began is None:
            return
        wall, cpu = self.began
        self.count += 1
        record = {"step": self.count, "step_s": time.perf_counter() - wall}
        record |= {"cpu_s": time.process_time() - cpu, "compilations": self.compilations}
        report(record | self.phases)
        self.phases, self.compilations, self.began = {}, 0, None

    def timed(self, name: str, function: Callable, result: Callable[[Any], Any]) -> Callable:
        """Wraps `function`: the time until `result` of its output is ready counts as `name`."""

        def wrapper(*args, **kwargs):
            start = time.perf_counter()
            out = function(*args, **kwargs)
            jax.block_until_ready(result(out))
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - start
            return out

        return wrapper


def parse_arguments() -> argparse.Namespace:
    """Sizes; the defaults are those of grpo_step.py."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("prompts", 8),
        ("samples", 8),
        ("prompt-length", 32),
        ("new-tokens", 64),
        ("steps", 8),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--beta", type=float, default=0.0, help="weight of the KL; 0: no reference")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument(
        "--eos-frac", type=float, default=0.0, help="share of the vocabulary that ends a response"
    )
    parser.add_argument("--tied", action="store_true", help="tie embeddings")
    parser.add_argument("--paced", action="store_true", help="a line of stdin starts each step")
    return parser.parse_args()


def make_model(args: argparse.Namespace) -> llama3.Llama3:
    """A Llama with random weights, every matrix N(0, 0.02); Tunix initialises some with zeros."""
    config = llama3.ModelConfig(
        num_layers=6,
        vocab_size=VOCAB,
        embed_dim=256,
        hidden_dim=768,
        num_heads=4,
        head_dim=64,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-5,
        weight_tying=args.tied,
    )
    model = llama3.Llama3(config, rngs=nnx.Rngs(0))
    leaves, tree = jax.tree.flatten(nnx.state(model, nnx.Param))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    leaves = [
        0.02 * jax.random.normal(key, x.shape, x.dtype) if x.ndim >= 2 else x
        for key, x in zip(keys, leaves, strict=True)
    ]
    nnx.update(model, jax.tree.unflatten(tree, leaves))
    return model


def end_ids(vocab: int, share: float) -> list[int]:
    """The last `share` of the vocabulary; for 0 an id that is never sampled."""
    return list(range(vocab - max(1, round(vocab * share)), vocab)) if share else [-1]


def make_cluster(
    args: argparse.Namespace, mesh: jax.sharding.Mesh, tokenizer: CharacterTokenizer
) -> rl_cluster.RLCluster:
    """Actor, sampler, and with a KL a reference, all on one device."""
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    return rl_cluster.RLCluster(
        actor=make_model(args),
        reference=make_model(args) if args.beta else None,
        tokenizer=tokenizer,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            rollout_engine="vanilla",
            offload_to_cpu=False,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adamw(args.lr),
                eval_every_n_steps=10**9,
                max_steps=args.steps,
                mini_batch_size=args.prompts,
                train_micro_batch_size=args.prompts,
                rollout_micro_batch_size=args.prompts,
                compute_logps_micro_batch_size=args.prompts,
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=args.new_tokens,
                max_prompt_length=args.prompt_length,
                kv_cache_size=args.prompt_length + args.new_tokens,
                temperature=1.0,
                top_p=1.0,
                top_k=None,
                eos_tokens=end_ids(VOCAB, args.eos_frac),
                return_logprobs=False,
            ),
        ),
    )


def batches(args: argparse.Namespace, tokenizer: CharacterTokenizer) -> Iterator[dict]:
    """Random prompts of exactly `prompt_length` ids, as text."""
    rng = np.random.default_rng(0)
    for _ in range(args.steps):
        ids = rng.integers(3, VOCAB, size=(args.prompts, args.prompt_length))
        yield {"prompts": np.array([tokenizer.decode(row) for row in ids])}


def main() -> None:
    args = parse_arguments()
    jax.config.update("jax_platforms", "cpu")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    tokenizer, timer = CharacterTokenizer(), StepTimer(args.paced)

    def reward(prompts, completions, **_):
        """Share of ids in the lower half of the vocabulary."""
        lower = VOCAB // 2
        return [sum(i < lower for i in tokenizer.encode(c)) / max(len(c), 1) for c in completions]

    with mesh:
        cluster = make_cluster(args, mesh, tokenizer)
        learner = grpo_learner.GRPOLearner(
            rl_cluster=cluster,
            reward_fns=reward,
            algo_config=grpo_learner.GRPOConfig(
                num_generations=args.samples,
                num_iterations=1,
                beta=args.beta,
                epsilon=0.2,
                kl_loss_mode="low_var_kl",
            ),
        )
        generate = timer.timed("rollout_s", cluster.generate, lambda out: None)

        def timed_generate(*given, **options):
            timer.begin()
            out = generate(*given, **options)
            # Tunix leaves the end token out of a response
            timer.phases["tokens"] = int(sum(len(t) for t in out.tokens))
            return out

        cluster.generate = timed_generate
        cluster.get_ref_per_token_logps = timer.timed(
            "reference_s", cluster.get_ref_per_token_logps, lambda out: out
        )
        cluster.update_actor = timer.timed(
            "update_s", cluster.update_actor, lambda _: nnx.state(cluster.actor_trainer.model)
        )
        learner.train(batches(args, tokenizer))
    timer.end()


if __name__ == "__main__":
    main()
