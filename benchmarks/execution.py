"""How large networks are executed: a step of ours beside the plain PyTorch loop of the
same networks in the same run.

    python benchmarks/execution.py
        everything; about eight minutes on an H200
    python benchmarks/execution.py resnet50 widths
        some of resnet50, resnext50, vit, widths, each a CSV of its own
    python benchmarks/execution.py --brief
        small batches of small images: seconds, to try it, on a CPU too

Three particles. ResNet-50 and ResNeXt-50 as in the preset imagenet-lt: the trunk up to
the second stage is shared; a ViT-S/16 of timm is copied whole. The plain loop has
modules of timm, autocast, fused SGD and torch.compile. `widths` compares stacked and
separate networks by the channels of their widest layer, which the rule of
execution=auto rests on.
"""

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional

from recording import write
from rfdlc.probabilities.classes import Classes
from rfdlc.training.building import method_net
from rfdlc.training.execution import Execution
from rfdlc.training.losses import RunLosses
from rfdlc.training.methods import METHODS, resolve
from rfdlc.training.networks.backbones import small_resnet
from rfdlc.training.networks.particles import ParticleNet, place
from rfdlc.training.step import Step

PARTICLES, CLASSES, METHOD = 3, 1000, "rf-dlc"
MODULES = {
    "resnet50": "resnet50",
    "resnext50": "resnext50_32x4d",
    "vit": "vit_small_patch16_224",
}
Batch = tuple[Tensor, Tensor, Tensor]


