"""The settings of a training, declared in groups, and what each of them means.

A new setting is its declaration here and the line that uses it: what resuming, forks,
stacks and comparisons need to know of it says its `Setting`, which they ask for by
`settings_where`.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat

from rfdlc.data.augment import AUGMENTATIONS
from rfdlc.data.loader import SAMPLINGS
from rfdlc.probabilities.calibrators import CALIBRATORS
from rfdlc.probabilities.model import COMBINATIONS
from rfdlc.training.distributed import PARALLEL
from rfdlc.training.losses.terms import REPULSIONS, WEIGHT_FORMS
from rfdlc.training.networks.backbones import BACKBONES
from rfdlc.training.networks.particles import EXECUTIONS, HEADS
from rfdlc.training.optimisation import OPTIMISERS, SCHEDULES

SINKS = ("tensorboard", "mlflow", "wandb")
TABULAR = ("mixture", "trees")  # backbones of tables, that are not networks alone

Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class Setting:
    """What a setting means, beside its type, its range and its default.

    Parameters
    ----------
    description
        One line for users.
    choices
        The names that it may have, in collections; registries may grow.
    short
        Another name of it; who writes that is told this one.
    starts_network
        It chooses the network and the weights that a training starts from. Runs that
        differ in it are trained in calls of their own, and a fork cannot change it.
    fixed_in_forks
        A fork cannot change it either, as the checkpoint depends on it.
    in_stacks
        Of runs that train as one stack: it is `"shared"` by all, or a run's `"own"`. If
        it is `"deferred"`, it is a run's own and matters after the deferred epoch only;
        if it is `"unlearned"`, it is a run's own and changes nothing that a network
        learns.
    may_change_on_resume
        It may change between the calls that train a run, and no model depends on it.
    only_when_written
        It says when files are written, and no model depends on it.
    own_per_process
        Each process of a training may have a value of its own.
    networks_only
        Who changes it is told that trees have no use for it.
    in_model_card
        The card of an exported model shows it.
    asks_for_trials
        Its default is that there are no trials before the training.
    decides_time
        Who chooses it has said how long a training may take.
    decides_defaults
        The defaults of other settings depend on it.
    """

    description: str
    choices: tuple[Collection[str], ...] = ()
    short: str = ""
    starts_network: bool = False
    fixed_in_forks: bool = False
    in_stacks: Literal["shared", "own", "deferred", "unlearned"] = "shared"
    may_change_on_resume: bool = False
    only_when_written: bool = False
    own_per_process: bool = False
    networks_only: bool = False
    in_model_card: bool = False
    asks_for_trials: bool = False
    decides_time: bool = False
    decides_defaults: bool = False


class SettingGroup(BaseModel):
    """Settings that belong together. The first line of its docstring is shown."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class NetworkSettings(SettingGroup):
    """The network, and what it starts from."""

    backbone: Annotated[
        str,
        Setting(
            "network, timm:NAME or package.module:function; auto: by the data; tables:"
            " trees, mixture",
            choices=(("auto", "timm:NAME", "own", *TABULAR), BACKBONES),
            starts_network=True,
            in_model_card=True,
            decides_time=True,
            decides_defaults=True,
        ),
    ] = "auto"
    backbone_options: Annotated[
        dict[str, Any],
        Setting(
            "further arguments of a timm network: backbone.KEY=VALUE",
            starts_network=True,
        ),
    ] = {}
    pretrained: Annotated[
        str,
        Setting(
            "weights to start from: none, a safetensors file, or hub (timm's)",
            starts_network=True,
        ),
    ] = "none"
    image_size: Annotated[
        int,
        Field(ge=0),
        Setting(
            "side of the images that the network sees; 0: timm's, or as they are",
            starts_network=True,
        ),
    ] = 0
    lora: Annotated[
        int,
        Field(ge=0),
        Setting(
            "rank of the updates (LoRA) that alone are trained in a transformer, or 0",
            fixed_in_forks=True,
        ),
    ] = 0
    interpolation: Annotated[
        str,
        Setting(
            "how images are resized: bilinear or bicubic; auto: timm's",
            choices=(("auto", "bilinear", "bicubic"),),
            starts_network=True,
        ),
    ] = "auto"
    widths: Annotated[
        tuple[Annotated[int, Field(ge=1, le=2**15)], ...],
        Field(max_length=32),
        Setting(
            "hidden widths of an mlp; empty for none",
            fixed_in_forks=True,
            networks_only=True,
        ),
    ] = (256, 256)
    whiten: Annotated[
        float,
        Field(ge=0, lt=1),
        Setting(
            "share of the covariance within classes in an mlp's whitening",
            fixed_in_forks=True,
        ),
    ] = 0.0
    head: Annotated[
        str,
        Setting(
            "cosine (of features and weights), linear, or mixed: both in turn",
            choices=(HEADS,),
            fixed_in_forks=True,
            networks_only=True,
            decides_defaults=True,
        ),
    ] = "cosine"
    head_scale: Annotated[
        float,
        Field(ge=1e-3),
        Setting("scale of cosine heads' logits; mixed: half for linear ones"),
    ] = 30.0
    head_init: Annotated[
        str,
        Setting(
            "random, or class-means of the first features",
            choices=(("random", "class-means"),),
        ),
    ] = "random"
    dropout: Annotated[
        float,
        Field(ge=0, lt=1),
        Setting("share of the features before the head dropped in training"),
    ] = 0.0


