"""Embedding: how images became features. Files of features and run folders keep it, to
embed other images alike.
"""

import warnings
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from rfdlc.data.images import Resizing
from rfdlc.errors import InputError
from rfdlc.formats.files import sha256_of

VERSION = 1  # of the format: another number for whatever changes what is said
OUTPUT = "output"  # the name of what a network returns, among its layers


class Embedding(BaseModel):
    """The network, its images, and what was taken from it; the weights are in a file of
    their own.

    Parameters
    ----------
    backbone, options : str, dict
        `timm:NAME`, `package.module:function`, the name of a built-in backbone, or
        `onnx`; arguments of timm.
    input_shape : tuple of int
        (channels, size, size) of an image.
    mean, std, fit, interpolation, crop
        Of the channels on the scale 0..1; how image files become squares, and the
        fraction of the square that is used.
    layers, flips, half
        What is concatenated; whether the features of an image and of its mirror image
        are averaged; 16 bits on a GPU.
    width, weights, file
        The number of features; the SHA-256 of the weights, and the name of their file
        beside the features.
    version : int
        Of this format.
    """

    model_config = ConfigDict(frozen=True)

    backbone: str
    options: dict[str, Any] = {}
    input_shape: tuple[PositiveInt, PositiveInt, PositiveInt]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fit: str = "crop"
    interpolation: str = "bilinear"
    crop: float = Field(1.0, gt=0, le=1)
    layers: tuple[str, ...] = (OUTPUT,)
    flips: bool = False
    half: bool = False
    width: PositiveInt = 1
    weights: str = ""
    file: str = ""
    version: int = VERSION
    place: Path | None = Field(
        None, exclude=True
    )  # of the weights, where they were found

    @classmethod
    def read(cls, text: Any, where: object) -> "Embedding":
        """From JSON or a mapping; raises for anything else."""
        try:
            embedding = (
                cls.model_validate_json(text)
                if isinstance(text, str | bytes)
                else cls.model_validate(text)
            )
        except ValidationError as error:
            first = error.errors()[0]
            problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise InputError(
                f"{where}: how the features were made is damaged ({problem}); embed"
                " again"
            ) from None
        if embedding.version != VERSION:
            raise InputError(
                f"{where}: how the features were made has format version"
                f" {embedding.version}: this rfdlc reads version {VERSION}; embed again"
                " with this rfdlc"
            )
        return embedding

    def beside(self, path: Path) -> "Embedding":
        """With the file of weights beside the features, where it is there."""
        place = path.with_name(Path(self.file).name or "none")
        return self.model_copy(
            update={"place": place if self.file and place.is_file() else None}
        )

    def is_like(self, other: "Embedding") -> bool:
        """Whether both give the same features."""
        return self.model_dump(exclude={"file"}) == other.model_dump(exclude={"file"})

    @property
    def resizing(self) -> Resizing:
        """How image files become squares."""
        return Resizing(self.fit, self.interpolation, self.crop)

    @property
    def weights_name(self) -> str:
        """The name of the file of weights in a run folder."""
        return f"embedding{'.onnx' if self.backbone == 'onnx' else '.safetensors'}"


def weights_of(embedding: Embedding | None) -> dict[str, Path]:
    """The copy of weights that a run keeps to embed images; nothing, and a warning,
    where they are not there.
    """
    if embedding is None:
        return {}
    if embedding.place is None or sha256_of(embedding.place) != embedding.weights:
        absent = (
            f"the weights that made the features ({embedding.file}) are not beside"
            " them, or are other ones"
        )
        warnings.warn(
            f"{absent}: the model will predict from features, but not from images",
            stacklevel=3,
        )
        return {}
    return {embedding.weights_name: embedding.place}
