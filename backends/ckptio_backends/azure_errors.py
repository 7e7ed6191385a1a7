"""What the Azure SDK raises, as the contract's errors, with URI, key, container and endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import requests
import urllib3
from azure.core.exceptions import (
    AzureError,
    ClientAuthenticationError,
    HttpResponseError,
    ServiceRequestError,
)

from ckptio.errors import (
    AlreadyExistsError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StorageError,
    StorageFullError,
    StoreUnavailableError,
    StoreUnreachableError,
)

__all__ = ["mapped", "refusal"]

# https://learn.microsoft.com/rest/api/storageservices/blob-service-error-codes
_CODES: dict[str, tuple[type[StorageError], str]] = {
    "BlobAlreadyExists": (AlreadyExistsError, "already exists"),
    "BlobNotFound": (NotFoundError, "does not exist"),
    "ResourceNotFound": (NotFoundError, "does not exist"),
    "ContainerNotFound": (NotFoundError, "its container does not exist"),
    "ContainerBeingDeleted": (NotFoundError, "its container is being deleted"),
    "ConditionNotMet": (PreconditionFailedError, "changed since its etag was read"),
    "AuthenticationFailed": (PermissionDeniedError, "the credentials are not accepted"),
    "InvalidAuthenticationInfo": (PermissionDeniedError, "the credentials are not accepted"),
    "NoAuthenticationInformation": (PermissionDeniedError, "credentials are needed"),
    "PublicAccessNotPermitted": (PermissionDeniedError, "anonymous access is not permitted"),
    "InvalidBlockList": (StorageError, "parts of the upload are missing"),
    "BlobArchived": (StorageError, "is in the archive tier: rehydrate it first"),
    "InsufficientAccountQuota": (StorageFullError, "the account's quota is used up"),
    "LeaseIdMissing": (StorageError, "somebody holds a lease on it"),
    "SnapshotsPresent": (StorageError, "has snapshots, which keep it from being deleted"),
}
_STATUSES: dict[int, tuple[type[StorageError], str]] = {
    401: (PermissionDeniedError, "the credentials are not accepted"),
    403: (PermissionDeniedError, "the credentials, or the lack of them, do not permit that"),
    404: (NotFoundError, "does not exist"),
    408: (StoreUnavailableError, "the store timed out"),
    412: (PreconditionFailedError, "changed since its etag was read"),
    429: (StoreUnavailableError, "the store is busy"),
}


def refusal(status: int, code: str, where: str, endpoint: str) -> StorageError:
    """Return the error for an answer of the store, by its error code or else its status."""
    kind, text = _CODES.get(code) or _STATUSES.get(status) or (StorageError, "was refused")
    if status >= 500:
        kind, text = StoreUnavailableError, "the store is busy or failing"
    answer = f"{status} {code}".rstrip()
    return kind(f"{where}: {text} ({endpoint} answered {answer})")


@contextmanager
def mapped(where: str, endpoint: str) -> Iterator[None]:
    """Turn what the SDK raises into the contract's errors.

    Parameters
    ----------
    where : str
        The URI of the object, or of what is listed.
    endpoint : str
        Without credentials. The SDK's own texts may quote a request's signature: none is repeated.
    """
    try:
        yield
    except AzureError as error:
        raise _from_sdk(error, where, endpoint) from error
    except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
        raise StoreUnavailableError(
            f"{where}: the answer of {endpoint} was cut off ({type(error).__name__})"
        ) from error


def _from_sdk(error: AzureError, where: str, endpoint: str) -> StorageError:
    response = error.response if isinstance(error, HttpResponseError) else None
    code = getattr(error, "error_code", None)
    if response is not None and response.status_code is not None and response.status_code >= 300:
        # Its code is a member of an enumeration, or a string where the SDK does not know it.
        text = str(getattr(code, "value", code) or "")
        return refusal(response.status_code, text, where, endpoint)
    if isinstance(error, ClientAuthenticationError):
        return PermissionDeniedError(
            f"{where}: no usable credentials for {endpoint}: {str(error.message).splitlines()[0]}"
        )
    cause = error.inner_exception or error
    # The SDK: a request error never left this machine, a response error did.
    unreachable = isinstance(error, ServiceRequestError)
    kind = StoreUnreachableError if unreachable else StoreUnavailableError
    return kind(f"{where}: cannot reach {endpoint}: {cause}")
