"""METHODS: a method is a row. What it optimises, with which particles, stages, combination and decision.

A row's `settings` are its defaults; any of them can be overridden. Most rows share one loss, the integrated gain,
whose parts the settings switch on. A method of your own is a row too: `METHODS["mine"] = Method(...)`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rfdlc.decide.classes import Classes
from rfdlc.decide.utility import Utility
from rfdlc.errors import choose
from rfdlc.training import factories
from rfdlc.training.config import TrainConfig, preset
from rfdlc.training.factories import CombinationFactory, LossFactory, Matrix, carried_prior, integrated_gain
from rfdlc.training.networks.particles import ParticleNet


@dataclass(frozen=True)
class Stage:
    """A stage of a training."""

    epochs: int | None = None
    trains: Literal["all", "head", "router"] = "all"
    settings: Mapping[str, Any] = field(default_factory=dict)
    learning_rate_factor: float = 1.0
    loss: LossFactory | None = None
    reinitialize_head: bool = False
    weight_averaging: bool = False
    swag_samples: int = 0
    finalize: Callable[[ParticleNet, TrainConfig], None] | None = None


@dataclass(frozen=True)
class Method:
    """One row.

    - `prior` gives the class prior of the trained probabilities: a Decider never corrects it twice. `target_prior`
      is the one decided for, where that is part of the method.
    - `combination` joins particles inside the network; by default a Decider averages them.
    - `utility` and `rule` are those of the Decider that a training leaves behind; any other utility can follow.
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

    def stage_epochs(self, settings: TrainConfig) -> list[int]:
        """Epochs of every stage."""
        return [settings.epochs if stage.epochs is None else stage.epochs for stage in self.stages]

    def relative_cost(self, epochs: int = 200) -> float:
        """Work of a training of so many epochs, in trainings of one network: frozen layers have no backward pass."""
        settings = TrainConfig(**{**self.settings, "epochs": epochs})
        passes = [3 if stage.trains == "all" else 1 for stage in self.stages]
        stages = zip(self.stages, self.stage_epochs(settings), passes, strict=True)
        work = sum(length * each * (1 + stage.swag_samples) for stage, length, each in stages)
        return settings.particles * work / (3 * epochs)


# The paper's protocol: steps x 0.01 after 80% and 90% of the epochs (audited); a linear head unless margins are used.
_PLAIN = {"head": "linear", "schedule": "step"}
_EFFECTIVE = {"weights": "effective", "weight_beta": 0.9999}
_LDAM = {"margin": 0.5, "schedule": "step", "keep": (0.8,)}  # kept for forks: `ldam-drw` is the same until then
_LDAM_DRW = {**_LDAM, **_EFFECTIVE, "deferred": 0.8}
_EXPERTS = {**_LDAM_DRW, "particles": 3, "combine": "mean-logits"}
_THREE = {"particles": 3, "shared_stages": 0, "combine": "mean-logits"}
_BALANCED = {
    "sampling": "balanced", "schedule": "cosine", "warmup": 0, "mixup": 0.0, "cutmix": 0.0, "repulsion": "none",
}  # fmt: skip

