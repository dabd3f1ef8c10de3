"""Settings are declared once, in groups, and say what they mean."""

import ast
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

import rfdlc
from rfdlc.errors import InputError
from rfdlc.training.config import TrainConfig
from rfdlc.training.settings import GROUPS, SETTINGS, Setting, settings_where

SOURCE = Path(rfdlc.__file__).parent


def test_every_setting_is_in_one_group():
    in_groups = [name for settings in GROUPS.values() for name in settings.model_fields]
    assert in_groups == list(TrainConfig.model_fields) == list(SETTINGS)
    assert len(in_groups) == len(set(in_groups))
    assert all(settings.__doc__ for settings in GROUPS.values())


def test_a_group_is_read_from_a_config():
    config = TrainConfig(epochs=20, head="linear")
    assert config.in_group("schedule")["epochs"] == 20
    assert config.in_group("network")["head"] == "linear"
    assert "head" not in config.in_group("schedule")
    with pytest.raises(InputError, match="group of settings 'optimizer' is unknown"):
        config.in_group("optimizer")


@pytest.mark.parametrize("name", SETTINGS)
def test_the_default_of_a_setting_is_one_of_its_choices(name):
    choices = list(chain(*SETTINGS[name].choices))
    default = TrainConfig.model_fields[name].default
    values = default if isinstance(default, tuple) else [default]
    assert not choices or set(values) <= set(choices)


@pytest.mark.parametrize("name", [n for n in SETTINGS if SETTINGS[n].choices])
def test_what_is_not_a_choice_is_refused(name):
    with pytest.raises(InputError, match=f"setting {name} 'nonsense' is unknown"):
        TrainConfig(**{name: "nonsense"})


@pytest.mark.parametrize("name", [n for n in SETTINGS if SETTINGS[n].short])
def test_short_names_are_answered_with_the_setting(name):
    short = SETTINGS[name].short
    assert short not in SETTINGS
    with pytest.raises(InputError, match=f"{short!r} is unknown.*mean {name!r}"):
        TrainConfig(**{short: 1})


def test_meanings_do_not_contradict_each_other():
    """What no model depends on teaches a network nothing, and no fork depends on it."""
    for name, setting in SETTINGS.items():
        if setting.may_change_on_resume or setting.only_when_written:
            assert setting.in_stacks in ("shared", "unlearned"), name
            assert not setting.fixed_in_forks, name
            assert not setting.starts_network, name
        if setting.starts_network:
            assert setting.in_stacks == "shared", name
        if setting.own_per_process:
            assert setting.may_change_on_resume, name


def test_a_new_setting_is_in_every_answer_that_it_asks_for(monkeypatch):
    monkeypatch.setitem(SETTINGS, "new", Setting("a new one", in_stacks="deferred"))
    assert "new" in settings_where(lambda setting: setting.in_stacks != "shared")
    assert "new" not in settings_where(lambda setting: setting.fixed_in_forks)


def constants(tree: ast.Module) -> dict[str, set[str]]:
    """The texts in tuples, lists and sets of a module's constants, by their names."""
    texts = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and not isinstance(
            statement.value, ast.Dict
        ):
            texts[ast.unparse(statement.targets[0])] = {
                node.value
                for node in ast.walk(statement.value)
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            }
    return texts


def test_no_module_keeps_a_list_of_settings():
    kept = [
        f"{file.relative_to(SOURCE)}: {name}"
        for file in SOURCE.rglob("*.py")
        for name, texts in constants(ast.parse(file.read_text("utf-8"))).items()
        if len(texts) > 1 and texts <= set(SETTINGS)
    ]
    assert kept == []


def test_a_list_of_settings_would_be_found():
    lists = 'A = ("epochs", "head")\nB = frozenset({"epochs"}) | {"seed"}\nC = {"x": 1}'
    assert constants(ast.parse(lists)) == {
        "A": {"epochs", "head"},
        "B": {"epochs", "seed"},
    }


@pytest.mark.parametrize(
    ("setting", "values", "jobs"),
    [
        ("interpolation", ["bilinear", "bicubic"], 2),
        ("image_size", [32, 64], 2),
        ("learning_rate", [0.1, 0.2], 1),
    ],
)
def test_runs_of_a_sweep_that_start_from_other_networks_are_jobs_of_their_own(
    tmp_path, setting, values, jobs
):
    np.savez(tmp_path / "data.npz", x=np.zeros((4, 2)), y=[0, 0, 1, 1])
    file = tmp_path / "grid.toml"
    file.write_text(f'data = "{tmp_path}/data.npz"\n[grid]\n{setting} = {values}\n')
    with pytest.raises(InputError, match=f"expected 0 to {jobs - 1}$"):
        rfdlc.sweep(file, tmp_path / "out", runs_per_job=9, job=9)
