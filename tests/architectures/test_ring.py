"""`ring` trains like one worker on the whole batch."""

import pytest
import torch
import torch.distributed as dist

from paceline import spec
from paceline.architectures.ring import RingArchitecture
from paceline.testing import run_members
from paceline.training.session import Session
from tests.curves import largest_difference, loss_curve, whole


@pytest.fixture(scope="module")
def reference():
    return whole(run_members(loss_curve, workers=1))


@pytest.mark.parametrize("workers", [2, 4])
def test_follows_single_on_the_same_global_batch(workers, reference):
    curve = whole(run_members(loss_curve, workers=workers, architecture=spec.Ring()))
    assert largest_difference(curve, reference) < 1e-4


def test_uneven_shares_give_the_whole_batch_gradient(reference):
    parts = run_members(loss_curve, [3.0, 1.0], workers=2, architecture=spec.Ring())
    assert largest_difference(whole(parts), reference) < 1e-4


def train_without_averaging(session: Session) -> list[float]:
    """What a broken ring would do: every worker keeps its own gradients."""
    distribute = RingArchitecture.distribute

    def broken(self, model, optimizer):
        model, optimizer = distribute(self, model, optimizer)
        model.register_comm_hook(None, keep_own)
        return model, optimizer

    RingArchitecture.distribute = broken
    return loss_curve(session)


def keep_own(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def test_the_comparison_notices_gradients_that_are_not_averaged(reference):
    parts = run_members(train_without_averaging, workers=2, architecture=spec.Ring())
    assert largest_difference(whole(parts), reference) > 1e-3


def starts_with_a_small_bucket(session: Session) -> bool:
    model = torch.nn.Linear(4, 4)
    model, _ = session.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return bool(model.bucket_bytes_cap_default)


@pytest.mark.parametrize(("bucket", "small"), [("auto", True), ("25MiB", False)])
def test_the_exchange_starts_early_unless_the_user_sizes_the_buckets(bucket, small):
    ring = spec.Ring(bucket=bucket)
    assert run_members(starts_with_a_small_bucket, workers=2, architecture=ring) == [small, small]
