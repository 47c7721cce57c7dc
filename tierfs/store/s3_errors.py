"""What an S3 answer, or the lack of one, means: the only place that turns both into StoreErrors.

Source of the codes: Amazon S3 API reference, "Error responses", and what other servers send in their place.
What is unknown counts as transient: a proxy's 418 or an HTML page is no statement about the object.

Messages carry the server's code and text, and never a header, a signature or a request body.
"""

from __future__ import annotations

import email.utils
import time
from collections.abc import Mapping
from typing import Any

import botocore.exceptions as boto

from tierfs.errors import (
    ClockSkewed,
    CredentialsExpired,
    ObjectNotFound,
    ObjectTooLarge,
    PreconditionFailed,
    ShortBody,
    StoreAccessDenied,
    StoreConfigError,
    StoreError,
    StoreThrottled,
    StoreTimeout,
    StoreUnavailable,
    StoreUnsupported,
    TransientStoreError,
)

_BY_CODE: dict[str, type[StoreError]] = {
    "NoSuchKey": ObjectNotFound,
    "NoSuchVersion": ObjectNotFound,
    "NoSuchUpload": ObjectNotFound,
    "NoSuchBucket": StoreConfigError,
    "InvalidBucketName": StoreConfigError,
    "PermanentRedirect": StoreConfigError,
    "TemporaryRedirect": StoreUnavailable,
    "AuthorizationHeaderMalformed": StoreConfigError,
    "IllegalLocationConstraintException": StoreConfigError,
    "InvalidArgument": StoreConfigError,
    "InvalidRequest": StoreConfigError,
    "InvalidPart": StoreConfigError,
    "InvalidPartOrder": StoreConfigError,
    "EntityTooSmall": StoreConfigError,
    "KeyTooLongError": StoreConfigError,
    "MetadataTooLarge": StoreConfigError,
    "MalformedXML": StoreConfigError,
    "XMinioInvalidObjectName": StoreConfigError,
    "EntityTooLarge": ObjectTooLarge,
    "AccessDenied": StoreAccessDenied,
    "AllAccessDisabled": StoreAccessDenied,
    "AccountProblem": StoreAccessDenied,
    "InvalidAccessKeyId": StoreAccessDenied,
    "SignatureDoesNotMatch": StoreAccessDenied,
    "InvalidObjectState": StoreAccessDenied,
    "PreconditionFailed": PreconditionFailed,
    "InvalidRange": PreconditionFailed,
    "ConditionalRequestConflict": StoreUnavailable,
    "OperationAborted": StoreUnavailable,
    "ExpiredToken": CredentialsExpired,
    "ExpiredTokenException": CredentialsExpired,
    "TokenRefreshRequired": CredentialsExpired,
    "InvalidToken": CredentialsExpired,
    "RequestExpired": ClockSkewed,
    "RequestTimeTooSkewed": ClockSkewed,
    "RequestTimeout": StoreTimeout,
    "IncompleteBody": StoreUnavailable,
    "BadDigest": StoreUnavailable,
    "XAmzContentSHA256Mismatch": StoreUnavailable,
    "InternalError": StoreUnavailable,
    "ServiceUnavailable": StoreThrottled,
    "SlowDown": StoreThrottled,
    "SlowDownRead": StoreThrottled,
    "SlowDownWrite": StoreThrottled,
    "Throttling": StoreThrottled,
    "ThrottlingException": StoreThrottled,
    "RequestThrottled": StoreThrottled,
    "TooManyRequests": StoreThrottled,
    "NotImplemented": StoreUnsupported,
    "MethodNotAllowed": StoreUnsupported,
    "UnsupportedOperation": StoreUnsupported,
}
_BY_STATUS: dict[int, type[StoreError]] = {
    301: StoreConfigError,
    401: StoreAccessDenied,
    403: StoreAccessDenied,
    404: ObjectNotFound,
    405: StoreUnsupported,
    408: StoreTimeout,
    411: StoreUnsupported,
    412: PreconditionFailed,
    413: ObjectTooLarge,
    416: PreconditionFailed,
    429: StoreThrottled,
    501: StoreUnsupported,
    503: StoreThrottled,
    504: StoreTimeout,
}
_HINTS: dict[str, str] = {
    "NoSuchBucket": "; check the bucket's name and the endpoint",
    "PermanentRedirect": "; the bucket is in another region, set region",
    "AuthorizationHeaderMalformed": "; the bucket may be in another region, set region",
    "InvalidAccessKeyId": "; check the credentials (profile, environment)",
    "SignatureDoesNotMatch": "; check the secret key",
    "InvalidObjectState": "; the object is archived and must be restored first",
}
_LONGEST_MESSAGE = 300


