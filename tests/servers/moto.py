"""moto: an S3 server that starts at once; it checks no credentials."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from servers.process import ServerUnavailableError, free_ports, running
from servers.s3 import S3Server


@contextlib.contextmanager
def moto() -> Iterator[S3Server]:
    """Run moto with one bucket until the block ends."""
    program = Path(sys.executable).with_name("moto_server")
    if not program.exists():
        raise ServerUnavailableError("moto is missing: pip install 'moto[s3,server]'")
    (port,) = free_ports(1)
    endpoint = f"http://127.0.0.1:{port}"
    with running([program, "-H", "127.0.0.1", "-p", str(port)], f"{endpoint}/moto-api/"):
        server = S3Server(endpoint, "ckptio-test", "test-access-key", "test-secret-key")
        server.warm_up()
        yield server