class LossSettings(SettingGroup):
    """What a network is trained for."""

    weights: Annotated[
        str,
        Setting(
            "class weights 1/f(n): the form of f",
            choices=(WEIGHT_FORMS,),
            in_stacks="deferred",
            networks_only=True,
            in_model_card=True,
        ),
    ] = "constant"
    trained_prior: Annotated[
        tuple[NonNegativeFloat, ...],
        Setting("class prior to train for; empty for uniform", in_stacks="own"),
    ] = ()
    weight_power: Annotated[
        float,
        Field(ge=0),
        Setting("exponent of f(n) = n^power", in_stacks="deferred"),
    ] = 0.5
    weight_beta: Annotated[
        Share,
        Setting("beta of the effective number", in_stacks="deferred"),
    ] = 0.9999
    margin: Annotated[
        float,
        Field(ge=0),
        Setting("largest LDAM margin, 0 for none", in_stacks="own"),
    ] = 0.0
    focal: Annotated[
        float,
        Field(ge=0),
        Setting("exponent of the focal loss, 0 for none", in_stacks="own"),
    ] = 0.0
    prior_tau: Annotated[
        tuple[float, ...],
        Setting(
            "tau of the likelihood's prior: none, one or one per particle",
            in_stacks="own",
            networks_only=True,
            in_model_card=True,
        ),
    ] = ()
    deferred: Annotated[
        Share,
        Setting(
            "class weights and the utility term start after this share of the epochs",
            in_stacks="deferred",
        ),
    ] = 0.0
    utility: Annotated[
        str,
        Setting(
            "utility to train with: none, one-hot, tail-sensitive[-by-rank], or a CSV",
            in_stacks="deferred",
            in_model_card=True,
        ),
    ] = "none"
    penalty: Annotated[
        float,
        Field(le=0),
        Setting(
            "value of a tail sample decided as a head class (tail-sensitive)",
            in_stacks="deferred",
        ),
    ] = -1.0
    utility_form: Annotated[
        str,
        Setting(
            "row: U[y,c] log p(c); bounded: U[y,c] p(c); column: U[c,y] log p(c)",
            choices=(("row", "bounded", "column"),),
            in_stacks="deferred",
        ),
    ] = "row"
    utility_weights: Annotated[
        str,
        Setting(
            "by the class of samples, of columns (the authors'), or none",
            choices=(("samples", "columns", "none"),),
            in_stacks="deferred",
        ),
    ] = "samples"
    alpha: Annotated[
        float,
        Field(ge=1e-9),
        Setting("the utility term is divided by alpha", in_stacks="deferred"),
    ] = 1.0


