"""From a photograph's file to a picture of one size. numpy and Pillow only, no torch.

Run as a script it is a decoder: a process that `decoders.Decoders` starts, which reads tasks from
its standard input and writes pictures into memory that it shares with whoever started it.
"""

import json
import math
import mmap
import sys

import numpy as np
from numpy.typing import NDArray
from PIL import Image

TEST_ZOOM = 256 / 224
"""The test picture is the middle of the photograph resized to this many times its side."""

Box = tuple[float, float, float, float]


class UnreadableError(Exception):
    """A file that Pillow cannot make a picture of: its path, and why."""


class Decoder:
    """Photographs by number; decoded ones are kept where there is a cache."""

    def __init__(self, paths: list[str], *, side: int, train: bool, seed: int, cache: bool) -> None:
        self._paths, self._side, self._train, self._seed = paths, side, train, seed
        self._decoded: dict[int, Image.Image] | None = {} if cache else None

    def picture(self, number: int, epoch: int) -> NDArray[np.uint8]:
        """Height, width, channels. A function of (seed, epoch, number) alone."""
        try:
            return self._picture(number, epoch)
        except Exception as error:  # Pillow has many, and not all of one family
            why = str(error).replace("\n", " ") or type(error).__name__
            raise UnreadableError(f"{self._paths[number]}: {why}") from error

    def _picture(self, number: int, epoch: int) -> NDArray[np.uint8]:
        with self._open(number) as image:
            if self._train:
                rng = np.random.default_rng((self._seed, epoch, number))
                box = random_box(image.width, image.height, rng)
                mirrored = rng.random() < 0.5
            else:
                box, mirrored = middle_box(image.width, image.height), False
            picture = _cut(image, box, self._side)
        return picture[:, ::-1] if mirrored else picture

    def _open(self, number: int) -> Image.Image:
        if self._decoded is None:
            return Image.open(self._paths[number])
        if number not in self._decoded:
            with Image.open(self._paths[number]) as image:
                self._decoded[number] = image.convert("RGB")
        return self._decoded[number]


def _cut(image: Image.Image, box: Box, side: int) -> NDArray[np.uint8]:
    """Resize the part of `image` in `box` to side x side."""
    full_width = image.width
    left, upper, right, lower = box
    # A JPEG can be decoded at 1/2, 1/4, 1/8 of its size for a fraction of the time.
    enough = max(side / (right - left), side / (lower - upper))
    image.draft("RGB", (int(image.width * enough), int(image.height * enough)))
    scale = image.width / full_width
    scaled = (left * scale, upper * scale, right * scale, lower * scale)
    bounded = (*scaled[:2], min(scaled[2], image.width), min(scaled[3], image.height))
    colours = image if image.mode == "RGB" else image.convert("RGB")
    resized = colours.resize((side, side), Image.Resampling.BILINEAR, box=bounded)
    return np.asarray(resized)


def random_box(width: int, height: int, rng: np.random.Generator) -> Box:
    """A part of 8 % to 100 % of the area, with sides in a ratio of 3:4 to 4:3."""
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1.0)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        across, down = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if across <= width and down <= height:
            left, upper = rng.uniform(0, width - across), rng.uniform(0, height - down)
            return left, upper, left + across, upper + down
    return middle_box(width, height, zoom=1)


def middle_box(width: int, height: int, zoom: float = TEST_ZOOM) -> Box:
    """The square in the middle, 1/zoom of the shorter side."""
    size = min(width, height) / zoom
    left, upper = (width - size) / 2, (height - size) / 2
    return left, upper, left + size, upper + size


def main() -> None:
    """Be a decoder until standard input ends: a line of options, then a line for each task."""
    options = json.loads(sys.stdin.readline())
    descriptor, side = options.pop("descriptor"), options["side"]
    with mmap.mmap(descriptor, 0) as memory:
        pictures = np.frombuffer(memory, np.uint8).reshape(-1, side, side, 3)
        decoder = Decoder(**options)
        for line in sys.stdin:
            epoch, wanted = json.loads(line)
            answer = "done"
            for place, number in wanted:
                try:
                    pictures[place] = decoder.picture(number, epoch)
                except UnreadableError as error:
                    answer = str(error)
                    break
            print(answer, flush=True)
        del pictures


if __name__ == "__main__":
    main()
