"""In verl's forms: a compute_score by data source, and an async one that returns a dict."""

import asyncio
import re


def extract_solution(solution_str, method="strict"):
    pattern = "#### (\\-?[0-9\\.\\,]+)" if method == "strict" else "(\\-?[0-9\\.\\,]+)"
    found = re.findall(pattern, solution_str)
    return found[-1].replace(",", "") if found else None


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    if data_source != "openai/gsm8k":
        raise NotImplementedError(f"Reward function is not implemented for {data_source=}")
    method = kwargs.get("method", "strict")
    found = extract_solution(solution_str, method)
    if found is None:
        return 0
    return 1.0 if found == ground_truth else 0.1


async def judged(data_source, solution_str, ground_truth, extra_info=None, judge="none"):
    await asyncio.sleep(0)
    right = ground_truth in solution_str
    shown = f"{judge}: {extra_info['question']}"
    return {"score": 2.0 * right, "acc": right, "index": extra_info["index"], "shown": shown}
