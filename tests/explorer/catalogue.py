"""All races, by name: importing the modules that tell them registers them."""

from __future__ import annotations

from typing import Final

from tests.explorer import (
    of_emitted,
    of_ends,
    of_errands,
    of_families,
    of_lanes,
    of_mail,
    of_messages,
    of_mutexes,
    of_owners,
    of_tasks,
    of_triggers,
    of_waits,
)
from tests.explorer.races import REGISTERED, Race

MODULES: Final = (
    of_emitted,
    of_ends,
    of_errands,
    of_families,
    of_lanes,
    of_mail,
    of_messages,
    of_mutexes,
    of_owners,
    of_tasks,
    of_triggers,
    of_waits,
)

RACES: Final[dict[str, Race]] = REGISTERED
