"""Samples: a card per prompt, the best response first, and the prompt at an earlier step."""

import json
import re

import numpy as np

from distflow_jax.batch import Prompt, Samples
from distflow_jax.images.data_uris import small_uri
from distflow_jax.images.record import image_of
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.report.page import report
from distflow_jax.report.read_run import read_run
from distflow_jax.report.sections.sample_cards import groups_of, sample_cards
from distflow_jax.runtime.run_files import evaluation_lines, sample_lines
from distflow_jax.stages.evaluate import Scored


def write(folder, name, records):
    (folder / "samples").mkdir(exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "samples" / f"{name}.jsonl").write_text(text)


def response(prompt, score, text, **more):
    return {"row": prompt, "prompt": f"prompt {prompt}", "response": text, "score": score, **more}


def cards(html):
    return re.findall(r"<article.*?</article>", html, re.DOTALL)


def test_a_card_per_prompt_with_its_responses_by_score(tmp_path):
    records = [
        response(1, 0.25, "middle", response_length=7, finished=True),
        response(2, 1.0, "other"),
        response(1, "NaN", "unscored"),
        response(1, 1.0, "best", response_length=9, finished=False, version=3),
        response(1, -2, "worst"),
    ]
    write(tmp_path, 4, records)
    first, second = cards(sample_cards(read_run(tmp_path)))
    places = [first.index(word) for word in ("best", "middle", "worst", "unscored")]
    assert places == sorted(places) and "other" in second
    assert "4 responses · mean score -0.25" in first
    for word in ("9 tokens", "cut by the limit", "7 tokens", "ended", "version 3", "vs mean +1.25"):
        assert word in first


def test_the_same_prompt_at_an_earlier_step(tmp_path):
    for step in range(1, 31):
        write(tmp_path, step, [response(step % 3, step / 10, f"at {step};")])
    run = read_run(tmp_path)
    (card,) = cards(sample_cards(run))[:1]
    assert "at 30;" in card and "at 27;" in card and "at 29;" not in card
    assert "the same prompt, step 27: mean score 2.7, now 3" in card
    assert "27" not in run.samples  # read for its prompt alone
    oldest = cards(sample_cards(run))[-1]
    assert "at 1;" in oldest and "the same prompt" not in oldest


def test_evaluations_are_compared_with_evaluations(tmp_path):
    for step, scores in ((0, [0, 0]), (5, [1, 0])):
        record = {"row": 1, "prompt": "p", "responses": ["a", "b"], "scores": scores}
        write(tmp_path, f"eval-{step}", [record | {"lengths": [3, 4], "finished": [True, False]}])
    write(tmp_path, 4, [response(1, 1.0, "training") | {"prompt": "p"}])
    html = sample_cards(read_run(tmp_path))
    assert "the same prompt, evaluation at step 0: mean score 0, now 0.5" in html
    assert html.count("the same prompt") == 1
    assert "3 tokens" in html and "cut by the limit" in html


def test_advantages_are_shown_where_a_run_recorded_them(tmp_path):
    records = [response(1, 1.0, "a", advantage=0.5), response(1, 0.0, "b", advantage=None)]
    (group,) = groups_of(records).values()
    assert group.answers[0].advantage == 0.5
    write(tmp_path, 1, records)
    (card,) = cards(sample_cards(read_run(tmp_path)))
    assert card.count("advantage 0.5") == 1 and card.count("vs mean -0.5") == 1
    assert "vs mean +0.5" not in card


def test_responses_can_be_sorted_by_the_numbers_that_they_have(tmp_path):
    write(tmp_path, 1, [response(1, 1.0, "a")])
    assert "by score" not in sample_cards(read_run(tmp_path))
    records = [response(1, 1.0, "a", advantage=0.5), response(1, "NaN", "b", finished=False)]
    write(tmp_path, 1, records)
    html = sample_cards(read_run(tmp_path))
    assert re.findall("<option value='[a-z]+'>(by .*?)<", html) == [
        *("by score", "by advantage", "by ending")
    ]
    assert re.findall("<li(.*?)>", html) == [
        " data-score='1.0' data-advantage='0.5'",
        " data-ending='0.0'",
    ]


def test_records_of_any_shape_make_cards(tmp_path):
    odd = [
        {},
        {"prompt": None},
        {"prompt": ["x"], "responses": "no list"},
        {"responses": [1, None, {}], "scores": [True]},
        {"response": 7, "score": [1], "response_length": "long", "finished": "yes"},
    ]
    write(tmp_path, 1, odd)
    html = sample_cards(read_run(tmp_path))
    assert len(cards(html)) == 2  # the records without prompt and row are of one prompt


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    outside, run = tmp_path / "outside.jsonl", tmp_path / "run"
    outside.write_text(json.dumps(response(1, 1.0, "secret")) + "\n")
    (run / "samples").mkdir(parents=True)
    (run / "samples" / "1.jsonl").symlink_to(outside)
    (run / "metrics.jsonl").symlink_to(outside)
    (run / "plan.txt").symlink_to(outside)
    (run / "events.jsonl").symlink_to("events.jsonl")  # a loop
    found = read_run(run)
    assert not found.samples and not found.rows and not found.plan_text and not found.events


def test_pictures_of_a_prompt_stand_once_in_its_card(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (300, 200, 3), np.uint8)
    good = [small_uri(pixels), small_uri(np.zeros((8, 8, 3), np.uint8))]
    assert good[0].startswith("data:image/jpeg;") and good[1].startswith("data:image/png;")
    assert max(map(len, good)) < 40_000
    bad = ["https://example.org/a.png", "data:image/svg+xml;base64,AAAA", f"{good[1]}' onload='x"]
    records = [
        response(1, 1.0, "a", images=good),
        response(1, 0.0, "b"),
        response(2, 1.0, "c", images=[*bad, 3]),
        response(3, 1.0, "d", images="x"),
    ]
    write(tmp_path, 1, records)
    text = report(tmp_path)
    first, second, third = cards(text)
    assert re.findall(r"<img src='([^']*)'", first) == good
    assert "<img" not in second + third and "example.org" not in text
    assert "; img-src data:" in text
    write(tmp_path, 1, records[1:])
    assert "img-src" not in report(tmp_path)


def test_records_have_the_pictures_of_each_prompt_once():
    image = image_of(np.zeros((8, 8, 3), np.uint8))
    prompts = [Prompt(0, 5, np.arange(3), "p", "d", "t", {}, images=(image,) * 6)] * 2
    prompts += [Prompt(1, 6, np.arange(3), "p", "d", "t", {})]
    uid = np.array([[0, 0], [0, 1], [1, 0]])
    tokens, masks = [np.arange(2)] * 3, [np.ones(2, bool)] * 3
    lines = sample_lines(Samples(prompts, uid, tokens, masks), Tokenizer.byte_level(300))
    made = [json.loads(line).get("images") for line in lines]
    assert made == [[small_uri(image.pixels)] * 4, None, None]
    scored = [Scored(p, ["a"], ["a"], [1.0], [1], [True], []) for p in prompts[1:]]
    made = [json.loads(line).get("images", []) for line in evaluation_lines(scored)]
    assert list(map(len, made)) == [4, 0]
