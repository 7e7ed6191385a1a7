"""ckptio on the Rust object_store: ``s3+obstore://``, ``gs+obstore://``, ``az+obstore://``.

With ``CKPTIO_DRIVERS="s3=obstore"`` in the environment it serves plain ``s3://`` URIs too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptio import hookimpl

from ckptio_obstore.backend import ObstoreBackend

__all__ = ["ObstoreBackend", "az", "gs", "s3"]


@dataclass(frozen=True)
class _Driver:
    """What an entry point names: the driver of one scheme."""

    scheme: str

    @hookimpl
    def ckptio_open_backend(
        self, uri: str, scheme: str, storage_options: Mapping[str, Any]
    ) -> ObstoreBackend | None:
        """Open a bucket or container."""
        return ObstoreBackend(uri, storage_options) if scheme == self.scheme else None


s3 = _Driver("s3")
gs = _Driver("gs")
az = _Driver("az")
