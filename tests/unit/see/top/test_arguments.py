# SPDX-License-Identifier: Apache-2.0
"""What ``top`` says about a count that it does not accept."""

from __future__ import annotations

import argparse

import pytest

from pyebpf_proxy.see.top.arguments import count, number


@pytest.mark.parametrize("word", ["-3", "0", "1.5", "x", ""])
def test_a_refused_number_of_intervals_says_which_are_accepted(word: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"^must be a whole number from 1, not {word}$"):
        count(word)
    assert count("1") == 1


@pytest.mark.parametrize("word", ["-3", "1.5", "x", ""])
def test_a_refused_number_of_endpoints_says_which_are_accepted(word: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"^must be a whole number from 0, not {word}$"):
        number(word)
    assert number("0") == 0
