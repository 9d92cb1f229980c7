"""What the flows of the acceptance tests ask of the desks, beside what they ask of the shop's services."""

from __future__ import annotations

from pydantic import BaseModel

from contracts.messages import Command


class Label(BaseModel):
    label: str


class Void(Command[None], endpoint="labels", type="label.void"):
    order: str


class Print(Command[Label], endpoint="labels", type="label.print"):
    order: str


class Stamp(BaseModel):
    stamp: str


class Return(Command[None], endpoint="stamps", type="stamp.return"):
    order: str


class Buy(Command[Stamp], endpoint="stamps", type="stamp.buy"):
    order: str
