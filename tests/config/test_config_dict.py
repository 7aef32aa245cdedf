"""Dataclasses survive the way through a ConfigDict; a wrong key or value is named in one line."""

import dataclasses
import json
from typing import Any

import pytest
from support.paths import ROOT
from support.programs import finished

from distflow_jax.config.config_dict import from_config_dict, override, to_config_dict, to_json


@dataclasses.dataclass(frozen=True)
class Optimizer:
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    name: str = "adamw"
    clip: float | None = None
    nesterov: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=lambda: {"deep": {"a": 1}})

    def __post_init__(self):
        if self.lr <= 0:
            raise ValueError(f"lr must be positive, got {self.lr}")


@dataclasses.dataclass(frozen=True)
class Training:
    steps: int = 10
    optimizer: Optimizer = Optimizer()
    second: Optimizer | None = None


@dataclasses.dataclass(frozen=True)
class Config:
    training: Training = Training()
    files: tuple[str, ...] = ("a", "b")
    workers: int | None = None
    stop: int | str = 3
    roles: dict[str, Optimizer] = dataclasses.field(default_factory=lambda: {"ACTOR": Optimizer()})
    seed: int = 0


FULL = Config(
    Training(5, Optimizer(lr=2.0, clip=0.5), Optimizer(name="sgd")),
    files=(),
    workers=4,
    stop="never",
    roles={"CRITIC": Optimizer(nesterov=True)},
)


@pytest.mark.parametrize("config", [Config(), FULL])
def test_there_and_back_is_identity(config):
    edited = to_config_dict(config)
    assert edited.is_locked and edited.training.optimizer.is_locked
    assert from_config_dict(Config, edited) == config
    assert from_config_dict(Config, json.loads(to_json(edited))) == config
    assert to_json(to_config_dict(from_config_dict(Config, edited))) == to_json(edited)


def test_equal_configs_have_equal_json():
    edited = to_config_dict(Config())
    assert to_json(override(edited, ["seed=0", "training.optimizer.lr=1e-6"])) == to_json(edited)
    assert to_json(override(edited, ["seed=1"])) != to_json(edited)


def test_overrides_read_as_the_command_line_does():
    before = to_config_dict(Config())
    text = to_json(before)
    after = override(
        before,
        [
            "training.optimizer.lr=2",
            "training.optimizer.clip=0.5",
            "training.optimizer.betas=(0, 0.5)",
            "training.optimizer.nesterov=true",
            "training.optimizer.options.deep.a=7",
            "training.second={'lr': 3}",
            "files=x",
            "files=y",
            "workers=2",
            "stop=never",
            "roles.ACTOR.name=sgd",
        ],
    )
    assert to_json(before) == text
    config = from_config_dict(Config, after)
    assert config.training == Training(
        optimizer=Optimizer(2.0, (0.0, 0.5), clip=0.5, nesterov=True, options={"deep": {"a": 7}}),
        second=Optimizer(lr=3.0),
    )
    assert config.files == ("x", "y")
    assert (config.workers, config.stop) == (2, "never")
    assert config.roles == {"ACTOR": Optimizer(name="sgd")}
    assert isinstance(config.training.optimizer.lr, float)


@pytest.mark.parametrize(
    "assignment, message",
    [
        ("training.optimizr.lr=2", "optimizr.lr (did you mean config.training.optimizer.lr?)"),
        ("training.optimizer.lrr=2", "did you mean config.training.optimizer.lr?"),
        ("zzz=2", "unknown key config.zzz (config has: "),
        ("seed.x=2", "unknown key config.seed.x: config.seed is 0 and has no keys"),
        ("seed=1.5", "config.seed must be an integer, got '1.5'"),
        ("training.optimizer.lr=a: b", "config.training.optimizer.lr must be a number, got 'a: b'"),
        ("training.optimizer.nesterov=5", "must be true or false, got '5'"),
        ("workers=many", "config.workers must be an integer, got 'many'"),
        ("files=(1, ", "config.files must be a tuple, got '(1, '"),
        ("training.optimizer.options=5", "must be a dict such as \"{'a': 1}\", got '5'"),
        ("seed", "write overrides as key=value, got 'seed'"),
    ],
)
def test_a_wrong_override_is_named(assignment, message):
    with pytest.raises(ValueError) as caught:
        override(to_config_dict(Config()), ["seed=3", assignment])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "tree, message",
    [
        ({"sead": 1}, "unknown key config.sead (did you mean config.seed?)"),
        (
            {"training": {"optimizer": {"l_r": 1}}},
            "optimizer.l_r (did you mean config.training.optimizer.lr?)",
        ),
        ({"seed": 1.0}, "config.seed must be an integer, got 1.0"),
        ({"seed": True}, "config.seed must be an integer, got True"),
        ({"seed": None}, "config.seed must be an integer, got None"),
        ({"workers": "2"}, "config.workers must be an integer, got '2'"),
        ({"stop": 1.5}, "config.stop must be an integer or a string, got 1.5"),
        ({"files": "ab"}, "config.files must be a tuple, each item a string, got 'ab'"),
        ({"files": ["a", 1]}, "config.files[1] must be a string, got 1"),
        ({"training": {"optimizer": {"betas": [1.0]}}}, "betas must be a tuple of 2"),
        ({"training": {"optimizer": {"betas": [1, "x"]}}}, "betas[1] must be a number, got 'x'"),
        ({"training": {"optimizer": {"lr": True}}}, "lr must be a number, got True"),
        ({"training": {"optimizer": {"nesterov": 1}}}, "nesterov must be true or false, got 1"),
        ({"training": {"optimizer": {"options": 3}}}, "options must be a dict"),
        ({"training": {"optimizer": {"lr": 0}}}, "config.training.optimizer: lr must be positive"),
        ({"training": {"optimizer": 3}}, "config.training.optimizer must be a section with lr, "),
        ({"roles": {"ACTOR": {"lr": "x"}}}, "config.roles.ACTOR.lr must be a number, got 'x'"),
    ],
)
def test_a_wrong_value_is_named(tree, message):
    with pytest.raises(ValueError) as caught:
        from_config_dict(Config, tree)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_has_no_default_must_be_given():
    @dataclasses.dataclass(frozen=True)
    class Needs:
        size: int

    with pytest.raises(ValueError, match="model.size is missing: give it an integer"):
        from_config_dict(Needs, {}, "model")


