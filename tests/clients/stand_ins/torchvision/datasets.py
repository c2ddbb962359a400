"""MNIST, read from the compressed official files."""

import gzip
import os
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset

DATA = Path(os.environ["SHARED_DATA"]) / "mnist"


class MNIST(Dataset):
    def __init__(self, root, train=True, download=False, transform=None):
        part, count = ("train" if train else "t10k"), int(os.environ["SAMPLES"])
        pixels = _read(f"{part}-images-idx3-ubyte.gz", 16, count * 28 * 28)
        self.images = pixels.reshape(count, 28, 28)
        self.labels = _read(f"{part}-labels-idx1-ubyte.gz", 8, count).astype(int)
        self.transform = transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.transform(self.images[index]), int(self.labels[index])


def _read(name, header_bytes, count):
    with gzip.open(DATA / name) as file:
        return np.frombuffer(file.read(header_bytes + count), np.uint8)[header_bytes:]
