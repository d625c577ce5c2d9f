# SPDX-License-Identifier: Apache-2.0
"""The log: one line per message on standard error, as text or JSON.

    log = Logger("datapath")
    log.info("programs attached", devices=3, hook="tcx")

    2026-11-21T02:39:29.123Z info programs attached devices=3 hook=tcx
    {"time": "2026-11-21T02:39:29.123Z", "level": "info", "message": "programs attached", "devices": 3, …}

It uses the standard ``logging``, so messages of libraries have the same format.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from typing import Literal

from pyebpf_proxy.common.printable import printable, printable_json

_LEVELS = {
    logging.DEBUG: "debug",
    logging.INFO: "info",
    logging.WARNING: "warning",
    logging.ERROR: "error",
    logging.CRITICAL: "error",
}


class Logger:
    """Logs messages of one package. Keyword arguments become fields; a field whose value is None is omitted."""

    def __init__(self, name: str = "") -> None:
        self._logger = logging.getLogger(f"pyebpf_proxy.{name}" if name else "pyebpf_proxy")

    def debug(self, message: str, /, **fields: object) -> None:
        self._log(logging.DEBUG, message, fields)

    def info(self, message: str, /, **fields: object) -> None:
        self._log(logging.INFO, message, fields)

    def warning(self, message: str, /, **fields: object) -> None:
        self._log(logging.WARNING, message, fields)

    def error(self, message: str, /, **fields: object) -> None:
        self._log(logging.ERROR, message, fields)

    def internal_error(self) -> None:
        """Log the current exception as a bug, with its traceback."""
        self._logger.exception("internal error, please report it", extra={"fields": {}})

    def _log(self, level: int, message: str, fields: dict[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", message, extra={"fields": fields})


#: Debug messages are written from this verbosity (``-v``) on.
DEBUG_VERBOSITY = 2


def configure(
    format: Literal["text", "json"] = "text",  # noqa: A002
    verbosity: int = 0,
    verbosities: Sequence[tuple[str, int]] = (),
) -> None:
    """Write every log line to standard error in ``format``; messages of libraries only from level warning on.

    ``verbosities``: patterns of package names, each with its verbosity; the first match applies.
    """
    handler = logging.StreamHandler()
    handler.addFilter(_Verbosity(verbosity, verbosities))
    handler.setFormatter(_Json() if format == "json" else _Text())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    set_verbosity(verbosity)
    # A closed pipe must not cause tracebacks about the log.
    logging.raiseExceptions = False


def set_verbosity(verbosity: int) -> None:
    """Change the verbosity, except for packages that match a pattern. Safe in any thread."""
    for handler in logging.getLogger().handlers:
        for each in handler.filters:
            if isinstance(each, _Verbosity):
                each.verbosity = verbosity
                level = logging.DEBUG if each.highest() >= DEBUG_VERBOSITY else logging.INFO
                logging.getLogger("pyebpf_proxy").setLevel(level)


class _Verbosity(logging.Filter):
    def __init__(self, verbosity: int, verbosities: Sequence[tuple[str, int]]) -> None:
        super().__init__()
        self.verbosity = verbosity
        self._verbosities = verbosities

    def highest(self) -> int:
        """The highest verbosity of any package."""
        return max([self.verbosity, *(level for _, level in self._verbosities)])

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno > logging.DEBUG:
            return True
        from fnmatch import fnmatchcase

        package = record.name.partition(".")[2]
        fitting = (level for pattern, level in self._verbosities if fnmatchcase(package, pattern))
        return next(fitting, self.verbosity) >= DEBUG_VERBOSITY


def _time(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03}Z"


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = getattr(record, "fields", {})
    return {key: value for key, value in fields.items() if value is not None}


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {_LEVELS.get(record.levelno, 'info')} {printable(record.getMessage())}"
        for key, value in _fields(record).items():
            text = str(value)
            if not text or any(character in text for character in ' "=\n\t'):
                text = json.dumps(text, ensure_ascii=False)
            line += f" {key}={printable(text)}"
        if record.exc_info:
            line += "".join(f"\n{printable(each)}" for each in self.formatException(record.exc_info).split("\n"))
        return line


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": _time(record),
            "level": _LEVELS.get(record.levelno, "info"),
            "message": record.getMessage(),
        }
        entry.update(_fields(record))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return printable_json(json.dumps(entry, ensure_ascii=False, default=str))
