"""The loader's order is one for any number of processes, and goes on where it was."""

import itertools
import json

import numpy as np
import pytest

from distflow_jax.config.data_config import DataConfig
from distflow_jax.data.dataset import open_dataset
from distflow_jax.data.loader import Loader, SamplerShare
from distflow_jax.data.step_columns import loader_columns
from distflow_jax.data.unpaired_rows import UnpairedRows


class ByteTokenizer:
    """One token per byte of the last message."""

    origin = "bytes"

    def render(self, prompt):
        return prompt if isinstance(prompt, str) else prompt[-1]["content"]

    def count(self, text, enough):
        return len(text.encode())

    def encode_prompt(self, prompt):
        text = self.render(prompt)
        return text, np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_answer(self, prompt, answer):
        return self.encode_prompt(f"{answer}.")[1]


def data_of(tmp_path, rows=24, length=lambda i: 1):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}" * length(i)}) + "\n" for i in range(rows)))
    return open_dataset(str(path))


def loader_of(dataset, *, seed=0, sampler=0, samplers=1, **config):
    config = DataConfig(**{"prompts_per_step": 4, "max_prompt_length": 64} | config)
    share = SamplerShare(sampler, samplers)
    return Loader(dataset, ByteTokenizer(), config, seed=seed, share=share)


def rows_of(loader, steps):
    return [[p.row for p in prompts] for prompts in itertools.islice(loader, steps)]


def flat(steps):
    return [row for step in steps for row in step]


def test_a_prompt_has_the_messages_of_its_row_for_reward_functions(tmp_path):
    path, asked = tmp_path / "data.jsonl", [{"role": "user", "content": "6 * 7?"}]
    path.write_text(json.dumps({"prompt": asked}) + '\n{"prompt": "6 * 7 ="}\n')
    loader = loader_of(open_dataset(str(path)), prompts_per_step=2, shuffle=False)
    assert [prompt.messages for prompt in next(loader)] == [asked, None]


def test_every_prompt_once_per_epoch_in_a_new_order(tmp_path):
    steps = rows_of(loader_of(data_of(tmp_path)), 18)
    epochs = [flat(steps[i : i + 6]) for i in (0, 6, 12)]
    assert all(sorted(epoch) == list(range(24)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    assert list(range(24)) not in epochs


def test_epochs_need_not_end_with_a_step(tmp_path):
    rows = flat(rows_of(loader_of(data_of(tmp_path, rows=10)), 5))
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))


