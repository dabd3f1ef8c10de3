"""How the work of a convolution is cut into programs: row by row of the images, or tile by tile of their pixels."""

from dataclasses import dataclass

import triton


@dataclass(frozen=True)
class Rows:
    """How a convolution goes row by row."""

    group: int  # neighbouring pixels that are one row of the matrix product
    programs: int  # wanted, about
    warps: int
    ahead: int  # loads in flight
    tallest: int = 64  # rows of the matrix product: 64, or more where there are programs enough

    def images(self, width: int, of: int) -> int:
        """Images that a program works on side by side, of all there are."""
        tall = 64
        while tall < self.tallest and of * width // (2 * tall * self.group) >= self.programs:
            tall *= 2
        return max(1, tall * self.group // width)

    def parts(self, sets: int, height: int) -> int:
        """Into how many parts an image is cut, so that there are programs enough."""
        parts = 1
        while sets * parts < self.programs and height // parts > 4 and height % (2 * parts) == 0:
            parts *= 2
        return parts

    def window(self, channels: int) -> int:
        """Values that a row of the product sees: group + 2 pixels, up to a power of two that hardware can multiply."""
        return max(16, triton.next_power_of_2((self.group + 2) * channels))


@dataclass(frozen=True)
class Tiles:
    """How a convolution goes tile by tile."""

    pixels: int
    warps: int
    ahead: int


# By the channels made; chosen by measuring on an H200 (benchmarks/README.md)
ROWS = {16: Rows(2, 400, 4, 4), 32: Rows(2, 200, 4, 3)}
TILES = {16: Tiles(128, 4, 2), 32: Tiles(128, 4, 3), 64: Tiles(128, 4, 3)}
GRADIENT_ROWS = {16: Rows(2, 200, 4, 4, tallest=128), 32: Rows(1, 200, 8, 4, tallest=128)}
GRADIENT_TILES = {16: Tiles(64, 4, 2), 32: Tiles(64, 4, 2), 64: Tiles(64, 4, 2)}
GRADIENT_PROGRAMS = 512
