"""Names that other frameworks have for our keys lead to our keys, in one line."""

import tomllib

import pytest
from absl import flags

from distflow_jax.commands import command_line
from distflow_jax.config import unknown_keys
from distflow_jax.config.config_dict import from_config_dict, override, to_config_dict
from distflow_jax.config.key_reference import keys
from distflow_jax.config.run_config import Config

FRAMEWORKS = {"trl", "verl", "openrlhf", "prime_rl"}


def refusal(assignment):
    with pytest.raises(ValueError) as caught:
        override(to_config_dict(Config()), [assignment])
    (line,) = str(caught.value).splitlines()
    return line


def test_the_table_names_keys_that_exist_and_none_of_ours():
    known, found = set(keys()), unknown_keys.other_names()
    assert not known & set(found)
    assert {key for other in found.values() for key in other.keys} <= known
    assert not [name for name, other in found.items() if not (other.keys or other.note)]
    assert not [name for name in found if "-" in name or name.startswith("config.")]


def test_each_name_of_the_table_leads_to_its_keys():
    known = list(keys())
    for name, other in unknown_keys.other_names().items():
        hint = unknown_keys.key_hint(name, known)
        assert not other.keys or any(f"config.{key}" in hint for key in other.keys), name
        assert other.note in hint, name


def test_the_table_has_every_framework_and_is_read_when_a_key_is_unknown():
    text = unknown_keys.importlib.resources.files("distflow_jax.config") / "other_names.toml"
    assert set(tomllib.loads(text.read_text())) == FRAMEWORKS
    unknown_keys.other_names.cache_clear()
    override(to_config_dict(Config()), ["training.steps=3"])
    assert unknown_keys.other_names.cache_info().misses == 0


@pytest.mark.parametrize(
    "given, meant",
    [
        ("learning_rate=1e-6", "(did you mean config.training.optimizer.lr?)"),
        ("training.learning_rate=1e-6", "(did you mean config.training.optimizer.lr?)"),
        ("num_generations=8", "(did you mean config.rollout.num_samples?)"),
        ("num-generations=8", "(did you mean config.rollout.num_samples?)"),
        ("num_generation=8", "(did you mean config.rollout.num_samples?)"),
        ("actor_rollout_ref.rollout.n=8", "(did you mean config.rollout.num_samples?)"),
        ("rollout.n=8", "(did you mean config.rollout.num_samples?)"),
        ("data.train_files=x", "(did you mean config.data.train?)"),
        ("train_files=x", "(did you mean config.data.train?)"),
        ("kl_coef=0.1", "(did you mean config.algorithm.kl_coef?)"),
        ("training.beta=0.1", "config.algorithm.kl_coef or config.preference.beta?)"),
        ("lr=1", "config.training.optimizer.lr or config.critic.optimizer.lr?)"),
        ("training.warmup_steps=9", "(did you mean config.training.optimizer.warmup_steps"),
        ("per_device_train_batch_size=1", "prompts_per_step? it counts prompts, over all devices)"),
        ("gradient_accumulation_steps=2", "config.training.micro_batch_rows or config.training.mi"),
        ("trainer.nnodes=2", "(a run takes the devices of its processes: distflow launch)"),
        ("output_dir=runs/x", "(the run's folder is the flag --workdir)"),
        ("max_async_level=2", "(did you mean config.stream.max_staleness?)"),
        ("reward.name=x", "(config.reward has: conversational, function"),
        ("flow.max_lag=2", "config.flow.max_lag was renamed to config.stream.max_staleness"),
    ],
)
def test_a_name_of_another_framework_leads_to_ours(given, meant):
    line = refusal(given)
    name = given.partition("=")[0]
    assert line.startswith(("unknown key config." + name, f"config.{name} ")) and meant in line


def test_a_config_file_with_such_a_name_is_explained_too():
    with pytest.raises(ValueError, match="config.rollout.n .did you mean config.rollout.num_sam"):
        from_config_dict(Config, {"rollout": {"n": 8}})


@pytest.mark.parametrize(
    "flag, meant",
    [
        ("learning_rate", "(did you mean --config.training.optimizer.lr?)"),
        ("confgi", "(did you mean --config?)"),
        ("zzz", "(keys of the config are --config.KEY=VALUE)"),
    ],
)
def test_a_flag_that_is_a_key_is_explained(flag, meant):
    values = flags.FlagValues()
    flags.DEFINE_string("config", None, "", flag_values=values)
    assert command_line._unknown_flag(flag, values) == f"unknown flag --{flag} {meant}"
