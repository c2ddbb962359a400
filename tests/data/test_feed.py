"""Batches on their way to a device: the loader's own, ahead of need; decoders' pictures alike."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.data.feed import DeviceLoader
from paceline.data.imagefolder import ImageFolder
from paceline.data.loader import Loader
from paceline.data.sampling import GlobalBatches, part_of, split
from paceline.data.synthetic import Synthetic
from paceline.errors import MissingError
from tests.data.test_loader import Numbered

CPU = torch.device("cpu")


def test_the_feed_yields_what_the_loader_yields():
    batches = GlobalBatches(100, 12, seed=3)
    fed = DeviceLoader(Numbered(), batches, part_of(1, [1.0, 2.0]), CPU).steps(2, 11)
    plain = Loader(Numbered(), batches, part_of(1, [1.0, 2.0])).steps(2, 11)
    for (_, targets), (_, expected) in zip(fed, plain, strict=True):
        assert targets.tolist() == expected.tolist()


def test_what_was_made_ahead_is_made_anew_when_the_batch_divides_differently():
    batches, shares = GlobalBatches(100, 12, seed=3), [1.0, 1.0]
    loader = DeviceLoader(Numbered(), batches, lambda count: split(count, shares)[0], CPU)
    with closing(loader.steps(0, 6)) as steps:
        for step, (_, targets) in enumerate(steps):
            own = batches.indices(step)[split(12, shares)[0]]
            assert targets.tolist() == own.tolist()
            if step == 2:
                shares[:] = [3.0, 1.0]


def test_an_error_in_the_making_reaches_the_loop():
    loader = DeviceLoader(Numbered(5000), GlobalBatches(5000, 50), part_of(0, [1.0]), CPU)
    with pytest.raises(ValueError, match="no such sample"):
        list(loader.steps(0, 100))


def test_a_synthetic_batch_larger_than_the_pool_is_a_view_too():
    samples = Synthetic(input_shape=(3, 64, 64), num_classes=5)
    pool = samples._pool
    first, _ = samples.batch(np.arange(7, 7 + 2 * pool))
    again, _ = samples.batch(np.arange(7, 7 + 2 * pool))
    assert first.data_ptr() == again.data_ptr()
    assert torch.equal(first[0], first[pool])
    chosen = np.array([3, 1, pool + 4])
    assert torch.equal(samples.batch(chosen)[0][2], samples.batch(np.arange(4, 5))[0][0])


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(1)
    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        for number in range(6):
            values = rng.integers(256, size=(50, 70, 3), dtype=np.uint8)
            Image.fromarray(values).save(tmp_path / label / f"{number}.png")
    return tmp_path


@pytest.mark.parametrize("cache", [False, True])
def test_decoders_make_the_pictures_that_this_process_would(folder, cache):
    options = {"side": 32, "train": True, "seed": 5, "cache": cache}
    with (
        closing(ImageFolder(folder, **options, processes=0)) as here,
        closing(ImageFolder(folder, **options, processes=3)) as there,
    ):
        for epoch, count in enumerate((4, 4, 11)):  # the last needs more room
            numbers = np.random.default_rng(epoch).permutation(12)[:count]
            mine, labels = here.batch(numbers, epoch)
            theirs, same = there.batch(numbers, epoch)
            assert torch.equal(mine, theirs)
            assert torch.equal(labels, same)


def damaged(kind: str, path: Path) -> None:
    match kind:
        case "no picture":
            path.write_bytes(b"no picture")
        case "cut short":
            path.write_bytes(path.read_bytes()[:-40])
        case "empty":
            path.write_bytes(b"")
        case "gone":
            path.unlink()
            path.symlink_to("nowhere.png")


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("kind", ["no picture", "cut short", "empty", "gone"])
def test_a_file_that_is_no_picture_is_named(folder, processes, kind):
    damaged(kind, folder / "cat" / "0.png")
    options = {"side": 32, "train": True, "seed": 5}
    with (
        closing(ImageFolder(folder, **options, processes=processes)) as pictures,
        pytest.raises(MissingError, match=r"0\.png"),
    ):
        pictures.batch(np.arange(12))
