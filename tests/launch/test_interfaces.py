"""Which address is announced: as told, loopback, on the way to worker 0, or an honest question."""

import pytest

from paceline.errors import SpecError
from paceline.launch import interfaces
from paceline.launch.interfaces import ELSEWHERE, HostNetwork

ADDRESSES = {"127.0.0.1": "lo", "172.17.0.1": "docker0", "10.0.0.5": "ib0", "192.168.1.5": "eth0"}


def network(routes: dict[str, str], addresses: dict[str, str] = ADDRESSES) -> HostNetwork:
    return HostNetwork(addresses=addresses, route=routes.get)


def choose(net: HostNetwork, towards: str = "", **environ: str) -> interfaces.Choice:
    return interfaces.choose(environ, towards=towards, on_one_host=False, network=net)


def test_one_host_talks_over_loopback() -> None:
    choice = interfaces.choose({}, towards="", on_one_host=True, network=network({}))
    assert (choice.address, choice.interface) == ("127.0.0.1", "lo")


def test_the_route_to_worker_0_decides_before_the_default_route() -> None:
    routes = {"head": "10.0.0.5", ELSEWHERE: "192.168.1.5"}
    choice = choose(network(routes), "head")
    assert (choice.address, choice.interface) == ("10.0.0.5", "ib0")
    assert "head" in choice.why


def test_worker_0_whose_name_is_loopback_at_home_takes_the_default_route() -> None:
    choice = choose(network({"head": "127.0.0.1", ELSEWHERE: "192.168.1.5"}), "head")
    assert choice.interface == "eth0"
    assert "default route" in choice.why


def test_the_only_way_out_needs_no_route() -> None:
    addresses = {"127.0.0.1": "lo", "10.0.0.5": "ib0"}
    assert choose(network({}, addresses)).address == "10.0.0.5"


def test_several_ways_out_and_no_route_is_a_question_and_not_a_guess() -> None:
    with pytest.raises(SpecError, match="docker0") as caught:
        choose(network({}))
    assert "PACELINE_ADDRESS" in caught.value.fix


def test_the_user_may_name_an_interface_or_an_address() -> None:
    routes = {ELSEWHERE: "192.168.1.5"}
    assert choose(network(routes), PACELINE_ADDRESS="ib0").address == "10.0.0.5"
    assert choose(network(routes), PACELINE_ADDRESS="10.0.0.5").interface == "ib0"
    with pytest.raises(SpecError, match="neither an interface nor an address"):
        choose(network(routes), PACELINE_ADDRESS="ib1")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("localhost", True), ("127.0.1.1", True), ("::1", True), ("node01", False), ("", False)],
)
def test_what_counts_as_loopback(host: str, loopback: bool) -> None:
    assert interfaces.is_loopback(host) is loopback


def test_this_machine_has_loopback() -> None:
    assert interfaces.this_network().addresses["127.0.0.1"] == "lo"
    assert interfaces.source_towards("127.0.0.1") == "127.0.0.1"
