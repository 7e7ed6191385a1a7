"""Orbax's `PyTreeCheckpointHandler`, by default (OCDBT) and with a directory for each leaf."""

from __future__ import annotations

from typing import Any

import orbax.checkpoint as ocp


def _checkpointer(ocdbt: bool) -> Any:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt))


def save(tree: Any, path: str, *, ocdbt: bool) -> None:
    with _checkpointer(ocdbt) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))


def restore(path: str, like: Any, *, ocdbt: bool) -> Any:
    with _checkpointer(ocdbt) as checkpointer:
        arguments = ocp.args.PyTreeRestore(
            item=like,
            restore_args=ocp.checkpoint_utils.construct_restore_args(like),
            partial_restore=True,
        )
        return checkpointer.restore(path, args=arguments)
