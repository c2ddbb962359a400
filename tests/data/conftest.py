"""Real data where there is a copy of it, and a cache folder of the test's own."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture
def real_data(cache):
    """The folder of real data sets beside the repository."""
    if not SHARED.is_dir():
        pytest.skip(f"real data sets are not at {SHARED}")
    return SHARED


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Downloads and parsed copies go to a folder that ends with the test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("PACELINE_DATA", str(folder))
    return folder
