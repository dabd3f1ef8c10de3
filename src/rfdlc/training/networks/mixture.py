"""Mixture: trees, linear models and networks as the particles of one module. A fitted
tree is arrays, and no code.

A member maps features (B, F) to the logits (K, B, C) of K models: one per fold, and one
of all samples.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rfdlc.errors import choose, expect
from rfdlc.training.networks.particles import Combination, ParticleNet

UNLIKELY = 5.0  # nats below the least likely class
MANY = 32  # samples, from which a loop over trees pays
VOTES_OF_THE_PRIOR = (
    1.0  # that a forest is short of: no class is impossible where no tree has seen it
)


class Trees(nn.Module):
    """K ensembles of T trees: each sends a sample down to a leaf, and the values of the
    leaves are added.

    Nodes of all trees lie one after the other, parents first. A sample goes to `right`
    where its feature exceeds the threshold; both children of a leaf are the leaf
    itself. `value` is (nodes, C), or (nodes, 1) for trees that score one class each, in
    turn. `roots` is (K, T) and `baseline`, what the values are added to, (K, C).
    """

    feature: Tensor
    left: Tensor
    right: Tensor
    roots: Tensor
    threshold: Tensor
    baseline: Tensor
    INDICES = ("feature", "left", "right", "roots")

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name in (*self.INDICES, "threshold", "baseline"):
            self.register_buffer(name, tensors[name])
        self.value = nn.Parameter(tensors["value"], requires_grad=False)
        self.depth = self._depth()

    @classmethod
    def joined(cls, each: Sequence[Self]) -> Self:
        """The models of several in one."""
        states, start = [dict(trees.state_dict()) for trees in each], 0
        for state in states:
            nodes = len(state["feature"])
            state |= {name: state[name] + start for name in ("left", "right", "roots")}
            start += nodes
        return cls(
            **{name: torch.cat([state[name] for state in states]) for name in states[0]}
        )

    @classmethod
    def rebuilt(cls, state: Mapping[str, Tensor], features: int, classes: int) -> Self:
        """From the tensors of a file, which may hold anything: no index may point
        outside, no way may be a circle.
        """
        nodes, models = len(state["feature"]), len(state["roots"])
        own, width = (
            torch.arange(nodes),
            1 if state["value"].shape[-1] == 1 else classes,
        )
        _expect_shapes(
            state, threshold=(nodes,), value=(nodes, width), baseline=(models, classes)
        )
        bounds: dict[str, tuple[Any, int]] = {
            "feature": (0, features),
            "roots": (0, nodes),
        }
        bounds |= {"left": (own, nodes), "right": (own, nodes)}
        for name, (low, high) in bounds.items():
            indices = state[name]
            inside = (
                indices.dtype == torch.int64
                and indices.ndim == 1 + (name == "roots")
                and indices.numel()
            )
            inside = inside and bool(((indices >= low) & (indices < high)).all())
            expect(inside, f"{name} of the trees points outside of them")
        whole = state["roots"].shape[1] * width % classes == 0
        expect(whole, "the trees are not equally many for every class")
        return cls(**state)

    def _depth(self) -> int:
        """The longest way from a root to a leaf."""
        left, right = self.left.numpy(), self.right.numpy()
        nodes, depth = np.unique(self.roots.numpy()), 0
        while len(nodes := nodes[left[nodes] != nodes]):
            nodes, depth = (
                np.unique([left[nodes], right[nodes]]),
                depth + 1,
            )  # files may share children
        return depth

    def sums(self, x: Tensor) -> Tensor:
        """(B, F) -> (K, B, C)."""
        x = x.float()  # as trees were fitted, also where sums are wider
        plain = x.device.type == "cpu" and not torch.compiler.is_compiling()
        if plain and len(x) >= MANY and self._trees:
            return self._added(x.numpy())
        node = self.roots.reshape(-1).expand(x.shape[0], -1)  # (B, K * T)
        for _ in range(self.depth):
            exceeds = x.gather(1, self.feature[node]) > self.threshold[node]
            node = torch.where(exceeds, self.right[node], self.left[node])
        models, classes = self.baseline.shape
        values = self.value[node].reshape(x.shape[0], models, -1, classes).sum(2)
        return (values + self.baseline).transpose(0, 1)

    @cached_property
    def _trees(self) -> list[Any]:
        """The trees as scikit-learn walks them, far faster on a CPU; none where nodes
        of a file are mixed up.
        """
        from sklearn.tree._tree import NODE_DTYPE, Tree

        left, right, own = (
            self.left.numpy(),
            self.right.numpy(),
            np.arange(len(self.left)),
        )
        roots, leaf = self.roots.numpy().reshape(-1), left == own
        ends = np.append(np.unique(roots), len(own))
        tree = np.searchsorted(ends, own, side="right")
        if (leaf != (right == own)).any() or (tree[[left, right]] != tree).any():
            return []
        nodes = np.zeros(len(own), NODE_DTYPE)
        nodes["feature"], nodes["threshold"], nodes["missing_go_to_left"] = (
            self.feature,
            self.threshold,
            1,
        )
        start = ends[tree - 1]
        nodes["left_child"], nodes["right_child"] = np.where(
            leaf, -1, (left - start, right - start)
        )
        found, features, one = [], int(self.feature.max()) + 1, np.ones(1, np.intp)
        for root in roots:
            part = nodes[root : ends[tree[root]]]
            state = {
                "nodes": part,
                "node_count": len(part),
                "values": np.zeros((len(part), 1, 1)),
            }
            found.append(Tree(features, one, 1))
            found[-1].__setstate__(state | {"max_depth": self.depth})
        return found

    def _added(self, x: NDArray[np.float32]) -> Tensor:
        """`sums` of many samples, tree by tree."""
        found = np.repeat(self.baseline.numpy()[:, None], len(x), axis=1)
        value, turns = (
            self.value.numpy(),
            self.baseline.shape[1] if self.value.shape[1] == 1 else 1,
        )
        for number, (root, tree) in enumerate(
            zip(self.roots.reshape(-1).tolist(), self._trees, strict=True)
        ):
            model, turn = divmod(number, self.roots.shape[1])
            own = found[model] if turns == 1 else found[model, :, turn % turns, None]
            own += value[root + tree.apply(x)]
        return torch.from_numpy(found)


class Boosting(Trees):
    """Leaves add up to logits."""

    def forward(self, x: Tensor) -> Tensor:
        return self.sums(x)


class Forest(Trees):
    """Leaves add up to probabilities."""

    def forward(self, x: Tensor) -> Tensor:
        return self.sums(x).log()


class LinearModels(nn.Module):
    """Weights (K, F, C) and biases (K, 1, C)."""

    weight: Tensor
    bias: Tensor

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    @classmethod
    def joined(cls, each: Sequence[Self]) -> Self:
        states = [model.state_dict() for model in each]
        return cls(
            **{name: torch.cat([state[name] for state in states]) for name in states[0]}
        )

    @classmethod
    def rebuilt(cls, state: Mapping[str, Tensor], features: int, classes: int) -> Self:
        models = len(state["weight"])
        _expect_shapes(
            state, weight=(models, features, classes), bias=(models, 1, classes)
        )
        return cls(**state)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class QuadraticModels(LinearModels):
    """Linear in features and their products: weights (K, F + F (F + 1) / 2, C) and
    biases (K, 1, C).
    """

    @classmethod
    def rebuilt(cls, state: Mapping[str, Tensor], features: int, classes: int) -> Self:
        return super().rebuilt(
            state, features + features * (features + 1) // 2, classes
        )

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(products(x))


class Perceptrons(LinearModels):
    """One hidden layer, of rectified units: weight (K, F, H), bias (K, 1, H), output
    (K, H, C) and shift (K, 1, C).
    """

    output: Tensor
    shift: Tensor

    @classmethod
    def rebuilt(cls, state: Mapping[str, Tensor], features: int, classes: int) -> Self:
        models, hidden = len(state["weight"]), state["weight"].shape[-1]
        _expect_shapes(
            state, weight=(models, features, hidden), bias=(models, 1, hidden)
        )
        _expect_shapes(
            state, output=(models, hidden, classes), shift=(models, 1, classes)
        )
        return cls(**state)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu() @ self.output + self.shift


def products(x: Tensor) -> Tensor:
    """Features (B, F) and the products of all pairs of them, squares included."""
    first, second = torch.triu_indices(x.shape[1], x.shape[1], device=x.device)
    return torch.cat([x, x[:, first] * x[:, second]], dim=1)


class Networks(nn.Module):
    """The runs of a ParticleNet: log of the mean probability of their particles, (B, F)
    -> (R, B, C).
    """

    def __init__(self, net: ParticleNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        log_p = self.net(x.expand(self.net.runs, *x.shape)).log_softmax(
            -1
        )  # (R, M, B, C)
        return log_mean(log_p.transpose(0, 1))


class SignedLog(nn.Module):
    """`sign(d) log(1 + |d| / unit)` of d = x - origin, standardised; features (B, F)
    with scale 0 stay as they are.
    """

    NAMES = ("origin", "log_unit", "scale", "shift")  # (F,) each
    origin: Tensor
    log_unit: Tensor
    scale: Tensor
    shift: Tensor

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name in self.NAMES:
            self.register_buffer(name, tensors[name])

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        distance = (x - self.origin).to(wide)
        ratio = (distance.abs() / self.log_unit.to(wide).exp()).clamp_max(
            torch.finfo(torch.float32).max
        )
        logged = distance.sign() * ratio.log1p() * self.scale + self.shift
        return torch.where(self.scale > 0, logged.to(x.dtype), x)


class TrainingRange(nn.Module):
    """Features (B, F) no further out than training saw them: low and high, (F,) each.

    Linear models and networks would extrapolate to certainty; trees do not notice.
    """

    NAMES = ("low", "high")
    low: Tensor
    high: Tensor

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name in self.NAMES:
            self.register_buffer(name, tensors[name])

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(self.low.to(x.dtype), self.high.to(x.dtype))


class Mixture(nn.Module):
    """(1, B, F) -> logits (1, M, B, C), one particle per member: the mean probability
    of its calibrated models.

    The last model, of all samples, counts as much as those of the folds together.
    `slope` (M,) and `bias` (M, C) calibrate the models of a member and bring them to
    one class prior. All members get features within `range`, and those that
    `sees_logs` names get them through `log`, where there are these.
    """

    name = "mixture"
    runs = 1
    bias: Tensor

    def __init__(
        self,
        members: Mapping[str, nn.Module],
        slope: Tensor,
        bias: Tensor,
        log: SignedLog | None = None,
        training_range: TrainingRange | None = None,
    ) -> None:
        super().__init__()
        self.members, self.log = nn.ModuleDict(dict(members)), log
        self.range = training_range
        self.slope = nn.Parameter(slope, requires_grad=False)
        self.register_buffer("bias", bias)
        self.combination, self.particles = Combination(), len(members)

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """In full precision: weights of linear models were not fitted to be rounded."""
        kind = x.device.type
        with (
            torch.autocast(kind, enabled=False)
            if torch.is_autocast_enabled(kind)
            else nullcontext()
        ):
            inside = x[0] if self.range is None else self.range(x[0])
            seen = {
                False: inside,
                True: inside if self.log is None else self.log(inside),
            }
            members = enumerate(self.members.items())
            each = [
                self._particle(m, member(seen[sees_logs(name)]))
                for m, (name, member) in members
            ]
        logits = torch.stack(each).unsqueeze(0)
        return logits, logits

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(x)[0]

    def execute(self, how: str) -> None:
        for net in (
            module for module in self.modules() if isinstance(module, ParticleNet)
        ):
            net.execute(how)

    def _particle(self, number: int, logits: Tensor) -> Tensor:
        calibrated = (logits * self.slope[number] + self.bias[number]).log_softmax(-1)
        folds = len(logits) - 1
        return log_mean(calibrated, [*[0.5 / folds] * folds, 0.5] if folds else [1.0])


def log_mean(log_p: Tensor, weights: Sequence[float] = ()) -> Tensor:
    """Logarithm of the mean of probabilities (K, ...) over K, equally or with weights.

    Written out, as exported graphs compute torch.logaddexp by logarithms of what may be
    0.
    """
    top = log_p.amax(0)
    shares = log_p.new_tensor([*weights] or [1 / len(log_p)] * len(log_p))
    return (shares.view(-1, *[1] * top.ndim) * (log_p - top).exp()).sum(0).log() + top


KINDS: dict[str, Any] = {
    "forest": Forest,
    "boosting": Boosting,
    "linear": LinearModels,
    "quadratic": QuadraticModels,
    "perceptron": Perceptrons,
}


def sees_logs(name: str) -> bool:
    """Whether a member gets logarithms of skewed features: trees would split at the
    same samples.
    """
    return not (
        name.endswith("-raw")
        or issubclass(KINDS.get(name.split("-")[0], nn.Module), Trees)
    )


def rebuilt_log(weights: Mapping[str, Tensor], features: int) -> SignedLog | None:
    """Room for the logarithms of a file; None for files without."""
    found = any(name.startswith("log.") for name in weights)
    return (
        SignedLog(**{name: torch.zeros(features) for name in SignedLog.NAMES})
        if found
        else None
    )


def rebuilt_range(weights: Mapping[str, Tensor], features: int) -> TrainingRange | None:
    """Room for the range of a file; None for files of earlier versions."""
    if not any(name.startswith("range.") for name in weights):
        return None
    return TrainingRange(
        **{name: torch.zeros(features) for name in TrainingRange.NAMES}
    )


def rebuilt_member(
    name: str, state: Mapping[str, Tensor], features: int, classes: int
) -> nn.Module:
    """A member from the tensors of a file; the first word of its name is its kind."""
    kind = KINDS[choose("member of a mixture", name.split("-")[0], KINDS)]
    member: nn.Module = kind.rebuilt(state, features, classes)
    return member


def _expect_shapes(state: Mapping[str, Tensor], **shapes: tuple[int, ...]) -> None:
    for name, shape in shapes.items():
        found = tuple(state[name].shape)
        expect(found == shape, f"{name} has shape {found}: expected {shape}")


def forest(model: Any, prior: NDArray[np.float64]) -> Forest:
    """scikit-learn's forest whose labels are indices of classes. The prior (C,) counts
    as one more vote.
    """
    votes, nodes = len(model.estimators_) + VOTES_OF_THE_PRIOR, []
    for tree in (estimator.tree_ for estimator in model.estimators_):
        value = np.zeros((tree.node_count, len(prior)))
        value[:, model.classes_] = (
            tree.value[:, 0] / tree.value[:, 0].sum(axis=1, keepdims=True) / votes
        )
        nodes.append(
            (
                tree.feature,
                tree.threshold,
                tree.children_left,
                tree.children_right,
                value,
            )
        )
    return Forest(
        **_tensors(
            nodes, [tree[2] < 0 for tree in nodes], VOTES_OF_THE_PRIOR * prior / votes
        )
    )


def boosting(model: Any, classes: int) -> Boosting:
    """scikit-learn's histogram gradient boosting whose labels are indices of classes.

    It scores all classes that it has seen in turn, or of two the second alone: then
    values have a column per class.
    """
    seen, baseline = model.classes_, model._baseline_prediction.reshape(-1)
    scored, first = (seen[1:], [0.0]) if baseline.size == 1 else (seen, [])
    tables, nodes = (
        [tree.nodes for iteration in model._predictors for tree in iteration],
        [],
    )
    for number, table in enumerate(tables):
        value = table["value"][:, None]
        if len(scored) < classes:
            value = np.zeros((len(table), classes))
            value[:, scored[number % len(scored)]] = table["value"]
        nodes.append(
            (
                table["feature_idx"],
                table["num_threshold"],
                table["left"],
                table["right"],
                value,
            )
        )
    return Boosting(
        **_tensors(
            nodes,
            [t["is_leaf"] == 1 for t in tables],
            _filled([*first, *baseline], seen, classes),
        )
    )


def linear(model: Any, classes: int) -> LinearModels:
    """scikit-learn's logistic regression whose labels are indices of classes."""
    return LinearModels(
        **_layer(
            "weight", "bias", model.coef_.T, model.intercept_, model.classes_, classes
        )
    )


