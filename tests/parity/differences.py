# SPDX-License-Identifier: Apache-2.0
"""Intended differences of pyebpf-proxy's answers from kube-proxy's. docs/differences.md gives the reasons."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.parity.answer import Answer
from tests.parity.case import Case

_DECODE = "failed complete: failed to decode: "
_OLD_FLAG = re.compile(r"unknown flag: --(\S+)")
_OWN = re.compile(r"Flag --(\S+) is of an older release: accepted, without effect")
_UNUSUAL = re.compile(r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]|\\x[789]|\\u(?:00[89]|202[89]|feff|fff[ef])|\\[NLP]")


def _program_name(case: Case, expected: Answer, actual: Answer) -> bool:
    """The message about arguments names the program."""
    return _same_but(expected, actual, error=expected.error.replace('"kube-proxy" does', '"pyebpf-proxy" does'))


def _own_version(case: Case, expected: Answer, actual: Answer) -> bool:
    """A second line with pyebpf-proxy's version."""
    first, newline, second = actual.output.partition("\n")
    good = newline == "\n" and re.fullmatch(r"pyebpf-proxy \d+\.\d+\.\d+", second) is not None
    raw = expected.output.startswith("version.Info{") and first.startswith(
        'version.Info{Major:"1", Minor:"36", GitVersion:'
    )
    return good and (first == expected.output or raw) and _same_but(expected, actual, output=actual.output)


def _all_type_errors(case: Case, expected: Answer, actual: Answer) -> bool:
    """All type errors of a file; kube-proxy stops at the first one."""
    if not (expected.error.startswith(_DECODE) and actual.error.startswith(f"{_DECODE}[")):
        return False
    first = expected.error.removeprefix(_DECODE)
    rest = actual.error.removeprefix(f"{_DECODE}[").removeprefix(first)
    named = re.match(r"(?: \([\w.\[\]]+\))?, \S", rest) is not None
    return actual.error.startswith(f"{_DECODE}[{first}") and named and _same_but(expected, actual, error=actual.error)


def _field_is_named(case: Case, expected: Answer, actual: Answer) -> bool:
    """The field of a bad duration or quantity, in brackets after kube-proxy's text."""
    added = actual.error.removeprefix(expected.error)
    named = added != actual.error and re.fullmatch(r" \([\w.\[\]]+\)", added) is not None
    return expected.error.startswith(_DECODE) and named and _same_but(expected, actual, error=actual.error)


def _no_file_in_the_message(case: Case, expected: Answer, actual: Answer) -> bool:
    """The message about a missing kind or version does not repeat the whole file."""
    shown = re.sub(r"( is missing) in '.*'$", r"\1", expected.error, flags=re.DOTALL)
    return shown != expected.error and _same_but(expected, actual, error=shown)


def _no_go_inside(case: Case, expected: Answer, actual: Answer) -> bool:
    """The message names no source line of Go's scheme and no Go type."""
    shown = re.sub(r' in scheme "[^"]*"$', "", expected.error)
    shown = re.sub(r" into Go value of type struct \{.*$", ": the file holds no fields", shown)
    return shown != expected.error and _same_but(expected, actual, error=shown)


def _json_syntax(case: Case, expected: Answer, actual: Answer) -> bool:
    """Syntax errors of a JSON file have other words, with the line."""
    prefix = f"{_DECODE}couldn't get version/kind; json parse error: "
    both = expected.error.startswith(prefix) and re.match(
        re.escape(prefix) + r"(line \d+|invalid character)", actual.error
    )
    return bool(both) and "cannot unmarshal" not in expected.error and _same_but(expected, actual, error=actual.error)


def _older_flags(case: Case, expected: Answer, actual: Answer) -> bool:
    """Flags of older releases and of klog are accepted, each with a warning."""
    refused, matched = _OLD_FLAG.fullmatch(expected.error), [_OWN.fullmatch(warning) for warning in actual.warnings]
    named = [match[1] for match in matched if match]
    return refused is not None and actual.status == 0 and actual.error == "" and refused[1] in named


