# SPDX-License-Identifier: Apache-2.0
"""Detection of helpers on a kernel that is older than the supported ones and lacks some."""

from __future__ import annotations

import os

import pytest

from pyebpf_proxy.datapath.loader.abilities import Abilities, of_kernel

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_bpf]


def test_helpers_of_an_old_kernel_are_detected() -> None:
    if not os.environ.get("REFUSED"):
        pytest.skip("this kernel is not one that has to be refused")
    # Linux 5.10 has socket storage for both kinds of programs, and nothing else.
    assert of_kernel() == Abilities(loop=False, set_retval=False, coarse_clock=False, socket_storage=True)
