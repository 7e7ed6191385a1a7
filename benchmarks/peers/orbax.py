"""Orbax's `PyTreeCheckpointHandler`, by default (OCDBT) and with a directory for each leaf."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import orbax.checkpoint as ocp


def _checkpointer(ocdbt: bool, storage_options: Mapping[str, Any] | None) -> Any:
    _reach(storage_options or {})
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt))


def _reach(storage_options: Mapping[str, Any]) -> None:
    """Point at a server other than Google's what Orbax is made of; it has no setting of its own."""
    if url := storage_options.get("endpoint_url"):
        os.environ |= {
            "STORAGE_EMULATOR_HOST": url,  # gcsfs and google-cloud-storage
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # else gcsfs asks Google all the same
            "TENSORSTORE_GCS_HTTP_URL": url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",  # TensorStore sends it, the server ignores it
        }


def save(
    tree: Any, path: str, *, ocdbt: bool, storage_options: Mapping[str, Any] | None = None
) -> None:
    with _checkpointer(ocdbt, storage_options) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))


def restore(
    path: str, like: Any, *, ocdbt: bool, storage_options: Mapping[str, Any] | None = None
) -> Any:
    with _checkpointer(ocdbt, storage_options) as checkpointer:
        arguments = ocp.args.PyTreeRestore(
            item=like,
            restore_args=ocp.checkpoint_utils.construct_restore_args(like),
            partial_restore=True,
        )
        return checkpointer.restore(path, args=arguments)