def from_answer(status: int, code: str, message: str, *, key: str, operation: str,
                headers: Mapping[str, str] | None = None) -> StoreError:
    """The error for an answer that is not a success. ``headers`` have lower-case names."""
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status) or StoreUnavailable
    if code == "ServiceUnavailable" and status not in (0, 503):
        kind = StoreUnavailable
    text = f"{key or '/'}: {operation}: {status} {code}: {message[:_LONGEST_MESSAGE]}{_HINTS.get(code, '')}"
    if kind is ClockSkewed:
        text += "; " + _clock_hint((headers or {}).get("date"))
    error = kind(text)
    if isinstance(error, TransientStoreError):
        error.retry_after_s = _retry_after_s((headers or {}).get("retry-after"))
    return error


def from_client_error(error: boto.ClientError, key: str, operation: str) -> StoreError:
    """The error for botocore's ClientError (an answer with a status of its own)."""
    answer: dict[str, Any] = error.response
    about = answer.get("Error", {})
    metadata = answer.get("ResponseMetadata", {})
    status = metadata.get("HTTPStatusCode", 0)
    return from_answer(
        status if isinstance(status, int) else 0, str(about.get("Code", "")), str(about.get("Message", "")),
        key=key, operation=operation, headers=metadata.get("HTTPHeaders"))


def from_exception(error: Exception, key: str, operation: str) -> StoreError:
    """The error for anything else that a request raised: no answer, or one that makes no sense."""
    text = f"{key or '/'}: {operation}: "
    match error:
        case StoreError():
            return error
        case boto.ClientError():
            return from_client_error(error, key, operation)
        case boto.ConnectTimeoutError() | boto.ReadTimeoutError():
            return StoreTimeout(text + "the store did not answer in time")
        case boto.SSLError():
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                return StoreConfigError(text + "the store's certificate is not trusted (set AWS_CA_BUNDLE)")
            return StoreUnavailable(text + "the TLS connection failed")
        case boto.EndpointConnectionError() | boto.ProxyConnectionError():
            return StoreUnavailable(text + "could not connect to the store")
        case boto.IncompleteReadError() | boto.ResponseStreamingError():
            return ShortBody(text + "the body ended early")
        case boto.NoCredentialsError() | boto.PartialCredentialsError():
            return StoreAccessDenied(text + "no complete credentials were found (profile, environment, role)")
        case boto.TokenRetrievalError() | boto.SSOError() | boto.CredentialRetrievalError():
            return CredentialsExpired(text + f"credentials could not be fetched ({type(error).__name__})")
        case boto.ParamValidationError():
            return StoreConfigError(text + f"the request cannot be sent: {str(error)[:_LONGEST_MESSAGE]}")
        case boto.BotoCoreError():
            return StoreUnavailable(text + type(error).__name__)
        case OSError():
            return StoreUnavailable(text + f"the connection broke ({type(error).__name__})")
        case _:
            # KeyError, ValueError, TypeError... while an answer was read: it was not what it should be.
            return StoreUnavailable(text + f"the answer makes no sense ({type(error).__name__})")


def _retry_after_s(value: str | None) -> float | None:
    try:
        seconds = float(value or "")
    except ValueError:
        return None
    return min(seconds, 60.0) if seconds > 0 else None


def _clock_hint(date: str | None) -> str:
    parsed = email.utils.parsedate_to_datetime(date) if date and _is_date(date) else None
    if parsed is None:
        return "this machine's clock differs from the store's; correct the clock"
    behind_s = parsed.timestamp() - time.time()
    word = "behind" if behind_s > 0 else "ahead of"
    return f"this machine's clock is {abs(behind_s):.0f} s {word} the store's; correct the clock"


def _is_date(text: str) -> bool:
    try:
        email.utils.parsedate_to_datetime(text)
    except ValueError:
        return False
    return True
