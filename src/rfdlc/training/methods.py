"""METHODS: a method is data. What it minimises, with which particles, stages, combination and decision.

Most methods share one loss, the integrated gain, whose terms the settings switch on.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rfdlc.decide.classes import Classes
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError, choose, listing
from rfdlc.training import factories
from rfdlc.training.config import TrainConfig, preset
from rfdlc.training.factories import CombinationFactory, LossFactory, Matrix, carried_prior, integrated_gain
from rfdlc.training.losses.experts import NestedExperts, Routing, SelfDistillation
from rfdlc.training.networks.combinations import Evidential, GroupMean, nested_groups
from rfdlc.training.networks.particles import ParticleNet
from rfdlc.training.optimisation import normalise_head


@dataclass(frozen=True)
class Option:
    """A number of a method that users may set like a setting: `rfdlc train DATA --method ride diversity=0.1`.

    Parameters
    ----------
    default
        Its value unless it is set. An option with an integer default takes integers.
    help
        What it means, as `rfdlc methods` shows it.
    low, high
        The range, ends included.
    """

    default: float
    help: str
    low: float = 0.0
    high: float = math.inf

    def parse(self, name: str, value: Any) -> float:
        """The value as a number within the range; text is parsed."""
        try:
            number = type(self.default)(value)
            if not self.low <= number <= self.high or number != float(value) or math.isinf(number):
                raise ValueError
            return number
        except (TypeError, ValueError, OverflowError):
            kind = "an integer" if isinstance(self.default, int) else "a number"
            bounds = f"at least {self.low:g}" + (f" and at most {self.high:g}" if self.high < math.inf else "")
            raise InputError(f"method option {name}={value!r} is not possible: expected {kind}, {bounds}") from None


@dataclass(frozen=True)
class Stage:
    """A stage of a training. Checkpoints are written and resumed in any stage.

    A number may be given as the name of an `Option` of the method.

    Parameters
    ----------
    epochs
        Number of epochs; by default that of the configuration.
    trains
        `"all"` layers, the `"head"`, or the `"router"` of the combination. Frozen layers keep their batch-norm
        statistics.
    settings
        Settings that differ in this stage.
    learning_rate_factor
        Factor of the learning rate.
    loss
        By default the loss of the method.
    reinitialize_head
        Whether heads start from new weights.
    weight_averaging
        Whether weights are replaced by their mean over the last quarter of the epochs when the stage ends (SWA).
    swag_samples
        Number of networks that are sampled around the mean of an earlier stage (SWAG, diagonal covariance) and whose
        logits the loss sees after those of the network itself.
    finalize
        Called with the network and the configuration when the stage ends.
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

    def number(self, name: Literal["epochs", "learning_rate_factor", "swag_samples"], config: TrainConfig) -> Any:
        """A number of this stage, read from the method's options where it names one."""
        value = getattr(self, name)
        return config.method_options[value] if isinstance(value, str) else value


