"""The work of benchmarks/decode.py by google-tunix's own (vanilla) sampler.

Needs a separate environment (benchmarks/peers/requirements.txt). Uses random weights of the same
architecture; nothing ends a response early, so the weights do not matter. A batch runs until its
longest response has ended; its program is compiled for that length in the warm-up.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from decode_turns import Case, Decoder, peak_resident_gb, serve
from flax import nnx
from tunix.generate import sampler as sampler_lib
from tunix.models.llama3 import model as llama3

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CharacterTokenizer:
    """Every id is one character, so that encode and decode are exact inverses. 0 pads."""

    first = 0x10000  # beyond the surrogates

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
        """An id that is never sampled."""
        return -1

    def bos_id(self) -> None:
        """No first token."""
        return None


class Compilations:
    """Counts programs handed to XLA."""

    def __init__(self):
        self._count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration: float, **_: Any) -> None:
        self._count += event == COMPILE_EVENT

    def take(self) -> int:
        """Number of compilations since the last call."""
        count, self._count = self._count, 0
        return count


class Sampler:
    """A sampler with a cache as large as the case needs."""

    def __init__(self, model: llama3.Llama3, compilations: Compilations, case: Case):
        self.case, self.compilations, self.tokenizer = case, compilations, CharacterTokenizer()
        config = model.config
        self.sampler = sampler_lib.Sampler(
            model,
            self.tokenizer,
            sampler_lib.CacheConfig(
                cache_size=case.prompt_length + max(case.limits),
                num_layers=config.num_layers,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
            ),
        )

    def warm_up(self, ids: np.ndarray) -> None:
        """Runs one batch of each shape of the case."""
        shapes = {(len(part), longest) for part, longest in self.case.batches(self.case.limits)}
        if self.case.fixed:
            shapes |= {(count, 1) for count, _ in shapes}  # for the time to the first token
        for count, longest in sorted(shapes):
            self._batch(ids[:count], longest)

    def decode(self, ids: np.ndarray, limits: tuple[int, ...]) -> int:
        """Decodes batch after batch."""
        useful, samples = 0, self.case.samples
        for prompts, longest in self.case.batches(limits):
            self._batch(ids[prompts.start : prompts.stop], longest)
            useful += sum(limits[prompts.start * samples : prompts.stop * samples])
        return useful

    def _batch(self, ids: np.ndarray, longest: int) -> None:
        texts = [self.tokenizer.decode(row) for row in ids for _ in range(self.case.samples)]
        out = self.sampler(
            texts,
            max_generation_steps=longest,
            max_prompt_length=self.case.prompt_length,
            temperature=1.0,
            top_p=1.0,
            top_k=None,
            eos_tokens=[-1],
        )
        assert len(out.tokens) == len(texts) and len(out.tokens[0]) == longest

    def measures(self) -> dict[str, Any]:
        """Compilations since the last call."""
        return {"compilations": self.compilations.take()}

    def peak_gb(self) -> float:
        """Peak memory of this process."""
        return peak_resident_gb()


def open_side(options: dict[str, Any]) -> Callable[[Case], Decoder]:
    """The model, in float32."""
    jax.config.update("jax_platforms", "cpu")
    shape = options["shape"]
    model = llama3.Llama3(
        llama3.ModelConfig(
            num_layers=shape["num_layers"],
            vocab_size=shape["vocab_size"],
            embed_dim=shape["hidden_size"],
            hidden_dim=shape["mlp_size"],
            num_heads=shape["num_heads"],
            head_dim=shape["head_dim"],
            num_kv_heads=shape["num_kv_heads"],
            rope_theta=int(shape["rope_theta"]),
            norm_eps=shape["norm_eps"],
            weight_tying=shape["tie_embeddings"],
        ),
        rngs=nnx.Rngs(0),
    )
    leaves, tree = jax.tree.flatten(nnx.state(model, nnx.Param))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    leaves = [
        0.02 * jax.random.normal(key, x.shape, x.dtype) if x.ndim >= 2 else x
        for key, x in zip(keys, leaves, strict=True)
    ]
    nnx.update(model, jax.tree.unflatten(tree, leaves))
    compilations = Compilations()
    return lambda case: Sampler(model, compilations, case)


if __name__ == "__main__":
    serve(open_side)
