"""s3fs, gcsfs, adlfs and other fsspec file systems: their bulk calls, `pipe` and `cat_ranges`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.clients import Buffer, Range


class FsspecClient:
    """A file system, and the path below which it works."""

    takes_bytes = True

    def __init__(self, filesystem: Any, place: str) -> None:
        self._filesystem = filesystem
        self._place = place.rstrip("/")

    def write(self, objects: Mapping[str, memoryview]) -> None:
        self._filesystem.pipe({f"{self._place}/{k}": data.obj for k, data in objects.items()})

    def read(self, ranges: Sequence[Range]) -> Sequence[Buffer]:
        paths = [f"{self._place}/{r.key}" for r in ranges]
        found: Sequence[Buffer] = self._filesystem.cat_ranges(
            paths, [r.start for r in ranges], [r.stop for r in ranges], on_error="raise"
        )
        return found

    def close(self) -> None:
        """Leave it to the end of the process: fsspec's loop has no way to be closed."""


_FRESH = {"skip_instance_cache": True, "use_listings_cache": False}


class S3Client(FsspecClient):
    """s3fs."""

    def __init__(self, uri: str, storage_options: Mapping[str, Any]) -> None:
        import s3fs

        super().__init__(s3fs.S3FileSystem(**storage_options, **_FRESH), uri.partition("://")[2])


class GcsClient(FsspecClient):
    """gcsfs."""

    def __init__(self, uri: str, storage_options: Mapping[str, Any]) -> None:
        import gcsfs

        super().__init__(gcsfs.GCSFileSystem(**storage_options, **_FRESH), uri.partition("://")[2])


class AzureClient(FsspecClient):
    """adlfs."""

    def __init__(self, uri: str, storage_options: Mapping[str, Any]) -> None:
        import adlfs

        options = {**storage_options, **_FRESH}
        super().__init__(adlfs.AzureBlobFileSystem(**options), uri.partition("://")[2])


class AnyClient(FsspecClient):
    """Whatever fsspec has for the scheme."""

    def __init__(self, uri: str, storage_options: Mapping[str, Any]) -> None:
        import fsspec

        super().__init__(*fsspec.core.url_to_fs(uri, **storage_options))
