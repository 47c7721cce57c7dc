"""Logging of the engine: structlog to standard error and to a file that only the owner reads.

One line per event: time, level, text, then ``name=value`` pairs, then the module. A stack follows on
lines of its own, indented. Values come from buckets and from applications: control characters in them are
escaped, so that a file name cannot forge a line. Secrets are blotted out of the finished text, stacks and
foreign libraries included: what ``add_secret`` was told, and what looks like a signature or a password.

Who may call: any thread. ``configure`` once, in the process that serves the mount, after it forked.
``get_logger`` is safe at import time, before ``configure``. Nothing here raises: a full disk must not fail
a read.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import re
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import structlog

MAX_LOG_BYTES = 16 * 1024 * 1024
KEPT_LOG_FILES = 3
_MIN_SECRET_CHARS = 6
_SECRET_VARIABLES = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN")
_SECRET_NAME = re.compile(r"(secret|password|passwd|token|authorization|credential)", re.IGNORECASE)
_SECRET_TEXT = re.compile(
    r"(?P<keep>X-Amz-(?:Signature|Credential|Security-Token)=|Signature=|aws_secret_access_key\W{1,4}"
    r"|aws_session_token\W{1,4}|Authorization\W{1,4}(?:AWS4-HMAC-SHA256 )?|://[^/\s:@]{1,200}:(?=[^\s/@]{1,200}@))[^\s&,'\"@]+",
    re.IGNORECASE,
)
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_PLAIN = re.compile(r"^[^\s\"'=\\]+$")
_secrets: set[str] = set()


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger for a module: ``log.info("text", name=value)``, ``log.exception("text")`` with the stack."""
    logger: structlog.stdlib.BoundLogger = structlog.get_logger(name)
    return logger


def add_secret(secret: str | None) -> None:
    """Never print this text again."""
    if secret and len(secret) >= _MIN_SECRET_CHARS:
        _secrets.add(secret)


def redact(text: str) -> str:
    """``text`` without secrets."""
    for secret in _secrets:
        text = text.replace(secret, "[secret]")
    return _SECRET_TEXT.sub(r"\g<keep>[secret]", text)


def configure(*, level: str, file: Path | None, stderr: bool) -> None:
    """Send what is at ``level`` or above to standard error and to ``file`` (mode 0600, rotated)."""
    for variable in _SECRET_VARIABLES:
        add_secret(os.environ.get(variable))
    number = logging.getLevelNamesMapping()[level.upper()]
    formatter = _LineFormatter()
    handlers: list[logging.Handler] = []
    if stderr:
        handlers.append(logging.StreamHandler(sys.stderr))
    if file is not None:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handlers.append(_PrivateFileHandler(file))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        handler.setFormatter(formatter)
        root.addHandler(handler)
    root.setLevel(max(number, logging.WARNING))  # other libraries: only what is wrong
    logging.getLogger("tierfs").setLevel(number)
    logging.raiseExceptions = False
    logging.captureWarnings(True)


def _to_line(
    _logger: object, _method: str, event: MutableMapping[str, Any]
) -> tuple[tuple[str], dict[str, Any]]:
    """Render the event for the standard library's logger; the stack goes with it as ``exc_info``."""
    keywords = {name: event.pop(name) for name in ("exc_info", "stack_info") if event.get(name)}
    text = _escape(str(event.pop("event", "")))
    pairs = [f"{name}={_value(name, value)}" for name, value in event.items()]
    line = "  ".join([text, " ".join(pairs)]) if pairs else text
    return (line,), keywords


def _value(name: str, value: object) -> str:
    if _SECRET_NAME.search(name):
        return "[secret]"
    if isinstance(value, bytes):
        value = os.fsdecode(value)
    text = _escape(str(value))
    return text if _PLAIN.match(text) else '"' + text.replace('"', '\\"') + '"'


def _escape(text: str) -> str:
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


class _LineFormatter(logging.Formatter):
    """``2026-11-30T04:36:42.123Z warning  text``; further lines (stacks) are indented."""

    def format(self, record: logging.LogRecord) -> str:
        text = f"{record.getMessage()}  [{record.name}]"
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        if record.stack_info:
            text = f"{text}\n{record.stack_info}"
        first, *rest = redact(text).split("\n")
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        head = f"{stamp}.{int(record.msecs):03d}Z {record.levelname.lower():<8} {_escape(first)}"
        return "\n".join([head, *("    " + _escape(line) for line in rest)])


class _PrivateFileHandler(logging.handlers.RotatingFileHandler):
    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=MAX_LOG_BYTES, backupCount=KEPT_LOG_FILES, encoding="utf-8")

    def _open(self) -> Any:
        return open(
            self.baseFilename,
            self.mode,
            encoding=self.encoding,
            errors="backslashreplace",
            opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o600),
        )


# Also without ``configure`` (unit tests, offline commands) events go through the standard library, which
# then shows warnings and errors on standard error.
structlog.configure(
    processors=[structlog.stdlib.filter_by_level, _to_line],
    wrapper_class=structlog.stdlib.BoundLogger,
    logger_factory=structlog.stdlib.LoggerFactory(),
    cache_logger_on_first_use=False,
)


class StateLog:
    """One line per change of a state, however often it is reported: a failing disk, a store that is down."""

    def __init__(self, log: structlog.stdlib.BoundLogger, subject: str, *, initial: str = "ok") -> None:
        self._log = log
        self._subject = subject
        self.state = initial

    def change(self, state: str, *, level: str = "warning", **values: object) -> bool:
        """Note the state; logs and returns True if it is another one than before."""
        if state == self.state:
            return False
        before, self.state = self.state, state
        self._log.log(
            logging.getLevelNamesMapping()[level.upper()],
            f"{self._subject} is {state}",
            before=before,
            **values,
        )
        return True
