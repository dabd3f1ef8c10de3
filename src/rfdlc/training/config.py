"""Settings of a training: one flat, typed, checked record. Defaults, the method's row, a preset, then the user's.

Class count, input size and frequency order are no settings: the data says them.
"""

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.resources import files
from typing import Any, get_type_hints

from rfdlc.data.load import all_options
from rfdlc.data.sources.listing import plain_name
from rfdlc.decide.calibration import KINDS
from rfdlc.errors import InputError, choose, listing, suggestion
from rfdlc.training.losses.repulsion import REPULSIONS
from rfdlc.training.losses.terms import WEIGHT_FORMS
from rfdlc.training.networks.backbones import BACKBONES
from rfdlc.training.networks.particles import HEADS
from rfdlc.training.optimisation.optimisers import OPTIMISERS
from rfdlc.training.optimisation.schedules import SCHEDULES


def _setting(
    default: Any, text: str, low: float | None = None, high: float | None = None, among: Sequence[str] = ()
) -> Any:
    return field(default=default, metadata={"help": text, "low": low, "high": high, "among": tuple(among)})


@dataclass(frozen=True)
class Settings:
    """What can be chosen about a training. `Settings.describe()` lists every key with its meaning."""

    # network
    backbone: str = _setting("auto", "network; auto: by the shape of a sample", among=("auto", "own", *BACKBONES))
    widths: tuple[int, ...] = _setting((256, 256), "hidden widths of an mlp", 1)
    particles: int = _setting(1, "particles M of the ensemble", 1, 64)
    shared_stages: int = _setting(0, "first stages of the backbone that the particles share", 0)
    head: str = _setting("cosine", "cosine (normalised features and weights) or linear", among=HEADS)
    head_scale: float = _setting(30.0, "scale of a cosine head's logits", 1e-3)
    # objective
    weights: str = _setting("constant", "class weights 1/f(n): the form of f", among=WEIGHT_FORMS)
    target_prior: tuple[float, ...] = _setting((), "class prior aimed at, one number a class; empty for uniform", 0)
    weight_power: float = _setting(0.5, "exponent of f(n) = n^power", 0)
    weight_beta: float = _setting(0.9999, "beta of the effective number", 0, 1)
    margin: float = _setting(0.0, "largest LDAM margin, 0 for none", 0)
    focal: float = _setting(0.0, "exponent of the focal loss, 0 for none", 0)
    prior_tau: tuple[float, ...] = _setting(
        (), "prior in the likelihood: tau, one value or one a particle; empty for none"
    )
    deferred: float = _setting(0.0, "class weights and the utility term start after this share of the epochs", 0, 1)
    utility: str = _setting("none", "utility trained with: none, one-hot, tail-sensitive[-by-rank], or a CSV file")
    penalty: float = _setting(
        -1.0, "entry of the tail-sensitive utility for taking a tail sample for a head class", high=0
    )
    utility_form: str = _setting(
        "row",
        "row: sum U[y,c] log p(c); bounded: sum U[y,c] p(c); column: the paper's text, for comparison",
        among=("row", "bounded", "column"),
    )
    utility_weights: str = _setting(
        "samples",
        "samples: by the class of the sample; columns: the authors' 1/n of the column",
        among=("samples", "columns", "none"),
    )
    alpha: float = _setting(1.0, "the utility term is divided by alpha", 1e-9)
    # repulsion
    repulsion: str = _setting("none", "what the particles are pushed apart in", among=("none", *REPULSIONS))
    repulsion_tau: float = _setting(40.0, "epochs over which the repulsion fades", 1e-9)
    repulsion_strength: float = _setting(1.0, "factor of the repulsion", 0)
    # optimisation
    epochs: int = _setting(100, "passes over the training data", 1)
    batch_size: int = _setting(128, "samples a step, of all processes together", 1)
    accumulate: int = _setting(1, "parts in which a process computes its share of a batch, to save memory", 1)
    optimiser: str = _setting("sgd", "sgd (Nesterov) or adamw", among=tuple(OPTIMISERS))
    learning_rate: float = _setting(0.1, "base learning rate", 0)
    momentum: float = _setting(0.9, "momentum of sgd", 0, 1)
    weight_decay: float = _setting(5e-4, "L2 decay of every weight", 0)
    schedule: str = _setting("cosine", "how the learning rate falls", among=tuple(SCHEDULES))
    milestones: tuple[float, ...] = _setting(
        (0.8, 0.9), "shares of the epochs after which a step schedule decays", 0, 1
    )
    decay: float = _setting(0.01, "factor of a step schedule at each milestone", 0, 1)
    warmup: int = _setting(5, "epochs of linear warm-up", 0)
    clip: float = _setting(0.0, "largest gradient norm of a run, 0 for no clipping", 0)
    average: float = _setting(0.0, "decay of an exponential moving average of the weights, 0 for none", 0, 1)
    # data
    sampling: str = _setting("shuffle", "order of the samples", among=("shuffle", "balanced", "sqrt"))
    augment: str = _setting(
        "auto", "augmentation; auto: by the kind of data", among=("auto", "none", "crop-flip", "crop-flip-rotate")
    )
    jitter: float = _setting(0.0, "colour jitter of image files that are decoded while training", 0, 1)
    workers: int = _setting(-1, "processes that decode image files; -1: one a core", -1)
    mixup: float = _setting(0.0, "alpha of mixup's Beta(alpha, alpha), 0 for none", 0)
    cutmix: float = _setting(0.0, "alpha of CutMix (images), 0 for none; not together with mixup", 0)
    hold_out: float = _setting(0.1, "share of the training data held out for calibration, 0 for none", 0, 0.9)
    refit: bool = _setting(False, "train again on everything and keep the calibration: twice the cost")
    # decisions
    combine: str = _setting(
        "mean-probabilities", "how particles are joined", among=("mean-probabilities", "mean-logits")
    )
    calibration: str = _setting("temperature", "fitted on held-out data", among=("none", *KINDS))
    # the run
    seed: int = _setting(0, "of weights, order, augmentation and mixup", 0, 2**31 - 1)
    evaluate_every: int = _setting(0, "epochs between evaluations on held-out data, 0 for the end alone", 0)
    checkpoint_every: int = _setting(0, "epochs between checkpoints; 0: once ten seconds have passed", 0)
    keep: tuple[float, ...] = _setting((), "shares of the epochs whose checkpoints are kept, for forks", 0, 1)
    device: str = _setting("auto", "auto, cpu, cuda or cuda:N")
    precision: str = _setting("auto", "auto: bf16 on a GPU, float32 on a CPU", among=("auto", "bf16", "float32"))
    compile: bool = _setting(False, "compile the networks (GPU); pays for long trainings")
    checkpoint_activations: bool = _setting(
        False, "compute activations again in the backward pass instead of keeping them; not together with compile"
    )
    batch_norm: str = _setting(
        "local", "statistics of several processes: local to each, or sync, of the whole batch", among=("local", "sync")
    )

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            _check(name, value)
        if not self.widths:
            raise InputError("setting widths is empty: expected one width or more, such as widths=256,256")
        if self.prior_tau and len(self.prior_tau) not in (1, self.particles):
            count = len(self.prior_tau)
            raise InputError(f"prior_tau has {count} values for {self.particles} particles: expected one, or one each")
        if self.mixup and self.cutmix:
            raise InputError("mixup and cutmix cannot be used together: set one of them to 0")
        if self.compile and self.checkpoint_activations:
            raise InputError("compile and checkpoint_activations cannot be used together: set one of them to false")

    @property
    def deferred_epoch(self) -> int:
        """The last epoch before what is deferred starts."""
        return round(self.deferred * self.epochs)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def changed(self, values: Mapping[str, Any]) -> "Settings":
        """A copy with these values, each converted to its type and checked; text is parsed as the command line's.

        >>> Settings().changed({"epochs": "20", "prior_tau": "0,1,2", "particles": 3}).prior_tau
        (0.0, 1.0, 2.0)
        """
        types = get_type_hints(Settings)
        Settings.check_names(values)
        return replace(self, **{name: _convert(name, value, types[name]) for name, value in values.items()})

    @staticmethod
    def check_names(names: Iterable[str]) -> None:
        """An error for the first that is no setting."""
        known = Settings.describe()
        for name in names:
            if name not in known:
                if name in all_options():
                    written = f"write data.{name}=..., in Python data_options={{{name!r}: ...}}"
                    raise InputError(f"{name} is an option of the data and no setting: {written}")
                hint = suggestion(name, known)
                raise InputError(f"setting {name!r} is unknown: expected one of {listing(known, 60)}{hint}")

    @staticmethod
    def describe() -> dict[str, tuple[Any, str]]:
        """Every key with its default and its meaning."""
        return {f.name: (f.default, f.metadata["help"]) for f in fields(Settings)}