def quadratic(model: Any, scale: NDArray[np.float64], classes: int) -> QuadraticModels:
    """Of a logistic regression that was fitted to `products`, each divided by its
    scale.
    """
    weight = model.coef_.T / scale[:, None]
    return QuadraticModels(
        **_layer("weight", "bias", weight, model.intercept_, model.classes_, classes)
    )


def perceptron(model: Any, classes: int) -> Perceptrons:
    """scikit-learn's multi-layer perceptron with one hidden layer, whose labels are
    indices of classes.
    """
    (weight, output), (bias, shift) = model.coefs_, model.intercepts_
    hidden = {"weight": _single(weight), "bias": _single(bias[None])}
    return Perceptrons(
        **hidden, **_layer("output", "shift", output, shift, model.classes_, classes)
    )


def _layer(
    name: str, bias_name: str, weight: Any, bias: Any, seen: Any, classes: int
) -> dict[str, Tensor]:
    """The last layer, for all classes; with two classes scikit-learn has the logit of
    the second alone.
    """
    filled = np.zeros((len(weight), classes))
    filled[:, seen[1:] if bias.size == 1 else seen] = weight
    biases = _filled([0.0, *bias] if bias.size == 1 else bias, seen, classes)
    return {name: _single(filled), bias_name: _single(biases[None])}