class EnsembleSettings(SettingGroup):
    """The particles, what they share, and how they affect each other."""

    particles: Annotated[
        int,
        Field(ge=1, le=64),
        Setting(
            "number of particles M of the ensemble",
            fixed_in_forks=True,
            networks_only=True,
        ),
    ] = 1
    shared_stages: Annotated[
        int,
        Field(ge=0),
        Setting(
            "number of first stages of the backbone that the particles share",
            fixed_in_forks=True,
        ),
    ] = 0
    repulsion: Annotated[
        str,
        Setting(
            "what repels the particles",
            choices=(("none",), REPULSIONS),
            in_stacks="own",
            in_model_card=True,
        ),
    ] = "none"
    repulsion_tau: Annotated[
        float,
        Field(ge=1e-9),
        Setting("number of epochs over which the repulsion fades", in_stacks="own"),
    ] = 40.0
    repulsion_strength: Annotated[
        float,
        Field(ge=0),
        Setting("factor of the repulsion", in_stacks="own"),
    ] = 1.0
    consistency: Annotated[
        float,
        Field(ge=0),
        Setting("factor of a particle's right predictions of a weaker view"),
    ] = 0.0
    consistency_ramp: Annotated[
        Share,
        Setting("share of the epochs over which the factor rises"),
    ] = 0.5


class OptimiserSettings(SettingGroup):
    """Batches, and how a step changes the weights."""

    batch_size: Annotated[
        int,
        Field(ge=1),
        Setting(
            "size of the global batch: samples per step, of all processes",
            short="bs",
            networks_only=True,
        ),
    ] = 128
    accumulate: Annotated[
        int,
        Field(ge=1),
        Setting("micro-batches per step and process, to save memory"),
    ] = 1
    optimiser: Annotated[
        str,
        Setting(
            "sgd (Nesterov) or adamw",
            choices=(OPTIMISERS,),
            short="optimizer",
            fixed_in_forks=True,
            networks_only=True,
        ),
    ] = "sgd"
    learning_rate: Annotated[
        float,
        Field(ge=0),
        Setting("base learning rate", short="lr", in_stacks="own", networks_only=True),
    ] = 0.1
    backbone_rate: Annotated[
        float,
        Field(ge=0),
        Setting("factor of the learning rate of all layers but the head"),
    ] = 1.0
    layer_decay: Annotated[
        float,
        Field(gt=0, le=1),
        Setting("another factor per stage, from the last to the first"),
    ] = 1.0
    momentum: Annotated[
        Share,
        Setting("momentum of sgd"),
    ] = 0.9
    weight_decay: Annotated[
        float,
        Field(ge=0),
        Setting(
            "L2 decay of every weight", short="wd", in_stacks="own", networks_only=True
        ),
    ] = 5e-4
    clip: Annotated[
        float,
        Field(ge=0),
        Setting("largest gradient norm, 0 for no clipping"),
    ] = 0.0
    average: Annotated[
        Share,
        Setting("decay of an exponential moving average of the weights, 0 for none"),
    ] = 0.0


class ScheduleSettings(SettingGroup):
    """How long a training is, and the learning rate in its course."""

    epochs: Annotated[
        int,
        Field(ge=1),
        Setting(
            "passes over the training data",
            networks_only=True,
            in_model_card=True,
            decides_time=True,
            decides_defaults=True,
        ),
    ] = 100
    schedule: Annotated[
        str,
        Setting(
            "learning-rate schedule",
            choices=(SCHEDULES,),
            in_stacks="own",
            networks_only=True,
        ),
    ] = "cosine"
    milestones: Annotated[
        tuple[Share, ...],
        Setting("shares of epochs after which a step schedule decays", in_stacks="own"),
    ] = (0.8, 0.9)
    decay: Annotated[
        Share,
        Setting("factor of a step schedule at each milestone", in_stacks="own"),
    ] = 0.01
    warmup: Annotated[
        int,
        Field(ge=0),
        Setting(
            "epochs of linear warm-up; at most a third of all, unless it is set",
            in_stacks="own",
        ),
    ] = 5
    patience: Annotated[
        int,
        Field(ge=0),
        Setting("evaluations without a lower held-out loss until it stops; 0: never"),
    ] = 0