def parse_pairs(pairs: Sequence[str]) -> dict[str, str]:
    """`key=value` words of a command line.

    >>> parse_pairs(["epochs=20", "head=linear"])
    {'epochs': '20', 'head': 'linear'}
    """
    for pair in pairs:
        if "=" not in pair:
            raise InputError(f"{pair!r} is no setting: expected key=value, for example epochs=20")
    return {key.strip().replace("-", "_"): value.strip() for key, value in (pair.split("=", 1) for pair in pairs)}


def preset(data_name: str, method: str, kind: str = "") -> dict[str, Any]:
    """Settings for a data set of this name from its TOML file: its top-level keys, and its table of the method.

    Data without a preset of their own have that of their kind: `images` or `features` (tables and embeddings).
    Lists are named as they were published, so that `ImageNet_LT` means imagenet-lt.
    """
    presets = {
        plain_name(file.name.removesuffix(".toml")): file for file in (files("rfdlc.training") / "presets").iterdir()
    }
    general = {"images": "images", "features": "table"}.get(kind, "")
    source = presets.get(plain_name(data_name)) or presets.get(general)
    if source is None:
        return {}
    table = tomllib.loads(source.read_text(encoding="utf-8"))
    common = {key: value for key, value in table.items() if not isinstance(value, dict)}
    return {**common, **table.get(method, {})}


