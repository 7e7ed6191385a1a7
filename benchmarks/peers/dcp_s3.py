"""PyTorch's distributed checkpoints on S3, through AWS's own connector for PyTorch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from s3torchconnector import S3ClientConfig
from s3torchconnector.dcp import S3StorageReader, S3StorageWriter


def _where(path: str, storage_options: Mapping[str, Any]) -> dict[str, Any]:
    # It takes no credentials and no endpoint as arguments, but reads what the AWS tools read.
    found = {
        "AWS_ACCESS_KEY_ID": storage_options.get("key"),
        "AWS_SECRET_ACCESS_KEY": storage_options.get("secret"),
        "AWS_ENDPOINT_URL": storage_options.get("endpoint_url"),
        "AWS_PROFILE": storage_options.get("profile"),
    }
    os.environ.update({name: str(value) for name, value in found.items() if value})
    region = (storage_options.get("client_kwargs") or {}).get("region_name")
    return {
        "path": f"{path}/",
        "region": region or os.environ.get("AWS_REGION", "us-east-1"),
        "s3client_config": S3ClientConfig(force_path_style="endpoint_url" in storage_options),
    }


def save(tree: Any, path: str, *, threads: int, storage_options: Mapping[str, Any]) -> None:
    writer = S3StorageWriter(**_where(path, storage_options), thread_count=threads)
    dcp.save(tree, storage_writer=writer, no_dist=True)


def restore(path: str, like: Any, *, threads: int, storage_options: Mapping[str, Any]) -> Any:
    del threads  # reading has no such setting
    tree = {name: torch.empty(leaf.shape, dtype=leaf.dtype) for name, leaf in like.items()}
    reader = S3StorageReader(**_where(path, storage_options))
    dcp.load(tree, storage_reader=reader, no_dist=True)
    return tree