class AugmentationSettings(SettingGroup):
    """How samples are drawn and changed, in training and for predictions."""

    sampling: Annotated[
        str,
        Setting("how samples are drawn", choices=(SAMPLINGS,), networks_only=True),
    ] = "shuffle"
    augment: Annotated[
        str,
        Setting(
            ", ".join(AUGMENTATIONS) + " of images; auto: crop",
            choices=(("auto",), AUGMENTATIONS),
            in_stacks="own",
        ),
    ] = "auto"
    magnitude: Annotated[
        Share,
        Setting("largest strength of random operations of `augment`; 0: as they have"),
    ] = 0.0
    cutout: Annotated[
        float,
        Field(ge=0),
        Setting("side of a black square in every image: pixels, or a share below 1"),
    ] = 0.0
    jitter: Annotated[
        Share,
        Setting("colour jitter of image files that are decoded while training"),
    ] = 0.0
    mixup: Annotated[
        float,
        Field(ge=0),
        Setting(
            "alpha of mixup's Beta(alpha, alpha), 0 for none",
            in_stacks="own",
            networks_only=True,
            in_model_card=True,
        ),
    ] = 0.0
    cutmix: Annotated[
        float,
        Field(ge=0),
        Setting(
            "alpha of CutMix (images), 0 for none; not together with mixup",
            in_stacks="own",
        ),
    ] = 0.0
    test_flip: Annotated[
        bool,
        Setting("predict the mean logits of an image and its mirror image"),
    ] = False
    test_shift: Annotated[
        int,
        Field(ge=0, le=16),
        Setting("and of two copies shifted by so many pixels; 0: none"),
    ] = 0


class CalibrationSettings(SettingGroup):
    """Held-out samples, trainings after them, and what decisions start from."""

    hold_out: Annotated[
        float,
        Field(ge=0, le=0.9),
        Setting(
            "share of the training data held out for calibration",
            fixed_in_forks=True,
            in_stacks="own",
        ),
    ] = 0.1
    refit: Annotated[
        bool,
        Setting(
            "train again on all samples and keep the calibration: one training more",
            fixed_in_forks=True,
            in_stacks="unlearned",
        ),
    ] = False
    refit_epochs: Annotated[
        int,
        Field(ge=0),
        Setting("epochs of a refit; 0: as many as `epochs`"),
    ] = 0
    warm_refit: Annotated[
        bool,
        Setting(
            "a refit starts from the networks trained before it, not from new ones"
        ),
    ] = False
    calibration_folds: Annotated[
        int,
        Field(ge=1, le=20),
        Setting(
            "trainings before a refit, each without a fold, that calibrate; 1: hold_out"
            " alone",
            fixed_in_forks=True,
            in_stacks="unlearned",
        ),
    ] = 1
    familiarity: Annotated[
        bool,
        Setting(
            "learn from features how far samples are from the training data",
            in_stacks="unlearned",
        ),
    ] = False
    combine: Annotated[
        str,
        Setting(
            "how particles are combined", choices=(COMBINATIONS,), in_stacks="unlearned"
        ),
    ] = "mean-probabilities"
    target_prior: Annotated[
        str,
        Setting(
            "prior to decide for: train, uniform, a=0.9,b=0.1; scores: as is",
            in_stacks="unlearned",
        ),
    ] = "train"
    calibration: Annotated[
        str,
        Setting(
            "calibrator fitted on held-out data",
            choices=(CALIBRATORS,),
            in_stacks="unlearned",
        ),
    ] = "auto"