# -- values ----------------------------------------------------------------------------------------------------


def _convert(name: str, value: Any, kind: Any) -> Any:
    try:
        if kind in (tuple[int, ...], tuple[float, ...]):
            number = int if kind == tuple[int, ...] else float
            words = value.replace(";", ",").split(",") if isinstance(value, str) else value
            many = words if isinstance(words, Iterable) else [words]
            return tuple(number(word) for word in many if str(word).strip())
        if kind is bool:
            return _truth(value)
        if kind is int and not isinstance(value, str) and int(value) != value:
            raise ValueError
        return kind(value)
    except (TypeError, ValueError, OverflowError):
        word = {int: "a whole number", float: "a number", bool: "true or false"}.get(
            kind, "numbers separated by commas"
        )
        raise InputError(f"setting {name}={value!r} cannot be read: expected {word}") from None


def _truth(value: Any) -> bool:
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if str(value).lower() not in words:
        raise ValueError
    return words[str(value).lower()]


_RULES = {f.name: f.metadata for f in fields(Settings)}


def _check(name: str, value: Any) -> None:
    rule = _RULES[name]
    if rule["among"]:
        choose(f"setting {name}", value, rule["among"])
    low, high = rule["low"], rule["high"]
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, str | bool):
            continue
        if not math.isfinite(number) or (low is not None and number < low) or (high is not None and number > high):
            ends = {"at least": low, "at most": high}
            bounds = " and ".join(f"{word} {end}" for word, end in ends.items() if end is not None)
            raise InputError(f"setting {name}={number} is out of range: expected {bounds or 'a finite number'}")
