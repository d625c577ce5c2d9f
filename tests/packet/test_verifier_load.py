# SPDX-License-Identifier: Apache-2.0
"""How many instructions the verifier reads at a start: this is most of the load time."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from pyebpf_proxy.datapath.loader import _libbpf
from pyebpf_proxy.datapath.loader.libbpf import Program
from pyebpf_proxy.datapath.loader.programs import SCHEDULERS, Settings, load

#: Instructions of one socket program: 6 000 to 15 000 on Linux 6.18; without global functions 77 000 to 406 000.
MOST = 30_000
#: Instructions of one tc program with the fast path: 142 000. tc_l3, where the IP header has no fixed place: 195 000.
MOST_OF_TC = 200_000
#: 161 000.
MOST_OF_XDP = 170_000
#: 2 000; 96 000 if the code is verified again for each entry.
MOST_OF_SWEEP = 10_000
#: The offset of verified_insns in struct bpf_prog_info, and the struct's size (include/uapi/linux/bpf.h).
_VERIFIED, _SIZE = 216, 228


def read_by_verifier(program: Program) -> int:
    info = _libbpf.ffi.new("char[]", _SIZE)
    size = _libbpf.ffi.new("uint32_t *", _SIZE)
    _libbpf.checked(_libbpf.lib().bpf_obj_get_info_by_fd(program.fd, info, size), f"info of {program.name}")
    (found,) = struct.unpack_from("=I", bytes(_libbpf.ffi.buffer(info)), _VERIFIED)
    return int(found)


@pytest.mark.parametrize("pods", [False, True], ids=["node", "all"])
@pytest.mark.parametrize("scheduler", ["", "lblcr"], ids=["random", "lblcr"])
def test_socket_programs_are_verified_once_and_not_once_per_call(bpf_objects: Path, scheduler: str, pods: bool) -> None:
    number = dict(SCHEDULERS)[scheduler] if scheduler else 0  # type: ignore[index]
    loaded = load(Settings(netns_cookie=1, scheduler=number, pod_sockets=pods), objects=bpf_objects)
    try:
        assert loaded.settings.pod_sockets == pods
        read = {name: read_by_verifier(program) for name, program in loaded.sock.programs.items()}
    finally:
        loaded.close()
    assert min(read.values()) > 0
    assert max(read.values()) <= MOST, read


def test_packet_programs_with_the_fast_path_are_verified_once(bpf_objects: Path) -> None:
    ports = {"snat_port_min": 1024, "snat_port_max": 32767}
    loaded = load(Settings(netns_cookie=1, fast_path=True, pod_sockets=True, xdp=True, **ports), objects=bpf_objects)
    try:
        assert loaded.settings.fast_path
        assert loaded.settings.pod_sockets
        assert loaded.xdp is not None
        programs = {**loaded.tc.programs, **loaded.xdp.programs}
        read = {name: read_by_verifier(program) for name, program in programs.items()}
    finally:
        loaded.close()
    assert 0 < read.pop("xdp_ethernet") <= MOST_OF_XDP
    assert 0 < max(read.values()) <= MOST_OF_TC, read
    assert read["sweep_flows"] <= MOST_OF_SWEEP, read
