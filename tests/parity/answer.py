# SPDX-License-Identifier: Apache-2.0
"""A program's answer to a case, without what differs from run to run: times, process ids, line numbers, folders."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

# Lines that kube-proxy logs at every start, or about itself: they are no answer to the case.
NOISE = ("Using iptables proxy", "Wrote configuration", "Error running ProxyServer", "FLAG: ", "Updated")

_KLOG = re.compile(r"^([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w.]+:\d+\] (.*)$", re.DOTALL)
_FIELD = re.compile(r"(?:KubeProxyConfiguration|logging)\.[A-Za-z]+(?:\.[A-Za-z]+|\[\d+\])*")
_JSON_FIELD = re.compile(
    r"Go struct field \w+\.([\w.]+)|(?:unknown|duplicate) field \"([^\"]+)\"|key \"?([^\" ]+)\"? already"
)
_FLAG = re.compile(r'for "([^"]+)" flag|(?:unknown (?:shorthand )?flag|flag needs an argument): (.*)')


class Answer(NamedTuple):
    """Exit status, the error that ended the run, warnings, standard output, and the document that was written."""

    status: int
    error: str = ""
    warnings: tuple[str, ...] = ()
    output: str = ""
    document: str | None = None

    def fields(self) -> list[str]:
        """The fields and flags that the error names, in its order."""
        found = _FIELD.findall(self.error)
        for pattern in (_JSON_FIELD, _FLAG):
            found += [next(filter(None, groups)) for groups in pattern.findall(self.error) if any(groups)]
        return found

    def to_data(self) -> dict[str, Any]:
        data: dict[str, Any] = {"status": self.status}
        data.update({name: getattr(self, name) for name in ("error", "output") if getattr(self, name)})
        if self.warnings:
            data["warnings"] = list(self.warnings)
        if self.document is not None:
            data["document"] = self.document
        return data

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Answer:
        return cls(
            data["status"],
            data.get("error", ""),
            tuple(data.get("warnings", ())),
            data.get("output", ""),
            data.get("document"),
        )


def of_kube_proxy(status: int, stdout: str, stderr: str, document: str | None, folder: str) -> Answer:
    """The answer in kube-proxy's output."""
    error, warnings, usage = "", [], False
    for entry in _entries(stderr):
        severity, message, reason = entry
        if severity == "usage":
            usage = True
        elif severity == "E" and message not in NOISE:
            error = reason or message
        elif severity in "WI" and message and not message.startswith(NOISE):
            warnings.append(f"{message}: {reason}" if reason else message)
    # Help and usage differ; the comparison only checks that they were shown.
    output = (
        "usage" if stdout.startswith("The Kubernetes network proxy runs") or (usage and not error) else stdout.strip()
    )
    if _KLOG.match(output) or output.startswith('{"ts":'):
        output = ""  # with split streams, the log is there
    clean = [_clean(text, folder) for text in (error, output)]
    # kube-proxy sets gates twice at a start, and warns each time. A document that could not be written is left empty.
    logged = tuple(dict.fromkeys(_clean(text, folder) for text in warnings))
    return Answer(status, clean[0], logged, clean[1], document or None)


def _clean(text: str, folder: str) -> str:
    return text.replace(folder, "{dir}").strip().replace("\n", "\\n")


def _entries(stderr: str) -> list[tuple[str, str, str]]:
    """Each log line: severity letter, message, reason."""
    found: list[tuple[str, str, str]] = []
    lines = stderr.split("\n")
    while lines:
        line = lines.pop(0)
        klog = _KLOG.match(line)
        if klog:
            severity, text = klog[1], klog[2]
            if text.endswith("err=<"):
                block = []
                while lines and lines[0] != " >":
                    block.append(lines.pop(0).removeprefix("\t"))
                del lines[:1]
                found.append((severity, _message(text), "\n".join(block)))
            else:
                found.append((severity, _message(text), _reason(text)))
        elif line.startswith("{") and '"ts":' in line:
            entry = json.loads(line)
            severity = "E" if "err" in entry and "v" not in entry else "I"
            found.append((severity, entry["msg"], entry.get("err", "")))
        elif line.startswith("Error: "):
            found.append(("E", "\n".join([line.removeprefix("Error: "), *lines]).strip("\n"), ""))
            break
        elif line.startswith("Flag "):
            found.append(("W", line, ""))
        elif line.startswith("Usage:"):
            found.append(("usage", "", ""))
    return found


def _message(text: str) -> str:
    quoted = re.match(r'"((?:[^"\\]|\\.)*)"', text)
    return _unquoted(quoted[1]) if quoted else text


def _reason(text: str) -> str:
    quoted = re.search(r' err="((?:[^"\\]|\\.)*)"', text)
    if quoted:
        return _unquoted(quoted[1])
    extra = [
        f"{name}={value}"
        for name, value in re.findall(r' (\w+)="?([^" ]+)"?', text.partition('" ')[2] and " " + text.partition('" ')[2])
    ]
    return " ".join(extra)


def _unquoted(text: str) -> str:
    """Undo the quoting of Go's %q."""
    escapes = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}

    def undo(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] in "xuU":
            return chr(int(code[1:], 16))
        return escapes.get(code, code)

    return re.sub(r"\\(x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}|.)", undo, text)
