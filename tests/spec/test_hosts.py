"""A cluster written out: who stands where, with which cable and device."""

import pytest

from paceline import spec
from paceline.errors import SpecError
from paceline.spec.hosts import host_of, place


def experiment(**cluster: object) -> spec.Experiment:
    return spec.from_tables({"architecture": "server", "cluster": cluster}, "test")


def test_without_hosts_every_member_has_its_own():
    placed = place(experiment(workers=2, servers=1, link="10gbit,20us", device="k80"))
    assert [(host.name, host.members) for host in placed] == [
        ("worker0", ("worker0",)),
        ("worker1", ("worker1",)),
        ("server0", ("server0",)),
    ]
    assert {host.link.bandwidth_bits_per_second for host in placed} == {1e10}
    assert [host.link.latency_seconds for host in placed] == pytest.approx([20e-6] * 3)
    assert {host.device for host in placed} == {"k80"}


def test_hosts_hold_members_in_order_and_may_differ():
    hosts = [
        {"count": 2, "workers": 2, "rack": "a"},
        {"workers": 0, "servers": 2, "link": "10gbit", "rack": "b"},
        {"workers": 1, "device": "v100", "slowdown": 2.0, "rack": "b"},
    ]
    made = experiment(workers=5, servers=2, link="1gbit", device="k80", hosts=hosts)
    placed = place(made)
    assert [host.members for host in placed] == [
        ("worker0", "worker1"),
        ("worker2", "worker3"),
        ("server0", "server1"),
        ("worker4",),
    ]
    assert placed[2].link.bandwidth_bits_per_second == 1e10
    last = host_of(made, "worker4")
    assert (last.device, last.slowdown, last.rack) == ("v100", 2.0, "b")


def test_hosts_must_hold_all_members():
    with pytest.raises(SpecError, match="hosts hold 2 workers, and the cluster has 3"):
        place(experiment(workers=3, servers=1, hosts=[{"workers": 2, "servers": 1}]))
