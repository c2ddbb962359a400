"""`ring` trains like one worker on the whole batch."""

import pytest
import torch

from paceline import spec
from paceline.collectives.collective import TorchCollective
from paceline.session.session import Session
from paceline.testing import run_members
from tests.support.curves import largest_difference, loss_curve, whole


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
    TorchCollective.start = lambda self, flat: flat.mul_(session.workers)  # type: ignore
    return loss_curve(session)


def test_the_comparison_notices_gradients_that_are_not_averaged(reference):
    parts = run_members(train_without_averaging, workers=2, architecture=spec.Ring())
    assert largest_difference(whole(parts), reference) > 1e-3


def bucket_sizes(session: Session) -> list[int]:
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(16)))
    session.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert session.architecture is not None
    return [len(bucket.slots) for bucket in session.architecture._buckets]  # type: ignore


@pytest.mark.parametrize(("bucket", "sizes"), [("auto", [4, 12]), ("2MiB", [4, 8, 4])])
def test_the_first_bucket_is_small_so_that_the_exchange_starts_early(bucket, sizes):
    """256 KiB each: 1 MiB first, then as many as fit."""
    ring = spec.Ring(bucket=bucket)
    assert run_members(bucket_sizes, workers=2, architecture=ring) == [sizes, sizes]


def script_with_its_own_group(session: Session) -> float:
    """torch's default group is the script's, whether it is made before or after ours."""
    model = torch.nn.Linear(4, 1)
    session.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not torch.distributed.is_initialized()
    store = torch.distributed.PrefixStore("script", session.store)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=session.rank, world_size=session.workers
    )
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    model(torch.ones(2, 4)).sum().backward()
    return float(total)


def test_a_script_may_have_a_process_group_of_its_own():
    assert run_members(script_with_its_own_group, workers=2, architecture=spec.Ring()) == [2, 2]
