"""What several unit tests are given."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sandbox_maker import Maker, needs_bubblewrap


@pytest.fixture(params=["bubblewrap", "none"])
def maker(request: pytest.FixtureRequest, tmp_path: Path) -> Maker:
    """Of process sandboxes, with and without bubblewrap."""
    if request.param == "bubblewrap":
        needs_bubblewrap()
    return Maker(tmp_path, request.param)


@pytest.fixture
def wrapped(tmp_path: Path) -> Maker:
    needs_bubblewrap()
    return Maker(tmp_path, "bubblewrap")
