"""PyTorch's distributed checkpoints, from one process; whole tensors on the CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp


def save(tree: Any, path: str, *, threads: int) -> None:
    writer = dcp.FileSystemWriter(path, thread_count=threads, sync_files=True)
    dcp.save(tree, storage_writer=writer, no_dist=True)


def restore(path: str, like: Any, *, threads: int) -> Any:
    del threads  # reading has no such setting
    tree = {name: torch.empty(leaf.shape, dtype=leaf.dtype) for name, leaf in like.items()}
    dcp.load(tree, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return tree
