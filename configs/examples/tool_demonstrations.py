"""Writes demonstrations of calls of a tool for configs/tools_smollm2.py: a call, and an answer.

python configs/examples/tool_demonstrations.py --out=calls.jsonl
"""

import argparse
import json

from distflow_jax.data.generated_tasks import Arithmetic

COUNT = 48  # problems, of the training split

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="the file, JSON lines")
    task = Arithmetic(operands=3, operators="+-*", digits="2-3", template="What is {problem}?")
    with open(parser.parse_args().out, "w", encoding="utf-8") as file:
        for example in map(task.__getitem__, range(COUNT)):
            call = {"role": "assistant", "content": f"<tool>{example.extra_info['problem']}</tool>"}
            result = {"role": "user", "content": f"<result>{example.ground_truth}</result>"}
            answer = {"role": "assistant", "content": f"#### {example.ground_truth}"}
            asked = list(example.prompt)
            for messages in ([*asked, call], [*asked, call, result, answer]):
                file.write(json.dumps({"messages": messages}) + "\n")
