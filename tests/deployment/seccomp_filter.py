# SPDX-License-Identifier: Apache-2.0
"""The seccomp filter of a container, built as runc does: containerd's default profile, compiled by libseccomp.

``containerd/seccomp.json`` is the profile; ``containerd/profile.sh`` writes it with containerd's own code. One thing
differs from runc: calls that are newer than the profile are refused with EPERM, not with ENOSYS.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PROFILE = Path(__file__).parent / "containerd" / "seccomp.json"
# include/seccomp.h of libseccomp
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
OPERATIONS = {"SCMP_CMP_LT": 2, "SCMP_CMP_EQ": 4, "SCMP_CMP_MASKED_EQ": 7}
# The other architectures whose calls the profile filters too: x86 and x32.
BESIDE = {"x86_64": (0x40000003, 0x4000003E)}
EPERM = 1


class Comparison(ctypes.Structure):
    """``struct scmp_arg_cmp``"""

    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("datum_a", ctypes.c_uint64),
        ("datum_b", ctypes.c_uint64),
    )


def rules_of(profile: Mapping[str, Any], capabilities: Iterable[str]) -> list[Mapping[str, Any]]:
    """The rules for a container with these capabilities. KeyError: the profile was not recorded for one of them."""
    names = [f"CAP_{name}" for name in capabilities]
    rules = [*profile["rules"], *(rule for name in names for rule in profile["with"][name])]
    return rules + [
        rule
        for rule in (rule for rules in profile["unless"].values() for rule in rules)
        if not any(rule in profile["unless"][name] for name in names)
    ]


def runtime_default(capabilities: Iterable[str]) -> bytes:
    """The BPF program of seccompProfile ``RuntimeDefault`` for these capabilities."""
    profile = json.loads(PROFILE.read_text())
    return compiled(profile["default"], rules_of(profile, capabilities))


def compiled(default: str, rules: Iterable[Mapping[str, Any]]) -> bytes:
    """``struct sock_filter[]`` for prctl(PR_SET_SECCOMP)."""
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    if default != "SCMP_ACT_ERRNO":
        raise ValueError(f"default action {default}")
    context = ctypes.c_void_p(library.seccomp_init(ERRNO | EPERM))
    try:
        for token in BESIDE.get(platform.machine(), ()):
            _checked(library.seccomp_arch_add(context, token), "seccomp_arch_add")
        for rule in rules:
            action = ALLOW if rule["action"] == "SCMP_ACT_ALLOW" else ERRNO | rule.get("errnoRet", EPERM)
            comparisons = [
                Comparison(each["index"], OPERATIONS[each["op"]], each["value"], each.get("valueTwo", 0))
                for each in rule.get("args", ())
            ]
            array = (Comparison * len(comparisons))(*comparisons)
            for name in rule["names"]:
                number = library.seccomp_syscall_resolve_name(name.encode())
                if number != -1:  # newer than this libseccomp: runc leaves it out too
                    added = library.seccomp_rule_add_array(context, action, number, len(comparisons), array)
                    _checked(added, f"rule for {name}")
        with tempfile.TemporaryFile() as file:
            _checked(library.seccomp_export_bpf(context, file.fileno()), "seccomp_export_bpf")
            file.seek(0)
            return file.read()
    finally:
        library.seccomp_release(context)


def _checked(result: int, what: str) -> None:
    if result < 0:
        raise OSError(-result, os.strerror(-result), what)
