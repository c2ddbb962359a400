"""`text`: bytes of a text file as tokens, for `gpt-small`; without a file, sentences of a grammar.

A sample is a window of the text; the target at each place is the byte that follows. Windows do not
overlap. The last tenth of the text is the test part.
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data import files
from paceline.data.base import Batch, Dataset, Request
from paceline.data.sampling import Indices
from paceline.errors import MissingError

CONTEXT = 128
TEST_FRACTION = 0.1
NUM_SENTENCES = 12_000

NOUNS = ["rider", "leader", "sprinter", "climber", "captain", "team", "wind", "hill", "river"]
VERBS = ["follows", "passes", "leads", "shelters", "watches", "drops", "joins", "chases"]
KINDS = ["quiet", "steady", "tired", "early", "broken", "narrow", "golden", "distant"]
PLACES = ["on the hill", "by the river", "into the wind", "behind the team", "before the bridge"]


class Text(Dataset):
    """Windows of `context` bytes."""

    name = "text"
    num_classes = 256

    def __init__(self, content: NDArray[np.uint8], context: int) -> None:
        self.input_shape = (context,)
        count = (len(content) - 1) // context
        self._inputs = torch.from_numpy(content[: count * context].reshape(count, context))
        self._targets = torch.from_numpy(content[1 : count * context + 1].reshape(count, context))

    def __len__(self) -> int:
        return len(self._inputs)

    def batch(self, indices: Indices, epoch: int = 0) -> Batch:
        chosen = torch.from_numpy(indices)
        return self._inputs[chosen].long(), self._targets[chosen].long()


def sentences(count: int = NUM_SENTENCES, seed: int = 0) -> bytes:
    """Write `count` sentences of a small grammar, the same ones each time."""
    rng = np.random.default_rng(seed)

    def column(words: list[str]) -> list[str]:
        return [words[number] for number in rng.integers(len(words), size=count)]

    parts = (KINDS, NOUNS, VERBS, KINDS, NOUNS, PLACES)
    rows = zip(*map(column, parts), strict=True)
    lines = (
        f"the {kind} {who} {does} the {how} {whom} {where}.\n"
        for kind, who, does, how, whom, where in rows
    )
    return "".join(lines).encode()


def load(request: Request) -> Dataset:
    """Open the training or the test part of a file, a folder's .txt files, or the grammar."""
    context = request.input_shape[0] if request.input_shape else CONTEXT
    content = np.frombuffer(_content(request.data_dir), np.uint8).copy()
    cut = int(len(content) * (1 - TEST_FRACTION))
    part = content[:cut] if request.train else content[cut:]
    if len(part) <= context:
        problem = f"data set text: {len(part)} bytes do not fill one window of {context}."
        raise MissingError(problem, "give a longer text or a smaller input_shape.")
    return Text(part, context)


def _content(place: Path | None) -> bytes:
    if place is None:
        return sentences()
    if place.is_file():
        return files.read(place)
    paths = sorted(place.glob("*.txt")) + sorted(place.glob("*.txt.*"))
    if not paths:
        problem = f"data set text: there is no .txt file in {place}."
        raise MissingError(problem, "name a text file, or a folder of them, with --data-dir.")
    return b"".join(files.read(path) for path in paths)
