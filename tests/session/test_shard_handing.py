"""What a handed batch counts, and who is given a stand-in: by what the script does with batches."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader

from paceline.errors import SpecError
from tests.session.test_shard import Numbers
from tests.support.workers import Worker


def loaders(*settings, workers: int = 2, rank: int = 1, batch: str = "global"):
    """Worker `rank` of a job, and a loader for each (samples, batch size) of `settings`."""
    worker = Worker(rank, workers, None)  # nothing is shuffled here
    return worker, *(
        worker.shard(DataLoader(Numbers(n), size), batch=batch) for n, size in settings
    )


def train(worker, batches, steps: int | None = None) -> list[float]:
    """One backward pass for each batch."""
    return [worker.backward() for _ in itertools.islice(batches, steps)]


def test_a_stand_in_counts_nothing_in_training():
    worker, loader = loaders((9, 4))  # 4, 4 and a last batch of one sample
    seen = [(batch.tolist(), worker.backward()) for batch in loader]
    assert seen == [([2, 3], 1.0), ([6, 7], 1.0), ([8], 0.0)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("batch", ["global", "per-worker"])
def test_evaluation_sees_every_sample_once_and_no_stand_in(mode, batch):
    for workers in (1, 2, 4, 8):
        seen = []
        for rank in range(workers):
            _, loader = loaders((9, 4), workers=workers, rank=rank, batch=batch)
            with mode():
                seen += [index for part in loader for index in part.tolist()]
        assert sorted(seen) == list(range(9))


@pytest.mark.parametrize("is_training", [True, False])
def test_evaluation_is_known_by_what_was_done_so_far(is_training):
    """As in `for x, y in loader: with torch.no_grad(): …`, with model.eval() or without."""
    worker, loader = loaders((9, 4))
    worker.distribution.is_training = is_training
    assert [batch.tolist() for batch in loader] == [[2, 3], [6, 7]]


def test_evaluation_of_one_batch_is_known_by_the_models_mode():
    worker, loader = loaders((1, 4))
    worker.distribution.is_training = False
    assert list(loader) == []
    worker.distribution.is_training = True
    with pytest.raises(SpecError, match=r"inside torch\.no_grad"):
        list(loader)


def test_training_in_evaluation_mode_is_training():
    """Frozen statistics: `model.eval()`, and gradients all the same."""
    worker, loader = loaders((9, 4))
    worker.distribution.is_training = False
    assert train(worker, loader) == [1.0, 1.0, 0.0]


def test_a_look_at_the_first_batch_before_there_is_a_model():
    worker, loader = loaders((1, 4))
    worker.distribution.is_training = None
    assert next(iter(loader)).tolist() == [0]
    assert worker.gradients.scale == 1.0


def test_evaluation_between_drawing_and_backward_changes_nothing():
    worker, train, test = loaders((6, 3), (5, 3))
    for scheme in (torch.no_grad, torch.enable_grad):
        batches = iter(train)
        next(batches)
        with scheme():
            assert len(list(test)) == 2
        assert worker.backward() == pytest.approx(2 / 3)
        next(batches)
        assert worker.backward() == pytest.approx(2 / 3)


def test_training_on_what_was_drawn_without_gradients_is_refused():
    """As with a function that draws and prepares a batch under `@torch.no_grad()`."""
    worker, loader = loaders((11, 4))
    with torch.no_grad():
        next(iter(loader))
    with pytest.raises(SpecError, match=r"drawn inside torch\.no_grad"):
        worker.backward()
    worker, loader = loaders((12, 4))
    with torch.no_grad():
        next(iter(loader))
    assert worker.backward() == 1.0


def test_training_on_data_that_are_not_sharded_beside_evaluation_on_such_as_are():
    worker, test = loaders((11, 4))
    for _ in range(2):
        worker.distribution.is_training = False
        with torch.no_grad():
            list(test)
        worker.distribution.is_training = True
        assert worker.backward() == 1.0


def test_accumulated_batches_count_by_themselves():
    worker, loader = loaders((11, 4))
    assert train(worker, loader) == pytest.approx([1.0, 1.0, 2 / 3])
    batches = iter(loader)
    first, _, last = next(batches), next(batches), next(batches)  # several drawn before backward
    assert (first.tolist(), last.tolist()) == ([2, 3], [10])
    assert worker.backward() == pytest.approx(2 / 3)  # the last drawn one's holds


def test_one_batch_may_have_several_backward_passes():
    worker, loader = loaders((11, 4))
    assert [[worker.backward() for _ in range(3)] for _ in loader][-1] == pytest.approx([2 / 3] * 3)


def test_loaders_trained_on_in_turns():
    worker, one, two = loaders((11, 4), (8, 4))
    scales = []
    for _ in one:
        scales.append(worker.backward())
        next(iter(two))
        scales.append(worker.backward())
    assert scales == pytest.approx([1, 1, 1, 1, 2 / 3, 1])


def test_two_batches_in_one_backward_are_refused_where_they_count_differently():
    worker, one, two = loaders((11, 4), (12, 4))
    with pytest.raises(SpecError, match="batches of two loaders"):
        train(worker, zip(one, two, strict=True))
    assert worker.gradients.count == 2
    worker, one, two = loaders((12, 4), (12, 4))
    assert train(worker, zip(one, two, strict=True)) == [1.0] * 3


def test_an_evaluation_that_was_left_is_not_mixed_with_training():
    """As in `for x, y in test: … break` in evaluation mode, drawn with gradients enabled."""
    worker, test, loader = loaders((11, 3), (12, 4))
    worker.distribution.is_training = False
    next(iter(test))
    worker.distribution.is_training = True
    assert train(worker, loader) == [1.0] * 3


@pytest.mark.parametrize("keep", [itertools.cycle, list])
def test_batches_of_a_pass_that_is_over_are_refused_where_they_count_differently(keep):
    worker, loader = loaders((11, 4))
    with pytest.raises(SpecError, match="yield from loader"):
        train(worker, keep(loader), 6)
    assert worker.gradients.count <= 1, "at once, not after a pass"
    with torch.no_grad():
        assert len(list(itertools.islice(keep(loader), 3))) == 3
    worker, loader = loaders((12, 4))
    assert train(worker, keep(loader), 3) == [1.0] * 3


def test_reading_ahead_is_refused_where_batches_count_differently():
    def ahead(loader):
        batches = iter(loader)
        current = next(batches)
        for following in batches:
            yield current
            current = following
        yield current

    worker, loader = loaders((11, 4))
    with pytest.raises(SpecError, match="no reading ahead"):
        train(worker, ahead(loader))


def test_a_new_pass_makes_amends():
    worker, loader, test = loaders((11, 4), (8, 4))
    for _ in range(2):
        assert train(worker, loader) == pytest.approx([1, 1, 2 / 3])
        list(test)
    with pytest.raises(SpecError, match="has ended"):
        worker.backward()


def test_gradients_are_watched_where_a_loader_may_be_uneven_and_nowhere_else():
    worker, loader = loaders((12, 4))
    train(worker, loader)
    assert worker.gradients.count == 0
    worker, loader, _ = loaders((12, 4), (11, 4))
    train(worker, loader)
    assert worker.gradients.count > 0


def test_a_pass_that_was_left_leaves_its_scale():
    worker, loader = loaders((5, 3))
    batch = next(iter(loader))
    assert (batch.tolist(), worker.backward()) == ([2], pytest.approx(2 / 3))
    assert worker.backward() == pytest.approx(2 / 3)
