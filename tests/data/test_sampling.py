"""The global batch is the same whatever the number of workers, and nobody's sample is lost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.sampling import GlobalBatches, part_of, split
from paceline.errors import SpecError

SHARES = st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=9).filter(
    lambda shares: sum(shares) > 0
)


@st.composite
def batches(draw):
    num_samples = draw(st.integers(1, 300))
    return GlobalBatches(
        num_samples,
        draw(st.integers(1, num_samples)),
        seed=draw(st.integers(0, 2**31)),
        shuffle=draw(st.booleans()),
        keep_last=draw(st.booleans()),
    )


@given(batches(), st.integers(0, 5))
def test_an_epoch_visits_no_sample_twice(batches, epoch):
    first = epoch * batches.steps_per_epoch
    steps = range(first, first + batches.steps_per_epoch)
    seen = np.concatenate([batches.indices(step) for step in steps])
    assert len(set(seen.tolist())) == len(seen)
    assert seen.min() >= 0
    assert seen.max() < batches.num_samples
    left_out = batches.num_samples - len(seen)
    assert left_out == 0 if batches.keep_last else left_out < batches.global_batch
    assert {batches.epoch(step) for step in steps} == {epoch}


@given(batches(), st.lists(st.integers(0, 1000), min_size=1, max_size=6))
def test_a_step_is_the_same_whenever_it_is_asked_for(batches, steps):
    fresh = GlobalBatches(
        batches.num_samples,
        batches.global_batch,
        seed=batches.seed,
        shuffle=batches.shuffle,
        keep_last=batches.keep_last,
    )
    in_order = {step: fresh.indices(step).tolist() for step in sorted(steps)}
    assert {step: batches.indices(step).tolist() for step in steps} == in_order


def test_epochs_and_seeds_differ():
    one, two = (GlobalBatches(1000, 100, seed=seed) for seed in (1, 2))
    assert one.indices(0).tolist() != two.indices(0).tolist()
    assert one.indices(0).tolist() != one.indices(one.steps_per_epoch).tolist()


@given(st.integers(0, 10_000), SHARES)
def test_split_is_contiguous_whole_and_proportional(count, shares):
    parts = split(count, shares)
    assert len(parts) == len(shares)
    stops = [0, *(part.stop for part in parts)]
    assert [part.start for part in parts] == stops[:-1]
    assert stops[-1] == count
    for part, share in zip(parts, shares, strict=True):
        assert abs((part.stop - part.start) - count * share / sum(shares)) < 1 + 1e-6


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_equal_shares_differ_by_one_sample_at_most(count, workers):
    sizes = [part.stop - part.start for part in split(count, [1.0] * workers)]
    assert max(sizes) - min(sizes) <= 1


@given(batches(), SHARES, st.integers(0, 50))
def test_the_workers_parts_are_the_global_batch(batches, shares, step):
    whole = batches.indices(step)
    parts = [whole[part_of(worker, shares)(len(whole))] for worker in range(len(shares))]
    assert np.concatenate(parts).tolist() == whole.tolist()


@pytest.mark.parametrize("shares", [[], [0.0, 0.0], [1.0, -1.0], [float("inf"), 1.0]])
def test_shares_that_divide_nothing_are_refused(shares):
    with pytest.raises(SpecError, match="do not divide"):
        split(8, shares)


@pytest.mark.parametrize("global_batch", [0, 11])
def test_an_impossible_batch_is_refused(global_batch):
    with pytest.raises(SpecError, match="impossible"):
        GlobalBatches(10, global_batch)
