"""Ages of a step's tokens, as its metrics tell them."""

import numpy as np
import pytest

from distflow_jax.batch import Samples
from distflow_jax.coordinator.batch_metrics import means_by_age, staleness_metrics


def samples_of(versions, masks=None):
    masks = masks or [np.ones(len(v), bool) for v in versions]
    uid = np.array([[i, 0] for i in range(len(versions))], np.int64)
    return Samples(
        [None] * len(uid), uid, [np.zeros(len(m)) for m in masks], masks, {"version": versions}
    )


def test_ages_and_their_shares():
    versions = [np.array([5, 5, 6, 7]), np.array([7, 7])]
    found = staleness_metrics(samples_of(versions), step=8, max_staleness=2)
    name = "training/off_policy/trajectory_staleness"
    assert (found[f"{name}/mean"], found[f"{name}/max"], found[f"{name}/min"]) == (1.0, 2.0, 0.0)
    shares = [found[f"training/off_policy/age_share/{age}"] for age in range(3)]
    np.testing.assert_allclose(shares, [3 / 6, 1 / 6, 2 / 6])


def test_observations_do_not_count():
    mask = np.array([True, False, True])
    found = staleness_metrics(samples_of([np.array([4, 0, 4])], [mask]), step=5, max_staleness=3)
    assert found["training/off_policy/trajectory_staleness/max"] == 0.0
    assert found["training/off_policy/age_share/0"] == 1.0


def test_one_number_per_response_is_that_of_all_its_tokens():
    masks = [np.ones(3, bool)]
    found = staleness_metrics(samples_of([np.int32(1)], masks), step=3, max_staleness=1)
    assert found["training/off_policy/age_share/1"] == 1.0


def test_a_token_ages_in_flight_or_while_it_waits():
    """Up to the last token of its response, and afterwards; both together are its age."""
    versions = [np.array([5, 5, 6]), np.array([7])]
    found = staleness_metrics(samples_of(versions), step=8, max_staleness=2)

    def shares(name):
        return [found[f"training/off_policy/{name}/{steps}"] for steps in range(3)]

    np.testing.assert_allclose(shares("in_flight_share"), [2 / 4, 2 / 4, 0])
    np.testing.assert_allclose(shares("waiting_share"), [1 / 4, 3 / 4, 0])
    mean = [np.arange(3) @ shares(f"{name}_share") for name in ("age", "in_flight", "waiting")]
    assert mean[0] == pytest.approx(mean[1] + mean[2])


def test_means_by_age_are_parts_of_the_mean_over_shares():
    corr = "node/rollout_corr"
    told = {"rollout_corr/kl": 0.5, f"{corr}/kl": 0.3, f"{corr}/kl/0": 0.1, f"{corr}/kl/1": 0.2}
    told |= {f"{corr}/kl/2": 0.0} | {
        f"{corr}/tokens_of_age/{age}": share for age, share in enumerate((0.8, 0.2, 0.0))
    }
    assert means_by_age(told) == pytest.approx(
        {"rollout_corr/kl": 0.5, f"{corr}/kl": 0.3, f"{corr}/kl/0": 0.125, f"{corr}/kl/1": 1.0}
    )
