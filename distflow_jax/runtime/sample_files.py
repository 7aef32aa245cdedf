"""Records of samples/: those of a step and of an evaluation, gathered from all processes.

Each process makes the lines of its own responses; process 0 puts them in order and writes them.
"""

import itertools
import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distflow_jax.batch import Prompt, Samples
from distflow_jax.images.shown_pictures import first_of_prompts, pictures
from distflow_jax.layout import RESPONSE_IMAGES, ROUTED_EXPERTS, ROWS_COLUMNS, STEP, VERSION
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.parallel import processes
from distflow_jax.report.json_lines import json_line
from distflow_jax.stages.evaluate import Scored

Uid = tuple[int, int]  # prompt counter, sample


def sample_lines(samples: Samples, tokenizer: Tokenizer) -> list[str]:
    """The lines of samples/STEP.jsonl, a response each, in process 0; [] elsewhere. Collective.

    `samples`: the step's, of this process.
    """
    scalars = {
        name: values
        for name, values in samples.fields.items()
        if name not in (*ROWS_COLUMNS, "rollout_logp", ROUTED_EXPERTS, RESPONSE_IMAGES, STEP)
    }
    if VERSION in scalars:
        masks = samples.response_mask
        scalars[VERSION] = [_version(x, m) for x, m in zip(scalars[VERSION], masks, strict=True)]
    uids = [(counter, sample) for counter, sample in samples.uid.tolist()]
    shown = _shown(uids, samples.prompt)
    records = [
        {
            "uid": uid,
            "row": prompt.row,
            "data_source": prompt.data_source,
            "prompt": prompt.text,
            **shown.get(uid, {}),
            "response": tokenizer.decode(samples.response[i], skip_special=False),
            "ground_truth": prompt.ground_truth,
            "response_length": len(samples.response[i]),
            **{name: values[i] for name, values in scalars.items()},
        }
        for i, (uid, prompt) in enumerate(zip(uids, samples.prompt, strict=True))
    ]
    return _gathered(uids, records)


def evaluation_lines(scored: Sequence[Scored]) -> list[str]:
    """The lines of samples/eval-STEP.jsonl, a prompt each, in process 0; [] elsewhere. Collective.

    `scored`: the evaluation's, of this process.
    """
    uids = [(s.prompt.counter, 0) for s in scored]
    shown = _shown(uids, [s.prompt for s in scored])
    records = [
        {
            "row": s.prompt.row,
            "data_source": s.prompt.data_source,
            "prompt": s.prompt.text,
            **shown.get(uid, {}),
            "ground_truth": s.prompt.ground_truth,
            "responses": s.texts,
            "scores": s.scores,
            "lengths": s.lengths,
            "finished": s.finished,
        }
        for uid, s in zip(uids, scored, strict=True)
    ]
    return _gathered(uids, records)


def _shown(uids: Sequence[Uid], prompts: Sequence[Prompt]) -> dict[Uid, dict[str, list[str]]]:
    """{"images": pictures} by uid, of those of this process's records that show some."""
    images = {uid: p.images for uid, p in zip(uids, prompts, strict=True) if p.images}
    first = processes.all_gather_json(first_of_prompts(images))
    shown = first_of_prompts(itertools.chain(*first))
    return {uid: {"images": pictures(images[uid])} for uid in images.keys() & set(shown)}


def _gathered(uids: Sequence[Uid], records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The records of all processes in the order of their uids, as lines."""
    found: list[tuple[list[int], str]] = []
    for text in processes.gather_text("\n".join([json.dumps(uids), *map(json_line, records)])):
        theirs, *lines = text.split("\n")
        found += zip(json.loads(theirs), lines, strict=True)
    return [line for _, line in sorted(found, key=operator.itemgetter(0))]


def _version(version: Any, mask: np.ndarray) -> int | list[int]:
    """The version that sampled a response, or that of each token [T] where there are several.

    Observations, where `mask` [T] is false, were not sampled.
    """
    if not np.ndim(version):  # of a user's own sampler
        return int(version)
    found = np.unique(version[mask])
    return version.tolist() if len(found) > 1 else int(found.max(initial=0))
