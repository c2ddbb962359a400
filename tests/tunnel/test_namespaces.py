"""Nothing is left on any exit, and nothing of others is touched."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.errors import MissingError
from paceline.spec import parse_link
from paceline.tunnel import namespaces
from paceline.tunnel.hosts import HostPlan, Tunnel
from paceline.tunnel.namespaces import call_in, ip, list_ours, sweep

pytestmark = [pytest.mark.tunnel, pytest.mark.quiet]

LINK = parse_link("100mbit", "test")
BUILDS_AND_WAITS = """
import subprocess, sys, time
from paceline.spec import parse_link
from paceline.tunnel.hosts import HostPlan, Tunnel

with Tunnel([HostPlan(name="only", link=parse_link("100mbit", "test"))]) as network:
    command = network.command("only", ["sh", "-c", "echo; exec sleep 600"])
    inside = subprocess.Popen(command, stdout=subprocess.PIPE)
    inside.stdout.readline()  # it is there: one on its way in belongs to no tunnel yet
    print(network.lease.id, inside.pid, flush=True)
    time.sleep(600)
"""


def test_a_killed_tunnel_is_swept_with_what_runs_inside(rights):
    with Tunnel([HostPlan(name="living", link=LINK)]) as living:
        argv = [sys.executable, "-c", BUILDS_AND_WAITS]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            tunnel_id, inside = parent.stdout.readline().split()
            parent.kill()
        ours = [name for name in list_ours() if tunnel_id in name]
        assert len(ours) == 2, "the killed tunnel left its host and its switch"
        assert set(sweep()) == set(ours)
        assert not [name for name in list_ours() if tunnel_id in name]
        assert living.namespace("living") in list_ours()
        _wait_until_gone(int(inside))


def test_a_terminated_tunnel_leaves_nothing(rights):
    argv = [sys.executable, "-c", BUILDS_AND_WAITS]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        tunnel_id, inside = parent.stdout.readline().split()
        parent.terminate()
    assert not [name for name in list_ours() if tunnel_id in name]
    _wait_until_gone(int(inside))


def test_a_namespace_of_others_is_left_alone(rights):
    ip("netns", "add", "somebody-elses")
    try:
        sweep()
        assert "somebody-elses" in ip("netns", "list")
    finally:
        ip("netns", "delete", "somebody-elses")


def test_two_tunnels_do_not_meet(rights):
    plans = [HostPlan(name="a", link=LINK)]
    with Tunnel(plans) as first, Tunnel([*plans, HostPlan(name="b", link=LINK)]) as second:
        address = second.address("b")
        listener = call_in(second.namespace("b"), lambda: socket.create_server((address, 0)))
        with listener:
            there = listener.getsockname()

            def connect() -> bool:
                with contextlib.closing(socket.socket()) as client:
                    client.settimeout(2)
                    return client.connect_ex(there) == 0

            assert call_in(second.namespace("a"), connect), "hosts of one tunnel meet"
            assert not call_in(first.namespace("a"), connect)


def test_a_failure_while_building_leaves_nothing(rights, monkeypatch):
    def fails(*_):
        raise RuntimeError("no shaping today")

    monkeypatch.setattr("paceline.tunnel.links.read_back", fails)
    with pytest.raises(RuntimeError, match="no shaping"):
        Tunnel([HostPlan(name="a", link=LINK)]).__enter__()


def test_without_rights_the_missing_ones_are_named(monkeypatch):
    monkeypatch.setattr(namespaces, "missing_rights", lambda: ["CAP_NET_ADMIN", "the command tc"])
    with pytest.raises(MissingError, match="CAP_NET_ADMIN, the command tc missing") as caught:
        namespaces.require_rights()
    assert caught.value.exit_status == 2


def test_rights_are_read_from_the_kernel(monkeypatch):
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: None)
    assert {"the command ip", "the command tc"} <= set(namespaces.missing_rights())


def _wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            if "(sleep) Z" in Path(f"/proc/{pid}/stat").read_text(encoding="ascii"):
                return
        except (ProcessLookupError, FileNotFoundError):
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("a process inside the dead tunnel outlived it")
