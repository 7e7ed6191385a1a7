"""Where the same tests run: every store that ckptio has a driver for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import pytest


@dataclass(frozen=True)
class Place:
    """A fresh prefix in some store."""

    uri: str
    storage_options: dict[str, Any] = field(default_factory=dict)

    def __truediv__(self, name: str) -> Place:
        return Place(f"{self.uri}/{name}", self.storage_options)

    @property
    def to(self) -> dict[str, Any]:
        """The arguments that name it to ckptio."""
        return {"uri": self.uri, "storage_options": self.storage_options}


@pytest.fixture(params=["local", "memory"])
def place(request, tmp_path):
    """A fresh prefix in each store in turn."""
    if request.param == "local":
        return Place(str(tmp_path / "here"))
    return Place(f"memory://place/{uuid4().hex}")
