"""What the tunnel's tests share: a skip where it cannot be built, and no namespace left behind."""

from collections.abc import Iterator

import pytest

from paceline.tunnel.namespaces import list_ours, missing_rights


@pytest.fixture
def rights() -> Iterator[None]:
    """Needed by every test that builds hosts; checks that they are gone after it."""
    missing = missing_rights()
    if missing:
        pytest.skip(f"no tunnel here: {', '.join(missing)} missing")
    before = set(list_ours())
    yield
    assert not set(list_ours()) - before, "namespaces left"
