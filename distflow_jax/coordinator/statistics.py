"""Numbers about a step's samples, over all processes, the same on every one.

N samples of this process. Only a few numbers per sample travel.
"""

import numpy as np

from distflow_jax.batch import Samples
from distflow_jax.observe.metrics import summarize
from distflow_jax.parallel import processes


def batch_metrics(samples: Samples, tokens_per_rank: np.ndarray) -> dict[str, float]:
    """verl's batch metrics.

    `tokens_per_rank` int64 [ranks]: tokens in the packed rows of this process's data ranks. Every
    process must have equally many samples.
    """
    local = np.array(
        [
            [len(p.tokens), len(r), float(done), float(score)]
            for p, r, done, score in zip(
                samples.prompt,
                samples.response,
                samples.fields["finished"],
                samples.fields["score"],
                strict=True,
            )
        ],
        np.float64,
    )
    table = processes.all_gather_ints(local).reshape(-1, 4)
    balanced = processes.all_gather_ints(np.asarray(tokens_per_rank, np.int64)).reshape(-1)
    prompt, response, finished, score = table.T
    total = prompt + response
    metrics = {
        **summarize("critic/score", score),
        **summarize("critic/rewards", score),
        **summarize("response_length", response),
        "response_length/clip_ratio": float(1.0 - finished.mean()),
        **summarize("prompt_length", prompt),
        **summarize("global_seqlen", total),
        "global_seqlen/balanced_min": float(balanced.min()),
        "global_seqlen/balanced_max": float(balanced.max()),
        "perf/total_num_tokens": float(total.sum()),
    }
    return metrics