METHODS: dict[str, Method] = {
    # one network, one stage
    "ce": Method("cross-entropy, one network", "the plain baseline", _PLAIN),
    "ce-balanced": Method(
        "cross-entropy, every class drawn equally often", "Kang et al. 2020", {**_PLAIN, "sampling": "balanced"}
    ),
    "mixup": Method("cross-entropy on mixed pairs of samples", "Zhang et al. 2018", {**_PLAIN, "mixup": 1.0}),
    "focal": Method("hard samples weigh more", "Lin et al. 2017", {**_PLAIN, "focal": 1.0}),
    "cb": Method("weights by the effective number of samples", "Cui et al. 2019", {**_PLAIN, **_EFFECTIVE}),
    "cb-focal": Method(
        "focal loss weighted by the effective number", "Cui et al. 2019", {**_PLAIN, **_EFFECTIVE, "focal": 1.0}
    ),
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
        "class-balanced weights, then least expected cost",
        "Elkan 2001 after Cui et al. 2019",
        {**_PLAIN, **_EFFECTIVE},
        utility=Utility.tail_sensitive,
    ),
    "cobb": Method(
        "cross-entropy, then the largest log expected gain",
        "Cobb et al. 2018",
        _PLAIN,
        utility=Utility.tail_sensitive,
        rule="cobb",
    ),
    "tau-norm": Method(
        "cross-entropy, then class weights of more equal length",
        "Kang et al. 2020",
        _PLAIN,
        prior=factories.uniform,
        stages=(Stage(finalize=factories.equal_lengths),),
    ),
    # two stages
    "crt": Method(
        "cross-entropy, then a new head on balanced samples",
        "Kang et al. 2020",
        _PLAIN,
        prior=factories.uniform,
        stages=(Stage(), Stage(epochs=10, trains="head", settings=_BALANCED, reinitialize_head=True)),
    ),
    "srepr": Method(
        "mean weights of the last epochs, then a new head on stochastic representations",
        "Nam et al. 2023",
        {**_PLAIN, "schedule": "swa"},
        prior=factories.uniform,
        stages=(
            Stage(weight_averaging=True),
            Stage(
                epochs=10,
                trains="head",
                settings=_BALANCED,
                loss=factories.self_distillation,
                reinitialize_head=True,
                swag_samples=5,
            ),
        ),
    ),
    # experts
    "ride": Method(
        "diverse experts, then a router that asks as many as a sample needs",
        "Wang et al. 2021",
        {**_EXPERTS, "shared_stages": 2},
        loss=factories.diverse_experts,
        stages=(
            Stage(),
            Stage(epochs=5, trains="router", settings=_BALANCED, learning_rate_factor=0.1, loss=factories.routing),
        ),
        combination=factories.routed,
    ),
    "tlc": Method(
        "evidential experts, engaged while a sample is uncertain",
        "Li et al. 2022",
        {**_EXPERTS, "shared_stages": 1},
        loss=factories.evidential_experts,
        combination=factories.evidential,
    ),
    "ace": Method(
        "experts on nested groups of classes",
        "Cai et al. 2021",
        {"particles": 3, "shared_stages": 2, "schedule": "step", "combine": "mean-logits"},
        loss=factories.nested_experts,
        combination=factories.group_mean,
    ),
    # ensembles
    "ensemble-cb": Method("three independent CB networks", "the paper's ablation", {**_PLAIN, **_EFFECTIVE, **_THREE}),
    "ensemble-ldam": Method("three independent LDAM-DRW networks", "the paper's ablation", {**_LDAM_DRW, **_THREE}),
    "repulsive-predictions": Method(
        "the prior inside the likelihood; particles repelled in their predictions",
        "D'Angelo and Fortuin 2021",
        {
            "particles": 3,
            "shared_stages": 1,
            "prior_tau": (1.0,),
            "repulsion": "predictions",
            "repulsion_strength": 0.1,
            "combine": "mean-logits",
        },
    ),
    "rf-dlc-paper": Method(
        "the paper as its authors ran it: margins, deferred weights 1/n, deferred utility, repulsion on head weights",
        "RF-DLC, sections 3 and 4 and its authors' code",
        settings={
            "particles": 3,
            "shared_stages": 1,
            "weights": "linear",
            "margin": 0.5,
            "deferred": 0.8,
            "utility_weights": "columns",
            "repulsion": "head",
            "schedule": "step",
            "combine": "mean-logits",
            "keep": (0.8,),
        },
    ),
    "rf-dlc": Method(
        "our default: the prior inside the likelihood, mixup, repulsion; calibrated, then decided by expected utility",
        "RF-DLC with the target prior in the likelihood (docs/learn.md)",
        settings={
            "particles": 3,
            "shared_stages": 1,
            "prior_tau": (1.0,),
            "mixup": 0.4,
            "repulsion": "head",
            "schedule": "cosine",
            "combine": "mean-logits",
            "calibration": "prior-corrected-temperature",
        },
    ),
}


def find_method(name: str) -> Method:
    """The row of this name."""
    choose("method", name, METHODS)
    return METHODS[name]


def resolve(
    method: str, data_name: str, overrides: Mapping[str, Any], kind: str = "", samples: int = 0
) -> tuple[Method, TrainConfig]:
    """The row and the settings: defaults, then the row's, then the data set's preset, then the user's.

    `kind` and number of training `samples` say what suits data without a preset of their own.
    """
    row = find_method(method)
    sized = {"batch_size": table_batch(samples)} if kind == "features" and samples else {}
    return row, TrainConfig(**{**row.settings, **sized, **preset(data_name, method, kind), **overrides})


def table_batch(samples: int) -> int:
    """Rows a step: an eighth of a small table, so that it has some steps an epoch; large ones for large tables.

    >>> [table_batch(n) for n in (100, 1000, 10_000, 100_000)]
    [64, 64, 1024, 1024]
    """
    return min(1024, max(64, 2 ** int(math.log2(max(1, samples / 8)))))
