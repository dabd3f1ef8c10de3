"""Trees in ONNX: one operator per ensemble instead of a loop over levels, which takes
minutes to export.
"""

from typing import Any

import torch
from torch import Tensor, library, nn

from rfdlc.training.networks.mixture import Forest, Trees


@library.custom_op("rfdlc::tree_sums", mutates_args=())
def tree_sums(x: Tensor, number: int, width: int) -> Tensor:
    """Stands for the sums of an ensemble while a graph is captured; `translate` makes
    it the operator.
    """
    return x.new_zeros(x.shape[0], width)


@tree_sums.register_fake
def _(x: Tensor, number: int, width: int) -> Tensor:
    return x.new_empty(x.shape[0], width)


class Ensemble(nn.Module):
    """What stands for trees: (B, F) -> (K, B, C)."""

    def __init__(self, trees: Trees, number: int) -> None:
        super().__init__()
        self.number, self.shape, self.log = (
            number,
            tuple(trees.baseline.shape),
            isinstance(trees, Forest),
        )

    def forward(self, x: Tensor) -> Tensor:
        models, classes = self.shape
        sums = tree_sums(x.float(), self.number, models * classes)
        sums = sums.to(x.dtype).unflatten(1, self.shape).transpose(0, 1)
        return sums.log() if self.log else sums


def replace_trees(net: nn.Module) -> list[dict[str, Any]]:
    """Replace the trees of a network; returns the attributes of the operators, by
    number.
    """
    found = [
        (name, module)
        for name, module in net.named_modules()
        if isinstance(module, Trees)
    ]
    for number, (name, trees) in enumerate(found):
        net.set_submodule(name, Ensemble(trees, number))
    return [attributes(trees) for _, trees in found]


def attributes(trees: Trees) -> dict[str, Any]:
    """Attributes of a TreeEnsembleRegressor of (K * C) targets; the nodes of all trees
    are numbered as ours.
    """
    (models, classes), roots = trees.baseline.shape, trees.roots
    sizes = torch.diff(torch.cat([roots.flatten(), torch.tensor([len(trees.feature)])]))
    tree = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    own = torch.arange(len(tree)) - roots.flatten()[tree]
    leaf, start = trees.left == torch.arange(len(tree)), roots.flatten()[tree]
    leaves, width = torch.nonzero(leaf).flatten(), trees.value.shape[1]
    first = tree[leaves] // roots.shape[1] * classes  # the first target of the model
    turn = (
        tree[leaves] % roots.shape[1] % classes
        if width == 1
        else torch.zeros_like(first)
    )
    targets = (first + turn)[:, None] + torch.arange(width)
    known: dict[str, Any] = {
        "nodes_treeids": tree,
        "nodes_nodeids": own,
        "nodes_featureids": trees.feature,
        "nodes_values": torch.where(leaf, 0, trees.threshold).float(),
        "nodes_truenodeids": torch.where(leaf, 0, trees.left - start),
        "nodes_falsenodeids": torch.where(leaf, 0, trees.right - start),
        "target_treeids": tree[leaves].repeat_interleave(width),
        "target_nodeids": own[leaves].repeat_interleave(width),
        "target_ids": targets.flatten(),
        "target_weights": trees.value[leaves].flatten().float(),
        "base_values": trees.baseline.flatten().float(),
    }
    modes = {"nodes_modes": ["LEAF" if end else "BRANCH_LEQ" for end in leaf.tolist()]}
    return (
        {name: values.tolist() for name, values in known.items()}
        | modes
        | {"n_targets": models * classes}
    )


def translation(tables: list[dict[str, Any]]) -> dict[Any, Any]:
    """For torch's exporter: the operator of each ensemble."""
    from onnxscript import values

    ml = values.Opset("ai.onnx.ml", 3)

    def translate(x: Any, number: int, width: int) -> Any:
        return ml.TreeEnsembleRegressor(x, **tables[number])

    return {torch.ops.rfdlc.tree_sums.default: translate}
