"""TrainConfig: the settings of a training. Defaults, then the method's, then a
preset's, then the user's.
"""

import json
import os
import tomllib
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from itertools import chain
from typing import Annotated, Any, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    ValidationError,
    field_validator,
    model_validator,
)

from rfdlc.data.augment import AUGMENTATIONS
from rfdlc.data.load import all_options
from rfdlc.data.loader import SAMPLINGS
from rfdlc.data.readers.image_lists import plain_name
from rfdlc.errors import InputError, choose, expect
from rfdlc.imports import choose_registered
from rfdlc.probabilities.calibrators import CALIBRATORS
from rfdlc.probabilities.model import COMBINATIONS
from rfdlc.training.distributed import PARALLEL
from rfdlc.training.losses.terms import REPULSIONS, WEIGHT_FORMS
from rfdlc.training.networks.backbones import BACKBONES
from rfdlc.training.networks.particles import EXECUTIONS, HEADS
from rfdlc.training.optimisation import OPTIMISERS, SCHEDULES

GENERAL = (
    "images",
    "features",
    "table",
    "finetune",
)  # presets by kind of data, not by name
UNITS = {"s": 1, "m": 60, "h": 3600}  # of durations, in seconds
SHORT = {
    "lr": "learning_rate",
    "wd": "weight_decay",
    "bs": "batch_size",
    "optimizer": "optimiser",
}
SINKS = ("tensorboard", "mlflow", "wandb")
TABULAR = ("mixture", "trees")  # backbones of tables, that are not networks alone
SAFETY = 0.9  # of a budget: evaluation, calibration and files take some of it
# The names that a setting may have; registries may grow.
CHOICES: dict[str, tuple[Collection[str], ...]] = {
    "backbone": (("auto", "timm:NAME", "own", *TABULAR), BACKBONES),
    "head": (HEADS,),
    "weights": (WEIGHT_FORMS,),
    "head_init": (("random", "class-means"),),
    "interpolation": (("auto", "bilinear", "bicubic"),),
    "utility_form": (("row", "bounded", "column"),),
    "utility_weights": (("samples", "columns", "none"),),
    "repulsion": (("none",), REPULSIONS),
    "optimiser": (OPTIMISERS,),
    "schedule": (SCHEDULES,),
    "sampling": (SAMPLINGS,),
    "augment": (("auto",), AUGMENTATIONS),
    "combine": (COMBINATIONS,),
    "calibration": (CALIBRATORS,),
    "precision": (("auto", "bf16", "float32"),),
    "execution": (EXECUTIONS,),
    "batch_norm": (("local", "sync"),),
    "parallel": (PARALLEL,),
}

Share = Annotated[float, Field(ge=0, le=1)]