def _single(values: Any) -> Tensor:
    """The values of one model, in 32 bits."""
    return torch.tensor(np.asarray(values)[None], dtype=torch.float32)


def _filled(logits: Any, seen: NDArray[np.int64], classes: int) -> NDArray[np.float64]:
    """Logits (C,) of all classes: those that were never seen are unlikely."""
    filled = np.full(classes, np.min(logits) - UNLIKELY)
    filled[seen] = logits
    return filled


def _tensors(
    nodes: Sequence[tuple[Any, ...]], leaves: Sequence[NDArray[np.bool_]], baseline: Any
) -> dict[str, Tensor]:
    """Of trees, each with feature, threshold, left, right and value by node."""
    starts = np.cumsum([0, *map(len, leaves)])
    leaf, own, offset = (
        np.concatenate(leaves),
        np.arange(starts[-1]),
        np.repeat(starts[:-1], np.diff(starts)),
    )
    feature, threshold, left, right, value = (
        np.concatenate(parts) for parts in zip(*nodes, strict=True)
    )
    # A 32-bit feature exceeds a threshold exactly if it exceeds the next smaller 32-bit
    # number.
    narrow = threshold.astype(np.float32)
    narrow = np.where(
        narrow > threshold, np.nextafter(narrow, np.float32(-np.inf)), narrow
    )
    indices = {"feature": np.where(leaf, 0, feature), "roots": starts[None, :-1]}
    indices |= {
        name: np.where(leaf, own, child + offset)
        for name, child in (("left", left), ("right", right))
    }
    numbers = {
        "threshold": narrow,
        "value": np.where(leaf[:, None], value, 0),
        "baseline": baseline[None],
    }
    floats = {
        name: torch.tensor(array, dtype=torch.float32)
        for name, array in numbers.items()
    }
    return floats | {
        name: torch.tensor(array, dtype=torch.int64) for name, array in indices.items()
    }