def test_a_lock_refuses_a_new_key_and_a_wrong_type():
    config = to_config_dict(Config())
    with pytest.raises(AttributeError, match="seed"):
        config.sead = 1
    with pytest.raises(TypeError):
        config.training.optimizer.clip = "x"


# -- scripts ----------------------------------------------------------------------------------

SCRIPT = '''
"""Prints a number. Example: python script.py --config=my.py"""
from absl import flags
from ml_collections import config_flags
from distflow_jax.commands import command_line
from distflow_jax.config import config_dict
from distflow_jax.models.decoder_config import DecoderConfig

CONFIG = config_flags.DEFINE_config_file("config")
FAIL = flags.DEFINE_string("fail", "", "How to fail.")
flags.mark_flag_as_required("config")


def main(argv):
    config = config_dict.from_config_dict(DecoderConfig, CONFIG.value)
    if FAIL.value == "user":
        raise ValueError("batch 7 is not divisible by 2")
    if FAIL.value == "bug":
        int("x")
    if FAIL.value == "file":
        open("nowhere.jsonl")
    print(config.lora.alpha)
    return 75


if __name__ == "__main__":
    command_line.run_main(main)
'''

CONFIG = """
from distflow_jax.config.config_dict import to_config_dict
from distflow_jax.models.decoder_config import DecoderConfig, LoraConfig


def get_config(kind="good"):
    if kind == "bad":
        DecoderConfig(num_heads=0)
    return to_config_dict(DecoderConfig(lora=LoraConfig(4)))
"""


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        ("--config=my.py --config.lora.alpha=2", 75, "2.0\n"),
        ("--config=my.py --config.lora.alhpa=2", 2, "config.lora.alpha?)\n"),
        ("--config=my.py --config.num_heads=x", 2, "num_heads must be an integer, got 'x'\n"),
        ("--config=my.py --config.lora.alpha=-2", 2, "error: config.lora: lora.alpha must be"),
        ("--config=mine.py --config.num_heads=2", 2, "did you mean my.py?\n"),
        (
            "--config=my.py:bad",
            2,
            "'my.py:bad': model num_heads must be an integer from 1 to 21474",
        ),
        ("--fail=user", 2, "error: --config is missing: give --config=VALUE\n"),
        ("--config=my.py --fial=user", 2, "error: unknown flag --fial (did you mean --fail?)"),
        ("--config=my.py num_heads=3", 2, "error: unexpected argument 'num_heads=3'"),
        ("--config=my.py --fail=user", 2, "error: batch 7 is not divisible by 2\n"),
        ("--config=my.py --fail=file", 2, "nowhere.jsonl'\n"),
        ("--config=my.py --fail=bug", 1, "Traceback"),
        ("--config=my.py --fail=user --debug", 1, "Traceback"),
        ("--help", 0, "Example: python script.py"),
    ],
)
def test_a_script_says_what_is_wrong_in_one_line(tmp_path, arguments, code, message):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "my.py").write_text(CONFIG)
    env = {"PYTHONPATH": str(ROOT), "PATH": ""}
    done = finished("script.py", *arguments.split(), cwd=tmp_path, env=env, codes=(code,))
    assert message in done.stdout + done.stderr
    if code == 2:
        assert done.stderr.count("\n") == 1, done.stderr
