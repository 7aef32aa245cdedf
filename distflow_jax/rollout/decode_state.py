"""Everything a decode step reads and writes.

B slots in all, D data ranks, S = B / D slots and P = S prompts of a rank, V vocabulary.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from distflow_jax.config.implementation_table import DECODE, PREFILL, Need, candidates, named, names
from distflow_jax.config.rollout_config import DECODE_ATTENTION, STORED
from distflow_jax.images.patch_chunks import PatchSizes
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.moe import recording
from distflow_jax.models.vision.patch_attention import WHOLE, Form
from distflow_jax.parallel.rules import sharding
from distflow_jax.parsing.checked_fields import at_least
from distflow_jax.parsing.setting_checks import Section, setting
from distflow_jax.rollout.kv_cache import pages as cache_lib

PAGE_CHUNK = 32  # pages that attention takes at a time: more than these are a multiple


@dataclasses.dataclass(frozen=True)
class EngineConfig(Section, name="rollout"):
    """Static sizes of an engine."""

    slots: int  # responses that have begun and keep their pages, at most
    max_prompt: int  # tokens
    max_response: int  # tokens, the end token included
    lanes: int = 0  # of these, decoded side by side by a Scheduler; 0: all
    tokens_per_call: int = 16  # k: decode steps per call from the host
    page_size: int = 64  # tokens per page of the cache
    group_size: int = 8  # slots that share one prompt at most
    cache_tokens: int = 0  # room of the cache; 0: for full slots, see `default_pages`
    prefill_tokens: int = 512  # read at a time: short prompts together, long ones in chunks
    prefix_tokens: int = 0  # of cached shared prefixes; 0: off
    max_read: int = 0  # longest prompt with tokens of a resumed response; 0: max_prompt
    max_forced: int = 64  # tokens that are fed to a slot between its own, at most at a time
    dtype: str = "float32"  # of activations, and of weights where `weights_dtype` is "auto"
    # of matrices and tables: "auto": `dtype`, "int8": with a scale per output
    weights_dtype: str = setting("auto", STORED)
    # of keys and values: "auto": `dtype`, "int8": with a scale per token
    cache_dtype: str = setting("auto", STORED)
    attention: str = setting("auto", DECODE_ATTENTION)
    prefill_by: str = "loops"  # one of library_attention.BY_MASK
    weights: str = "auto"  # of layers, one of matmul_layouts.WEIGHTS
    speculative_tokens: int = 0  # d: guessed in a step, beside the one that is drawn; 0: off
    # tokens that must have stood before for a guess
    speculative_ngram: int = setting(2, at_least(1))
    record_experts: bool = False  # of a mixture: Response.routed_experts, see engine_programs.py
    images: PatchSizes | None = None  # patches that are encoded together; None: no tower
    tower: Form = WHOLE  # of attention between these patches

    @property
    def decode_slots(self) -> int:
        """Responses decoded side by side."""
        return self.lanes or self.slots


@struct.dataclass
class DecodeState:
    """The decode state: KV cache, slot bookkeeping, per-slot sampling parameters."""

    cache: cache_lib.Cache
    logits: Any  # float32 [B, V]: distribution of the next token
    length: Any  # int32 [B]: tokens in the cache, the prompt's included
    own: Any  # int32 [B]: of these, in the slot's own pages
    prompt: Any  # int32 [B]: which prompt of its rank the slot reads; P: none
    member: Any  # int32 [B]: its number among the slots that read it
    emitted: Any  # int32 [B]: tokens of the response so far
    limit: Any  # int32 [B]: longest response allowed
    active: Any  # bool [B]: goes on
    kept: Any  # bool [B]: keeps its pages after it has ended
    counter: Any  # int32 [B]: uid, first half
    sample: Any  # int32 [B]: uid, second half
    temperature: Any  # float32 [B]
    top_k: Any  # int32 [B]
    top_p: Any  # float32 [B]
    forced: Any  # int32 [B, F]: tokens to be fed before the next one is drawn
    forced_left: Any  # int32 [B]: how many of them, the last ones of the row
    prompt_length: Any  # int32 [D, P]: tokens
    prompt_held: Any  # bool [D, P]: held though no slot reads it
    seed: Any  # key of the run
    exit_below: Any  # int32: generate returns early once this many or fewer slots are active
    # int32 [B]: a slot's next position less its length; None where images take as many as tokens
    shift: Any = None
    history: Any = None  # int32 [B, X]: tokens in the cache, where they are looked up in: d > 0


def longest_read(config: EngineConfig) -> int:
    """Tokens of the longest prompt, or of one with a part of its response."""
    return max(config.max_prompt, config.max_read)


def check_length(length: int, most: int) -> None:
    """ValueError for a prompt that is empty or longer than `most` tokens."""
    if not 0 < length <= most:
        raise ValueError(f"a prompt must have 1 to {most} tokens, got {length}")


def history_length(config: EngineConfig) -> int:
    """X: tokens that a slot can hold, its prompt's and its response's."""
    return longest_read(config) + config.max_response


def check_speculation(config: EngineConfig) -> None:
    """ValueError for numbers of tokens that no step can guess, or look up."""
    if not 0 <= config.speculative_tokens < config.page_size:
        raise ValueError(
            f"rollout.speculative_tokens {config.speculative_tokens} must be at least 0 and below "
            f"the page size of {config.page_size} tokens"
        )


def check_recording(config: EngineConfig, model: DecoderConfig) -> None:
    """ValueError where experts are to be recorded and there are none."""
    if config.record_experts and not model.num_experts:
        raise ValueError(
            "record_experts=True is for a mixture of experts, and this model of family "
            f"{model.family!r} has none; use False"
        )


def attention_need(model: DecoderConfig, dtype: str, platform: str, where: str = DECODE) -> Need:
    """The needs of a sampler, for decode steps or for prefill."""
    features = {"shared prompts"} | ({"windows"} if model.sliding_window else set())
    return Need(where, platform, model.head_dim, dtype, frozenset(features))


class SamplerAttentions(NamedTuple):
    """Attention that a sampler may have, the preferred first."""

    decode: tuple[str, ...]  # for EngineConfig.attention
    prefill: tuple[str, ...]  # for EngineConfig.prefill_by


def sampler_attentions(
    name: str, model: DecoderConfig, dtype: str, platform: str
) -> SamplerAttentions:
    """Resolves rollout.attention, a name of decode steps' attention or of prefill's.

    Prefill by a library is left to a trial, unless it is named. Raises ValueError for a name that
    cannot do what the sampler needs.
    """
    need = attention_need(model, dtype, platform)
    where = PREFILL if name in names(PREFILL)[1:] else DECODE
    if name != "auto":
        named("rollout.attention", name, need._replace(where=where))
    decode = tuple(one.name for one in candidates(need))
    if where == PREFILL:
        return SamplerAttentions(decode, ("loops" if name == "masked" else name,))
    if name != "auto":
        return SamplerAttentions((name,), ("loops",))
    others = (one.name for one in candidates(need._replace(where=PREFILL)))
    return SamplerAttentions(decode, ("loops", *(n for n in others if n != "masked")))


def stored_dtype(config: EngineConfig) -> str:
    """The dtype that keys and values are stored as."""
    return config.dtype if config.cache_dtype == "auto" else config.cache_dtype


def result_tokens(config: EngineConfig) -> int:
    """Most tokens that one generate call gives a slot: k, each with d that were guessed."""
    return config.tokens_per_call * (1 + config.speculative_tokens)


def pages_of(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens`."""
    return -(-tokens // page_size)


def default_pages(config: EngineConfig, ranks: int) -> int:
    """Pages of a rank: every lane with its longest response, those of responses that wait, and the
    prompts that these answer.

    Prompts: those of full groups, and as many again for groups of which a few responses are left.
    """
    slots, lanes = config.slots // ranks, config.decode_slots // ranks
    groups = min(slots, 2 * -(-slots // config.group_size) + 1)
    response = pages_of(config.max_response, config.page_size)
    prompts = groups * pages_of(config.max_prompt, config.page_size)
    return lanes * response + waiting_pages(config, ranks) + prompts


def waiting_pages(config: EngineConfig, ranks: int) -> int:
    """Pages of a rank for the responses beyond its lanes: half of the longest for each."""
    response = pages_of(config.max_response, config.page_size)
    return (config.slots - config.decode_slots) // ranks * -(-response // 2)


def least_pages(config: EngineConfig) -> int:
    """Pages of one full slot and its prompt, which every rank has to hold."""
    size = config.page_size
    return pages_of(longest_read(config), size) + pages_of(config.max_response, size)


def num_pages(config: EngineConfig, ranks: int) -> int:
    """Pages of a rank: as configured, in whole chunks of attention.

    Raises ValueError where one full slot and its prompt would not fit.
    """
    size, one = config.page_size, least_pages(config)
    pages = max(one, default_pages(config, ranks))
    if config.cache_tokens:
        pages = config.cache_tokens // (ranks * size)
        if pages < one:
            raise ValueError(
                f"rollout.cache_tokens {config.cache_tokens} leaves {pages * size} tokens to each "
                f"of {ranks} data ranks, and one prompt of {longest_read(config)} with a response "
                f"of {config.max_response} takes {one * size}: use at least {one * size * ranks}"
            )
    return pages if pages <= PAGE_CHUNK else -(-pages // PAGE_CHUNK) * PAGE_CHUNK


def attention_for(config: EngineConfig, model: DecoderConfig, mesh: Mesh) -> str:
    """How attention of decode steps runs on the mesh."""
    if config.attention != "auto":
        return config.attention
    platform = mesh.devices.flat[0].platform
    return next(candidates(attention_need(model, config.dtype, platform))).name


def _check_int8_pages(shapes: "StateShapes") -> None:
    """ValueError for pages that the GPU kernel cannot address. The kernel's own error comes at
    compilation and names no setting."""
    config, model, tensor = shapes.config, shapes.model, shapes.mesh.shape["tensor"]
    if shapes.attention != "gpu" or stored_dtype(config) != "int8":
        return
    heads = model.num_kv_heads
    heads = heads // tensor if heads % tensor == 0 else heads
    page = model.num_layers * heads * model.head_dim * config.page_size
    if 2**31 < shapes.pages * page <= 2**32:
        fits = 2**31 // page // 32 * 32 * config.page_size * shapes.ranks
        raise ValueError(
            "rollout.cache_dtype=int8: the GPU kernel takes keys of at most 2 GiB on a device, or "
            f"of more than 4, and {shapes.pages} pages of {config.page_size} tokens have "
            f"{shapes.pages * page / 2**30:.2f} GiB; set rollout.cache_tokens to at most {fits} "
            "for each sampler, or change rollout.num_slots"
        )


class StateShapes:
    """Shapes and layouts of a decode state on a mesh with axes ("data", "tensor")."""

    def __init__(self, model: DecoderConfig, config: EngineConfig, mesh: Mesh):
        self.model, self.config, self.mesh = model, config, mesh
        self.ranks = mesh.shape["data"]
        self.slots = config.slots // self.ranks
        self.lanes = config.decode_slots // self.ranks
        self.owners = 2 * self.slots
        self.members = min(config.group_size, self.slots)  # slots that share a prompt, at most
        self.pages = num_pages(config, self.ranks)
        self.attention = attention_for(config, model, mesh)
        _check_int8_pages(self)
        check_recording(config, model)
        # how every program of the sampler routes; None: as the network does, and nothing is kept
        experts, count = model.num_experts, model.experts_per_token
        self.route = recording(experts, count) if config.record_experts else None

    def empty(self, seed: int) -> DecodeState:
        """All slots free."""
        c, b = self.config, self.config.slots
        none = jnp.zeros(b, jnp.int32)
        off = jnp.zeros(b, bool)
        return DecodeState(
            cache=cache_lib.empty(
                self.model,
                ranks=self.ranks,
                pages=self.pages,
                page_size=c.page_size,
                owners=self.owners,
                dtype=stored_dtype(c),
                record_experts=c.record_experts,
            ),
            logits=jnp.zeros((b, self.model.vocab_size), jnp.float32),
            length=none,
            own=none,
            prompt=none + self.slots,
            member=none,
            emitted=none,
            limit=none,
            active=off,
            kept=off,
            counter=none,
            sample=none,
            temperature=jnp.ones(b, jnp.float32),
            top_k=none,
            top_p=jnp.ones(b, jnp.float32),
            forced=jnp.zeros((b, c.max_forced), jnp.int32),
            forced_left=none,
            prompt_length=jnp.zeros((self.ranks, self.slots), jnp.int32),
            prompt_held=jnp.zeros((self.ranks, self.slots), bool),
            seed=jax.random.key(seed),
            exit_below=jnp.zeros((), jnp.int32),
            shift=none if self.model.rope_sections else None,
            history=jnp.zeros((b, history_length(c)), jnp.int32) if c.speculative_tokens else None,
        )

    def specs(self) -> DecodeState:
        """ShapeDtypeStructs with shardings of what `empty` makes."""
        shapes = jax.eval_shape(lambda: self.empty(0))
        return jax.tree.map(
            lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout),
            shapes,
            self._layouts(shapes),
        )

    def shardings(self) -> DecodeState:
        """Slots and pages over data, heads over tensor."""
        return self._layouts(jax.eval_shape(lambda: self.empty(0)))

    def _layouts(self, shapes: DecodeState) -> DecodeState:
        def layout(x, *axes):
            axes = axes + (None,) * (x.ndim - len(axes))
            names = tuple(a or "activation" for a in axes)
            return sharding(self.mesh, names, x.shape)

        whole = {"seed", "exit_below"}
        fields = {
            f.name: jax.tree.map(
                lambda x, name=f.name: layout(x) if name in whole else layout(x, "batch"),
                getattr(shapes, f.name),
            )
            for f in dataclasses.fields(DecodeState)
        }
        cache = shapes.cache
        fields["cache"] = cache_lib.Cache(
            layout(cache.key, *cache_lib.KEY_AXES),
            layout(cache.value, *cache_lib.VALUE_AXES),
            layout(cache.owner, "batch"),
            layout(cache.rank, "batch"),
            *jax.tree.map(
                lambda x: layout(x, *cache_lib.SCALE_AXES), (cache.key_scale, cache.value_scale)
            ),
            jax.tree.map(lambda x: layout(x, *cache_lib.EXPERTS_AXES), cache.experts),
        )
        return DecodeState(**fields)

    def by_rank(self, x: jax.Array) -> jax.Array:
        """[B, ...] -> [D, S, ...]."""
        return x.reshape(self.ranks, self.slots, *x.shape[1:])

    def alive(self, state: DecodeState) -> jax.Array:
        """Owners whose pages are needed, bool [D, S + P]."""
        slots = self.by_rank(state.active | state.kept)
        entries = jnp.arange(self.slots, dtype=jnp.int32)[None, None]
        answers = self.by_rank(state.prompt)[..., None] == entries
        prompts = (answers & slots[..., None]).any(1) | state.prompt_held
        return jnp.concatenate([slots, prompts], axis=1)

    def released(self, state: DecodeState) -> DecodeState:
        """The state after the pages of owners that have ended are freed."""
        return state.replace(cache=cache_lib.release(state.cache, self.alive(state)))
