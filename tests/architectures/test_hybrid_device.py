"""`hybrid` where buckets are apart from the host's memory, without a GPU: copies come late."""

import pytest
import torch

from paceline import spec
from paceline.architectures.hybrid import host_stage, host_sums
from paceline.collectives.context import Context
from paceline.errors import SpecError
from paceline.launch import identify
from paceline.telemetry import StepClock
from paceline.testing import run_members
from tests.architectures.test_hybrid import curve_on_hosts
from tests.architectures.test_server_device import SlowLane
from tests.support.curves import largest_difference, loss_curve, whole


@pytest.fixture(scope="module")
def reference():
    return whole(run_members(loss_curve, workers=1))


class LazyLane:
    """Copies nothing before it is waited for."""

    def __init__(self, device):
        self._copies = []

    def here(self):
        return self

    def after(self, moment):
        pass

    def copy(self, targets, sources):
        for target, source in zip(targets, sources, strict=True):
            target.fill_(torch.nan)
            self._copies.append((target, source))

    def reached(self):
        return self

    @torch.no_grad()
    def synchronize(self):
        copies, self._copies = self._copies, []
        for target, source in copies:
            target.copy_(source)

    def query(self):
        self.synchronize()
        return True

    def follow(self, moment):
        moment.synchronize()

    def reuse(self, moment):
        pass

    def close(self):
        self.synchronize()


def curve_apart(session, hosts, forgets=""):
    lane = LazyLane if forgets else SlowLane
    host_stage.is_apart, host_stage.open_guest_lane = lambda device: True, lane
    if forgets == "sums":  # what a broken worker would do: not wait for the copy to the device
        host_stage.HostStage.follow = lambda stage: None
    if forgets == "gradients":  # or tell others of gradients that are not in the host's memory yet
        host_sums._is_here = lambda moment: True
    parts, counted = curve_on_hosts(session, hosts)
    assert all(flat is not None for flat in session.architecture._sums._on_device)
    return parts, counted


@pytest.mark.parametrize(
    ("hosts", "between", "servers"),
    [
        ("ab", "ring", 0),
        pytest.param("aab", "server", 0, marks=pytest.mark.slow),
        pytest.param("abab", "ring", 0, marks=pytest.mark.slow),
        pytest.param("aab", "server", 1, marks=pytest.mark.slow),
    ],
)
def test_follows_single_on_the_same_global_batch(hosts, between, servers, reference):
    options = spec.Hybrid(between=between)
    found = run_members(
        curve_apart, hosts, workers=len(hosts), servers=servers, architecture=options
    )
    assert largest_difference(whole([parts for parts, _ in found]), reference) < 1e-4


def test_workers_that_go_on_without_a_lost_one_are_refused(monkeypatch):
    monkeypatch.setattr(host_stage, "is_apart", lambda device: True)
    cpu = torch.device("cpu")
    common = {"store": None, "clock": StepClock(), "device": cpu, "note": print}
    context = Context(identity=identify({}), views=object(), **common)
    with pytest.raises(SpecError, match="cannot go on in place"):
        host_stage.HostStage(context).bucket(8, torch.float32, cpu)


@pytest.mark.parametrize("forgets", ["nothing", "sums", "gradients"])
def test_copies_that_are_not_waited_for_are_noticed(forgets, reference):
    found = run_members(curve_apart, "aa", forgets, workers=2, architecture=spec.Hybrid())
    follows = largest_difference(whole([parts for parts, _ in found]), reference) < 1e-4
    assert follows == (forgets == "nothing")
