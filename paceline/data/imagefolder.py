"""An ImageNet-style folder: train/<class>/*.JPEG and val/<class>/*.JPEG, loose or in one archive.

Training pictures are a random part of the photograph (8 % to 100 % of its area), resized and
mirrored half of the time; test pictures are the middle. Which part depends on (seed, epoch, sample)
alone, so every worker count sees the same pictures. ImageNet's mean and deviation per channel.
"""

import hashlib
import math
import os
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from paceline.data import files
from paceline.data.base import Batch, Dataset, Normaliser, Request
from paceline.data.sampling import Indices
from paceline.errors import MissingError

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIDE = 224
TEST_ZOOM = 256 / 224
"""The test picture is the middle of the photograph resized to this many times its side."""

PICTURE_SUFFIXES = {".jpeg", ".jpg", ".png", ".webp", ".bmp"}
PARTS = {True: ("train", "training"), False: ("val", "validation", "test")}

Box = tuple[float, float, float, float]


class ImageFolder(Dataset):
    """Photographs decoded when asked for, by as many threads as this process has cores."""

    name = "imagefolder"
    costly = True

    def __init__(
        self, folder: Path, *, side: int, train: bool, seed: int, cache: bool = False
    ) -> None:
        self.input_shape = (3, side, side)
        classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        self._samples: list[tuple[Path, int]] = []
        for label, name in enumerate(classes):
            entries = sorted(entry.name for entry in os.scandir(folder / name))
            pictures = (folder / name / entry for entry in entries)
            kept = (path for path in pictures if path.suffix.lower() in PICTURE_SUFFIXES)
            self._samples += [(path, label) for path in kept]
        if not self._samples:
            problem = f"data set imagefolder: {folder} has no pictures in folders by class."
            raise MissingError(problem, "lay them out as train/<class>/*.JPEG, val/<class>/*.JPEG.")
        self.num_classes = len(classes)
        self._side, self._train, self._seed = side, train, seed
        self._normalise = Normaliser(MEAN, DEVIATION)
        num_threads = len(os.sched_getaffinity(0))
        self._threads = ThreadPoolExecutor(num_threads, "paceline-decode")
        self._decoded: dict[int, Image.Image] | None = {} if cache else None

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, indices: Indices, epoch: int = 0) -> Batch:
        return self.on_device(self.host_batch(indices, epoch))

    def host_batch(self, indices: Indices, epoch: int = 0) -> Batch:
        """Bytes: a quarter of what the normalised numbers would take on their way."""
        numbers = indices.tolist()
        pictures = np.empty((len(numbers), self._side, self._side, 3), np.uint8)

        def fill(place: int) -> None:
            pictures[place] = self._decode(numbers[place], epoch)

        list(self._threads.map(fill, range(len(numbers))))
        labels = torch.tensor([self._samples[number][1] for number in numbers])
        return torch.from_numpy(pictures), labels

    def on_device(self, batch: Batch) -> Batch:
        pictures, labels = batch
        return self._normalise(pictures), labels

    def close(self) -> None:
        self._threads.shutdown()

    def _decode(self, number: int, epoch: int) -> NDArray[np.uint8]:
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
        """The photograph; decoded once and kept, where there is a cache."""
        path, _ = self._samples[number]
        if self._decoded is None:
            return Image.open(path)
        if number not in self._decoded:
            with Image.open(path) as image:
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


def load(request: Request) -> Dataset:
    """Open the training or the test part of the folder given."""
    if request.data_dir is None:
        problem = (
            "data set imagefolder: no folder is given, and ImageNet may not be downloaded for you."
        )
        raise MissingError(problem, "name a folder with train/ and val/ in it with --data-dir.")
    root = _root(request.data_dir)
    side = request.input_shape[-1] if request.input_shape else SIDE
    folder = next((root / name for name in PARTS[request.train] if (root / name).is_dir()), root)
    return ImageFolder(
        folder, side=side, train=request.train, seed=request.seed, cache=request.cache
    )


def _root(folder: Path) -> Path:
    """The folder that holds train/: the one given, one below it, or an archive's content."""
    archived = folder if folder.is_file() else files.find(folder, "*.tgz", "*.tar", "*.tar.gz")
    places = (
        [] if folder.is_file() else [folder, *sorted(p for p in folder.iterdir() if p.is_dir())]
    )
    for place in places:
        if any((place / name).is_dir() for name in PARTS[True]):
            return place
    if archived is not None:
        return _root(_unpacked(archived))
    return folder


def _unpacked(archive: Path) -> Path:
    """Unpack an archive once into the cache folder."""
    state = archive.stat()
    told_apart_by = f"{archive.resolve()} {state.st_size} {state.st_mtime_ns}"
    key = hashlib.sha256(told_apart_by.encode()).hexdigest()[:16]
    folder = files.cache_folder("imagefolder")
    target = folder / key
    with files.exclusive(folder):
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                with tarfile.open(archive) as opened:
                    opened.extractall(Path(temporary) / "content", filter="data")
                (Path(temporary) / "content").rename(target)
    return target
