"""Parts of the algorithm that wait for a whole batch: a sentence names the setting, or is empty.

Tests beside the computations show that the other parts need not wait: test_advantages.py,
test_policy_objective.py.
"""

import pytest

from distflow_jax.algorithms.whole_batch import (
    advantage_waits,
    loss_waits,
    update_waits,
    weights_wait,
)
from distflow_jax.config.algorithm_config import AlgorithmConfig

WAITS = {
    "advantage='gae'": advantage_waits(AlgorithmConfig(advantage="gae")),
    "cpgd_weight='clip_filter'": advantage_waits(
        AlgorithmConfig(advantage="cpgd", cpgd_weight="clip_filter")
    ),
    "kl_target=0.1": advantage_waits(
        AlgorithmConfig(kl_coef=0.1, kl_in_reward=True, kl_target=0.1)
    ),
    "policy_loss='kl_cov'": loss_waits(AlgorithmConfig(policy_loss="kl_cov")),
    "policy_loss='clip_cov'": update_waits(AlgorithmConfig(policy_loss="clip_cov"), 1, 1),
    "correction_batch_normalize=True": update_waits(
        AlgorithmConfig(correction="token_tis", correction_batch_normalize=True), 1, 1
    ),
    "mini_batches=4": update_waits(AlgorithmConfig(), 4, 1),
    "epochs=2": update_waits(AlgorithmConfig(proximal="rollout"), 1, 2),
    "epochs=3": update_waits(None, 1, 3),
    "training.mini_batches=2": weights_wait(2, 1),
    "training.epochs=2": weights_wait(1, 2),
}


@pytest.mark.parametrize("setting", WAITS)
def test_the_reason_begins_with_the_setting(setting):
    """And is one line of a table: no full stop, no line break."""
    key = WAITS[setting].split()[0]
    assert key.endswith(setting) and key.split(".")[0] in ("algorithm", "training")
    assert not WAITS[setting].endswith(".") and "\n" not in WAITS[setting]


@pytest.mark.parametrize("proximal", ["rollout", "a3po", "a3po_areal"])
def test_mini_batches_stream_where_old_log_probs_come_from_the_sampler(proximal):
    assert update_waits(AlgorithmConfig(proximal=proximal), 4, 1) == ""
    assert update_waits(None, 4, 1) == ""


def test_the_default_algorithm_streams():
    default = AlgorithmConfig()
    assert advantage_waits(default) == loss_waits(default) == ""
    assert update_waits(default, 1, 1) == weights_wait(1, 1) == ""
