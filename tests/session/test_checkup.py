"""What a job on several hosts asks of them before its first step."""

from contextlib import nullcontext

import pytest

from paceline import spec
from paceline.launch import Identity
from paceline.session import checkup


@pytest.mark.parametrize(
    ("architecture", "is_needed"), [("hybrid", True), ("ring", False), ("server", False)]
)
def test_shared_memory_is_asked_of_those_who_share_it(monkeypatch, architecture, is_needed):
    """Servers share memory where there is one host: on several, a small one once stopped them."""
    asked = []
    monkeypatch.setattr(checkup, "_listening", lambda *_: nullcontext((None, None)))
    monkeypatch.setattr(checkup.doctor, "gather", lambda *_: None)
    monkeypatch.setattr(checkup.doctor, "examine", lambda *_, **__: None)
    monkeypatch.setattr(
        checkup.doctor, "require_healthy", lambda _, needs: asked.append(needs) or []
    )
    checkup.check(Identity(workers=2), None, spec.parse_architecture(architecture), print)
    assert [bool(needs.shared_memory_bytes) for needs in asked] == [is_needed]
