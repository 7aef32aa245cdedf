"""The work of benchmarks/decode.py by `generate` of transformers, with PyTorch on CPU.

Needs a separate environment (benchmarks/peers/requirements-transformers.txt). Uses random weights
of the same architecture; nothing ends a response early, so the weights do not matter. A batch runs
until its longest response has ended.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from decode_turns import Case, Decoder, peak_resident_gb, serve


class Generate:
    """A model and what it decodes."""

    def __init__(self, model: transformers.LlamaForCausalLM, case: Case):
        self.model, self.case = model, case

    def warm_up(self, ids: np.ndarray) -> None:
        """Decodes a few tokens; nothing is compiled."""
        few = ids[: self.case.slots // self.case.samples]
        self.decode(few, (4,) * (len(few) * self.case.samples))

    def decode(self, ids: np.ndarray, limits: tuple[int, ...]) -> int:
        """Decodes batch after batch."""
        useful = 0
        samples = self.case.samples
        for prompts, longest in self.case.batches(limits):
            inputs = torch.from_numpy(ids[prompts.start : prompts.stop].astype(np.int64))
            with torch.inference_mode():
                out = self.model.generate(
                    input_ids=inputs,
                    attention_mask=torch.ones_like(inputs),
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    max_new_tokens=longest,
                    num_return_sequences=samples,
                    pad_token_id=0,
                )
            assert out.shape[1] == inputs.shape[1] + longest
            useful += sum(limits[prompts.start * samples : prompts.stop * samples])
        return useful

    def measures(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def peak_gb(self) -> float:
        """Peak memory of this process."""
        return peak_resident_gb()


def open_side(options: dict[str, Any]) -> Callable[[Case], Decoder]:
    """The model, in float32 on all cores."""
    shape = options["shape"]
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["mlp_size"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"],
        head_dim=shape["head_dim"],
        max_position_embeddings=shape["max_position"],
        rms_norm_eps=shape["norm_eps"],
        rope_theta=shape["rope_theta"],
        tie_word_embeddings=shape["tie_embeddings"],
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return lambda case: Generate(model, case)


if __name__ == "__main__":
    serve(open_side)
