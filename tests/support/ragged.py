"""Ragged sequences for tests of algorithms, and their packed form.

A test states a formula over a plain list of sequences, in float64 and without packing, and compares
it with what the package makes of rows. N sequences; T_i tokens in the response of sequence i.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from distflow_jax.batch import (
    Placement,
    Rows,
    RowShape,
    Sequences,
    from_sequence_field,
    from_token_field,
    sequence_field,
    to_rows,
    token_field,
)

# these programs run a few times on a few numbers: compiling them well would take most of the time
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
SHAPE = RowShape(mini_batches=1, rows=12, tokens=64, sequences=5)
# of one, of two, larger ones, and a group that has no sequence
SIZES = (4, 1, 5, 2, 0, 1, 3, 4)


@dataclasses.dataclass(frozen=True)
class Sequence:
    """One response. `mask` has gaps, and may be all False; `prompt` is a number of tokens."""

    group: int
    sample: int
    prompt: int
    mask: np.ndarray

    @property
    def length(self) -> int:
        return int(self.mask.sum())


def random_sequences(seed: int, sizes=SIZES, longest: int = 12) -> list[Sequence]:
    """Groups of these sizes. Some responses are empty or masked out; most have gaps."""
    rng = np.random.default_rng(seed)
    sequences = []
    for group, size in enumerate(sizes):
        prompt = int(rng.integers(1, 6))
        for sample in range(size):
            mask = rng.random(rng.integers(2, longest + 1)) < 0.75
            mask[0] = True  # but those below: most sequences count
            sequences.append(Sequence(group, sample, prompt, mask))
    # in the largest group one response is masked out, and one is empty
    large = [i for i, s in enumerate(sequences) if s.group == int(np.argmax(sizes))]
    for place, mask in ((large[0], np.zeros(4, bool)), (large[1], np.zeros(0, bool))):
        sequences[place] = dataclasses.replace(sequences[place], mask=mask)
    return sequences


def draw(seed: int, sequences, scale: float = 1.0, mean: float = 0.0) -> list[np.ndarray]:
    """One number per token, float32 values as float64, so that both sides see the same."""
    rng = np.random.default_rng(seed)
    return [rng.normal(mean, scale, len(s.mask)).astype(np.float32) for s in sequences]


@dataclasses.dataclass(frozen=True)
class Packed:
    """Rows of some sequences, and where each lies."""

    sequences: list[Sequence]
    table: Sequences
    placement: Placement
    rows: Rows  # jax arrays, [K, R, ...]

    def tokens(self, values, poison: float = 0.0) -> jax.Array:
        """Per-token values as [K, R, L], `poison` where the mask is off."""
        field = token_field(self.table, self.placement, values)
        return jnp.asarray(np.where(self.rows.response_mask, field, np.float32(poison)))

    def per_sequence(self, values, poison: float = 0.0) -> jax.Array:
        """One number per sequence as [K, R, S], `poison` where there is none."""
        field = sequence_field(self.placement, values)
        return jnp.asarray(np.where(self.rows.valid, field, np.float32(poison)))

    def unpack(self, field) -> list[np.ndarray]:
        """Per-token values of each sequence, in their order."""
        found = from_token_field(self.table, self.placement, np.asarray(field))
        return [found[i] for i in range(len(self.sequences))]

    def unpack_sequences(self, field) -> np.ndarray:
        """One value per sequence, in their order."""
        found = from_sequence_field(self.placement, np.asarray(field))
        return np.array([found[i] for i in range(len(self.sequences))])


def pack(
    sequences, seed: int, *, shared: bool, shape: RowShape = SHAPE, together: bool = False
) -> Packed:
    """Sequences in random order at random places; some rows stay empty.

    A group's mini-batch is its number modulo K. `together`: a group lies in one row, as pairs do.
    """
    rng = np.random.default_rng(seed)
    used = rng.permutation(shape.rows)[: shape.rows - 3]
    at = [[[] for _ in range(shape.rows)] for _ in range(shape.mini_batches)]
    room = np.zeros((shape.mini_batches, shape.rows), int)
    atoms: dict[int, list[int]] = {}
    for i in rng.permutation(len(sequences)):
        atoms.setdefault(sequences[i].group if together else int(i), []).append(int(i))
    for atom in atoms.values():
        k = sequences[atom[0]].group % shape.mini_batches
        need = sum(sequences[i].prompt + len(sequences[i].mask) for i in atom)
        fits = [
            r
            for r in used
            if room[k, r] + need <= shape.tokens and len(at[k][r]) + len(atom) <= shape.sequences
        ]
        row = rng.choice(fits)
        at[k][row] += atom
        room[k, row] += need
    table = Sequences(
        group=[s.group for s in sequences],
        member=[s.sample for s in sequences],
        prompt=[np.full(s.prompt, 7, np.int32) for s in sequences],
        response=[np.full(len(s.mask), 8, np.int32) for s in sequences],
        response_mask=[s.mask for s in sequences],
    )
    placement = Placement(shape, tuple(tuple(map(tuple, mini)) for mini in at), shared)
    rows = jax.tree.map(jnp.asarray, to_rows(table, placement))
    return Packed(list(sequences), table, placement, rows)


def first(tree):
    """The first mini-batch: [K, R, ...] -> [R, ...]."""
    return jax.tree.map(lambda x: x[0], tree)


def assert_close(got, expected, what: str = "", rtol: float = 1e-5):
    """Within rtol, and 1e-6 of the largest expected value or of 1."""
    expected = np.asarray(expected, np.float64)
    assert np.asarray(got).dtype == np.float32, what
    atol = 1e-6 * max(1.0, np.abs(expected).max(initial=0.0))
    np.testing.assert_allclose(np.asarray(got), expected, rtol=rtol, atol=atol, err_msg=what)
