"""obstore used directly: several objects at once, each in parts, from a few threads.

Its synchronous calls release the interpreter and run on its own runtime. The asynchronous ones
were measured too: what they return costs about 6 ns a byte more on its way through asyncio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import obstore
from ckptio_obstore.options import RETRIES, Config, make_store

from benchmarks.clients import Buffer, Range

THREADS = 8


class ObstoreClient:
    """A store, made from fsspec's options as the plugin makes its own."""

    takes_bytes = False

    def __init__(self, uri: str, storage_options: Mapping[str, Any]) -> None:
        config = Config.parse(uri, storage_options)
        self._root = f"{config.root}/" if config.root else ""
        self._store = make_store(config, RETRIES)

    def write(self, objects: Mapping[str, memoryview]) -> None:
        def put(item: tuple[str, memoryview]) -> None:
            # Sends in parts, several at once, when the object is large enough.
            obstore.put(self._store, self._root + item[0], item[1])

        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(put, objects.items()):
                pass

    def read(self, ranges: Sequence[Range]) -> Sequence[Buffer]:
        def get(wanted: Range) -> Buffer:
            key = self._root + wanted.key
            return memoryview(
                obstore.get_range(self._store, key, start=wanted.start, end=wanted.stop)
            )

        with ThreadPoolExecutor(THREADS) as pool:
            return [*pool.map(get, ranges)]

    def close(self) -> None:
        """Nothing is held."""
