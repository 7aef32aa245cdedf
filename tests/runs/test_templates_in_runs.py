"""Runs whose model has a chat template with a date, with marks, with variables, or with tools.

Nightly: marks around the answer change nothing of what is learned.
"""

import dataclasses
import json

import pytest
from support.chat_templates import TRAITS, write_tokenizer
from support.model_files import hf_settings
from support.run_folders import json_lines
from support.tiny_config import tiny_config
from support.tiny_model import TINY

from distflow_jax import run
from distflow_jax.config.config_dict import config_table
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.plan_run import open_configured, plan_run, prepare
from distflow_jax.runtime.run_files import recorded_date
from distflow_jax.stream.links.shared_tables import shared_tables

SAID = [
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "It is 5."},
]


@pytest.fixture
def config_of(tmp_path):
    """A config with a random model whose template has a trait."""

    def of(trait, *assignments):
        folder = write_tokenizer(tmp_path / trait[:20], TRAITS.get(trait, trait))
        (folder / "config.json").write_text(json.dumps(hf_settings(TINY)))
        rows = [[SAID[0], SAID[1] | {"content": f"It is {'1' * n}."}] for n in range(9)]
        lines = "".join(json.dumps({"messages": row}) + "\n" for row in rows)
        (tmp_path / "rows.jsonl").write_text(lines)
        chosen = [f"model.source=random:{folder}", "eval.dataset=", *assignments]
        return tiny_config(*chosen)

    return of


SFT = ("dag=sft", "data.prompts_per_step=8", "training.steps=2", "training.row_tokens=256")


@pytest.mark.slow
def test_marks_around_the_answer_learn_what_the_answer_learns(config_of, tmp_path):
    """A conversation of one turn has the same tokens and loss either way, to the bit."""
    metrics = []
    for train_on in ("answer", "generation"):
        rows = f"data.train={tmp_path / 'rows.jsonl'}"
        config = config_of("generation_trimmed", *SFT, rows, f"data.train_on={train_on}")
        assert run.train_here(config, tmp_path / train_on) == 0
        metrics.append(json_lines(tmp_path / train_on / "metrics.jsonl"))
    for one, other in zip(*metrics, strict=True):
        same = {k for k in one if not k.startswith(("time", "memory", "perf", "phase"))}
        losses = {k: one[k] for k in sorted(same) if "loss" in k or "grad" in k or "tokens" in k}
        assert losses and losses == {k: other[k] for k in losses}


def test_generation_is_for_demonstrations(config_of):
    with pytest.raises(ValueError, match="data.train_on=generation is for demonstrations, but dag"):
        prepare(config_of("generation", "data.train_on=generation"))


def test_the_date_of_a_run_is_that_of_its_first_start(config_of, tmp_path):
    config = config_of("date", "data.prompts_per_step=8")
    assert recorded_date(tmp_path) == ""
    first = prepare(config)
    first.rewards.close()
    assert len(first.config.data.date) == len("2026-02-03")
    again = prepare(config, date="2026-02-03")
    again.rewards.close()
    assert again.config.data.date == again.source.tokenizer.date == "2026-02-03"
    assert "Today: 03 Feb 2026" in again.loader.prompt(0).text
    chosen = config_of("date", "data.prompts_per_step=8", "data.date=2025-12-31")
    chosen = prepare(chosen, date="2026-02-03")
    chosen.rewards.close()
    assert "Today: 31 Dec 2025" in chosen.loader.prompt(0).text
    # a template without one has none
    plain = prepare(config_of("plain", "data.prompts_per_step=8"), date="2026-02-03")
    plain.rewards.close()
    assert plain.config.data.date == ""
    # as config.json has it
    table = json.dumps({"data": dataclasses.asdict(again.config.data)})
    (tmp_path / "config.json").write_text(table)
    assert recorded_date(tmp_path) == "2026-02-03"
    (tmp_path / "config.json").write_text('{"data": []}')
    assert recorded_date(tmp_path) == ""


def test_a_worker_agrees_whatever_its_day_is(config_of):
    config = config_of("date")
    trainers = dataclasses.replace(config, data=dataclasses.replace(config.data, date="2026-02-03"))
    worker, trainer = (
        shared_tables(config_table(c), {}, open_configured(c).tokenizer) for c in (config, trainers)
    )
    assert worker == trainer


def test_prompts_have_the_tools_of_the_environment(config_of):
    tools = (
        "rollout.environment=tools",
        "rollout.environment_kwargs={'tools': ('calculator', 'python')}",
    )
    for trait, found in (("hermes", 2), ("llama3_json", 2), ("plain", 0)):
        text = open_configured(config_of(trait, *tools)).tokenizer.render(SAID[:1])
        assert sum(f'"name": "{name}"' in text for name in ("calculator", "python")) == found
    other = "data.template_kwargs={'tools': [{'type': 'function'}]}"  # has precedence
    chosen = open_configured(config_of("hermes", *tools, other)).tokenizer
    assert chosen.variables == {"tools": [{"type": "function"}]}
    with pytest.raises(ValueError, match="unknown tool 'pyton'; did you mean 'python'"):
        open_configured(config_of("hermes", tools[0], tools[1].replace("python", "pyton")))


def test_variables_of_all_rows(config_of):
    choice = "data.template_kwargs={'enable_thinking': False}"
    found = prepare(config_of("thinking_switch", choice))
    found.rewards.close()
    assert found.loader.prompt(0).text.endswith("<think>\n\n</think>\n\n")
    with pytest.raises(
        ValueError, match="row 1: the chat template does not read 'enable_thinking'"
    ):
        prepare(config_of("plain", choice))
    with pytest.raises(ValueError, match="the model has no chat template"):
        plan_run(config_of("", choice), Machine.current())


def test_responses_that_would_never_end_are_found_before_step_1(config_of):
    text = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<s>' }}"
    text += "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    with pytest.raises(ValueError, match="ends an answer with '<s>', which ends no response"):
        prepare(config_of(text))