class TrainConfig(BaseModel):
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

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    preset: str = Field(
        "auto",
        description=(
            "settings to start from: auto (by the data), none, features, table, ..."
        ),
    )
    # network
    backbone: str = Field(
        "auto",
        description=(
            "network, timm:NAME or package.module:function; auto: by the data; tables:"
            " trees, mixture"
        ),
    )
    backbone_options: dict[str, Any] = Field(
        {}, description="further arguments of a timm network: backbone.KEY=VALUE"
    )
    pretrained: str = Field(
        "none",
        description="weights to start from: none, a safetensors file, or hub (timm's)",
    )
    image_size: int = Field(
        0,
        ge=0,
        description=(
            "side of the images that the network sees; 0: timm's, or as they are"
        ),
    )
    lora: int = Field(
        0,
        ge=0,
        description=(
            "rank of the updates (LoRA) that alone are trained in a transformer, or 0"
        ),
    )
    interpolation: str = Field(
        "auto", description="how images are resized: bilinear or bicubic; auto: timm's"
    )
    widths: tuple[Annotated[int, Field(ge=1, le=2**15)], ...] = Field(
        (256, 256), max_length=32, description="hidden widths of an mlp; empty for none"
    )
    whiten: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the covariance within classes in an mlp's whitening",
    )
    particles: int = Field(
        1, ge=1, le=64, description="number of particles M of the ensemble"
    )
    shared_stages: int = Field(
        0,
        ge=0,
        description="number of first stages of the backbone that the particles share",
    )
    head: str = Field(
        "cosine",
        description="cosine (of features and weights), linear, or mixed: both in turn",
    )
    head_scale: float = Field(
        30.0,
        ge=1e-3,
        description="scale of cosine heads' logits; mixed: half for linear ones",
    )
    head_init: str = Field(
        "random", description="random, or class-means of the first features"
    )
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the features before the head dropped in training",
    )
    # loss
    weights: str = Field("constant", description="class weights 1/f(n): the form of f")
    trained_prior: tuple[NonNegativeFloat, ...] = Field(
        (), description="class prior to train for; empty for uniform"
    )
    weight_power: float = Field(0.5, ge=0, description="exponent of f(n) = n^power")
    weight_beta: Share = Field(0.9999, description="beta of the effective number")
    margin: float = Field(0.0, ge=0, description="largest LDAM margin, 0 for none")
    focal: float = Field(
        0.0, ge=0, description="exponent of the focal loss, 0 for none"
    )
    prior_tau: tuple[float, ...] = Field(
        (), description="tau of the likelihood's prior: none, one or one per particle"
    )
    deferred: Share = Field(
        0.0,
        description=(
            "class weights and the utility term start after this share of the epochs"
        ),
    )
    utility: str = Field(
        "none",
        description=(
            "utility to train with: none, one-hot, tail-sensitive[-by-rank], or a CSV"
        ),
    )
    penalty: float = Field(
        -1.0,
        le=0,
        description="value of a tail sample decided as a head class (tail-sensitive)",
    )
    utility_form: str = Field(
        "row",
        description=(
            "row: U[y,c] log p(c); bounded: U[y,c] p(c); column: U[c,y] log p(c)"
        ),
    )
    utility_weights: str = Field(
        "samples",
        description="by the class of samples, of columns (the authors'), or none",
    )
    alpha: float = Field(
        1.0, ge=1e-9, description="the utility term is divided by alpha"
    )
    # repulsion
    repulsion: str = Field("none", description="what repels the particles")
    repulsion_tau: float = Field(
        40.0, ge=1e-9, description="number of epochs over which the repulsion fades"
    )
    repulsion_strength: float = Field(1.0, ge=0, description="factor of the repulsion")
    consistency: float = Field(
        0.0,
        ge=0,
        description="factor of a particle's right predictions of a weaker view",
    )
    consistency_ramp: Share = Field(
        0.5, description="share of the epochs over which the factor rises"
    )
    # optimisation
    epochs: int = Field(100, ge=1, description="passes over the training data")
    batch_size: int = Field(
        128,
        ge=1,
        description="size of the global batch: samples per step, of all processes",
    )
    accumulate: int = Field(
        1, ge=1, description="micro-batches per step and process, to save memory"
    )
    optimiser: str = Field("sgd", description="sgd (Nesterov) or adamw")
    learning_rate: float = Field(0.1, ge=0, description="base learning rate")
    backbone_rate: float = Field(
        1.0, ge=0, description="factor of the learning rate of all layers but the head"
    )
    layer_decay: float = Field(
        1.0,
        gt=0,
        le=1,
        description="another factor per stage, from the last to the first",
    )
    momentum: Share = Field(0.9, description="momentum of sgd")
    weight_decay: float = Field(5e-4, ge=0, description="L2 decay of every weight")
    schedule: str = Field("cosine", description="learning-rate schedule")
    milestones: tuple[Share, ...] = Field(
        (0.8, 0.9), description="shares of epochs after which a step schedule decays"
    )
    decay: Share = Field(
        0.01, description="factor of a step schedule at each milestone"
    )
    warmup: int = Field(
        5,
        ge=0,
        description=(
            "epochs of linear warm-up; at most a third of all, unless it is set"
        ),
    )
    clip: float = Field(
        0.0, ge=0, description="largest gradient norm, 0 for no clipping"
    )
    average: Share = Field(
        0.0,
        description="decay of an exponential moving average of the weights, 0 for none",
    )
    # data
    sampling: str = Field("shuffle", description="how samples are drawn")
    augment: str = Field(
        "auto", description=", ".join(AUGMENTATIONS) + " of images; auto: crop"
    )
    magnitude: Share = Field(
        0.0,
        description=(
            "largest strength of random operations of `augment`; 0: as they have"
        ),
    )
    cutout: float = Field(
        0.0,
        ge=0,
        description="side of a black square in every image: pixels, or a share below 1",
    )
    jitter: Share = Field(
        0.0, description="colour jitter of image files that are decoded while training"
    )
    workers: int = Field(
        -1, ge=-1, description="processes that decode image files; -1: one per core"
    )
    mixup: float = Field(
        0.0, ge=0, description="alpha of mixup's Beta(alpha, alpha), 0 for none"
    )
    cutmix: float = Field(
        0.0,
        ge=0,
        description="alpha of CutMix (images), 0 for none; not together with mixup",
    )
    hold_out: float = Field(
        0.1,
        ge=0,
        le=0.9,
        description="share of the training data held out for calibration",
    )
    refit: bool = Field(
        False,
        description=(
            "train again on all samples and keep the calibration: one training more"
        ),
    )
    refit_epochs: int = Field(
        0, ge=0, description="epochs of a refit; 0: as many as `epochs`"
    )
    warm_refit: bool = Field(
        False,
        description=(
            "a refit starts from the networks trained before it, not from new ones"
        ),
    )
    calibration_folds: int = Field(
        1,
        ge=1,
        le=20,
        description=(
            "trainings before a refit, each without a fold, that calibrate; 1: hold_out"
            " alone"
        ),
    )
    # decisions
    test_flip: bool = Field(
        False, description="predict the mean logits of an image and its mirror image"
    )
    test_shift: int = Field(
        0,
        ge=0,
        le=16,
        description="and of two copies shifted by so many pixels; 0: none",
    )
    familiarity: bool = Field(
        False,
        description="learn from features how far samples are from the training data",
    )
    combine: str = Field("mean-probabilities", description="how particles are combined")
    target_prior: str = Field(
        "train",
        description="prior to decide for: train, uniform, a=0.9,b=0.1; scores: as is",
    )
    calibration: str = Field("auto", description="calibrator fitted on held-out data")
    # the method's own
    method_options: dict[str, int | float] = Field(
        {}, description="options of the method, which `rfdlc methods` lists"
    )
    # before the training
    tune: str = Field(
        "off",
        description=(
            "trials on held-out data that choose settings: off, auto, or how many at"
            " most"
        ),
    )
    budget: float = Field(
        0.0,
        ge=0,
        description="seconds, or 90s, 10m, 2h, for trials and training; 0: no limit",
    )
    # the run
    seed: int = Field(
        0,
        ge=0,
        le=2**31 - 1,
        description="seed of weights, order, augmentation and mixup",
    )
    evaluate_every: int = Field(
        0,
        ge=0,
        description="epochs between evaluations on held-out data, 0: only at the end",
    )
    patience: int = Field(
        0,
        ge=0,
        description=(
            "evaluations without a lower held-out loss until it stops; 0: never"
        ),
    )
    checkpoint_every: int = Field(
        0, ge=0, description="epochs between checkpoints; 0: every ten seconds"
    )
    log: tuple[str, ...] = Field(
        (), description="where the history goes, too: tensorboard, mlflow, wandb"
    )
    keep: tuple[Share, ...] = Field(
        (), description="shares of the epochs whose checkpoints are kept, for forks"
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    precision: str = Field(
        "auto", description="auto: bf16 on a GPU that computes in it, else float32"
    )
    compile: bool = Field(
        False, description="compile the networks (GPU); pays off in long trainings"
    )
    execution: str = Field(
        "auto",
        description=(
            "networks stacked, or separate, one after another; auto: by their width"
        ),
    )
    checkpoint_activations: bool = Field(
        False, description="recompute activations to save memory; not with compile"
    )
    parallel: str = Field(
        "auto",
        description=(
            "sum gradients after the backward pass (sum), during it (ddp), or fsdp"
        ),
    )
    batch_norm: str = Field(
        "local",
        description="statistics: local to each process, or sync, of the global batch",
    )

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

    @field_validator("log")
    @classmethod
    def _sinks(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(choose("setting log", name.strip(), SINKS) for name in names)

    @field_validator("backbone_options")
    @classmethod
    def _values(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Text of a command line as the JSON value that it is."""
        for name, value in options.items():
            with suppress(ValueError):
                options[name] = json.loads(value) if isinstance(value, str) else value
        return options

    @field_validator(*CHOICES)
    @classmethod
    def _known(cls, value: str, info: Any) -> str:
        imported = info.field_name == "backbone" and ":" in value
        file = info.field_name == "weights" and value.endswith(".safetensors")
        expect(
            not file,
            f"setting weights={value!r}: weights are those of the classes; write"
            f" pretrained={value}",
        )
        known = choose_registered if info.field_name == "calibration" else choose
        return (
            value
            if imported
            else known(
                f"setting {info.field_name}", value, chain(*CHOICES[info.field_name])
            )
        )

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

    @staticmethod
    def check_names(names: Iterable[str]) -> None:
        """Raise InputError for the first name that is not a setting."""
        for name in (name for name in names if name not in TrainConfig.model_fields):
            fix = f"write data.{name}=..., in Python data_options={{{name!r}: ...}}"
            expect(
                name not in all_options(),
                f"{name} is an option of the data and not a setting: {fix}",
            )
            expect(
                name not in SHORT,
                f"setting {name!r} is unknown: did you mean {SHORT.get(name)!r}?",
            )
            choose("setting", name, TrainConfig.model_fields)

    @staticmethod
    def describe() -> dict[str, tuple[Any, str]]:
        return {
            name: (field.default, field.description or "")
            for name, field in TrainConfig.model_fields.items()
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
