# SPDX-License-Identifier: Apache-2.0
"""Blots out the credentials of a text that can be recognised by their form or by their name."""

from __future__ import annotations

import base64
import re

BLOT = "REDACTED"
#: How much of the end of what a program has written is looked at, in characters: its last lines name the reason.
MOST_OF_END = 16 << 10
#: How names of fields, variables, options and annotations end that hold credentials. "token-file" and "secretName" do
#: not.
_ENDS = (
    r"(?:token|password|passwd|passphrase|(?<![a-z])pass|credentials?|secret|authorization|dockerconfigjson|dockercfg|"
    r"(?:access|api|private|secret|encryption|signing|shared|account|tls)[-_.]?key|client-key-data|"
    r"client-certificate-data)"
)
_SENSITIVE = rf"[\w./-]*{_ENDS}"
_NAME = re.compile(_SENSITIVE, re.IGNORECASE)
#: Names of environment variables: these words count anywhere in them, short ones as a word of their own. That blots out
#: too much rather than too little.
_VARIABLE = re.compile(
    r"token|passw|passphrase|credential|secret|private|(?:^|[_.-])(?:pat|pwd|pass|auth|jwt|cookie|key)s?(?:$|[_.-])",
    re.IGNORECASE,
)
#: A line of YAML or JSON with such a name.
_LINE = re.compile(rf"^(\s*-?\s*\"?{_SENSITIVE}\"?:)[ \t]+\S.*$", re.MULTILINE | re.IGNORECASE)
#: Within a line: an option with its value.
_OPTION_VALUE = re.compile(rf"(--[\w.-]*{_ENDS} +)(?!-)[^\s\"',;]+", re.IGNORECASE)
#: A variable or an option with its value, and a field of JSON.
_ASSIGNED = re.compile(rf"({_ENDS}=)(?:\"[^\"]*\"|'[^']*'|[^\s\"',;&]+)", re.IGNORECASE)
_FIELD = re.compile(rf"({_ENDS}\" *: *)\"(?:[^\"\\]|\\.)*\"", re.IGNORECASE)
#: At least as much as the last two find, and fast: few texts have any of it.
_HINT = re.compile(r"(?:token|pass\w*|credentials?|secret|authorization|dockerc\w*|key|data)(?:=|\" *:)")
#: The option alone, whose value is the next word.
_OPTION_NAME = re.compile(rf"--?{_SENSITIVE}", re.IGNORECASE)
#: Wherever they stand: a signed token, an HTTP header, a private key, also in base64, the user of a URL.
_TOKEN = re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*")
_HEADER = re.compile(r"(\bauthorization: *\w+ +|\bbearer +(?=[\w.~+/-]{16}))[\w.~+/=-]+", re.IGNORECASE)
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL)
_BASE64_PEM = re.compile(r"LS0tLS1CRUdJTi[A-Za-z0-9+/]+={0,2}")
_URL_USER = re.compile(r"(?<=://)[^/\s\"'@]+(?=@(?!sha256:))")


def blotted(text: str) -> str:
    """A text without the credentials that can be recognised by their form, or by their name in the same line."""
    for pattern in (_PRIVATE_KEY, _TOKEN, _URL_USER):
        text = pattern.sub(BLOT, text)
    text = _BASE64_PEM.sub(lambda found: BLOT if _is_private_key(found[0]) else found[0], text)
    for pattern in (_HEADER, _OPTION_VALUE):
        text = pattern.sub(rf"\1{BLOT}", text)
    if _HINT.search(text.lower()):
        text = _FIELD.sub(rf'\1"{BLOT}"', _ASSIGNED.sub(rf"\1{BLOT}", text))
    return _LINE.sub(rf"\1 {BLOT}", text)


def blotted_end(text: str, longest: int) -> str:
    """The end of what a program has written, on one line of at most ``longest`` characters, without credentials.

    They are blotted out before the line is cut, which would hide their form.
    """
    line = " ".join(blotted(text[-MOST_OF_END:]).split())
    return line if len(line) <= longest else f"…{line[1 - longest :]}"


def _is_private_key(text: str) -> bool:
    """Whether this is a private key in base64, and not a certificate."""
    return b"PRIVATE KEY-----" in base64.b64decode(text[: min(64, len(text) // 4 * 4)])


def names_credential(name: str) -> bool:
    """Whether a field, variable or annotation of this name holds a credential."""
    return _NAME.fullmatch(name) is not None


def names_secret_variable(name: str) -> bool:
    """Whether an environment variable of this name may hold a credential."""
    return _VARIABLE.search(name) is not None or names_credential(name)


def is_option(word: str) -> bool:
    """Whether this is an option without its value, which is a credential."""
    return _OPTION_NAME.fullmatch(word) is not None