@dataclass(frozen=True)
class Method:
    """A way to train, by name in `METHODS`.

    Parameters
    ----------
    summary, reference
        What it does and whose it is, as `rfdlc methods` shows them.
    settings
        Its defaults of settings. Presets of data sets and users override them.
    options
        Numbers that only this method has, by name. `config.method_options[name]` is the value.
    prior
        From the configuration and the classes to the class prior that the trained probabilities carry, so that a
        Decider never corrects it twice.
    loss
        From the configuration, the classes and the matrix of the training utility (or None) to a loss: a function of
        logits (M,B,C), targets (B,) and the epoch that returns one value per sample.
    stages
        The stages in order.
    combination
        How particles are combined inside the network; by default they are not, and a Decider averages them.
    utility, rule, target_prior
        Those of the Decider that a training leaves behind. Any other utility can follow.

    Examples
    --------
    >>> from rfdlc.methods import METHODS
    >>> METHODS["crt"].reference
    'Kang et al. 2020'
    >>> [stage.trains for stage in METHODS["crt"].stages]
    ['all', 'head']
    """

    summary: str
    reference: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    prior: Callable[[TrainConfig, Classes], Matrix] = carried_prior
    loss: LossFactory = integrated_gain
    stages: tuple[Stage, ...] = (Stage(),)
    combination: CombinationFactory = factories.as_they_are
    utility: Callable[[Classes], Utility] = Utility.one_hot
    rule: str = "expected-utility"
    target_prior: str | None = None
    options: Mapping[str, Option] = field(default_factory=dict)

    def configure(self, values: Mapping[str, Any]) -> TrainConfig:
        """A configuration from settings, among which there may be options of this method."""
        given = {**values.get("method_options", {}), **{k: v for k, v in values.items() if k in self.options}}
        others = {name for method in METHODS.values() for name in method.options} - set(self.options)
        foreign = [name for name in (*values, *given) if name in others or (name in given and name not in self.options)]
        for name in foreign:
            raise InputError(
                f"{name} is not an option of this method: expected one of {listing(self.options, 20) or 'no options'}; "
                "`rfdlc methods` lists the options of all methods"
            )
        defaults = {name: option.default for name, option in self.options.items()}
        options = {name: self.options[name].parse(name, value) for name, value in {**defaults, **given}.items()}
        settings = {name: value for name, value in values.items() if name not in self.options}
        return TrainConfig(**{**settings, "method_options": options})

    def stage_epochs(self, config: TrainConfig) -> list[int]:
        """Epochs of every stage."""
        return [config.epochs if stage.epochs is None else stage.number("epochs", config) for stage in self.stages]

    def relative_cost(self, epochs: int = 200) -> float:
        """Work of a training of so many epochs, in trainings of one network: frozen layers have no backward pass."""
        config = self.configure({**self.settings, "epochs": epochs})
        passes = [
            (3 if stage.trains == "all" else 1) * (1 + stage.number("swag_samples", config)) for stage in self.stages
        ]
        work = sum(length * each for length, each in zip(self.stage_epochs(config), passes, strict=True))
        return float(config.particles * work / (3 * epochs))


# The paper's protocol: steps x 0.01 after 80% and 90% of the epochs (audited); a linear head unless margins are used.
_PLAIN = {"head": "linear", "schedule": "step"}
_EFFECTIVE = {"weights": "effective", "weight_beta": 0.9999}
_CB = {**_PLAIN, **_EFFECTIVE}
_LDAM = {"margin": 0.5, "schedule": "step", "keep": (0.8,)}  # kept for forks: `ldam-drw` is the same until then
_LDAM_DRW = {**_LDAM, **_EFFECTIVE, "deferred": 0.8}
_THREE = {"particles": 3, "combine": "mean-logits"}
_RF_DLC = {**_THREE, "shared_stages": 1, "repulsion": "head"}
_BALANCED = {
    "sampling": "balanced", "schedule": "cosine", "warmup": 0, "mixup": 0.0, "cutmix": 0.0, "repulsion": "none",
}  # fmt: skip
# Constants of other people's methods; docs/methods.md says where they are from and what differs.
_HEAD_EPOCHS = {"head_epochs": Option(10, "epochs of the second stage, which trains a new head", low=1)}
_NEW_HEAD = Stage(epochs="head_epochs", trains="head", settings=_BALANCED, reinitialize_head=True)
_TEMPERATURE_SHARE = Option(0.05, "share of the class frequency in the late temperatures of the divergence", high=1)

