"""`hybrid` trains like one worker, whatever its hosts and whoever sums between them."""

import msgspec
import pytest
import torch
from torch import nn

from paceline import engines, spec
from paceline.architectures.hybrid import RingSums
from paceline.autograd.averaging import BucketedArchitecture
from paceline.errors import MemberError
from paceline.telemetry.queues import HEADER_BYTES
from paceline.testing import run_members
from tests.support.curves import STEPS, largest_difference, loss_curve, small_model, whole
from tests.tunnel.conftest import rights  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def reference():
    return whole(run_members(loss_curve, workers=1))


def curve_on_hosts(session, hosts, shares=None):
    """Worker i is on host `hosts[i]`; returns its curve and what it counted."""
    session.identity = msgspec.structs.replace(session.identity, host=hosts[session.rank])
    parts = loss_curve(session, shares)
    return parts, session.architecture.counters()


@pytest.mark.parametrize(
    ("hosts", "between", "servers"),
    [
        ("aa", "ring", 0),
        ("ab", "ring", 0),
        ("abab", "ring", 0),
        ("aab", "server", 1),
        ("aab", "server", 0),
    ],
)
def test_follows_single_on_the_same_global_batch(hosts, between, servers, reference):
    found = run_members(
        curve_on_hosts,
        hosts,
        workers=len(hosts),
        servers=servers,
        architecture=spec.Hybrid(between=between),
    )
    curve = whole([parts for parts, _ in found])
    assert largest_difference(curve, reference) < 1e-4


def test_uneven_shares_give_the_whole_batch_gradient(reference):
    found = run_members(
        curve_on_hosts, "aab", [3.0, 1.0, 2.0], workers=3, architecture=spec.Hybrid()
    )
    assert largest_difference(whole([parts for parts, _ in found]), reference) < 1e-4


def buckets_sent_before_backward_ended(session):
    """One worker on each of two hosts: how many of all its buckets were with the exchange."""
    host = "ab"[session.rank]
    session.identity = msgspec.structs.replace(session.identity, host=host)
    sent, finish = [], BucketedArchitecture.pass_over

    def pass_over(architecture):
        sums = architecture._collective._between
        sent.append((sums._started, len(architecture._buckets)))
        finish(architecture)

    BucketedArchitecture.pass_over = pass_over
    model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = session.distribute(model, optimizer)
    for _ in range(2):
        model(torch.ones(2, 600)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return sent


@pytest.mark.parametrize("servers", [0, 1])
def test_buckets_leave_for_the_servers_while_backward_runs(servers):
    options = spec.Hybrid(between="server")
    found = run_members(
        buckets_sent_before_backward_ended, workers=2, servers=servers, architecture=options
    )
    for sent, buckets in (step for steps in found for step in steps):
        assert buckets > 1
        assert sent == buckets, "what was full had to wait for the end"


def curve_without_leaders(session, hosts):
    """What it would do if every host kept its own sums."""
    RingSums.start = lambda self, flat: None
    return curve_on_hosts(session, hosts)


def test_hosts_that_do_not_exchange_are_noticed():
    with pytest.raises(MemberError, match="weights have become different"):
        run_members(curve_without_leaders, "ab", workers=2, architecture=spec.Hybrid())


def test_only_leaders_send_between_hosts():
    found = run_members(curve_on_hosts, "aabb", workers=4, architecture=spec.Hybrid())
    sent = [counters["exchanged_bytes_between_hosts"] for _, counters in found]
    gradients = list(small_model().parameters())
    # And a mark for each, and one number that tells whether workers' weights are the same.
    num_floats = sum(p.numel() for p in gradients) + len(gradients) + 1
    assert sent == [STEPS * 4 * num_floats, 0, STEPS * 4 * num_floats, 0]
    assert all(counters["hosts"] == 2 for _, counters in found)


@pytest.mark.tunnel
def test_between_emulated_hosts_only_the_leaders_share_travels(rights, tmp_path):  # noqa: F811
    tables = {
        "engine": "tunnel",
        "architecture": "hybrid",
        "workload": {"model": "mnist-dnn", "data": "synthetic", "global_batch": 16, "steps": 12},
        "cluster": {"workers": 4, "link": "1gbit", "hosts": [{"count": 2, "workers": 2}]},
        "measurement": {"warmup_steps": 2, "sample_seconds": 0.2},
    }
    folder = engines.run(spec.from_tables(tables, "test"), tmp_path / "run")
    members = {member.name: member for member in folder.members()}
    # The host's own interface counts for both of its workers; worker 0's also sent first weights.
    leader = members["worker2"]
    payload = leader.bytes_sent - HEADER_BYTES * leader.packets_sent
    predicted = leader.counters["exchanged_bytes_between_hosts"]
    assert payload == pytest.approx(predicted, rel=0.05)
    assert predicted < members["worker3"].counters["exchanged_bytes_between_hosts_by_ring"]
