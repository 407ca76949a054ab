"""What the stand-in for the Hub can be told to do wrong."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp import web


@dataclasses.dataclass
class Failure:
    """A scripted refusal of the next `times` requests whose method and path fit."""

    method: str
    path: str
    status: int
    times: int
    headers: Mapping[str, str]

    def strikes(self, request: web.Request) -> bool:
        """Whether it is this request's turn; counts down."""
        due = self.times > 0 and request.method == self.method and self.path in request.path
        self.times -= due
        return due