METHODS: dict[str, Method] = {
    # one network, one stage
    "ce": Method("cross-entropy, one network", "the plain baseline", _PLAIN),
    "ce-balanced": Method(
        "cross-entropy, every class drawn equally often", "Kang et al. 2020", {**_PLAIN, "sampling": "balanced"}
    ),
    "mixup": Method("cross-entropy on mixed pairs of samples", "Zhang et al. 2018", {**_PLAIN, "mixup": 1.0}),
    "focal": Method("hard samples weigh more", "Lin et al. 2017", {**_PLAIN, "focal": 1.0}),
    "cb": Method("weights by the effective number of samples", "Cui et al. 2019", _CB),
    "cb-focal": Method("focal loss weighted by the effective number", "Cui et al. 2019", {**_CB, "focal": 1.0}),
    "ldam": Method("larger margins for rarer classes", "Cao et al. 2019", _LDAM),
    "ldam-drw": Method("LDAM, class weights late in the training", "Cao et al. 2019", _LDAM_DRW),
    "la": Method("the prior inside the likelihood", "Menon et al. 2021", {**_PLAIN, "prior_tau": (1.0,)}),
    "balanced-softmax": Method(
        "counts inside the softmax: LA with tau 1", "Ren et al. 2020", {**_PLAIN, "prior_tau": (1.0,)}
    ),
    # plain training, another decision
    "la-posthoc": Method(
        "cross-entropy; the prior is divided out afterwards", "Menon et al. 2021", _PLAIN, target_prior="uniform"
    ),
    "elkan": Method("cross-entropy, then least expected cost", "Elkan 2001", _PLAIN, utility=Utility.tail_sensitive),
    "reweighted-elkan": Method(
        "class-balanced weights, then least expected cost", "Elkan 2001 after Cui et al. 2019", _CB,
        utility=Utility.tail_sensitive,
    ),
    "cobb": Method(
        "cross-entropy, then the largest log expected gain", "Cobb et al. 2018", _PLAIN,
        utility=Utility.tail_sensitive, rule="cobb",
    ),
    "tau-norm": Method(
        "cross-entropy, then class weights of more equal length", "Kang et al. 2020", _PLAIN,
        prior=factories.uniform,
        stages=(Stage(finalize=lambda net, config: normalise_head(net, config.method_options["tau"])),),
        options={"tau": Option(1.0, "exponent of the length by which class weights are divided", high=2)},
    ),
    # two stages
    "crt": Method(
        "cross-entropy, then a new head on balanced samples", "Kang et al. 2020", _PLAIN,
        prior=factories.uniform, stages=(Stage(), _NEW_HEAD), options=_HEAD_EPOCHS,
    ),
    "srepr": Method(
        "mean weights of the last epochs, then a new head on stochastic representations", "Nam et al. 2023",
        {**_PLAIN, "schedule": "swa"},
        prior=factories.uniform,
        stages=(
            Stage(weight_averaging=True),
            replace(
                _NEW_HEAD, swag_samples="swag_samples",
                loss=lambda config, classes, utility: SelfDistillation(
                    config.particles, config.method_options["distillation"]
                ),
            ),
        ),
        options={
            **_HEAD_EPOCHS,
            "swag_samples": Option(5, "networks sampled around the mean weights", low=1),
            "distillation": Option(1.0, "factor of the divergence from the mean prediction of the samples"),
        },
    ),
    # experts
    "ride": Method(
        "diverse experts, then a router that asks as many as a sample needs", "Wang et al. 2021",
        {**_LDAM_DRW, **_THREE, "shared_stages": 2},
        loss=factories.diverse_experts,
        stages=(
            Stage(),
            Stage(
                epochs="router_epochs", trains="router", settings=_BALANCED,
                learning_rate_factor="router_learning_rate_factor",
                loss=lambda config, classes, utility: Routing(config.method_options["router_positive_weight"]),
            ),
        ),
        combination=factories.routed,
        options={
            "diversity": Option(0.2, "factor of the divergence between experts"),
            "temperature_share": _TEMPERATURE_SHARE,
            "router_epochs": Option(5, "epochs of the second stage, which trains the router", low=1),
            "router_learning_rate_factor": Option(0.1, "factor of the learning rate in the second stage"),
            "router_positive_weight": Option(100.0, "weight of samples that a later expert would get right"),
            "router_choices": Option(30, "largest mean logits that the router sees", low=1),
            "router_hidden": Option(16, "hidden units of the router", low=1),
        },
    ),
    "tlc": Method(
        "evidential experts, engaged while a sample is uncertain", "Li et al. 2022",
        {**_LDAM_DRW, **_THREE, "shared_stages": 1},
        loss=factories.evidential_experts,
        combination=lambda config, classes, runs, width: Evidential(config.method_options["eta"]),
        options={
            "diversity": Option(0.01, "factor of the divergence between experts"),
            "temperature_share": _TEMPERATURE_SHARE,
            "divergence": Option(
                0.05, "factor of the Dirichlet divergence: epoch * divergence / (late + annealing)", low=1e-9
            ),
            "annealing": Option(500.0, "epochs added to the late epoch in that factor", low=1),
            "threshold": Option(0.54, "an expert is engaged above this share of the largest uncertainty", high=1),
            "eta": Option(0.2, "temperature of the weights of experts in the prediction", low=1e-6),
        },
    ),
    "ace": Method(
        "experts on nested groups of classes", "Cai et al. 2021",
        {**_THREE, "shared_stages": 2, "schedule": "step"},
        loss=lambda config, classes, utility: NestedExperts(
            nested_groups(classes, config.particles), config.method_options["silence"]
        ),
        combination=lambda config, classes, runs, width: GroupMean(nested_groups(classes, config.particles)),
        options={"silence": Option(1.0, "factor of squared logits of classes outside an expert's group")},
    ),
    # ensembles
    "ensemble-cb": Method("three independent CB networks", "the paper's ablation", {**_CB, **_THREE}),
    "ensemble-ldam": Method("three independent LDAM-DRW networks", "the paper's ablation", {**_LDAM_DRW, **_THREE}),
    "repulsive-predictions": Method(
        "the prior inside the likelihood; particles repelled in their predictions", "D'Angelo and Fortuin 2021",
        {**_RF_DLC, "prior_tau": (1.0,), "repulsion": "predictions", "repulsion_strength": 0.1},
    ),
    "rf-dlc-paper": Method(
        "the paper as its authors ran it: margins, deferred weights 1/n, deferred utility, repulsion on head weights",
        "RF-DLC, sections 3 and 4 and its authors' code",
        {**_RF_DLC, **_LDAM, "weights": "linear", "deferred": 0.8, "utility_weights": "columns"},
    ),
    "rf-dlc": Method(
        "our default: the prior inside the likelihood, mixup, repulsion; calibrated, then decided by expected utility",
        "RF-DLC with the target prior in the likelihood (docs/learn.md)",
        {**_RF_DLC, "prior_tau": (1.0,), "mixup": 0.4, "calibration": "prior-corrected-temperature"},
    ),
}  # fmt: skip


def find_method(name: str) -> Method:
    """The method of this name."""
    choose("method", name, METHODS)
    return METHODS[name]


def resolve(
    method: str, data_name: str, overrides: Mapping[str, Any], kind: str = "", samples: int = 0
) -> tuple[Method, TrainConfig]:
    """The method and its configuration: defaults, then the method's, then the data set's preset, then the user's.

    `kind` and number of training `samples` say what suits data without a preset of their own.
    """
    row = find_method(method)
    sized = {"batch_size": table_batch(samples)} if kind == "features" and samples else {}
    return row, row.configure({**row.settings, **sized, **preset(data_name, method, kind), **overrides})


def table_batch(samples: int) -> int:
    """Rows per step: an eighth of a small table, so that an epoch has several steps; large ones for large tables.

    >>> [table_batch(n) for n in (100, 1000, 10_000, 100_000)]
    [64, 64, 1024, 1024]
    """
    return min(1024, max(64, 2 ** int(math.log2(max(1, samples / 8)))))
