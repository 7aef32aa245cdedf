"""The groups of steps on one process, where something is missing: it is waited for, or named."""

import dataclasses

import numpy as np
import pytest
from support.plain_flow import BATCH, SAMPLES, TOKENS, owned, plain_flow

from distflow_jax.flow.ledger import Ledger


def in_few_batches(counter):
    """One prompt of a batch: of the second one 9, of the third one 22."""
    return counter in (1, 9, 22)


def test_a_first_step_amid_a_batch_that_has_no_group_of_this_process(tmp_path):
    """After a restart steps need not begin with a batch: a process may own none of 13 to 20. A
    group of the next step says which fields there are."""
    draw = owned(first=13, mine=in_few_batches)
    flow = plain_flow(tmp_path, draw, step=3, counter=13, steps=5)
    store, metrics = flow.take(4)
    assert store.uid.shape == (0, 2) and store.columns["response"] == []
    assert {"prompt", "response", "response_mask"} <= store.columns.keys()
    assert metrics["ledger"].values and flow.finish(4) == 13 + BATCH
    flow.publish(np.zeros(1), 4)
    store, _ = flow.take(5)
    assert store.uid[:, 0].tolist() == [22] * SAMPLES
    flow.close()


@pytest.mark.parametrize("bounds", [{"steps": 4}, {"last": 2 * BATCH}], ids=str)
def test_a_process_without_a_group_in_all_that_is_left(tmp_path, bounds):
    """It does not wait for a step that will not come: the error names what would help."""
    draw = owned(first=13, mine=in_few_batches, last=bounds.get("last"))
    flow = plain_flow(tmp_path, draw, step=3, counter=13, **bounds)
    with pytest.raises(ValueError, match="no group of step 4, and none follows .* training.steps"):
        flow.take(4)
    flow.close()


def test_a_checkpoint_without_samples_has_the_account_of_all_tokens(tmp_path):
    """That of a run's last step: it goes on as if the run had not ended there."""
    flow, whole = plain_flow(tmp_path, owned(), steps=2), BATCH * SAMPLES * TOKENS
    for step in (1, 2):
        flow.take(step)
        flow.finish(step)
        flow.publish(np.zeros(1), step)
    assert flow.saver.account() == Ledger(sampled=2 * whole, trained=2 * whole)
    flow.close()


def test_samples_that_such_a_checkpoint_lacks_are_lost(tmp_path):
    flow, whole = plain_flow(tmp_path, owned(), steps=9), BATCH * SAMPLES * TOKENS
    flow.take(1)
    flow.finish(1)
    flow.drive(lambda: flow.producer.counts().tokens == 2 * whole)
    saved = flow.saver.account()
    assert saved == Ledger(sampled=2 * whole, trained=whole)
    found = Ledger.restored([saved.to_dict()], known=0)
    assert found == dataclasses.replace(saved, lost=whole)
    flow.close()
