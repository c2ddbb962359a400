"""What is seen of a loss and its labels in a sample of backward passes."""

import math

import pytest
import torch

from paceline.session.observers.objective import MOST_PASSES, Objective

functional = torch.nn.functional


def seen(labels_of, change=lambda loss: loss, passes=40):
    """The counts after passes of a model that guesses among four classes."""
    objective, weight = Objective(), torch.zeros(3, 4, requires_grad=True)
    for number in range(passes):
        labels = labels_of(number)
        loss = functional.cross_entropy(torch.ones(len(labels), 3) @ weight, labels)
        objective.look(change(loss), None)
    return objective.counts()


def test_guessing_costs_what_the_labels_frequencies_say():
    found = seen(lambda number: torch.tensor([0, 1, 2, 3] * 4))
    assert found["guess"] == pytest.approx(math.log(4))
    assert found["classes_seen"] == 4
    assert found["batches"] < MOST_PASSES
    uneven = seen(lambda number: torch.tensor([0] * 15 + [1]))
    assert uneven["guess"] < 0.3


def test_batches_of_one_class_hold_fewer_than_shuffled_ones():
    found = seen(lambda number: torch.full((16,), number // 2 % 4))
    assert found["labels_per_batch"] == 1
    assert found["labels_if_shuffled"] > 3
    mixed = seen(lambda number: torch.tensor([0, 1, 2, 3] * 4))
    assert mixed["labels_per_batch"] == pytest.approx(mixed["labels_if_shuffled"], rel=0.1)


@pytest.mark.parametrize("change", [lambda loss: -loss, lambda loss: -loss / 2])
def test_a_loss_with_its_sign_turned(change):
    assert seen(lambda number: torch.tensor([0, 1] * 8), change)["negated"]
    assert not seen(lambda number: torch.tensor([0, 1] * 8), lambda loss: 2 * loss)["negated"]


def test_labels_that_are_ignored_are_not_seen():
    found = seen(lambda number: torch.tensor([0, 1, -100, -100] * 4))
    assert found["classes_seen"] == 2


def test_a_loss_without_labels_is_not_known():
    objective = Objective()
    objective.look(torch.ones(4, requires_grad=True).square().mean(), None)
    objective.look(torch.tensor(1.0), None)
    assert objective.counts() == {}
