"""What `benchmarks/learn.py` can train: every method on CIFAR100-LT and CIFAR10-LT, and
variants of our own.
"""

from dataclasses import dataclass, field
from typing import Any

from rfdlc.training.config import TrainConfig
from rfdlc.training.methods import METHODS


@dataclass(frozen=True)
class Config:
    """A training: data, method, what differs from its preset, and with whom it shares
    the first epochs.

    They are the epochs before anything deferred, or those of the whole first stage
    where it is the same.
    """

    data: str
    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    fork_of: str | None = None
    same_stage: bool = False

    def shared_epochs(self, settings: TrainConfig) -> int:
        return settings.epochs if self.same_stage else settings.deferred_epoch


_UTILITY = {"utility": "tail-sensitive-by-rank"}


def _ours(**settings: Any) -> Config:
    return Config("cifar100-lt", "rf-dlc", settings)


# Which methods train exactly as another one does until their second stage, their last
# touch or their decision.
SAME_STAGE = {
    **dict.fromkeys(("la-posthoc", "elkan", "tau-norm", "crt"), "ce"),
    "reweighted-elkan": "cb",
    "balanced-softmax": "la",
}


def _every_method(data: str, suffix: str = "") -> dict[str, Config]:
    """A configuration of every method, named after it; `rf-dlc-paper` is `paper`, with
    its own names below.
    """
    configs = {}
    for name in METHODS:
        if name not in ("rf-dlc-paper", "rf-dlc"):
            source = SAME_STAGE.get(name, {"ldam-drw": "ldam"}.get(name))
            fork_of = None if source is None else source + suffix
            configs[name + suffix] = Config(
                data, name, fork_of=fork_of, same_stage=name in SAME_STAGE
            )
    return configs


CONFIGS = {
    **_every_method("cifar100-lt"),
    **_every_method("cifar10-lt", "-cifar10"),
    "paper": Config("cifar100-lt", "rf-dlc-paper"),
    "paper-utility": Config("cifar100-lt", "rf-dlc-paper", _UTILITY, fork_of="paper"),
    "paper-cifar10": Config("cifar10-lt", "rf-dlc-paper"),
    "paper-cifar10-utility": Config(
        "cifar10-lt", "rf-dlc-paper", _UTILITY, fork_of="paper-cifar10"
    ),
    "rf-dlc": _ours(),
    "rf-dlc-cifar10": Config("cifar10-lt", "rf-dlc"),
    "tau1": _ours(prior_tau=(1.0,), mixup=0.0, repulsion="head"),
    "tau1-mixup": _ours(prior_tau=(1.0,), mixup=0.4, repulsion="head"),
    "tau012-mixup": _ours(prior_tau=(0.0, 1.0, 2.0), mixup=0.4, repulsion="head"),
    "tau012-mixup-logits": _ours(
        prior_tau=(0.0, 1.0, 2.0), mixup=0.4, repulsion="head", combine="mean-logits"
    ),
    "tau051-mixup": _ours(prior_tau=(0.5, 1.0, 1.5), mixup=0.4, repulsion="head"),
    "tau1-mixup-normalised": _ours(
        prior_tau=(1.0,), mixup=0.4, repulsion="head-normalised"
    ),
    "tau1-mixup-predictions": _ours(
        prior_tau=(1.0,), mixup=0.4, repulsion="predictions", repulsion_strength=0.1
    ),
    "tau1-mixup-alone": _ours(prior_tau=(1.0,), mixup=0.4, repulsion="none"),
    "tau1-mixup8": _ours(prior_tau=(1.0,), mixup=0.8, repulsion="head"),
    "tau1-mixup2": _ours(prior_tau=(1.0,), mixup=0.2, repulsion="head"),
    "tau1-mixup-step": _ours(
        prior_tau=(1.0,), mixup=0.4, repulsion="head", schedule="step"
    ),
    "tau1-mixup-average": _ours(
        prior_tau=(1.0,), mixup=0.4, repulsion="head", average=0.999
    ),
    "tau1-mixup-decay": _ours(
        prior_tau=(1.0,), mixup=0.4, repulsion="head", weight_decay=1e-3
    ),
    "tau1-mixup-scale20": _ours(
        prior_tau=(1.0,), mixup=0.4, repulsion="head", head_scale=20.0
    ),
    "tau1-mixup-scale15": _ours(
        prior_tau=(1.0,), mixup=0.4, repulsion="head", head_scale=15.0
    ),
    "tau1-mixup-unshared": _ours(
        prior_tau=(1.0,), mixup=0.4, repulsion="head", shared_stages=0
    ),
}
