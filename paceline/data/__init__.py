"""The papers' data sets by name, and how workers get their samples.

One file per data set beside this one, one table here; `sampling` decides who gets which sample,
`loader` and `scatter` bring it. Models live in `paceline.models`.
"""

from collections.abc import Callable
from pathlib import Path

from paceline.data import (
    acoustic,
    adult,
    cifar10,
    higgs,
    imagefolder,
    mnist,
    shapes,
    synthetic,
    text,
)
from paceline.data.base import Batch, Dataset, Request
from paceline.data.feed import DeviceLoader
from paceline.data.loader import BatchSource, Loader
from paceline.data.sampling import GlobalBatches, part_of, split
from paceline.errors import MissingError, SpecError, suggest

__all__ = [
    "COMPUTED",
    "Batch",
    "BatchSource",
    "Dataset",
    "DeviceLoader",
    "GlobalBatches",
    "Loader",
    "names",
    "open",
    "part_of",
    "split",
]

_TABLE: dict[str, Callable[[Request], Dataset]] = {
    "cifar10": cifar10.load,
    "mnist": mnist.load,
    "adult": adult.load,
    "acoustic": acoustic.load,
    "higgs": higgs.load,
    "imagefolder": imagefolder.load,
    "synthetic": synthetic.load,
    "shapes": shapes.load,
    "text": text.load,
}

COMPUTED = ("shapes", "synthetic")
"""Sets that are made as they are needed, from no file."""


def names() -> list[str]:
    """Every data set, as the user types it."""
    return list(_TABLE)


def open(
    name: str,
    *,
    data_dir: Path | None = None,
    train: bool = True,
    seed: int = 0,
    input_shape: tuple[int, ...] | None = None,
    num_classes: int | None = None,
    num_samples: int | None = None,
    tokens: bool = False,
    cache: bool = False,
) -> Dataset:
    """Open the training or the test part of a data set.

    Files are looked for in `data_dir` and nowhere else when it is given; otherwise they are
    downloaded once into the cache folder. The four before `cache` are for sets that can have any
    shape (synthetic, imagefolder, text); for the others they must agree with what the set is.
    `cache` keeps photographs decoded in memory after their first use.
    """
    if name not in _TABLE:
        raise SpecError("data", f'"{name}" is not a data set.', suggest(name, names()))
    if data_dir is not None and not data_dir.exists():
        problem = f"data set {name}: there is no {data_dir}."
        raise MissingError(problem, "name the folder that holds its files with --data-dir.")
    dataset = _TABLE[name](
        Request(
            data_dir=data_dir,
            train=train,
            seed=seed,
            input_shape=input_shape,
            num_classes=num_classes,
            num_samples=num_samples,
            tokens=tokens,
            cache=cache,
        )
    )
    if input_shape is not None and tuple(input_shape) != dataset.input_shape:
        problem = f"input_shape = {input_shape}, but its samples have {dataset.input_shape}."
        raise SpecError(f"data {name}", problem, "leave input_shape out, or use synthetic data.")
    return dataset
