"""ParticleNet: R runs of M particles as one module. A shared trunk per run, then M
branches, M heads, a combination.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from rfdlc.errors import expect
from rfdlc.probabilities.classes import Classes
from rfdlc.training.networks import stack
from rfdlc.training.networks.backbones import Backbone, Copies
from rfdlc.training.networks.fused.stages import usable

HEADS: dict[
    str, Callable[..., nn.Module]
] = {  # (networks, features, classes, scale, particles)
    "cosine": lambda *size: stack.CosineHead(*size[:4]),
    "linear": lambda *size: stack.Linear(*size[:3]),
    "mixed": stack.MixedHead,
}
EXECUTIONS = ("auto", "stacked", "separate")
# channels from which grouped convolutions are not faster than one network after another
WIDE = 512
Net = TypeVar("Net", bound=nn.Module)

# -- combinations: logits (R,M,B,C) and features (R,M,B,F) -> predicted logits, and an
# uncertainty (R,B) or None ------- Experts that are routed, weighed sample by sample or
# silent on some classes become one, (R,1,B,C), so that whoever predicts, calibrates,
# exports or serves needs to know nothing of it. `measures` is the name of their
# uncertainty.

Combined = tuple[Tensor, Tensor | None]


class Combination(nn.Module):
    """Every particle as it is."""

    measures = ""

    def forward(self, logits: Tensor, features: Tensor) -> Combined:
        return logits, None


class Router(Combination):
    """Ask one expert after the other while the answer so far looks wrong; predict the
    mean of those asked.

    Features of expert i and the largest mean logits so far give a score (Wang et al.
    2021, section 3.3 and its code).
    """

    measures = "experts_used"

    def __init__(
        self,
        runs: int,
        particles: int,
        width: int,
        classes: int,
        choices: int,
        hidden: int = 16,
    ) -> None:
        super().__init__()
        self.choices = min(choices, classes)
        self.hidden = stack.Linear(runs * (particles - 1), width, hidden)
        self.score = stack.Linear(
            runs, hidden + self.choices, 1
        )  # the same for all experts of a run

    def scores(self, logits: Tensor, features: Tensor) -> Tensor:
        """(R, M-1, B): above 0, expert i + 1 is asked."""
        runs, particles = logits.shape[:2]
        asked = torch.arange(1, particles, device=logits.device).view(-1, 1, 1)
        best = (
            (logits.cumsum(1)[:, :-1] / asked).topk(self.choices, dim=-1).values
        )  # (R, M-1, B, choices)
        seen = functional.normalize(features[:, :-1], dim=-1).flatten(0, 1)
        hidden = self.hidden(seen).relu().unflatten(0, (runs, particles - 1))
        scores = self.score(torch.cat([best, hidden], -1).flatten(1, 2))
        return scores.unflatten(1, (particles - 1, -1))[..., 0]

    def forward(self, logits: Tensor, features: Tensor) -> Combined:
        asked = (self.scores(logits, features) > 0).to(logits.dtype).cumprod(1)
        used = torch.cat(
            [torch.ones_like(asked[:, :1]), asked], 1
        )  # (R, M, B): the first always is
        wide = used[..., None]
        return (wide * logits).sum(1, keepdim=True) / wide.sum(
            1, keepdim=True
        ), used.sum(1)


def engagement(logits: Tensor) -> Tensor:
    """Cumulative uncertainty before each expert, and after the last: (..., M, B, C) ->
    (..., M+1, B).

    Evidence exp(z) gives beliefs b = exp(z)/S and the uncertainty u = C/S, S = sum
    exp(z) + C. w_0 = 1 and w_i+1 = w_i u_i / (1 - conflict), the conflict being sum_{j
    != k} b_i-1[j] b_i[k] (Li et al. 2022, Dempster-Shafer).
    """
    log_classes = torch.full_like(logits[..., 0], logits.shape[-1]).log()
    log_strength = torch.cat([logits, log_classes[..., None]], -1).logsumexp(
        -1
    )  # (..., M, B)
    belief, unsure = (
        (logits - log_strength[..., None]).exp(),
        (log_classes - log_strength).exp(),
    )
    before, after = unsure[..., :-1, :], unsure[..., 1:, :]
    # 1 - conflict, written without a difference of numbers near 1
    harmony = (
        before
        + after
        - before * after
        + (belief[..., :-1, :, :] * belief[..., 1:, :, :]).sum(-1)
    )
    factors = torch.cat(
        [torch.ones_like(unsure[..., :1, :]), unsure[..., :1, :], after / harmony], -2
    )
    return factors.cumprod(-2)


def weighed(logits: Tensor, engaged: Tensor, eta: float) -> Tensor:
    """sum_i a_i z_i, a = softmax over experts of w_i / eta, w from `engagement`: (...,
    M, B, C) -> (..., 1, B, C).
    """
    shares = (engaged[..., :-1, :] / eta).softmax(-2)
    return (shares[..., None] * logits).sum(-3, keepdim=True)


class Evidential(Combination):
    """Later experts count more where the earlier ones were unsure. Each sample by
    itself, whatever its batch.
    """

    measures = "fused_uncertainty"

    def __init__(self, eta: float) -> None:
        super().__init__()
        self.eta = eta

    def forward(self, logits: Tensor, features: Tensor) -> Combined:
        engaged = engagement(logits)
        return weighed(logits, engaged, self.eta), engaged[..., -1, :]


def nested_groups(classes: Classes, experts: int) -> NDArray[np.float64]:
    """(M, C): 1 where an expert speaks for a class. Expert m leaves out the m/M most
    frequent classes.

    >>> nested_groups(Classes.from_counts([9, 5, 1]), 3).tolist()
    [[1.0, 1.0, 1.0], [0.0, 1.0, 1.0], [0.0, 0.0, 1.0]]
    """
    first = np.arange(experts) * len(classes) // experts
    return (classes.rank >= first[:, None]).astype(np.float64)


class GroupMean(Combination):
    """For every class the mean logit of the experts that speak for it."""

    speaks: Tensor

    def __init__(self, groups: NDArray[np.float64]) -> None:
        super().__init__()
        speaks = torch.as_tensor(groups, dtype=torch.float32)[:, None]
        self.register_buffer(
            "speaks", speaks, persistent=False
        )  # follows from the classes

    def forward(self, logits: Tensor, features: Tensor) -> Combined:
        return (self.speaks * logits).sum(1, keepdim=True) / self.speaks.sum(0), None


Combine = Callable[
    [int, int], Combination
]  # (runs, width of the features) -> a combination


class ParticleNet(nn.Module):
    """One batch per run, (R, B, ...), to the logits it predicts: (R, M, B, C), or (R,
    1, B, C) where they are combined.

    The first `shared_stages` stages of the backbone exist once per run, the others once
    per particle.
    """

    name = ""  # of the backbone
    recompute = False  # keep the inputs of stages alone for the backward pass
    fused = False  # whether a training step may use fused stages
    mirrored, shift = (
        False,
        0,
        # predictions are means over images, their mirror images, and those shifted by
        # pixels
    )

    def __init__(
        self,
        backbone: Backbone,
        classes: int,
        *,
        particles: int = 1,
        seeds: Sequence[int] = (0,),
        shared_stages: int = 0,
        head: str = "cosine",
        head_scale: float = 30.0,
        dropout: float = 0.0,
        combine: Combine = lambda runs, width: Combination(),
    ) -> None:
        super().__init__()
        most = len(backbone.stages)
        expect(
            shared_stages <= most,
            f"shared_stages {shared_stages} is not possible: the backbone has {most}"
            " stages",
        )
        self.seeds, self.runs, self.particles = tuple(seeds), len(seeds), particles
        self.layout, self.fusable = backbone.layout, backbone.fused
        networks = self.runs * particles
        self.stages = backbone.stages[:shared_stages], backbone.stages[shared_stages:]
        self.trunk, self.branches = (
            nn.Sequential(*(stage(count) for stage in part))
            for part, count in zip(self.stages, (self.runs, networks), strict=True)
        )
        self.single: list[
            nn.Sequential
        ] = []  # one network's trunk and branch, where networks are computed separately
        size = networks, backbone.width, classes
        self.dropout = stack.Dropout(networks, dropout)
        self.head: Any = HEADS[head](*size, head_scale, particles)
        self.combination: Combination = combine(self.runs, backbone.width)
        self.resize: nn.Module = (
            nn.Identity()
        )  # of images, to the size that the networks are made for
        stack.reset(self, seeds)

    def execute(self, how: str) -> None:
        """Compute the networks of a stack together, or separately, one after another,
        with the same parameters.

        Grouped convolutions pay for narrow layers and cost for wide ones
        (`benchmarks/execution.py`).
        """
        layers = (
            layer for layer in self.branches.modules() if isinstance(layer, stack.Conv)
        )
        widest = max((layer.weight.shape[0] for layer in layers), default=0)
        networks = self.runs * self.particles
        possible = networks > 1 and self.layout is stack.IN_CHANNELS
        separate = possible and (
            how == "separate" or (how == "auto" and widest >= WIDE * networks)
        )
        with torch.device("meta"):  # structure alone: every call brings its own tensors
            self.single = [
                nn.Sequential(*(stage(1) for stage in part))
                for part in self.stages
                if separate
            ]

    def features(self, x: Tensor) -> Tensor:
        x = self.resize(x)
        if self.single:
            return self._separate_features(x)
        fused = (
            self.fused and self.trunk.training and self.branches.training and usable(x)
        )
        layout = stack.IMAGES_IN_FRONT if fused else self.layout
        shared = self._through(self.trunk, layout.fold(x))
        if not len(self.branches):
            return stack.IN_FRONT.spread(
                layout.unfold(shared, self.runs), self.runs, self.particles
            )
        spread = (
            layout.spread(shared, self.runs, self.particles)
            if self.particles > 1
            else shared
        )
        return layout.unfold(
            self._through(self.branches, spread), self.runs * self.particles
        )

    def _separate_features(self, x: Tensor) -> Tensor:
        shared = self._one_by_one(
            self.trunk, self.single[0], [self.layout.fold(own[None]) for own in x]
        )
        spread = [own for own in shared for _ in range(self.particles)]
        found = self._one_by_one(self.branches, self.single[1], spread)
        return torch.cat([self.layout.unfold(own, 1) for own in found])

    def _one_by_one(
        self, stages: nn.Sequential, single: nn.Sequential, inputs: list[Tensor]
    ) -> list[Tensor]:
        """The stages of each network on its own input, with its slices of their
        parameters and buffers.
        """
        single.train(stages.training)
        for stage, template in zip(stages, single, strict=True):
            tensors = dict(stage.named_parameters()) | dict(stage.named_buffers())
            own = zip(
                *(tensor.chunk(len(inputs)) for tensor in tensors.values()), strict=True
            )
            calls = [dict(zip(tensors, values, strict=True)) for values in own]
            inputs = [
                stack.called(template, its, x, self.recompute)
                for its, x in zip(calls, inputs, strict=True)
            ]
        return inputs

    def _through(self, stages: nn.Sequential, x: Tensor) -> Tensor:
        for stage in stages:
            x = stack.called(stage, {}, x, self.recompute)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.combination(*self.outputs(x))[0]

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (R, M, B, C) of the particles, not combined, and their features (R, M,
        B, F), in full precision.
        """
        if self.training or not (self.mirrored or self.shift):
            return self.one_view(x)
        views, weights = [x], [1.0]
        if self.shift:  # along a diagonal; together they count as much as the image
            edge = functional.pad(
                x.flatten(0, 1), (self.shift,) * 4, mode="replicate"
            ).unflatten(0, x.shape[:2])
            far = 2 * self.shift
            views, weights = (
                [x, edge[..., far:, far:], edge[..., :-far, :-far]],
                [0.5, 0.25, 0.25],
            )
        if self.mirrored:
            views, weights = (
                views + [view.flip(-1) for view in views],
                [weight / 2 for weight in weights * 2],
            )
        logits, features = (
            t.unflatten(2, (len(views), -1)) for t in self.one_view(torch.cat(views, 1))
        )
        shares = logits.new_tensor(weights)[:, None, None]
        return (logits * shares).sum(2), (features * shares).sum(2)

    def one_view(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same of these images alone, without other views."""
        features, kind = self.features(x).to(self.head.weight.dtype), x.device.type
        with (
            torch.autocast(kind, enabled=False)
            if torch.is_autocast_enabled(kind)
            else nullcontext()
        ):
            logits = self.head(self.dropout(features))
        return self._by_run(logits), self._by_run(features)

    def particle_logits(self, x: Tensor) -> Tensor:
        return self.outputs(x)[0]

    def routing(self, x: Tensor) -> Tensor:
        """What a router's loss sees: logits and, as a last column, its scores (0 for
        the last expert).
        """
        logits, features = self.outputs(x)
        scores = functional.pad(self.combination.scores(logits, features), (0, 0, 0, 1))  # type: ignore[operator]
        return torch.cat([logits, scores[..., None]], -1)

    def _by_run(self, values: Tensor) -> Tensor:
        return values.view(
            self.runs, self.particles, *values.shape[1:]
        )  # (R*M, ...) -> (R, M, ...)

    @property
    def as_modules(self) -> bool:
        """Whether networks are computed one after another, and not as one stack."""
        return bool(self.single) or any(
            isinstance(module, Copies) for module in self.modules()
        )

    @property
    def head_weights(self) -> Tensor:
        """(R, M, F, C): what the paper's repulsion acts on."""
        return self._by_run(self.head.weight)

    def rate_factors(self, backbone: float, layer_decay: float) -> dict[Tensor, float]:
        """Learning-rate factors of the backbone's parameters: `backbone`, lower by a
        factor per stage to the input.
        """
        stages = [*self.trunk, *self.branches]
        pairs = zip(stages, range(len(stages) - 1, -1, -1), strict=True)
        return {
            p: backbone * layer_decay**depth
            for stage, depth in pairs
            for p in stage.parameters()
        }

    def parts(self, name: str) -> list[nn.Module]:
        """What a stage trains: all particles, their heads alone, or the router of its
        combination.
        """
        body: list[nn.Module] = [self.trunk, self.branches, self.head]
        return {
            "all": body,
            "head": body[2:],
            "router": [self.get_submodule("combination")],
        }[name]


def place(net: Net, device: torch.device, channels_last: bool | None = None) -> Net:
    """On the device, in the memory layout that is fast there: by default channels last
    on a GPU.
    """
    moved = net.to(device)
    if (device.type == "cuda") if channels_last is None else channels_last:
        for tensor in (*moved.parameters(), *moved.buffers()):
            if tensor.ndim in (4, 5):  # 5: stacked weights of copies
                tensor.data = tensor.data.movedim(-3, -1).contiguous().movedim(-1, -3)
    return moved
