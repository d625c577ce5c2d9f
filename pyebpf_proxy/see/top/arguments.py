# SPDX-License-Identifier: Apache-2.0
"""The command line of ``top``."""

from __future__ import annotations

import argparse
from typing import Literal

Order = Literal["flows", "packets", "bytes", "drops", "name"]
ORDERS: tuple[Order, ...] = ("flows", "packets", "bytes", "drops", "name")


def add(parser: argparse.ArgumentParser) -> None:
    """Add all arguments except the name, which other commands also have."""
    parser.add_argument("-s", "--sort", choices=ORDERS, default="flows", help="sort by this column (default: flows)")
    parser.add_argument(
        "-i", "--interval", type=seconds, default=1.0, metavar="SECONDS", help="length of an interval (default: 1)"
    )
    parser.add_argument("-c", "--count", type=count, metavar="N", help="stop after N intervals")
    parser.add_argument("--once", action="store_true", help="print one interval as plain text and stop")
    text = "endpoints shown for each service (default: 3)"
    parser.add_argument("-b", "--backends", type=number, default=3, metavar="N", help=text)
    text = "do not attach the measuring program: only new flows and drops, no packets and bytes"
    parser.add_argument("--light", action="store_true", help=text)


def seconds(word: str) -> float:
    """Parse an interval: 0.1 to 3600 seconds."""
    try:
        found = float(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word} is not a number of seconds") from None
    if not 0.1 <= found <= 3600:
        raise argparse.ArgumentTypeError(f"{word} is not between 0.1 and 3600 seconds")
    return found


def count(word: str) -> int:
    """Parse a number of intervals: 1 or more."""
    return _whole(word, 1)


def number(word: str) -> int:
    """Parse a count: 0 or more."""
    return _whole(word, 0)


def _whole(word: str, least: int) -> int:
    if not word.isdecimal() or int(word) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number from {least}, not {word}")
    return int(word)
