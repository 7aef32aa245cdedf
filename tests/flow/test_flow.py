"""The groups of steps on one process, where something is missing: it is waited for, or named."""

import numpy as np
import pytest
from support.plain_flow import BATCH, SAMPLES, owned, plain_flow


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
