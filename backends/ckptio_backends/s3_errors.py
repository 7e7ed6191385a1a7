"""What botocore raises and S3 answers, as the contract's errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import botocore.exceptions as boto
import urllib3.exceptions
from botocore.parsers import ResponseParserError

from ckptio.errors import (
    AlreadyExistsError,
    CkptioError,
    CorruptionError,
    InvalidKeyError,
    InvalidOptionError,
    InvalidURIError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StorageError,
    StorageFullError,
    StoreUnavailableError,
    StoreUnreachableError,
)

__all__ = ["code_of", "error_of_code", "mapped"]

_CREDENTIALS = (
    "give the storage options 'key' and 'secret' (and 'token'), or 'profile', or set "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; anon=True reads public data without any"
)

_VALUE = re.compile(r"value: .*?, (?=type: )", re.DOTALL)

_KINDS: dict[str, type[CkptioError]] = {
    "404": NotFoundError,
    "NoSuchKey": NotFoundError,
    "NoSuchBucket": NotFoundError,
    "NoSuchUpload": StorageError,
    "401": PermissionDeniedError,
    "403": PermissionDeniedError,
    "AccessDenied": PermissionDeniedError,
    "ExpiredToken": PermissionDeniedError,
    "InvalidToken": PermissionDeniedError,
    "InvalidRange": CorruptionError,
    "416": CorruptionError,
    "KeyTooLongError": InvalidKeyError,
    "InvalidBucketName": InvalidURIError,
    "QuotaExceeded": StorageFullError,
    "XMinioStorageFull": StorageFullError,
    "507": StorageFullError,
    "501": StorageError,
    "NotImplemented": StorageError,
    # Somebody else is writing the same key at this moment; the next try meets their object.
    "ConditionalRequestConflict": StoreUnavailableError,
    "OperationAborted": StoreUnavailableError,
    # Busy, or the request arrived damaged or too slowly.
    "408": StoreUnavailableError,
    "429": StoreUnavailableError,
    "BadDigest": StoreUnavailableError,
    "IncompleteBody": StoreUnavailableError,
    "RequestTimeout": StoreUnavailableError,
    "SlowDown": StoreUnavailableError,
    "ThrottlingException": StoreUnavailableError,
    "TooManyRequests": StoreUnavailableError,
    "XAmzContentSHA256Mismatch": StoreUnavailableError,
}
_OTHER_REGION = {
    "301",
    "307",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "PermanentRedirect",
    "TemporaryRedirect",
}


def error_of_code(code: str, status: int = 0) -> type[CkptioError]:
    """Return the error that an S3 error code, or else the HTTP status, stands for."""
    kind = _KINDS.get(code) or _KINDS.get(str(status))
    if kind is not None:
        return kind
    busy = status >= 500 or code in ("InternalError", "ServiceUnavailable")
    return StoreUnavailableError if busy else StorageError


@contextmanager
def mapped(
    where: str, bucket: str, endpoint: Callable[[], str], condition: Collection[str] = ()
) -> Iterator[None]:
    """Turn foreign exceptions into ours.

    Parameters
    ----------
    where : str
        The object's URI.
    endpoint : callable
        Returns the server's URL, which is known once there is a client.
    condition : collection of str
        Of a conditional request: ``IfNoneMatch`` or ``IfMatch``.
    """
    try:
        yield
    except CkptioError:
        raise
    except Exception as error:
        ours = _translated(error, f"{where} ({endpoint()})", bucket, condition)
        if ours is None:
            raise
        raise ours from error


def _translated(
    error: Exception, place: str, bucket: str, condition: Collection[str]
) -> CkptioError | None:
    """Return our error for a foreign one, None for what has no business here."""
    text = f"{place}: {error}"
    match error:
        case boto.ClientError():
            return _answered(error, place, bucket, condition)
        case (
            boto.NoCredentialsError()
            | boto.PartialCredentialsError()
            | boto.CredentialRetrievalError()
            | boto.TokenRetrievalError()
            | boto.SSOError()
            | boto.NoAuthTokenError()
        ):
            return PermissionDeniedError(f"{text}; {_CREDENTIALS}")
        case boto.ProfileNotFound():
            return InvalidOptionError(text)
        case boto.ParamValidationError():
            if "bucket name" in str(error).lower():
                return InvalidURIError(text)
            # The value may be an encryption key.
            return InvalidOptionError(_VALUE.sub("", text))
        case boto.EndpointConnectionError() | boto.ConnectTimeoutError():
            return StoreUnreachableError(
                f"{place}: cannot connect: {_reason(error)}; is this the right endpoint_url, and "
                "is the server up?"
            )
        case boto.SSLError() if "CERTIFICATE" in str(error).upper():
            return StorageError(
                f"{place}: the server's certificate is not trusted: {_reason(error)}; a CA of "
                "your own goes into client_kwargs={'verify': 'ca.pem'}"
            )
        case boto.ReadTimeoutError():
            return StoreUnavailableError(f"{place}: the server stopped answering")
        case (
            boto.HTTPClientError()
            | boto.IncompleteReadError()
            | boto.ResponseStreamingError()
            | urllib3.exceptions.HTTPError()
        ):
            return StoreUnavailableError(f"{place}: the connection broke: {_reason(error)}")
        case ResponseParserError():
            return StoreUnavailableError(f"{place}: the answer makes no sense: {error}")
        case boto.BotoCoreError():
            return StorageError(text)
    return None


def code_of(error: Exception) -> str:
    """Return the S3 error code of a `ClientError`."""
    response = getattr(error, "response", {})
    return str(response.get("Error", {}).get("Code", ""))


def _reason(error: Exception) -> str:
    """Return the innermost cause, which says more than the wrappings."""
    cause: BaseException = error
    while (inner := cause.__cause__ or cause.__context__) is not None:
        cause = inner
    return f"{type(cause).__name__}: {cause}"


def _answered(
    error: boto.ClientError, place: str, bucket: str, condition: Collection[str]
) -> CkptioError:
    details = error.response.get("Error", {})
    metadata = error.response.get("ResponseMetadata", {})
    status = int(metadata.get("HTTPStatusCode", 0))
    code = str(details.get("Code", status))
    answer = f"{code} {details.get('Message', '')}".strip()
    if status == 412 or code == "PreconditionFailed":
        if "IfNoneMatch" in condition:
            return AlreadyExistsError(f"{place} already exists")
        return PreconditionFailedError(f"{place} changed since it was looked at")
    if code == "NoSuchKey" and "IfMatch" in condition:
        return PreconditionFailedError(f"{place} is gone since it was looked at")
    region = details.get("Region") or metadata.get("HTTPHeaders", {}).get("x-amz-bucket-region")
    if code in _OTHER_REGION or (status in (301, 307, 400) and region):
        use = f"'{region}'" if region else "its own"
        return StorageError(
            f"{place}: the bucket {bucket!r} is in another region ({answer}): use "
            f"client_kwargs={{'region_name': {use}}}"
        )
    if code == "NoSuchBucket":
        return NotFoundError(f"{place}: the bucket {bucket!r} does not exist")
    kind = error_of_code(code, status)
    if kind is NotFoundError:
        return NotFoundError(f"{place} does not exist")
    if kind is CorruptionError:
        return CorruptionError(f"{place} ends before the bytes that were asked for")
    if kind is PermissionDeniedError:
        hint = _permission_hint(code)
        return PermissionDeniedError(f"{place}: permission denied ({answer}){hint}")
    return kind(f"{place}: {answer}")


def _permission_hint(code: str) -> str:
    if code == "403":  # all that the answer to a HEAD can say
        return (
            "; check the credentials, and that they allow s3:GetObject, and s3:ListBucket, without "
            "which a missing object looks like this too"
        )
    if code == "AccessDenied":
        return "; check what these credentials allow"
    return "; check the credentials"
