"""Storage servers on loopback for these tests, gone when the block ends."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
AZURITE = Path("azurite/node_modules/azurite/dist/src/blob/main.js")
# Published by Microsoft for every emulator: no secret.
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


def missing(what: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(f"{what} is not installed, and under CI every server has to run")
    pytest.skip(f"{what} is not installed")


@contextlib.contextmanager
def _running(command: list[str], ready_url: str) -> Iterator[None]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        deadline = time.monotonic() + 60
        while True:
            try:
                opener.open(ready_url, timeout=1).close()
                break
            except urllib.error.HTTPError as error:
                error.close()  # it answers: that is ready
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"{command[0]} did not start")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.05)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def moto() -> Iterator[str]:
    if not (server := shutil.which("moto_server", path=BIN)):
        missing("moto_server")
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with _running([str(server), "-H", "127.0.0.1", "-p", str(port)], url):
        yield url


@contextlib.contextmanager
def seaweedfs() -> Iterator[str]:
    if not (weed := shutil.which("weed", path=BIN)):
        missing("weed")
    ports = free_ports(8)
    names = ["master.port", "master.port.grpc", "volume.port", "volume.port.grpc"]
    names += ["filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": "key", "secretKey": "secret123"}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        config = Path(directory, "s3.json")
        config.write_text(json.dumps({"identities": [identity]}))
        command = [str(weed), "-logtostderr=true", "server", f"-dir={directory}"]
        command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-volume.max=0", "-filer", "-s3"]
        command += ["-master.volumeSizeLimitMB=1024", "-master.telemetry=false"]
        command += [f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        command += [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]
        url = f"http://127.0.0.1:{ports[6]}"
        with _running(command, f"{url}/healthz"):
            yield url


@contextlib.contextmanager
def azurite() -> Iterator[str]:
    script = Path(os.environ.get("CKPTIO_AZURITE", Path(sys.prefix) / AZURITE))
    node = shutil.which("node")
    if not (node and script.exists()):
        missing("Azurite")
    [port] = free_ports(1)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        command = [str(node), str(script), "--blobHost", "127.0.0.1", "--blobPort", str(port)]
        command += ["--location", directory, "--silent", "--skipApiVersionCheck"]
        command += ["--disableTelemetry"]
        url = f"http://127.0.0.1:{port}/{ACCOUNT}"
        with _running(command, url):
            yield url