def _without_escapes(document: str) -> str:
    """A document without characters that can be written in several ways: these, their escapes, quotes."""
    return re.sub(
        rf"{_UNUSUAL.pattern}|\\\\?(?:x[0-9a-fA-F]{{2}}|u[0-9a-fA-F]{{4}}|U[0-9a-fA-F]{{8}}|[a-zA-Z0-9\"\\_ ])|['\"\\]",
        "",
        document,
    )


def _unusual_characters(case: Case, expected: Answer, actual: Answer) -> bool:
    """Texts that kube-proxy cannot write, because its YAML reader rejects them, are written, and others are escaped."""
    given = (case.file or b"").decode(errors="replace") + "".join(case.arguments)
    if _UNUSUAL.search(given) is None or actual.status != 0 or actual.document is None:
        return False
    if expected.error == "yaml: control characters are not allowed":
        return True
    # The spelling of such a character may differ; the rest of the document must not.
    written = expected.document is not None and expected._replace(document=actual.document) == actual
    return written and _without_escapes(expected.document or "") == _without_escapes(actual.document)


def _yaml_syntax(case: Case, expected: Answer, actual: Answer) -> bool:
    """Both reject broken YAML, but the message may be about another mistake in the file, or another line."""
    both = all(answer.error.startswith(f"{_DECODE}yaml: ") for answer in (expected, actual))
    return both and _same_but(expected, actual, error=actual.error)


def _flow_indicators(case: Case, expected: Answer, actual: Answer) -> bool:
    """kube-proxy's YAML library accepts ``{a:}``, pyebpf-proxy does not; with ``{a?: 1}`` it is the other way round."""
    if re.search(r"yaml: (line \d+: )?found unexpected ':'$", actual.error):
        return actual.status == 1 and "yaml: " not in expected.error
    given = (case.file or b"").decode(errors="replace")
    refused = expected.error.startswith(f"{_DECODE}yaml: ") and expected.status == 1
    return refused and re.search(r"[{\[][^}\]]*\?", given) is not None and _read_as_a_key(actual)


def _read_as_a_key(actual: Answer) -> bool:
    """The answer to a file with the key ``a?``: a warning, since no field has that name; or another rejection.

    Inside an unknown field the warning names that field only.
    """
    if actual.status != 0:
        other = "yaml: " not in actual.error and "json parse error" not in actual.error
        return actual.status == 1 and actual.document is None and actual.error.startswith("failed") and other
    unknown = any('unknown field "' in warning for warning in actual.warnings)
    return not actual.error and actual.document is not None and unknown


def _escapes(case: Case, expected: Answer, actual: Answer) -> bool:
    """kube-proxy's YAML library accepts ``"\\'"``, pyebpf-proxy does not; with ``"\\/"`` it is the other way round."""
    given = (case.file or b"").decode(errors="replace")
    refused = [answer.error.endswith("found unknown escape character") for answer in (expected, actual)]
    return ("\\'" in given and refused == [False, True]) or ("\\/" in given and refused == [True, False])


DIFFERENCES: dict[str, Callable[[Case, Answer, Answer], bool]] = {
    "program name": _program_name,
    "own version": _own_version,
    "all type errors": _all_type_errors,
    "field is named": _field_is_named,
    "no file in the message": _no_file_in_the_message,
    "no Go inside": _no_go_inside,
    "JSON syntax": _json_syntax,
    "older flags": _older_flags,
    "unusual characters": _unusual_characters,
    "YAML syntax": _yaml_syntax,
    "flow indicators": _flow_indicators,
    "escapes": _escapes,
}


def difference(case: Case, expected: Answer, actual: Answer) -> str | None:
    """Empty if the answers are equal, the name of a listed difference, or None for one that is not listed."""
    if expected == actual:
        return ""
    return next((name for name, holds in DIFFERENCES.items() if holds(case, expected, actual)), None)


def _same_but(expected: Answer, actual: Answer, **changed: str) -> bool:
    return expected._replace(**changed) == actual
