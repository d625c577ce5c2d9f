# SPDX-License-Identifier: Apache-2.0
"""What is found out about the helpers of a kernel older than the supported ones: one that lacks some of them."""

from __future__ import annotations

import os

import pytest

from pyebpf_proxy.datapath.loader.abilities import Abilities, of_kernel

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_bpf]


def test_its_helpers_are_found_out() -> None:
    if not os.environ.get("REFUSED"):
        pytest.skip("this kernel is not one that has to be refused")
    # Linux 5.10 has storage in sockets for both kinds of programs, and none of the rest.
    assert of_kernel() == Abilities(loop=False, set_retval=False, coarse_clock=False, socket_storage=True)
