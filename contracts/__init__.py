"""What flows, services, relay and receiver agree on: messages, envelope, signature, outcomes, errors, limits.

Pure: nothing here reads a clock, draws chance or touches a socket; times and nonces are arguments.
"""

from contracts.envelope import ABSENT, Envelope
from contracts.errors import WaypostError
from contracts.messages import Action, Command, Effect, Event, Refused, command
from contracts.observer import Observer, Silent
from contracts.outcome import Outcome
from contracts.signature import Secret
from contracts.vault import Vault

__all__ = [
    "ABSENT",
    "Action",
    "Command",
    "Effect",
    "Envelope",
    "Event",
    "Observer",
    "Outcome",
    "Refused",
    "Secret",
    "Silent",
    "Vault",
    "WaypostError",
    "command",
]
