"""TrainConfig: the settings of a training. Defaults, then the method's, then a
preset's, then the user's.
"""

import json
import os
import tomllib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from itertools import chain
from typing import Any, get_origin

from pydantic import ValidationError, field_validator, model_validator

from rfdlc.data.load import all_options
from rfdlc.data.readers.image_lists import plain_name
from rfdlc.errors import InputError, choose, expect
from rfdlc.imports import choose_registered
from rfdlc.training.settings import (
    GROUPS,
    SETTINGS,
    TABULAR,
    AugmentationSettings,
    CalibrationSettings,
    EnsembleSettings,
    LossSettings,
    NetworkSettings,
    OptimiserSettings,
    RunSettings,
    ScheduleSettings,
)

GENERAL = (
    "images",
    "features",
    "table",
    "finetune",
)  # presets by kind of data, not by name
UNITS = {"s": 1, "m": 60, "h": 3600}  # of durations, in seconds
SAFETY = 0.9  # of a budget: evaluation, calibration and files take some of it


# Fields of the last base come first: these are in the order of `GROUPS`.
class TrainConfig(
    RunSettings,
    CalibrationSettings,
    AugmentationSettings,
    ScheduleSettings,
    OptimiserSettings,
    EnsembleSettings,
    LossSettings,
    NetworkSettings,
):
    """The settings of a training, immutable and validated; `TrainConfig.describe()`
    lists them.

    Parameters
    ----------
    **values
        Settings by name, as text or as values; others have their defaults. What is not
        possible raises an InputError.

    Examples
    --------
    >>> TrainConfig(epochs="20", particles=3).replace(prior_tau="0,1,2").prior_tau
    (0.0, 1.0, 2.0)
    """

    def __init__(self, **values: Any) -> None:
        TrainConfig.check_names(values)
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors()[0]
            if first["type"] == "value_error":  # ours
                raise InputError(str(first["ctx"]["error"])) from None
            problem = f"setting {first['loc'][0]}={first['input']!r} is not possible"
            raise InputError(
                f"{problem}: {first['msg'][0].lower()}{first['msg'][1:]}"
            ) from None

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: Any, info: Any) -> Any:
        """Paths, numbers and arrays of numpy, and comma-separated text as plain
        values.
        """
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        value = value.tolist() if hasattr(value, "tolist") else value
        if get_origin(cls.model_fields[info.field_name].annotation) is not tuple:
            return value
        if isinstance(value, str):
            return [word for word in value.replace(";", ",").split(",") if word.strip()]
        return value if isinstance(value, Iterable) else [value]

    @field_validator("pretrained", mode="before")
    @classmethod
    def _source(cls, value: Any) -> Any:
        return {"true": "hub", "false": "none"}.get(str(value).lower(), value)

    @field_validator("tune", mode="before")
    @classmethod
    def _trials(cls, value: Any) -> str:
        text = {"true": "auto", "false": "off", "0": "off"}.get(
            str(value).lower(), str(value).lower()
        )
        many = text.isdecimal() and int(text) > 1
        wrong = (
            f"setting tune={value!r} is not possible: expected auto, off, or a number"
            " of trials from 2"
        )
        expect(text in ("auto", "off") or many, wrong)
        return text

    @field_validator("budget", mode="before")
    @classmethod
    def _seconds(cls, value: Any) -> Any:
        text = str(value).strip().lower()
        unit = UNITS.get(text[-1:], 0)
        wrong = (
            f"setting budget={value!r} is not a duration: expected seconds, or a number"
            " with s, m or h, such as 10m"
        )
        try:
            return float(text[:-1]) * unit if unit else float(text)
        except ValueError:
            raise InputError(wrong) from None

    @field_validator("backbone_options")
    @classmethod
    def _values(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Text of a command line as the JSON value that it is."""
        for name, value in options.items():
            with suppress(ValueError):
                options[name] = json.loads(value) if isinstance(value, str) else value
        return options

    @field_validator("*")
    @classmethod
    def _is_a_choice(cls, value: Any, info: Any) -> Any:
        name = info.field_name
        choices = list(chain(*SETTINGS[name].choices))
        if not choices or (name == "backbone" and ":" in value):
            return value
        if name == "weights" and value.endswith(".safetensors"):
            raise InputError(
                f"setting weights={value!r}: weights are those of the classes; write"
                f" pretrained={value}"
            )
        if name == "calibration":
            return choose_registered(f"setting {name}", value, choices)
        if isinstance(value, tuple):
            words = [word.strip() for word in value]
            return tuple(choose(f"setting {name}", word, choices) for word in words)
        return choose(f"setting {name}", value, choices)

    @model_validator(mode="after")
    def _compatible(self) -> "TrainConfig":
        taus = (
            f"prior_tau has {len(self.prior_tau)} values for {self.particles} particles"
        )
        expect(
            len(self.prior_tau) in (0, 1, self.particles),
            f"{taus}: expected one, or one per particle",
        )
        for one, other, off in (
            ("mixup", "cutmix", 0),
            ("compile", "checkpoint_activations", "false"),
        ):
            both = getattr(self, one) and getattr(self, other)
            expect(
                not both,
                f"{one} and {other} cannot be used together: set one of them to {off}",
            )
        scaled = self.head != "linear" or self.head_init == "random"
        expect(
            scaled,
            "head_init=class-means is for cosine and mixed heads: set head=mixed, or"
            " head_init=random",
        )
        return self

    @property
    def deferred_epoch(self) -> int:
        """The last epoch before what is deferred starts."""
        return round(self.deferred * self.epochs)

    @property
    def tuned(self) -> bool:
        """Whether trials, or a measured time budget, come before the training."""
        return self.tune != "off" or (self.budget > 0 and self.backbone not in TABULAR)

    @property
    def folds(self) -> int:
        """Trainings with held-out samples; a refit comes after them."""
        return self.calibration_folds if self.refit else 1

    @property
    def trainings(self) -> int:
        return self.folds + self.refit

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def replace(self, **values: Any) -> "TrainConfig":
        return TrainConfig(**{**dict(self), **values})

    def in_group(self, group: str) -> dict[str, Any]:
        """The settings of one of the groups.

        Examples
        --------
        >>> TrainConfig(epochs=20).in_group("schedule")["epochs"]
        20
        """
        choose("group of settings", group, GROUPS)
        return {name: getattr(self, name) for name in GROUPS[group].model_fields}

    @staticmethod
    def check_names(names: Iterable[str]) -> None:
        """Raise InputError for the first name that is not a setting."""
        for name in names:
            if name in SETTINGS:
                continue
            if name in all_options():
                raise InputError(
                    f"{name} is an option of the data and not a setting: write"
                    f" data.{name}=..., in Python data_options={{{name!r}: ...}}"
                )
            for meant, setting in SETTINGS.items():
                if setting.short == name:
                    raise InputError(
                        f"setting {name!r} is unknown: did you mean {meant!r}?"
                    )
            choose("setting", name, SETTINGS)

    @staticmethod
    def describe() -> dict[str, tuple[Any, str]]:
        """Default and description of every setting, by name.

        `rfdlc.training.settings.GROUPS` has them in groups.
        """
        return {
            name: (TrainConfig.model_fields[name].default, setting.description)
            for name, setting in SETTINGS.items()
        }


def parse_pairs(pairs: Sequence[str]) -> dict[str, str]:
    """`key=value` words of a command line."""
    for pair in (pair for pair in pairs if "=" not in pair):
        fix = (
            "; to test on it, put both into one folder as train.csv and test.csv"
            if os.path.isfile(pair)
            else ""
        )
        raise InputError(
            f"{pair!r} is not a setting: expected key=value, for example epochs=20{fix}"
        )
    return {
        key.strip().replace("-", "_"): value.strip()
        for key, value in (pair.split("=", 1) for pair in pairs)
    }


def preset(
    wanted: str,
    method: str,
    data_name: str = "",
    kind: str = "",
    pretrained: bool = False,
) -> dict[str, Any]:
    """Settings of a preset, a TOML file: its top-level keys, then the method's table,
    and its name.

    Under `heads` a method may have settings for each head. `auto` is finetune for
    pretrained networks, otherwise that of the data's name where there is one, otherwise
    that of their kind: images, features or table. Which prior to decide for, finetune
    takes from the preset of the data.
    """
    presets, plain = _presets(), plain_name(data_name)
    of_data = [
        name for name in presets if name not in GENERAL and kind in ("", "images")
    ]
    named = next((name for name in of_data if plain_name(name) == plain), "")
    if wanted == "auto":
        wanted = "finetune" if pretrained else named or kind or "none"
    table = (
        {}
        if wanted == "none"
        else presets[choose("preset", wanted, ("auto", "none", *presets))]
    )
    if wanted == "finetune" and "target_prior" in presets.get(named, {}):
        table = {**table, "target_prior": presets[named]["target_prior"]}
    methods = {
        key: value for key, value in table.items() if isinstance(value, dict)
    }  # mixup is a method, too
    general = {key: value for key, value in table.items() if key not in methods}
    return {**general, **methods.get(method, {}), "preset": wanted}


@cache
def _presets() -> dict[str, dict[str, Any]]:
    found = (files("rfdlc.training") / "presets").iterdir()
    return {
        file.name.removesuffix(".toml"): tomllib.loads(file.read_text("utf-8"))
        for file in found
    }
