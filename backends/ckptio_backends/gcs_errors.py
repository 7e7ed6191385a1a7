"""What goes wrong with Google Cloud Storage, as the contract's errors."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckptio.errors import (
    CkptioError,
    NotFoundError,
    PermissionDeniedError,
    StorageError,
    StorageFullError,
    StoreUnavailableError,
    StoreUnreachableError,
)
from ckptio_backends.gcs_client import Client, Refused

import aiohttp  # isort: skip  # after gcs_client, which says what to install if it is missing
import gcsfs.retry  # isort: skip
import google.auth.exceptions  # isort: skip

__all__ = ["foreign_errors"]

_BUSY = {"rateLimitExceeded", "userRateLimitExceeded", "backendError"}
_FULL = {"quotaExceeded", "storageQuotaExceeded"}


@contextmanager
def foreign_errors(
    where: str, bucket: str, client: Callable[[], Client], conflict: type[StorageError]
) -> Iterator[None]:
    """Turn what gcsfs, google-auth, aiohttp and the service raise into the contract's errors.

    Parameters
    ----------
    where : str
        The URI of what the request is about.
    client : callable
        Returns the client that made the request.
    conflict : type
        What an unmet precondition means.
    """
    try:
        yield
    except CkptioError:
        raise
    except Refused as error:
        raise _refusal(error, where, bucket, client(), conflict) from error
    except gcsfs.retry.HttpError as error:  # gcsfs's word for credentials that cannot be refreshed
        raise PermissionDeniedError(
            f"{where}: the credentials were refused ({error}); check the storage option 'token'"
        ) from error
    except google.auth.exceptions.TransportError as error:
        raise StoreUnavailableError(
            f"{where}: the server that issues credentials cannot be reached"
        ) from error
    except (google.auth.exceptions.GoogleAuthError, gcsfs.retry.NonRetryableError) as error:
        raise PermissionDeniedError(
            f"{where}: no usable credentials ({type(error).__name__}); run `gcloud auth "
            "application-default login`, or give the storage option 'token'"
        ) from error
    except (aiohttp.ClientSSLError, ssl.SSLError) as error:
        raise StorageError(
            f"{where}: no secure connection to {client().endpoint}: {error}"
        ) from error
    except TimeoutError as error:
        raise StoreUnavailableError(
            f"{where}: {client().endpoint} did not answer in time"
        ) from error
    except aiohttp.ClientConnectorError as error:
        raise StoreUnreachableError(
            f"{where}: no connection to {client().endpoint}: {error}"
        ) from error
    except (aiohttp.ClientError, OSError) as error:
        raise StoreUnavailableError(
            f"{where}: the connection to {client().endpoint} broke: {error}"
        ) from error


def _refusal(
    error: Refused, where: str, bucket: str, client: Client, conflict: type[StorageError]
) -> StorageError:
    status, reason = error.status, error.reason
    text = f"{where}: {client.endpoint} answered {status}"
    if error.message:
        text += f": {error.message}"
    if status == 404:
        return _absence(error.message, where, bucket)
    if status == 412 and reason != "orgPolicyConstraintFailed":
        return conflict(f"{where} exists already, or changed ({error.message or status})")
    if reason in _FULL:
        return StorageFullError(text)
    if status in (408, 429) or status >= 500 or reason in _BUSY:
        return StoreUnavailableError(text)
    if status in (401, 403, 412):
        anonymous = " (without credentials: none were given or found)" * client.is_anonymous
        return PermissionDeniedError(f"{text}{anonymous}")
    if status == 400 and "requester pays" in error.message.lower():
        return PermissionDeniedError(f"{text}; set the storage option 'requester_pays'")
    return StorageError(text)


def _absence(message: str, where: str, bucket: str) -> NotFoundError:
    """Tell a missing bucket from a missing object: the service answers 404 for both."""
    if "bucket does not exist" in message.lower():
        return NotFoundError(f"{where}: bucket {bucket!r} does not exist")
    if message.lower().startswith("no such object"):
        return NotFoundError(f"{where} does not exist")
    return NotFoundError(f"{where} does not exist, or bucket {bucket!r} does not")
