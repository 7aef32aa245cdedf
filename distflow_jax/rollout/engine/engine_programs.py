"""The programs of one engine: compiled functions from decode state to decode state."""

import functools
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.rollout.decode_state import EngineConfig, StateShapes
from distflow_jax.rollout.engine import (
    compact_decode,
    decode,
    expert_recording,
    slot_updates,
)
from distflow_jax.rollout.prefill import prefill
from distflow_jax.rollout.prefill.prefill_programs import PrefillPrograms
from distflow_jax.rollout.sampler_program import sampler_program


def sampler_programs(model: DecoderConfig, config: EngineConfig) -> tuple[str, ...]:
    """Names of a sampler's largest programs: "prefill" of the longest row of prompts,
    "prefill_long" of a chunk of a prompt that no row holds, "decode" of k steps of all slots, and
    "encode_images" of a model with a tower."""
    long = ("prefill_long",) if prefill.takes_chunks(config) else ()
    images = ("encode_images",) if model.vision is not None else ()
    return ("prefill", *long, "decode", *images)


class EnginePrograms:
    """Programs with the sizes and layouts of `shapes`; each donates the decode state it is given.

    `prompts` read prompts. `few_slots`: active slots of a data rank that `generate_few` decodes; 0
    where there is no such program.
    """

    def __init__(self, shapes: StateShapes, *, stop_ids: tuple[int, ...], seed: int):
        layout, whole = shapes.shardings(), NamedSharding(shapes.mesh, PartitionSpec())
        program = functools.partial(sampler_program, shapes)
        self._shapes = shapes
        self.prompts = PrefillPrograms(shapes)
        self.init = jax.jit(functools.partial(shapes.empty, seed), out_shardings=layout)
        self.insert = program(slot_updates.insert, out=(layout, whole), donate=0)
        self.admit = program(slot_updates.admit, out=layout, donate=0)
        self.change = program(slot_updates.change, out=layout, donate=0)
        self.collect = program(expert_recording.collect, out=(layout, whole, whole), donate=0)
        small = compact_decode.small_shapes(shapes)
        self.few_slots = small.slots if small else 0
        generate = functools.partial(program, out=(layout, whole), donate=1)
        if shapes.lanes < shapes.slots:
            lanes = compact_decode.narrowed(shapes, shapes.lanes)
            self.generate = generate(compact_decode.generate_few, lanes, stop_ids)
        else:
            self.generate = generate(decode.generate, stop_ids)
        self.generate_few = generate(compact_decode.generate_few, small, stop_ids)

    def temporaries(self, params: Any) -> int | None:
        """Bytes of a device for the temporary buffers of the largest of the `traced` programs.

        None where the platform does not report it. Compiles nothing after `RolloutEngine.compile`
        with the same weights.
        """
        programs = self.traced(params).values()
        found = [program.lower().compile().memory_analysis() for program in programs]
        return max((m.temp_size_in_bytes for m in found if m is not None), default=None)

    def traced(self, params: Any) -> dict[str, jax.stages.Traced]:
        """The largest programs, by `sampler_programs`. `params` may be ShapeDtypeStructs with
        shardings."""
        found = {
            "prefill": self.prompts.trace_longest_row(params),
            "decode": self.generate.trace(params, self._shapes.specs()),
        }
        if prefill.takes_chunks(self._shapes.config):
            found["prefill_long"] = self.prompts.trace_chunk(params)
        if self.prompts.images is not None:
            found["encode_images"] = self.prompts.images.trace(params)
        return found