class RunSettings(SettingGroup):
    """Where settings come from, where a run is computed, and what it writes."""

    preset: Annotated[
        str,
        Setting(
            "settings to start from: auto (by the data), none, features, table, ..."
        ),
    ] = "auto"
    method_options: Annotated[
        dict[str, int | float],
        Setting("options of the method, which `rfdlc methods` lists", in_stacks="own"),
    ] = {}
    tune: Annotated[
        str,
        Setting(
            "trials on held-out data that choose settings: off, auto, or how many at"
            " most",
            asks_for_trials=True,
        ),
    ] = "off"
    budget: Annotated[
        float,
        Field(ge=0),
        Setting(
            "seconds, or 90s, 10m, 2h, for trials and training; 0: no limit",
            asks_for_trials=True,
            decides_time=True,
        ),
    ] = 0.0
    seed: Annotated[
        int,
        Field(ge=0, le=2**31 - 1),
        Setting(
            "seed of weights, order, augmentation and mixup",
            fixed_in_forks=True,
            in_stacks="own",
        ),
    ] = 0
    evaluate_every: Annotated[
        int,
        Field(ge=0),
        Setting(
            "epochs between evaluations on held-out data, 0: only at the end",
            in_stacks="unlearned",
            only_when_written=True,
        ),
    ] = 0
    checkpoint_every: Annotated[
        int,
        Field(ge=0),
        Setting(
            "epochs between checkpoints; 0: every 30 seconds",
            in_stacks="unlearned",
            only_when_written=True,
        ),
    ] = 0
    log: Annotated[
        tuple[str, ...],
        Setting(
            "where the history goes, too: tensorboard, mlflow, wandb",
            choices=(SINKS,),
            in_stacks="unlearned",
            may_change_on_resume=True,
        ),
    ] = ()
    keep: Annotated[
        tuple[Share, ...],
        Setting(
            "shares of the epochs whose checkpoints are kept, for forks",
            in_stacks="unlearned",
            only_when_written=True,
        ),
    ] = ()
    workers: Annotated[
        int,
        Field(ge=-1),
        Setting(
            "processes that decode image files; -1: one per core",
            may_change_on_resume=True,
            own_per_process=True,
        ),
    ] = -1
    device: Annotated[
        str,
        Setting(
            "auto, cpu, cuda or cuda:N", may_change_on_resume=True, own_per_process=True
        ),
    ] = "auto"
    precision: Annotated[
        str,
        Setting(
            "auto: bf16 on a GPU that computes in it, else float32",
            choices=(("auto", "bf16", "float32"),),
        ),
    ] = "auto"
    compile: Annotated[
        bool,
        Setting(
            "compile the networks (GPU); pays off in long trainings",
            may_change_on_resume=True,
        ),
    ] = False
    execution: Annotated[
        str,
        Setting(
            "networks stacked, or separate, one after another; auto: by their width",
            choices=(EXECUTIONS,),
            may_change_on_resume=True,
        ),
    ] = "auto"
    checkpoint_activations: Annotated[
        bool,
        Setting("recompute activations to save memory; not with compile"),
    ] = False
    parallel: Annotated[
        str,
        Setting(
            "sum gradients after the backward pass (sum), during it (ddp), or fsdp",
            choices=(PARALLEL,),
            may_change_on_resume=True,
        ),
    ] = "auto"
    batch_norm: Annotated[
        str,
        Setting(
            "statistics: local to each process, or sync, of the global batch",
            choices=(("local", "sync"),),
        ),
    ] = "local"


GROUPS: dict[str, type[SettingGroup]] = {
    "network": NetworkSettings,
    "loss": LossSettings,
    "ensemble": EnsembleSettings,
    "optimiser": OptimiserSettings,
    "schedule": ScheduleSettings,
    "augmentation": AugmentationSettings,
    "calibration": CalibrationSettings,
    "run": RunSettings,
}


SETTINGS: dict[str, Setting] = {
    name: next(entry for entry in field.metadata if isinstance(entry, Setting))
    for group in GROUPS.values()
    for name, field in group.model_fields.items()
}


def settings_where(holds: Callable[[Setting], bool]) -> tuple[str, ...]:
    """The names of the settings for which this holds, as they are declared.

    Examples
    --------
    >>> settings_where(lambda setting: setting.own_per_process)
    ('workers', 'device')
    """
    return tuple(name for name, setting in SETTINGS.items() if holds(setting))
