"""What a script's loss is made of: its sign, and the classes of the labels that it compares with.

A classifier that guesses has the loss of the labels' own frequencies, and samples that come sorted
have few classes in a batch. Both are read from the operations that `backward()` starts from, in a
sample of passes: the first ones, and every few after them. Other losses are not known.
"""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

FIRST_PASSES, EVERY, MOST_PASSES = 8, 4, 32
"""The passes that are looked at: so many at first, then one in a few, and so many in all."""

MOST_OPERATIONS = 8
"""Operations between the loss and the comparison with labels, at most."""

LABELS_EACH = 8
"""Labels seen for each class, from which their frequencies are told."""

COMPARES = ("NllLossBackward0", "NllLoss2DBackward0")


class Objective:
    """The sign of one worker's loss, and its labels."""

    def __init__(self) -> None:
        self._passes = self._looked = 0
        self._labels: Counter[int] = Counter()
        self._in_batches: list[tuple[int, int]] = []
        """Labels and different labels of each batch that was looked at."""

        self._is_negated = False

    def look(self, roots: Any, gradients: Any) -> None:
        """Look at what a backward pass starts from, if it is one of the sample."""
        number, self._passes = self._passes, self._passes + 1
        if self._looked >= MOST_PASSES or (number >= FIRST_PASSES and number % EVERY):
            return
        try:
            with torch._C.DisableTorchFunctionSubclass():
                for root in [roots] if isinstance(roots, Tensor) else roots:
                    self._look_at(root)
        except Exception:  # an unusual loss must cost its labels, never a script its pass
            self._looked = MOST_PASSES

    def counts(self) -> dict[str, object]:
        """What the record holds of it; empty where no labels were seen."""
        whole = sum(self._labels.values())
        if not whole:
            return {}
        shares = [count / whole for count in self._labels.values()]
        found: dict[str, object] = {"batches": self._looked, "classes_seen": len(shares)}
        found["negated"] = self._is_negated
        if whole >= LABELS_EACH * len(shares) and len(shares) > 1:
            found["guess"] = -sum(share * math.log(share) for share in shares)
        usual = [sum(1 - (1 - s) ** count for s in shares) for count, _ in self._in_batches]
        own = [float(different) for _, different in self._in_batches]
        found["labels_per_batch"] = sum(own) / len(own)
        found["labels_if_shuffled"] = sum(usual) / len(usual)
        return found

    def _look_at(self, root: Tensor) -> None:
        if root.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        sign = 1
        for operation in _chain(root):
            if operation.name() == "NegBackward0":
                sign = -sign
            if operation.name() in COMPARES:
                self._note(operation._saved_target, sign)
                return

    def _note(self, target: Tensor, sign: int) -> None:
        labels = [label for label in target.detach().flatten().tolist() if label >= 0]
        if labels:
            self._looked += 1
            self._labels.update(labels)
            self._in_batches.append((len(labels), len(set(labels))))
            self._is_negated = sign < 0


def _chain(root: Tensor) -> Iterator[Any]:
    """The operations behind a loss, the last first, along their first inputs."""
    operation: Any = root.grad_fn
    for _ in range(MOST_OPERATIONS):
        if operation is None:
            return
        yield operation
        operation = operation.next_functions[0][0] if operation.next_functions else None
