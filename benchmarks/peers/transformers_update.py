"""The update of benchmarks/update.py by transformers and torch: padded sequences, AdamW.

Needs a separate environment (benchmarks/peers/requirements-transformers.txt). Every sequence is a
row of its own with its prompt, as in trainers on top of transformers. Logits are computed only at
the positions of responses. Prints a record per step; see paced.py.
"""

import argparse
import time

import torch
from paced import report, wait_for_turn
from transformers import LlamaConfig, LlamaForCausalLM


def parse_arguments() -> argparse.Namespace:
    """Sizes; benchmarks/update.py gives them all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = "hidden layers heads kv-heads mlp vocab prompts samples prompt-length new-tokens micro"
    for name in names.split():
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--tied", action="store_true", help="tie embeddings")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.mlp,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.hidden // args.heads,
        tie_word_embeddings=args.tied,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).float().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0)
    count, length = args.prompts * args.samples, args.prompt_length + args.new_tokens
    tokens = torch.randint(3, args.vocab, (count, length))
    target = tokens[:, args.prompt_length :]
    advantage = torch.randn(count, 1)
    while True:
        wait_for_turn()
        wall, cpu = time.perf_counter(), time.process_time()
        for first in range(0, count, args.micro):
            part = slice(first, first + args.micro)
            # the last prompt token predicts the first of the response
            logits = model(tokens[part], logits_to_keep=args.new_tokens + 1).logits[:, :-1]
            logp = torch.log_softmax(logits, -1).gather(-1, target[part, :, None])[..., 0]
            ratio = torch.exp(logp - logp.detach())  # one update per batch
            clipped = ratio.clamp(0.8, 1.28)
            loss = -torch.minimum(ratio * advantage[part], clipped * advantage[part])
            (loss.sum() / (count * args.new_tokens)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        report({"seconds": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu})


if __name__ == "__main__":
    main()
