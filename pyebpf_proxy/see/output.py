# SPDX-License-Identifier: Apache-2.0
"""Prints the answer of a command in the requested format."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

import msgspec

from pyebpf_proxy.common.printable import printable
from pyebpf_proxy.see.model import encode
from pyebpf_proxy.see.text import safe


def show(
    arguments: argparse.Namespace, answer: msgspec.Struct, lines: Sequence[str], names: Iterable[str] = ()
) -> None:
    """Print an answer in the requested format."""
    if arguments.output == "json":
        print(encode(answer))
    elif arguments.output == "name":
        print("".join(f"{printable(name)}\n" for name in dict.fromkeys(names)), end="")
    else:
        print("\n".join(map(safe, lines)))
