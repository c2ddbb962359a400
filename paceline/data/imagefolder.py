"""An ImageNet-style folder: train/<class>/*.JPEG and val/<class>/*.JPEG, loose or in one archive.

Training pictures are a random part of the photograph (8 % to 100 % of its area), resized and
mirrored half of the time; test pictures are the middle. Which part depends on (seed, epoch, sample)
alone, so every worker count sees the same pictures. ImageNet's mean and deviation per channel.
"""

import hashlib
import os
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from paceline.data import files
from paceline.data.base import Batch, Dataset, Normaliser, Request
from paceline.data.decoders import Decoders, unreadable
from paceline.data.decoding import Decoder, UnreadableError
from paceline.data.sampling import Indices
from paceline.errors import MissingError

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIDE = 224
FEW_CORES = 2
"""Up to so many, decoders of their own would only take turns with the training."""

PICTURE_SUFFIXES = {".jpeg", ".jpg", ".png", ".webp", ".bmp"}
PARTS = {True: ("train", "training"), False: ("val", "validation", "test")}


class ImageFolder(Dataset):
    """Photographs decoded when asked for, by as many processes as this worker has cores to spare.

    On a core or two this process decodes by itself.
    """

    name = "imagefolder"
    costly = True

    def __init__(
        self,
        folder: Path,
        *,
        side: int,
        train: bool,
        seed: int,
        cache: bool = False,
        processes: int | None = None,
    ) -> None:
        """`processes` decode; None for one on each core but one, 0 for this process alone."""
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
        self._side, self._normalise = side, Normaliser(MEAN, DEVIATION)
        cores = len(os.sched_getaffinity(0))
        if processes is None:
            processes = cores - 1 if cores > FEW_CORES else 0
        paths = [path for path, _ in self._samples]
        self._decoders = (
            Decoders(paths, processes, side=side, train=train, seed=seed, cache=cache)
            if processes
            else None
        )
        self._decoder = Decoder(
            [str(path) for path in paths], side=side, train=train, seed=seed, cache=cache
        )
        self._threads = ThreadPoolExecutor(cores, "paceline-decode")

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, indices: Indices, epoch: int = 0) -> Batch:
        return self.on_device(self.host_batch(indices, epoch))

    def host_batch(self, indices: Indices, epoch: int = 0) -> Batch:
        """Bytes: a quarter of what the normalised numbers would take on their way."""
        numbers = indices.tolist()
        labels = torch.tensor([self._samples[number][1] for number in numbers])
        if self._decoders is not None:
            return torch.from_numpy(self._decoders.pictures(numbers, epoch)), labels
        pictures = np.empty((len(numbers), self._side, self._side, 3), np.uint8)

        def fill(place: int) -> None:
            pictures[place] = self._decoder.picture(numbers[place], epoch)

        try:
            list(self._threads.map(fill, range(len(numbers))))
        except UnreadableError as error:
            raise unreadable(str(error)) from None
        return torch.from_numpy(pictures), labels

    def on_device(self, batch: Batch) -> Batch:
        pictures, labels = batch
        return self._normalise(pictures), labels

    def close(self) -> None:
        self._threads.shutdown()
        if self._decoders is not None:
            self._decoders.close()


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