def test_the_seed_decides_the_order(tmp_path):
    dataset = data_of(tmp_path)
    orders = [flat(rows_of(loader_of(dataset, seed=seed), 12)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    # nor is one seed's second epoch the next one's first
    assert orders[0][24:] != orders[2][:24]


def test_without_shuffle_the_order_is_the_files(tmp_path):
    assert flat(rows_of(loader_of(data_of(tmp_path), shuffle=False), 12)) == [*range(24)] * 2


@pytest.mark.parametrize("process_count", [2, 4])
def test_the_global_order_does_not_know_the_number_of_processes(tmp_path, process_count):
    dataset = data_of(tmp_path)
    alone = loader_of(dataset, prompts_per_step=8)
    shares = [
        loader_of(dataset, prompts_per_step=8, sampler=i, samplers=process_count)
        for i in range(process_count)
    ]
    for _ in range(5):
        whole = next(alone)
        parts = [next(share) for share in shares]
        assert {len(part) for part in parts} == {8 // process_count}
        together = sorted((p for part in parts for p in part), key=lambda p: p.counter)
        assert [(p.counter, p.row) for p in together] == [(p.counter, p.row) for p in whole]


def test_prompts_carry_their_counter_and_row(tmp_path):
    loader = loader_of(data_of(tmp_path))
    loader.position = 40
    prompts = next(loader)
    assert [p.counter for p in prompts] == [40, 41, 42, 43]
    for prompt in prompts:
        assert prompt.text == f"{prompt.row}" == bytes(prompt.tokens.tolist()).decode()
        assert prompt.tokens.dtype == np.int32
        assert prompt.data_source == "data"
    assert loader.position == 44
    assert loader.epoch(36) == 1.5


@pytest.mark.parametrize("step", [0, 1, 5, 6, 11])
def test_resumed_at_any_step_equals_uninterrupted(tmp_path, step):
    dataset = data_of(tmp_path)
    whole = rows_of(loader_of(dataset, seed=5), 12)
    first = loader_of(dataset, seed=5)
    rows_of(first, min(step + 1, 12))  # one step further was prefetched
    state = json.loads(json.dumps(first.state(step * 4)))
    resumed = loader_of(data_of(tmp_path), seed=5)
    resumed.restore(state)
    assert rows_of(resumed, 12 - step) == whole[step:]


def test_restore_refuses_other_data(tmp_path):
    state = loader_of(data_of(tmp_path)).state(8)
    with pytest.raises(ValueError, match="trained on other data: fingerprint was .* and is"):
        loader_of(data_of(tmp_path, rows=25)).restore(state)
    with pytest.raises(ValueError, match="seed was 0 and is 1"):
        loader_of(data_of(tmp_path), seed=1).restore(state)
    with pytest.raises(ValueError, match="shuffle was True and is False"):
        loader_of(data_of(tmp_path), shuffle=False).restore(state)


def test_overlong_prompts(tmp_path):
    dataset = data_of(tmp_path, rows=10, length=lambda i: 9 if i in (3, 7) else 1)
    with pytest.raises(ValueError, match=r"data.jsonl, row 4: .* 9 tokens, more .* 5 \(2 of 10"):
        loader_of(dataset, max_prompt_length=5)

    dropping = loader_of(dataset, max_prompt_length=5, overlong="drop")
    assert dropping.dropped == 2
    assert sorted(flat(rows_of(dropping, 2))) == [0, 1, 2, 4, 5, 6, 8, 9]

    cutting = loader_of(dataset, max_prompt_length=5, overlong="truncate_left", shuffle=False)
    prompt = next(cutting)[3]
    assert bytes(prompt.tokens.tolist()).decode() == "3" * 5
    assert cutting.dropped == 0

    with pytest.raises(ValueError, match="all 10 prompts have more tokens .* the shortest 2"):
        loader_of(data_of(tmp_path, 10, lambda i: 2), max_prompt_length=1, overlong="drop")


def test_every_process_drops_the_same_rows(tmp_path):
    dataset = data_of(tmp_path, rows=10, length=lambda i: 9 if i < 4 else 1)
    loaders = [
        loader_of(
            dataset,
            max_prompt_length=5,
            overlong="drop",
            epochs=2,
            sampler=i,
            samplers=2,
        )
        for i in range(2)
    ]
    steps = [list(loader) for loader in loaders]
    assert len(steps[0]) == len(steps[1]) == loaders[0].num_steps == 3


def test_finite_epochs_end_and_leave_out_what_fills_no_step(tmp_path):
    dataset = data_of(tmp_path, rows=10)
    loader = loader_of(dataset, epochs=1)
    assert len(list(loader)) == loader.num_steps == 2
    assert loader_of(dataset).num_steps is None
    with pytest.raises(ValueError, match="10 prompts in 1 epochs, fewer .* 16"):
        loader_of(dataset, epochs=1, prompts_per_step=16)


def test_prompts_are_dealt_by_the_lengths_seen_before(tmp_path):
    """Row 3 answers at length: its sampler gets fewer other prompts, whoever reads ahead."""
    dataset = data_of(tmp_path, rows=6)
    shares = [
        loader_of(dataset, prompts_per_step=6, sampler=i, samplers=2, shuffle=False)
        for i in range(2)
    ]
    counter = np.repeat(np.arange(6), 2)
    for step in (1, 2, 3):
        dealt = [[p.row for p in next(share)] for share in shares]
        assert sorted(flat(dealt)) == list(range(6))
        if step < 3:  # what step 1 showed is known from step 3 on
            assert dealt == [[0, 2, 4], [1, 3, 5]]
        else:
            assert dealt == [[3], [0, 1, 2, 4, 5]]
        for share in shares:
            share.observe(step, counter + 6 * (step - 1), np.where(counter % 6 == 3, 50, 10))


def test_prompts_know_how_far_their_last_scores_lay_apart(tmp_path):
    dataset = data_of(tmp_path, rows=4)
    loader = loader_of(dataset, shuffle=False)
    rows_of(loader, 1)
    counter = np.array([0, 0, 1, 1, 2, 2, 3, 3])
    loader.observe_scores(1, counter, np.array([0.0, 1.0, 0.5, 0.5, 0.25, 0.5, np.nan, np.nan]))
    rows_of(loader, 1)  # estimates staleness by a step
    spread = {p.row: p.expected_spread for p in next(loader)}
    known = [1.0, 0.0, 0.25]
    assert [spread[row] for row in range(3)] == pytest.approx(known)
    assert spread[3] == pytest.approx(np.mean(known))  # never scored
    resumed = loader_of(dataset, shuffle=False)
    state = json.loads(json.dumps(loader.state(12)))
    resumed.restore(state)
    assert {p.row: p.expected_spread for p in next(resumed)} == pytest.approx(spread)
    del state["spreads"]  # of an older version
    resumed.restore(state)


@pytest.mark.parametrize("ahead", [False, True])
def test_lengths_survive_a_checkpoint(tmp_path, ahead):
    """The deal of step 4 is the same for a run that read ahead, did not, or was resumed."""
    dataset = data_of(tmp_path, rows=8)
    rng = np.random.default_rng(0)

    def advance(loader, steps, first=1):
        for step in range(first, first + steps):
            next(loader)
            counters = np.arange(8) + 8 * (step - 1)
            loader.observe(step, counters, rng.integers(1, 100, 8))

    whole = loader_of(dataset, prompts_per_step=8, samplers=2)
    advance(whole, 3)
    if ahead:
        rng = np.random.default_rng(0)
        reader = loader_of(dataset, prompts_per_step=8, samplers=2)
        for step in range(1, 4):
            if step == 1:
                next(reader)
            prompts = next(reader)  # of step + 1, before the lengths of this step are known
            reader.observe(step, np.arange(8) + 8 * (step - 1), rng.integers(1, 100, 8))
        assert prompts == next(whole)
        return
    resumed = loader_of(dataset, prompts_per_step=8, samplers=2)
    resumed.restore(json.loads(json.dumps(whole.state(24))))
    counters = [p.counter for p in next(whole)]
    assert [p.counter for p in next(resumed)] == counters
    assert counters not in ([24, 26, 28, 30], [25, 27, 29, 31])  # dealt by expected length
    assert counters == sorted(counters)  # as rows are assigned


def pairs_of(tmp_path, rows=12, **columns):
    path = tmp_path / "pairs.jsonl"
    lines = [
        {"prompt": f"p{i}", "chosen": "yes" * (1 + i % 3), "rejected": f"no{i}"} | columns
        for i in range(rows)
    ]
    kept = [{k: v for k, v in line.items() if v is not None} for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    return open_dataset(str(path))


def answers_of(dataset, answers, **config):
    config = DataConfig(
        **{"prompts_per_step": 4, "max_prompt_length": 8, "shuffle": False} | config
    )
    return Loader(dataset, ByteTokenizer(), config, seed=0, answers=answers, max_answer=8)


def test_answers_come_with_their_prompts_the_better_one_first(tmp_path):
    prompts = next(answers_of(pairs_of(tmp_path), 2, overlong="truncate_left"))
    texts = [[bytes(a.astype(np.uint8)).decode() for a in p.answers] for p in prompts]
    assert texts == [["yes.", "no0."], ["yesyes.", "no1."], ["yesyesye", "no2."], ["yes.", "no3."]]
    single = next(answers_of(pairs_of(tmp_path), 1, overlong="drop"))
    assert [len(p.answers) for p in single] == [1] * 4
    assert all(not p.answers for p in next(answers_of(pairs_of(tmp_path), 0)))
    columns = loader_columns(prompts, 5)
    assert [p.counter for p in columns["prompt"]] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(columns["response"]) == len(columns["finished"]) == 8
    assert len(loader_columns(next(answers_of(pairs_of(tmp_path), 0)), 5)["prompt"]) == 20


def test_answers_beyond_the_limit_are_told_or_dropped(tmp_path):
    with pytest.raises(ValueError, match="row 3: the answer has 10 tokens, more than rollout.max_"):
        answers_of(pairs_of(tmp_path), 2)
    loader = answers_of(pairs_of(tmp_path), 2, overlong="drop")
    assert loader.dropped == 4
    assert all(row % 3 != 2 for row in loader.rows)


def test_rows_without_the_answers_that_are_wanted_are_named(tmp_path):
    with pytest.raises(ValueError, match="row 1: has no 'rejected' answer, which this dag trains"):
        answers_of(pairs_of(tmp_path, rejected=None), 2, overlong="drop")


def unpaired(tmp_path, rows, **columns):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return UnpairedRows(open_dataset(str(path), **columns))


def labelled(count, **columns):
    row = [
        {"prompt": f"p{i}", "completion": f"c{i}", "label": i % 3 == 0} | columns
        for i in range(count)
    ]
    return [{k: v for k, v in one.items() if v is not None} for one in row]


def texts_of(prompt):
    return [bytes(a.astype(np.uint8)).decode() for a in prompt.answers]


@pytest.mark.parametrize("samplers", [1, 2])
def test_unpaired_rows_have_their_answer_and_that_of_another_row(tmp_path, samplers):
    """The next row of the step, in a circle, whichever process reads it."""
    dataset = unpaired(tmp_path, labelled(6))
    config = DataConfig(prompts_per_step=4, shuffle=False)
    found = []
    for index in range(samplers):
        share = SamplerShare(index, samplers)
        loader = Loader(
            dataset, ByteTokenizer(), config, seed=0, share=share, answers=1, max_answer=8
        )
        found += next(loader) + next(loader)
    found.sort(key=lambda prompt: prompt.counter)
    rows = [0, 1, 2, 3, 4, 5, 0, 1]
    others = [1, 2, 3, 0, 5, 0, 1, 4]
    assert [texts_of(p) for p in found] == [
        [f"c{i}.", f"c{j}."] for i, j in zip(rows, others, strict=True)
    ]
    assert [p.label for p in found] == [row % 3 == 0 for row in rows]
    columns = loader_columns(found, 8)
    assert columns["uid"][:4].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    np.testing.assert_array_equal(columns["label"], np.repeat([p.label for p in found], 2))


def test_the_other_answer_is_to_another_prompt_where_a_step_has_one(tmp_path):
    rows = [{"prompt": p, "completion": c, "label": True} for p, c in ("aw", "ax", "ay", "bz")]
    for count, expected in ((4, "z z z w"), (2, "x w z y")):
        loader = Loader(
            unpaired(tmp_path, rows),
            ByteTokenizer(),
            DataConfig(prompts_per_step=count, shuffle=False),
            seed=0,
            answers=1,
            max_answer=8,
        )
        found = [prompt for _ in range(4 // count) for prompt in next(loader)]
        assert " ".join(texts_of(prompt)[1][0] for prompt in found) == expected


def test_pairs_become_unpaired_rows_the_chosen_ones_first(tmp_path):
    pairs = pairs_of(tmp_path, rows=3)
    dataset = UnpairedRows(pairs)
    found = list(dataset)
    assert [(x.prompt, x.chosen, x.label) for x in found] == [
        *((f"p{i}", "yes" * (1 + i), True) for i in range(3)),
        *((f"p{i}", f"no{i}", False) for i in range(3)),
    ]
    assert all(x.rejected is None for x in found)
    for first, end in ((0, 6), (1, 2), (2, 5), (4, 6), (3, 3)):
        assert list(dataset.examples(first, end)) == found[first:end]
    assert dataset.place(4).endswith("row 2")
    assert dataset.fingerprint != pairs.fingerprint


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (labelled(3, label=None), r"row 1: has no column 'label', true for a desirable"),
        (labelled(3, label=None, labl=True), r"data.columns=\{'label': 'labl'\} reads 'labl'"),
        (labelled(3, label=1), "row 1, column 'label': expected true .desirable. or false, got 1"),
        (labelled(3, label="good"), "got 'good': write a boolean"),
        (labelled(3, completion=None), "row 1: has no 'chosen' answer, which this dag trains on"),
        (labelled(1), "has one row, and answers are compared with those of other rows: give at"),
        (
            [*labelled(2), {"prompt": "p", "chosen": "a", "rejected": "b"}],
            "row 3: the first row has a single answer, and this one has not",
        ),
        (
            [{"prompt": "p", "chosen": "a", "rejected": "b"}, *labelled(1)],
            "row 2: the first row has a pair, and this one has not",
        ),
    ],
)
def test_unpaired_rows_that_cannot_be_read(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        answers_of(unpaired(tmp_path, rows), 1)


def test_a_label_of_another_name(tmp_path):
    for liked in (False, "false", "False"):  # as a CSV file has it
        rows = labelled(2, label=None, liked=liked)
        assert unpaired(tmp_path, rows, columns={"label": "liked"})[1].label is False
