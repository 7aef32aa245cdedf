"""Nodes of the guides say scopes that hold: what a node gives a group is what it gives it alone."""

import types

import numpy as np
import pytest
from support.doc_blocks import blocks
from support.paths import ROOT
from support.ragged import draw, pack, random_sequences

SEQUENCES = random_sequences(0)
OLD, REF = draw(1, SEQUENCES), draw(2, SEQUENCES)
SCORE = np.float32(np.random.default_rng(3).random(len(SEQUENCES)))


def functions(page, title):
    """The definitions in a Python file of a guide."""
    (block,) = [block for block in blocks(ROOT / "docs" / page) if block.title == title]
    module = types.ModuleType(title)
    exec(block.text, vars(module))
    return module


def kl_and_advantage(chosen):
    """(kl, advantages) of the chosen responses, by the nodes of docs/tasks.md."""
    nodes = functions("tasks.md", "kl_advantage.py")
    packed = pack([SEQUENCES[i] for i in chosen], int(chosen.sum()), shared=True)
    old, ref = (packed.tokens([values[i] for i in chosen]) for values in (OLD, REF))
    fields = {"rows": packed.rows, "score": packed.per_sequence(SCORE[chosen])}
    _, of_kl, _ = nodes.sequence_kl(None, fields | {"old_logp": old, "ref_logp": ref}, {})
    options = {"kl_coef": 0.05, "prompts": 16}
    _, written, _ = nodes.advantage(None, fields | of_kl, options)
    return packed.unpack_sequences(of_kl["kl"]), packed.unpack(written["advantage"])


@pytest.mark.parametrize("group", sorted({s.group for s in SEQUENCES}))
def test_a_group_s_advantages_follow_from_itself(group):
    """Scope group: alone, and in other rows, a group has the advantages that it has among all."""
    (members,) = np.nonzero([s.group == group for s in SEQUENCES])
    kl, among_all = kl_and_advantage(np.arange(len(SEQUENCES)))
    of_group, alone = kl_and_advantage(members)
    for i, own_kl, own in zip(members, of_group, alone, strict=True):
        np.testing.assert_allclose(own_kl, kl[i], atol=1e-5)
        np.testing.assert_allclose(own, among_all[i], atol=1e-5)


def test_a_response_s_kl_follows_from_itself():
    """Scope sample, as nodes have it that say none."""
    kl, _ = kl_and_advantage(np.arange(len(SEQUENCES)))
    for i in range(len(SEQUENCES)):
        np.testing.assert_allclose(kl_and_advantage(np.array([i]))[0], kl[i], atol=1e-5)
    assert np.abs(kl).max() > 0.1


def test_a_mean_over_whatever_is_there_needs_the_batch():
    whiten = functions("dag.md", "whiten.py").whiten
    whole, half = (whiten(None, {"score": SCORE[:n]}, {})[1]["whitened"] for n in (None, 9))
    assert np.abs(whole[:9] - half).max() > 0.1
