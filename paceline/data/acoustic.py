"""Acoustic (SensIT Vehicle, acoustic view): 50 features, 3 kinds of vehicle, LIBSVM text.

Features are shifted and scaled by the training part's mean and deviation.
"""

import numpy as np

from paceline.data import files, libsvm
from paceline.data.base import Dataset, Request, Rows, standardise
from paceline.data.fetch import RemoteFile, fetch_all

NUM_FEATURES = 50
PLACE = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/vehicle"
FILES = tuple(
    RemoteFile(name=name, urls=(f"{PLACE}/{name}",), digest=None)  # no checksum is published
    for name in ("acoustic.bz2", "acoustic.t.bz2")
)
TEST_EVERY = 5
"""Without a test file every fifth row is the test part: the rows may be sorted by class."""


def load(request: Request) -> Dataset:
    """Open the training or the test part."""
    folder = request.data_dir or fetch_all(FILES, files.cache_folder("acoustic"))
    train_path = files.require(
        folder, "acoustic", "acoustic_scale", "acoustic.subset*", name="acoustic"
    )
    rows, labels = libsvm.parse(files.read(train_path), NUM_FEATURES)
    test_path = files.find(folder, "acoustic.t", "acoustic_scale.t")
    if test_path is None:
        held_out = np.arange(len(rows)) % TEST_EVERY == TEST_EVERY - 1
        (rows, labels), (test_rows, test_labels) = (
            (rows[chosen], labels[chosen]) for chosen in (~held_out, held_out)
        )
    elif not request.train:
        test_rows, test_labels = libsvm.parse(files.read(test_path), NUM_FEATURES)
    if request.train:
        return Rows("acoustic", standardise(rows), labels - 1, num_classes=3)
    return Rows("acoustic", standardise(test_rows, like=rows), test_labels - 1, num_classes=3)
