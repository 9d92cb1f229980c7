"""A worker in this process, as the engine's tests have it."""

from tests.engine.conftest import client, hints, working

__all__ = ["client", "hints", "working"]
