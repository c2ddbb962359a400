"""What the tunnel's tests share: a skip where it cannot be built, and no namespace left behind."""

from collections.abc import Iterator

import pytest

from paceline.tunnel.namespaces import Lease, list_ours, missing_rights


@pytest.fixture
def rights(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Needed by every test that builds hosts; checks that they are gone after it."""
    missing = missing_rights()
    if missing:
        pytest.skip(f"no tunnel here: {', '.join(missing)} missing")
    made: list[str] = []
    begin = Lease.__init__

    def remembered(self: Lease) -> None:
        begin(self)
        made.append(self.id)

    monkeypatch.setattr(Lease, "__init__", remembered)
    yield
    left = [name for name in list_ours() if any(tunnel_id in name for tunnel_id in made)]
    assert not left, f"namespaces left: {left}"
