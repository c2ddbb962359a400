"""A cache folder of the test's own."""

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Downloads and parsed copies go to a folder that ends with the test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("PACELINE_DATA", str(folder))
    return folder
