"""What ckptio is compared with, a small module each.

A peer has ``save(tree, path)``, ``restore(path, like)``, and ``read_rows(path, leaf, rows)`` where
it can read a part of an array. `like` may have fewer leaves than were saved. What trees are made of
is the peer's `kind`:

- ``"jax"``: nested dictionaries of `jax.Array` on 8 devices; `like` has `jax.ShapeDtypeStruct`
  with shardings, and what comes back must be on them.
- ``"torch"``: flat dictionaries of `torch.Tensor` by path; `like` has meta tensors.

Where a path may be a URI, they take ``storage_options`` too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Peer:
    """One of them.

    Attributes
    ----------
    module : str
        Below this package.
    kind : str
    settings : mapping
        Keyword arguments of its functions.
    resharding : bool
        Whether it restores onto another mesh.
    schemes : tuple of str
        Of the URIs that it takes; ``"file"`` for paths.
    """

    module: str
    kind: str = "jax"
    settings: Mapping[str, Any] = field(default_factory=dict)
    resharding: bool = True
    schemes: tuple[str, ...] = ("file",)

    def call(self, function: str, *arguments: Any, **options: Any) -> Any:
        return getattr(import_module(f"{__name__}.{self.module}"), function)(
            *arguments, **self.settings, **options
        )


def _dcp(threads: int) -> Peer:
    return Peer("dcp", "torch", {"threads": threads}, resharding=False)


def _dcp_s3(threads: int) -> Peer:
    return Peer("dcp_s3", "torch", {"threads": threads}, resharding=False, schemes=("s3",))


_FILE_AND_GCS = ("file", "gs", "gcs")

PEERS: Mapping[str, Peer] = {
    "ckptio": Peer("ckptio", schemes=("file", "s3", "gs", "gcs", "az", "abfs", "abfss")),
    "Orbax": Peer("orbax", settings={"ocdbt": True}, schemes=_FILE_AND_GCS),
    "Orbax, no OCDBT": Peer("orbax", settings={"ocdbt": False}, schemes=_FILE_AND_GCS),
    "TensorStore": Peer("tensorstore"),
    "safetensors": Peer("safetensors"),
    "DCP, 1 thread": _dcp(1),
    "DCP, 2 threads": _dcp(2),
    "DCP, 4 threads": _dcp(4),
    "DCP, s3torchconnector, 1 thread": _dcp_s3(1),
    "DCP, s3torchconnector, 4 threads": _dcp_s3(4),
}
READS_ROWS = ("ckptio", "TensorStore", "safetensors")
"""Those that have `read_rows`, so that nobody has to import them to know."""


def peers_of(scheme: str) -> list[str]:
    """Name those that take URIs of a scheme."""
    return [name for name, peer in PEERS.items() if scheme in peer.schemes]
