"""The work of benchmarks/grpo_step.py by google-tunix with its vanilla engine.

PYTHONPATH=benchmarks python -m peers.tunix_grpo --steps=8 --beta=0.04

Needs a separate environment (benchmarks/peers/requirements.txt). Prints one line of JSON per step,
in the format of grpo_step.py, which starts it with --paced to alternate with it. Phases are timed
by blocking on the results of generate, reference log-probs and update; in Tunix's colocated mode
they run one after the other anyway.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from peers import work
from peers.paced import StepClock
from tunix.models.llama3 import model as llama3
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout


class CharacterTokenizer:
    """Every id is one character, so that encode and decode are exact inverses. 0 pads, 1 ends."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return work.as_ids(text)

    def decode(self, ids: Any, **_: Any) -> str:
        return work.as_text(ids)

    def pad_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        """The tokenizer's end token; the end tokens of a response are set in the rollout config."""
        return 1

    def bos_id(self) -> None:
        return None


def make_model(args: argparse.Namespace) -> llama3.Llama3:
    """A Llama with random weights, every matrix N(0, 0.02); Tunix initialises some with zeros."""
    shape = work.MODELS[args.model]
    config = llama3.ModelConfig(
        num_layers=shape["layers"],
        vocab_size=shape["vocab"],
        embed_dim=shape["hidden"],
        hidden_dim=shape["mlp"],
        num_heads=shape["heads"],
        head_dim=work.HEAD_DIM,
        num_kv_heads=shape["kv_heads"],
        rope_theta=10_000,
        norm_eps=1e-5,
        weight_tying=args.model == "135m",
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


def make_cluster(
    args: argparse.Namespace, mesh: jax.sharding.Mesh, tokenizer: CharacterTokenizer
) -> rl_cluster.RLCluster:
    """Actor, sampler, and with a KL a reference, all on one device."""
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    vocab, longest = work.MODELS[args.model]["vocab"], args.prompt_length + args.new_tokens
    sizes: dict[str, int] = {}
    sampling: dict[str, Any] = {}
    if not args.defaults:
        names = ("mini", "train_micro", "rollout_micro", "compute_logps_micro")
        sizes = {f"{name}_batch_size": args.prompts for name in names}
        sampling = {"kv_cache_size": longest, "return_logprobs": False}
    elif longest > base_rollout.RolloutConfig().kv_cache_size:
        sampling = {"kv_cache_size": longest}
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
                **sizes,
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=args.new_tokens,
                max_prompt_length=args.prompt_length,
                temperature=1.0,
                top_p=1.0,
                top_k=None,
                # for 0 an id that is never sampled
                eos_tokens=work.end_ids(vocab, args.eos_frac) or [-1],
                **sampling,
            ),
        ),
    )


def batches(args: argparse.Namespace) -> Iterator[dict]:
    """Random prompts of each step, as text."""
    for ids in work.prompt_ids(args):
        yield {"prompts": np.array([work.as_text(row) for row in ids])}


def main() -> None:
    args = work.parse_arguments(__doc__)
    jax.config.update("jax_platforms", "cpu")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    tokenizer, clock = CharacterTokenizer(), StepClock(args.paced)

    def reward(prompts, completions, **_):
        return [
            work.lower_half(work.as_ids(text), work.MODELS[args.model]["vocab"])
            for text in completions
        ]

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
        generate = clock.timed("rollout_s", cluster.generate, lambda out: None)

        def timed_generate(*given, **options):
            clock.begin()
            out = generate(*given, **options)
            # Tunix leaves the end token out of a response
            clock.add("tokens", sum(len(t) for t in out.tokens))
            return out

        cluster.generate = timed_generate
        cluster.get_ref_per_token_logps = clock.timed(
            "reference_s", cluster.get_ref_per_token_logps, jax.block_until_ready
        )
        cluster.update_actor = clock.timed(
            "update_s",
            cluster.update_actor,
            lambda _: jax.block_until_ready(nnx.state(cluster.actor_trainer.model)),
        )
        learner.train(batches(args))
    clock.end()


if __name__ == "__main__":
    main()
