# SPDX-License-Identifier: Apache-2.0
"""Where our answers differ from kube-proxy's on purpose. The reasons are in docs/differences.md, under these names."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.parity.answer import Answer
from tests.parity.case import Case

_DECODE = "failed complete: failed to decode: "
_OLD_FLAG = re.compile(r"unknown flag: --(\S+)")
_OWN = re.compile(r"Flag --(\S+) is of an older release: accepted, without effect")
_UNUSUAL = re.compile(r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]|\\x[789]|\\u(?:00[89]|202[89]|feff|fff[ef])|\\[NLP]")


def _program_name(case: Case, theirs: Answer, ours: Answer) -> bool:
    """The message about arguments names our program."""
    return _same_but(theirs, ours, error=theirs.error.replace('"kube-proxy" does', '"pyebpf-proxy" does'))


def _own_version(case: Case, theirs: Answer, ours: Answer) -> bool:
    """A second line with our own version."""
    first, newline, second = ours.output.partition("\n")
    good = newline == "\n" and re.fullmatch(r"pyebpf-proxy \d+\.\d+\.\d+", second) is not None
    raw = theirs.output.startswith("version.Info{") and first.startswith(
        'version.Info{Major:"1", Minor:"36", GitVersion:'
    )
    return good and (first == theirs.output or raw) and _same_but(theirs, ours, output=ours.output)


def _all_type_errors(case: Case, theirs: Answer, ours: Answer) -> bool:
    """All type errors of a file, kube-proxy's one first, where it stops."""
    if not (theirs.error.startswith(_DECODE) and ours.error.startswith(f"{_DECODE}[")):
        return False
    first = theirs.error.removeprefix(_DECODE)
    rest = ours.error.removeprefix(f"{_DECODE}[").removeprefix(first)
    named = re.match(r"(?: \([\w.\[\]]+\))?, \S", rest) is not None
    return ours.error.startswith(f"{_DECODE}[{first}") and named and _same_but(theirs, ours, error=ours.error)


def _field_is_named(case: Case, theirs: Answer, ours: Answer) -> bool:
    """The field of a bad duration or quantity, in brackets after kube-proxy's text."""
    added = ours.error.removeprefix(theirs.error)
    named = added != ours.error and re.fullmatch(r" \([\w.\[\]]+\)", added) is not None
    return theirs.error.startswith(_DECODE) and named and _same_but(theirs, ours, error=ours.error)


def _no_file_in_the_message(case: Case, theirs: Answer, ours: Answer) -> bool:
    """Not the whole file in the message that kind or version is missing."""
    shown = re.sub(r"( is missing) in '.*'$", r"\1", theirs.error, flags=re.DOTALL)
    return shown != theirs.error and _same_but(theirs, ours, error=shown)


def _no_go_inside(case: Case, theirs: Answer, ours: Answer) -> bool:
    """Not the source line of Go's scheme, and not the Go type that a file with no fields is not."""
    shown = re.sub(r' in scheme "[^"]*"$', "", theirs.error)
    shown = re.sub(r" into Go value of type struct \{.*$", ": the file holds no fields", shown)
    return shown != theirs.error and _same_but(theirs, ours, error=shown)


def _json_syntax(case: Case, theirs: Answer, ours: Answer) -> bool:
    """What is wrong with the syntax of a JSON file is said in other words, with its line."""
    prefix = f"{_DECODE}couldn't get version/kind; json parse error: "
    both = theirs.error.startswith(prefix) and re.match(re.escape(prefix) + r"(line \d+|invalid character)", ours.error)
    return bool(both) and "cannot unmarshal" not in theirs.error and _same_but(theirs, ours, error=ours.error)


def _older_flags(case: Case, theirs: Answer, ours: Answer) -> bool:
    """Flags of older releases and of klog are accepted, each with a warning."""
    refused, told = _OLD_FLAG.fullmatch(theirs.error), [_OWN.fullmatch(warning) for warning in ours.warnings]
    named = [match[1] for match in told if match]
    return refused is not None and ours.status == 0 and ours.error == "" and refused[1] in named


def _without_escapes(document: str) -> str:
    """A document without what may be written in more than one way: these characters, their escapes, quotes."""
    return re.sub(
        rf"{_UNUSUAL.pattern}|\\\\?(?:x[0-9a-fA-F]{{2}}|u[0-9a-fA-F]{{4}}|U[0-9a-fA-F]{{8}}|[a-zA-Z0-9\"\\_ ])|['\"\\]",
        "",
        document,
    )


def _unusual_characters(case: Case, theirs: Answer, ours: Answer) -> bool:
    """Texts that kube-proxy cannot write, because its YAML reader refuses them, are written, and others escaped."""
    given = (case.file or b"").decode(errors="replace") + "".join(case.arguments)
    if _UNUSUAL.search(given) is None or ours.status != 0 or ours.document is None:
        return False
    if theirs.error == "yaml: control characters are not allowed":
        return True
    # How such a character is written may differ; all else of the document may not.
    written = theirs.document is not None and theirs._replace(document=ours.document) == ours
    return written and _without_escapes(theirs.document or "") == _without_escapes(ours.document)


def _yaml_syntax(case: Case, theirs: Answer, ours: Answer) -> bool:
    """Broken YAML is refused by both, but with the words for another mistake of those in the file, or another line."""
    both = all(answer.error.startswith(f"{_DECODE}yaml: ") for answer in (theirs, ours))
    return both and _same_but(theirs, ours, error=ours.error)


def _flow_indicators(case: Case, theirs: Answer, ours: Answer) -> bool:
    """``{a:}`` is taken by kube-proxy's YAML library and refused by ours, ``{a?: 1}`` the other way round."""
    if re.search(r"yaml: (line \d+: )?found unexpected ':'$", ours.error):
        return ours.status == 1 and "yaml: " not in theirs.error
    given = (case.file or b"").decode(errors="replace")
    refused = theirs.error.startswith(f"{_DECODE}yaml: ") and "yaml: " not in ours.error
    return refused and re.search(r"[{\[][^}\]]*\?", given) is not None


def _escapes(case: Case, theirs: Answer, ours: Answer) -> bool:
    """``"\\'"`` is taken by kube-proxy's YAML library and refused by ours, ``"\\/"`` the other way round."""
    given = (case.file or b"").decode(errors="replace")
    refused = [answer.error.endswith("found unknown escape character") for answer in (theirs, ours)]
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


def difference(case: Case, theirs: Answer, ours: Answer) -> str | None:
    """ "" where the answers are the same, the name of the listed difference, or None: they must not differ so."""
    if theirs == ours:
        return ""
    return next((name for name, holds in DIFFERENCES.items() if holds(case, theirs, ours)), None)


def _same_but(theirs: Answer, ours: Answer, **changed: str) -> bool:
    return theirs._replace(**changed) == ours
