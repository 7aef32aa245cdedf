"""The function of a custom node: see brevity.yaml."""

import numpy as np


def brevity(state, fields, options):
    """response, score -> short_score: the score halves every `half_length` tokens."""
    length = np.array([len(response) for response in fields["response"]])
    weight = 0.5 ** (length / options["half_length"])
    short_score = np.asarray(fields["score"] * weight, np.float32)
    return state, {"short_score": short_score}, {"brevity/weight": float(weight.mean())}
