"""Choices of the algorithm that need all rows of a batch, or of an optimizer step, and why.

With `stream.partial_batches` a step's groups are trained in parts, as they end. All other entries
of the tables of advantages, losses, aggregations, KL estimators, corrections and rejections are
about one group, one sequence or one token, or are sums that add up over parts. All functions return
a sentence, or "" where nothing has to wait.
"""

from distflow_jax.config.algorithm_config import AlgorithmConfig

_WHITENED = (
    "is divided by the standard deviation over all response tokens of the batch, after their mean "
    "was subtracted"
)
# why an advantage cannot be computed of some groups of a batch, by its name
_ADVANTAGES = {
    "gae": _WHITENED,
    "reinforce_plus_plus": _WHITENED,
    "reinforce_plus_plus_baseline": _WHITENED,
    "gpg": "is scaled by the share of responses in the batch whose score is not 0",
}


def advantage_waits(algorithm: AlgorithmConfig) -> str:
    """Why the advantages of some groups cannot be computed before the batch is complete."""
    name = algorithm.advantage
    reason = _ADVANTAGES.get(name, "")
    if reason:
        return f"algorithm.advantage={name!r} {reason}"
    if name == "cpgd" and algorithm.cpgd_weight == "clip_filter":
        return (
            "algorithm.cpgd_weight='clip_filter' is the share of groups in the batch whose scores "
            "differ"
        )
    if algorithm.kl_target:
        return (
            f"algorithm.kl_target={algorithm.kl_target} steers the coefficient by the mean KL of "
            "the batch"
        )
    return ""


def loss_waits(algorithm: AlgorithmConfig) -> str:
    """Why the loss of some groups cannot be computed before its optimizer step is complete."""
    if algorithm.selects:
        return (
            f"algorithm.policy_loss={algorithm.policy_loss!r} chooses among all response tokens of "
            "an optimizer step"
        )
    if algorithm.correction_batch_normalize:
        return (
            "algorithm.correction_batch_normalize=True divides weights by their mean over an "
            "optimizer step"
        )
    return ""


def weights_wait(mini_batches: int, epochs: int) -> str:
    """Why a forward pass by weights that the step trains waits: of old_logp, and of a critic.

    It takes the weights from before the step, and partial batches of later mini-batches come after
    the first optimizer step.
    """
    if mini_batches * epochs == 1:
        return ""
    key, value = ("mini_batches", mini_batches) if mini_batches > 1 else ("epochs", epochs)
    return (
        f"training.{key}={value} takes log-probs and values by the weights before the step's first "
        "optimizer step"
    )


def update_waits(algorithm: AlgorithmConfig | None, mini_batches: int, epochs: int) -> str:
    """Why an update cannot begin before the batch is complete.

    `algorithm` is the policy's; None: an update of another model, which reads values by itself.
    """
    if epochs > 1:
        return f"training.epochs={epochs} trains all of the batch before any of it again"
    if algorithm is None:
        return ""
    if reason := loss_waits(algorithm):
        return reason
    if algorithm.proximal == "recomputed":
        return weights_wait(mini_batches, epochs)
    return ""
