"""The seed of what chance decides in an acceptance test."""

from __future__ import annotations

import os
import secrets

import pytest


@pytest.fixture
def seed() -> int:
    """Drawn anew for each run; WAYPOST_SEED repeats one. Printed, so that a failure shows it."""
    found = int(os.environ.get("WAYPOST_SEED") or secrets.randbelow(1_000_000))
    print(f"WAYPOST_SEED={found}")  # noqa: T201  # pytest shows it when the test fails
    return found