class Plain(nn.Module):
    """A shared trunk, three branches, three cosine heads, as one would write them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        made: list[Any] = [
            timm.create_model(MODULES[kind], num_classes=0) for _ in range(PARTICLES)
        ]
        first = made[0]
        if kind == "vit":
            self.trunk, branches = nn.Sequential(), made
        else:
            parts = (
                first.conv1,
                first.bn1,
                first.act1,
                first.maxpool,
                first.layer1,
                first.layer2,
            )
            self.trunk = nn.Sequential(*parts)
            branches = [nn.Sequential(m.layer3, m.layer4, m.global_pool) for m in made]
        self.branches = nn.ModuleList(branches)
        weights = [
            functional.normalize(torch.randn(first.num_features, CLASSES), dim=0)
            for _ in made
        ]
        self.heads = nn.ParameterList(map(nn.Parameter, weights))

    def forward(self, x: Tensor) -> Tensor:
        shared = self.trunk(x)
        found = [
            functional.normalize(branch(shared).float(), dim=1)
            for branch in self.branches
        ]
        return torch.stack(
            [
                30 * f @ functional.normalize(w, dim=0)
                for f, w in zip(found, self.heads, strict=True)
            ]
        )


class Bench:
    """Batches on a device, and how a step is timed on it."""

    def __init__(
        self, device: torch.device, batch: int, side: int, repeats: int
    ) -> None:
        self.device, self.side, self.repeats, self.gpu = (
            device,
            side,
            repeats,
            device.type == "cuda",
        )
        counts = [int(1280 * (5 / 1280) ** (c / (CLASSES - 1))) for c in range(CLASSES)]
        self.classes = Classes(tuple(str(c) for c in range(CLASSES)), tuple(counts))
        self.log_prior = torch.tensor(counts, dtype=torch.float32, device=device).log()
        inputs = torch.randn(1, batch, 3, side, side, device=device)
        labels = torch.randint(0, CLASSES, (1, batch), device=device)
        self.batch: Batch = inputs, labels, torch.rand(1, 3, device=device)

    def timed(self, step: Callable[[], object]) -> tuple[float, float]:
        """Milliseconds of a step (least of five groups), and the peak of memory
        in GiB.
        """
        for _ in range(8 if self.gpu else 2):
            step()
        times = []
        for _ in range(5):
            self.wait()
            began = time.perf_counter()
            for _ in range(self.repeats):
                step()
            self.wait()
            times.append((time.perf_counter() - began) / self.repeats)
        return 1000 * min(times), (
            torch.cuda.max_memory_allocated() / 2**30 if self.gpu else 0.0
        )

    def wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def clean(self) -> None:
        torch.compiler.reset()
        gc.collect()
        if self.gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def plain(self, kind: str, compiled: bool) -> tuple[float, float]:
        self.clean()
        net = Plain(kind).to(self.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimiser = torch.optim.SGD(
            net.parameters(), 0.01, 0.9, weight_decay=2e-4, nesterov=True, fused=True
        )
        forward: Callable[[Tensor], Tensor] = (
            torch.compile(net, dynamic=False) if compiled else net
        )
        inputs, labels = (
            self.batch[0][0].contiguous(memory_format=torch.channels_last),
            self.batch[1][0],
        )

        def step() -> None:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.gpu):
                logits = forward(inputs)
            shifted = (logits + self.log_prior).flatten(0, 1).float()
            optimiser.zero_grad()
            functional.cross_entropy(shifted, labels.repeat(PARTICLES)).backward()  # type: ignore[no-untyped-call]
            optimiser.step()

        return self.timed(step)

    def ours(self, kind: str, compiled: bool, how: str = "auto") -> tuple[float, float]:
        changes: dict[str, Any] = {"compile": compiled, "mixup": 0.0, "execution": how}
        changes |= {"backbone": "resnext50"} if kind == "resnext50" else {}
        changes |= {"shared_stages": 0} if kind == "vit" else {}
        changes |= {"particles": PARTICLES, "batch_size": self.batch[1].shape[1]}
        row, config = resolve(METHOD, "imagenet-lt", changes)
        network = (
            (lambda: timm.create_model(MODULES["vit"], num_classes=0))
            if kind == "vit"
            else None
        )
        self.clean()
        return self.step(
            method_net(
                row, config, self.batch[0].shape[2:], self.classes, (0,), network
            ),
            config,
        )

    def step(self, net: ParticleNet, config: Any) -> tuple[float, float]:
        row = METHODS[METHOD]
        losses = RunLosses([row.loss(config, self.classes, None)]).to(self.device)
        step = Step(place(net, self.device), losses, config)
        execution = Execution(step, 1000)  # captured, and without fused kernels
        step.begin_epoch(1, 0.01)
        return self.timed(lambda: execution(*self.batch))


def large(kind: str, bench: Bench, compiled: Sequence[bool]) -> list[dict[str, object]]:
    """Ours beside the plain loop: time and memory of a step."""
    rows: list[dict[str, object]] = []
    for choice in compiled:
        name = (
            f"{kind}, {len(bench.batch[1][0])} images of {bench.side}"
            f" px{', compiled' * choice}"
        )
        plain, memory = bench.plain(kind, choice)
        rows.append(
            {"what": f"{name}: plain loop", "value": f"{plain:.4g}", "unit": "ms"}
        )
        found, used = bench.ours(kind, choice)
        compared = {"reference": f"{plain:.4g}", "ratio": f"{found / plain:.3f}"}
        compared |= {"required": "<= 1.0"} if choice else {}
        rows.append(
            {"what": f"{name}: ours", "value": f"{found:.4g}", "unit": "ms", **compared}
        )
        if bench.gpu:
            compared = {"reference": f"{memory:.2f}", "ratio": f"{used / memory:.3f}"}
            compared |= {"required": "<= 1.05"} if choice else {}
            rows.append(
                {
                    "what": f"{name}: memory of ours",
                    "value": f"{used:.2f}",
                    "unit": "GiB",
                    **compared,
                }
            )
    return rows


def widths(bench: Bench) -> list[dict[str, object]]:
    """Separate networks beside stacked ones, by the channels of the widest layer."""
    rows: list[dict[str, object]] = []
    _, config = resolve(
        METHOD, "imagenet-lt", {"compile": False, "mixup": 0.0, "particles": PARTICLES}
    )
    for width in (16, 32, 64, 128):
        times = {}
        for how in ("stacked", "separate"):
            bench.clean()
            net = ParticleNet(
                small_resnet(3, width=width), CLASSES, particles=PARTICLES
            )
            net.execute(how)
            times[how] = bench.step(net, config)[0]
        what = (
            f"ResNet-32 with {4 * width} channels in its widest layer,"
            f" {bench.device.type}: separate"
        )
        compared = {
            "reference": f"{times['stacked']:.4g}",
            "ratio": f"{times['separate'] / times['stacked']:.3f}",
        }
        rows.append(
            {
                "what": what,
                "value": f"{times['separate']:.4g}",
                "unit": "ms",
                **compared,
            }
        )
    return rows


def measure(options: argparse.Namespace) -> None:
    device, brief = (
        torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        options.brief,
    )
    torch.backends.cudnn.benchmark = True
    compiled = (False, True)[options.compiled :] if device.type == "cuda" else (False,)
    for kind in options.kinds:
        if kind == "widths":
            rows = widths(
                Bench(
                    device,
                    16 if brief or device.type == "cpu" else 128,
                    32,
                    2 if brief else 10,
                )
            )
        else:
            batch, side = (4, 224 if kind == "vit" else 64) if brief else (256, 224)
            rows = large(kind, Bench(device, batch, side, 1 if brief else 10), compiled)
        write(
            f"execution-{kind}{'-brief' * brief}",
            rows,
            ("torch", "timm"),
            options.commit,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "kinds", nargs="*", default=[*MODULES, "widths"], help="by default all"
    )
    parser.add_argument("--brief", action="store_true")
    parser.add_argument(
        "--compiled", action="store_true", help="compiled networks alone"
    )
    parser.add_argument(
        "--commit", default="", help="commit to record, where there is no git"
    )
    measure(parser.parse_args())
