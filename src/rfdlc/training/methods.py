"""METHODS: a method is data. What it minimises, with which particles, stages,
combination and decision.

Most methods share one loss, the integrated gain, whose terms the settings switch on.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

from rfdlc.decisions.utility import Utility
from rfdlc.errors import InputError, choose, expect, listing
from rfdlc.imports import choose_registered, register_first
from rfdlc.probabilities.classes import Classes
from rfdlc.probabilities.priors import NAMED, Prior, as_prior
from rfdlc.training import factories
from rfdlc.training.config import TrainConfig, preset
from rfdlc.training.factories import (
    CombinationFactory,
    LossFactory,
    Matrix,
    carried_prior,
    integrated_gain,
)
from rfdlc.training.losses.terms import (
    NestedCollaboration,
    NestedExperts,
    Routing,
    SelfDistillation,
)
from rfdlc.training.networks.particles import (
    Evidential,
    GroupMean,
    ParticleNet,
    nested_groups,
)
from rfdlc.training.optimisation import normalise_head
from rfdlc.training.settings import TABULAR


@dataclass(frozen=True)
class Option:
    """A number of a method that users may set like a setting: `rfdlc train DATA
    --method ride diversity=0.1`.

    Parameters
    ----------
    default, help, low, high
        Its value unless it is set (if that is an integer, all are), its meaning, and
        its range, ends included.
    """

    default: float
    help: str
    low: float = 0.0
    high: float = math.inf

    def parse(self, name: str, value: Any) -> float:
        """The value as a number within the range; text is parsed."""
        try:
            number = type(self.default)(value)
            if (
                not self.low <= number <= self.high
                or number != float(value)
                or math.isinf(number)
            ):
                raise ValueError
            return number
        except (TypeError, ValueError, OverflowError):
            kind = "an integer" if isinstance(self.default, int) else "a number"
            bounds = f"at least {self.low:g}" + (
                f" and at most {self.high:g}" if self.high < math.inf else ""
            )
            raise InputError(
                f"method option {name}={value!r} is not possible: expected {kind},"
                f" {bounds}"
            ) from None


@dataclass(frozen=True)
class Stage:
    """A stage of a training. A number may be given as the name of an `Option` of the
    method.

    Parameters
    ----------
    epochs, settings, learning_rate_factor
        Number of epochs, settings that differ in this stage, and a factor of the
        learning rate.
    trains
        `"all"` layers, the `"head"`, or the `"router"` of the combination; batch norm
        of frozen layers is frozen, too.
    loss, finalize
        A loss other than the method's; a function of network and configuration that is
        called when the stage ends.
    reinitialize_head, weight_averaging
        Whether heads start from new weights, and weights end as their mean over the
        last quarter of epochs (SWA).
    swag_samples
        Number of networks that are sampled around the mean of an earlier stage (SWAG,
        diagonal covariance) and whose logits the loss sees after those of the network
        itself.
    """

    epochs: int | str | None = None
    trains: Literal["all", "head", "router"] = "all"
    settings: Mapping[str, Any] = field(default_factory=dict)
    learning_rate_factor: float | str = 1.0
    loss: LossFactory | None = None
    reinitialize_head: bool = False
    weight_averaging: bool = False
    swag_samples: int | str = 0
    finalize: Callable[[ParticleNet, TrainConfig], None] | None = None

    def __post_init__(self) -> None:
        choose("`trains` of a stage", self.trains, ("all", "head", "router"))

    def number(
        self,
        name: Literal["epochs", "learning_rate_factor", "swag_samples"],
        config: TrainConfig,
    ) -> Any:
        """A number of this stage: by default that of the configuration; where it names
        an option, that option's.
        """
        value = getattr(self, name)
        return (
            config.method_options[value]
            if isinstance(value, str)
            else config.epochs
            if value is None
            else value
        )


@dataclass(frozen=True)
class Method:
    """A way to train, by name in `METHODS`.

    Parameters
    ----------
    summary, reference
        What it does and whose it is, as `rfdlc methods` shows them.
    settings
        Its settings, which presets of data sets and users override.
    prior
        The class prior that trained probabilities carry: `"uniform"`, `"train"`, or a
        function of the configuration and the classes. By default it follows from
        sampling, class weights and `prior_tau` of the last stage that trains a head. A
        loss of your own that changes it, such as a logit-adjusted one, must name it.
    loss
        From the configuration, the classes and the matrix of the training utility (or
        None) to a loss: a function of logits (M,B,C), targets (B,) and the epoch that
        returns one value per sample.
    stages, combination
        The stages in order, and how particles are combined inside the network; by
        default a Decider averages them.
    utility, target_prior
        Those of the Decider that a training leaves behind. Any other utility can
        follow.
    mixes
        Whether it can fit trees and mixtures to tables, and does so by default.
    options
        Numbers that only this method has, by a name that no setting has.
        `config.method_options[name]` is the value.

    Examples
    --------
    >>> [stage.trains for stage in METHODS["crt"].stages]
    ['all', 'head']
    """

    summary: str
    reference: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    prior: Literal["train", "uniform"] | Callable[[TrainConfig, Classes], Matrix] = (
        carried_prior
    )
    loss: LossFactory = integrated_gain
    stages: tuple[Stage, ...] = (Stage(),)
    combination: CombinationFactory = factories.as_they_are
    utility: Callable[[Classes], Utility] = Utility.one_hot
    target_prior: str | None = None
    mixes: bool = False
    options: Mapping[str, Option] = field(default_factory=dict)

    def __post_init__(self) -> None:
        expect(self.stages, "stages of a method is empty: expected one Stage or more")
        routes = self.combination is not factories.as_they_are or all(
            stage.trains != "router" for stage in self.stages
        )
        expect(
            routes,
            "`trains` of a stage is 'router', but its method has no `combination` with"
            " a router",
        )
        if not callable(self.prior):
            choose(
                "prior of a method",
                str(self.prior),
                (*NAMED, "a function of configuration and classes"),
            )
        for name in (name for name in self.options if name in TrainConfig.model_fields):
            own = (
                f"option {name!r} of a method has the name of a setting: name it"
                f" otherwise, such as 'own_{name}'"
            )
            raise InputError(f"{own}, or leave it out and use config.{name}")
        for name, value in (
            pair
            for stage in self.stages
            for pair in vars(stage).items()
            if pair[0] in STAGE_NUMBERS
        ):
            known = not isinstance(value, str) or value in self.options
            options = listing(self.options, 20) or "of which there are none"
            expect(
                known,
                f"{name}={value!r} of a stage: expected a number, or an option of its"
                f" method, {options}",
            )

    def carried(self, config: TrainConfig, classes: Classes) -> Prior:
        """The class prior that trained probabilities carry: that of the last stage
        which trains a head.
        """
        last = [Stage(), *(stage for stage in self.stages if stage.trains != "router")][
            -1
        ]
        found = (
            self.prior(config.replace(**last.settings), classes)
            if callable(self.prior)
            else self.prior
        )
        return as_prior(found, classes, "prior of a method")

    def configure(self, values: Mapping[str, Any]) -> TrainConfig:
        """The configuration with these settings, among which may be options, where they
        differ from the method's.
        """
        values = {**self.settings, **values}
        given = {
            **values.get("method_options", {}),
            **{k: v for k, v in values.items() if k in self.options},
        }
        others = {name for method in METHODS.values() for name in method.options} | set(
            given
        )
        foreign = [
            name
            for name in (*values, *given)
            if name in others and name not in self.options
        ]
        allowed = (
            f"expected one of {listing(self.options, 20) or 'no options'}; `rfdlc"
            " methods` lists those of all"
        )
        expect(
            not foreign,
            f"{''.join(foreign[:1])} is not an option of this method: {allowed}",
        )
        options = {
            name: option.parse(name, given.get(name, option.default))
            for name, option in self.options.items()
        }
        settings = {
            name: value for name, value in values.items() if name not in self.options
        }
        return TrainConfig(**{**settings, "method_options": options})

    def spans(self, config: TrainConfig) -> list[tuple[int, int]]:
        """Start and end epoch of every stage: [(0, 200), (200, 205)]."""
        return list(
            pairwise(
                accumulate(
                    (stage.number("epochs", config) for stage in self.stages), initial=0
                )
            )
        )

    def relative_cost(self, epochs: int = 200) -> float:
        """Work of a training of so many epochs, in trainings of one network: frozen
        layers have no backward pass.
        """
        config = self.configure({"epochs": epochs})
        work, views = 0, config.consistency > 0  # another forward pass
        for stage in self.stages:
            passes = (3 + views if stage.trains == "all" else 1) * (
                1 + stage.number("swag_samples", config)
            )
            work += stage.number("epochs", config) * passes
        return float(config.particles * work / (3 * epochs))


STAGE_NUMBERS = ("epochs", "learning_rate_factor", "swag_samples")
ROWS = {
    "table": (64, 1024),
    "features": (64, 128),
    "images": (32, 128),
}  # of a batch, by the preset
FEWEST_STEPS = 500  # of a training on features
SMALL_CNN = {
    "optimiser": "adamw",
    "learning_rate": 3e-3,
    "weight_decay": 1e-2,
    "warmup": 1,
}  # of backbone=cnn
FOLDS, MOST_FOLDED = (
    3,
    20_000,
)  # folds that calibrate heads and fine-tuned networks, up to so many samples

# The paper's protocol: steps x 0.01 after 80% and 90% of the epochs (audited); a linear
# head unless margins are used.
_PLAIN = {"head": "linear", "schedule": "step"}
_EFFECTIVE = {"weights": "effective", "weight_beta": 0.9999}
_CB = {**_PLAIN, **_EFFECTIVE}
_LDAM = {
    "margin": 0.5,
    "schedule": "step",
    "keep": (0.8,),
}  # kept for forks: `ldam-drw` is the same until then
_LDAM_DRW = {**_LDAM, **_EFFECTIVE, "deferred": 0.8}
_COSTS = Utility.tail_sensitive
_THREE = {"particles": 3, "combine": "mean-logits"}
_EXPERTS = {
    **_THREE,
    "shared_stages": 2,
    "schedule": "step",
    "decay": 0.1,
    "augment": "autoaugment",
}
_RF_DLC = {**_THREE, "shared_stages": 1, "repulsion": "head"}
_BALANCED = {
    "sampling": "balanced",
    "schedule": "cosine",
    "warmup": 0,
    "mixup": 0,
    "cutmix": 0,
    "repulsion": "none",
}
# Constants of other people's methods; docs/methods.md says where they are from and what
# differs.
_HEAD_EPOCHS = {
    "head_epochs": Option(
        10, "epochs of the second stage, which trains a new head", low=1
    )
}
_NEW_HEAD = Stage(
    epochs="head_epochs", trains="head", settings=_BALANCED, reinitialize_head=True
)
_TEMPERATURE_SHARE = Option(
    0.05,
    "share of the class frequency in the late temperatures of the divergence",
    high=1,
)

# Networks of a mixture: one per fold and one of all samples, averaged.
NETWORKS: dict[str, dict[str, Any]] = {"mlp": {"backbone": "mlp"}}
MIXED = {
    "backbone": "mixture",
    "particles": 1,
    "combine": "mean-logits",
    "calibration": "auto",
}

METHODS: dict[str, Method] = {
    # one network, one stage
    "ce": Method("cross-entropy, one network", "the plain baseline", _PLAIN),
    "ce-balanced": Method(
        "cross-entropy on balanced samples",
        "Kang et al. 2020",
        {**_PLAIN, "sampling": "balanced"},
    ),
    "mixup": Method(
        "cross-entropy on mixed pairs of samples",
        "Zhang et al. 2018",
        {**_PLAIN, "mixup": 1.0},
    ),
    "focal": Method(
        "hard samples weigh more", "Lin et al. 2017", {**_PLAIN, "focal": 1.0}
    ),
    "cb": Method("weights by the effective number of samples", "Cui et al. 2019", _CB),
    "cb-focal": Method(
        "focal loss weighted by the effective number",
        "Cui et al. 2019",
        {**_CB, "focal": 1.0},
    ),
    "ldam": Method("larger margins for rarer classes", "Cao et al. 2019", _LDAM),
    "ldam-drw": Method(
        "LDAM, class weights late in the training", "Cao et al. 2019", _LDAM_DRW
    ),
    "la": Method(
        "the prior inside the likelihood",
        "Menon et al. 2021",
        {**_PLAIN, "prior_tau": (1.0,)},
    ),
    "balanced-softmax": Method(
        "counts in the softmax: LA, tau 1",
        "Ren et al. 2020",
        {**_PLAIN, "prior_tau": (1.0,)},
    ),
    # plain training, another decision
    "la-posthoc": Method(
        "cross-entropy, the prior divided out",
        "Menon et al. 2021",
        _PLAIN,
        target_prior="uniform",
    ),
    "elkan": Method(
        "cross-entropy, then least expected cost", "Elkan 2001", _PLAIN, utility=_COSTS
    ),
    "reweighted-elkan": Method(
        "CB, then least expected cost",
        "Elkan 2001 after Cui et al. 2019",
        _CB,
        utility=_COSTS,
    ),
    "tau-norm": Method(
        "cross-entropy, then class weights of more equal length",
        "Kang et al. 2020",
        _PLAIN,
        "uniform",
        stages=(
            Stage(
                finalize=lambda net, config: normalise_head(
                    net, config.method_options["tau"]
                )
            ),
        ),
        options={
            "tau": Option(
                1.0, "exponent of the length by which class weights are divided", high=2
            )
        },
    ),
    # two stages
    "crt": Method(
        "cross-entropy, then a new head on balanced samples",
        "Kang et al. 2020",
        _PLAIN,
        stages=(Stage(), _NEW_HEAD),
        options=_HEAD_EPOCHS,
    ),
    "srepr": Method(
        (
            "mean weights of the last epochs,"
            " then a new head on stochastic representations"
        ),
        "Nam et al. 2023",
        {**_PLAIN, "schedule": "swa"},
        "uniform",
        stages=(
            Stage(weight_averaging=True),
            replace(
                _NEW_HEAD,
                swag_samples="swag_samples",
                loss=lambda config, *_: SelfDistillation(
                    config.particles, config.method_options["distillation"]
                ),
            ),
        ),
        options={
            **_HEAD_EPOCHS,
            "swag_samples": Option(
                5, "networks sampled around the mean weights", low=1
            ),
            "distillation": Option(
                1.0, "factor of the divergence from the mean prediction of the samples"
            ),
        },
    ),
    # experts
    "ride": Method(
        "diverse experts, then a router that asks as many as a sample needs",
        "Wang et al. 2021",
        {**_LDAM_DRW, **_THREE, "shared_stages": 2},
        loss=factories.diverse_experts,
        combination=factories.routed,
        stages=(
            Stage(),
            Stage(
                "router_epochs",
                "router",
                _BALANCED,
                learning_rate_factor="router_learning_rate_factor",
                loss=lambda config, *_: Routing(
                    config.method_options["router_positive_weight"]
                ),
            ),
        ),
        options={
            "diversity": Option(0.2, "factor of the divergence between experts"),
            "temperature_share": _TEMPERATURE_SHARE,
            "router_epochs": Option(
                5, "epochs of the second stage, which trains the router", low=1
            ),
            "router_learning_rate_factor": Option(
                0.1, "factor of the learning rate in the second stage"
            ),
            "router_positive_weight": Option(
                100.0, "weight of samples that a later expert would get right"
            ),
            "router_choices": Option(
                30, "largest mean logits that the router sees", low=1
            ),
            "router_hidden": Option(16, "hidden units of the router", low=1),
        },
    ),
    "tlc": Method(
        "evidential experts, engaged while a sample is uncertain",
        "Li et al. 2022",
        {**_LDAM_DRW, **_THREE, "shared_stages": 1},
        loss=factories.evidential_experts,
        combination=lambda config, *_: Evidential(config.method_options["eta"]),
        options={
            "diversity": Option(0.01, "factor of the divergence between experts"),
            "temperature_share": _TEMPERATURE_SHARE,
            "divergence": Option(
                0.05,
                "Dirichlet divergence's factor:"
                " epoch * divergence / (late + annealing)",
                1e-9,
            ),
            "annealing": Option(
                500.0, "epochs added to the late epoch in that factor", low=1
            ),
            "threshold": Option(
                0.54,
                "an expert is engaged above this share of the largest uncertainty",
                high=1,
            ),
            "eta": Option(
                0.2, "temperature of the weights of experts in the prediction", low=1e-6
            ),
        },
    ),
    "ace": Method(
        "experts on nested groups of classes",
        "Cai et al. 2021",
        {**_THREE, "shared_stages": 2, "schedule": "step"},
        loss=lambda config, classes, _: NestedExperts(
            nested_groups(classes, config.particles), config.method_options["silence"]
        ),
        combination=lambda config, classes, *_: GroupMean(
            nested_groups(classes, config.particles)
        ),
        options={
            "silence": Option(
                1.0, "factor of squared logits of classes outside an expert's group"
            )
        },
    ),
    # ensembles
    "ensemble-cb": Method(
        "three independent CB networks", "the paper's ablation", {**_CB, **_THREE}
    ),
    "ensemble-ldam": Method(
        "three independent LDAM-DRW networks",
        "the paper's ablation",
        {**_LDAM_DRW, **_THREE},
    ),
    "balpoe": Method(
        "experts for three class priors, whose product is balanced; mixup",
        "Aimar et al. 2023",
        {**_EXPERTS, "prior_tau": (0.0, 1.0, 2.0), "mixup": 0.4},
    ),
    "mdcs": Method(
        (
            "experts for three class priors,"
            " each consistent with its own right predictions of a weaker view"
        ),
        "Zhao et al. 2023",
        {
            **_EXPERTS,
            "prior_tau": (-0.5, 1.0, 2.5),
            "milestones": (0.5, 0.8, 0.95),
            "cutout": 0.5,
            "consistency": 0.6,
            "consistency_ramp": 0.05,
        },
    ),
    "ncl": Method(
        "experts that agree, on all classes and on the hardest ones of each sample",
        "Li et al. 2022",
        {
            **_EXPERTS,
            "shared_stages": 0,
            "prior_tau": (1.0,),
            "cutout": 0.5,
            "weight_decay": 2e-4,
        },
        loss=lambda config, classes, _: NestedCollaboration(
            classes.count_array,
            max(2, round(config.method_options["hard"] * len(classes))),
            config.method_options["agreement"],
        ),
        options={
            "hard": Option(
                0.3,
                "share of the classes that are the hardest of a sample",
                low=1e-6,
                high=1,
            ),
            "agreement": Option(0.6, "factor of the divergence between experts"),
        },
    ),
    "repulsive-predictions": Method(
        "the prior inside the likelihood; particles repelled in their predictions",
        "D'Angelo and Fortuin 2021",
        {
            **_RF_DLC,
            "prior_tau": (1.0,),
            "repulsion": "predictions",
            "repulsion_strength": 0.1,
        },
    ),
    "rf-dlc-paper": Method(
        (
            "the paper as its authors ran it: margins, deferred weights 1/n,"
            " deferred utility, repulsion on head weights"
        ),
        "RF-DLC, sections 3 and 4 and its authors' code",
        {
            **_RF_DLC,
            **_LDAM,
            "weights": "linear",
            "deferred": 0.8,
            "utility_weights": "columns",
        },
    ),
    "rf-dlc": Method(
        (
            "our default: the prior inside the likelihood, mixup, repulsion;"
            " calibrated, then decided by expected utility"
        ),
        "RF-DLC with the target prior in the likelihood (docs/training.md)",
        {
            **_RF_DLC,
            "prior_tau": (1.0,),
            "mixup": 0.4,
            "calibration": "prior-corrected-temperature",
        },
        mixes=True,
    ),
    "rf-dlc-strong": Method(
        "rf-dlc for images, trained longer on stronger augmentation",
        "rf-dlc with RandAugment and Cutout",
        {
            **_RF_DLC,
            "prior_tau": (1.0,),
            "mixup": 0.1,
            "weight_decay": 1e-3,
            "epochs": 400,
            "augment": "crop-randaugment",
            "magnitude": 1.0,
            "cutout": 0.5,
            "combine": "mean-logits",
            "calibration": "prior-corrected-temperature",
        },
    ),
}


def find_method(name: str, run: Path | None = None) -> Method:
    """The method of this name, which a `run` may have been trained with."""
    fix = (
        "in Python, register it in rfdlc.methods.METHODS, then call rfdlc.resume(...)"
        " or rfdlc.Model.load(...)"
    )
    own = (
        f"{run}: its method {name!r} is not one of rfdlc, and a run folder holds the"
        " name of a method, not its code"
    )
    if run is not None and name not in METHODS:
        raise InputError(f"{own}: {register_first(run)}; {fix}")
    return METHODS[choose_registered("method", name, METHODS)]


def resolve(
    method: str,
    data_name: str,
    overrides: Mapping[str, Any],
    kind: str = "",
    samples: int = 0,
) -> tuple[Method, TrainConfig]:
    """The method and its configuration: defaults, then the method's, then the data
    set's preset, then the user's.

    `kind` (images, features or table) and number of training `samples` say what suits
    data without a preset of their own. A method that `mixes` trains a table as a
    mixture with trees.
    """
    row, pretrained = (
        find_method(method),
        str(overrides.get("pretrained", "none")).lower() not in ("none", "false"),
    )
    found = preset(overrides.get("preset", "auto"), method, data_name, kind, pretrained)
    found |= found.pop("heads", {}).get(overrides.get("head", found.get("head")), {})
    sized = _sized(found["preset"], samples)
    mixes = (
        found["preset"] == "table"
        and row.mixes
        and overrides.get("backbone", "mixture") in TABULAR
    )
    suited = MIXED if mixes else {}
    if (
        overrides.get("backbone") == "cnn"
    ):  # it learns in few steps, which mixup slows down
        suited = ({} if {*SMALL_CNN} & {*overrides} else SMALL_CNN) | (
            {"mixup": 0.0} if row.mixes else {}
        )
    uniform = "uniform" in (overrides.get("target_prior"), found.get("target_prior"))
    if found["preset"] == "features" and uniform and "calibration" in found:
        found[
            "calibration"
        ] = (  # biases are noise where rare classes count alike and have one sample
            "temperature"
        )
    config = row.configure(
        {**sized, **found, **suited, **overrides, "preset": found["preset"]}
    )
    own = (
        "warmup" in overrides or config.backbone in TABULAR
    )  # otherwise most epochs are to have the full rate
    return row, (
        config
        if own
        else config.replace(warmup=min(config.warmup, math.ceil(config.epochs / 3)))
    )


def _sized(preset: str, samples: int) -> dict[str, int]:
    """Batches of about an eighth of the rows, so that an epoch has several steps;
    enough epochs to train heads.
    """
    if preset not in (*ROWS, "finetune") or not samples:
        return {}
    folds = {
        "calibration_folds": FOLDS if samples <= MOST_FOLDED else 1
    }  # a tenth is enough of many samples
    if preset == "finetune":
        return folds
    batch = min(ROWS[preset][1], max(ROWS[preset][0], 2 ** int(math.log2(samples / 8))))
    heads = {"epochs": max(10, math.ceil(FEWEST_STEPS * batch / samples))}
    return {"batch_size": batch, **(heads | folds if preset == "features" else {})}
