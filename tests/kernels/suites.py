# SPDX-License-Identifier: Apache-2.0
"""Which tests run in a guest: what goes by the kernel. What only looks at files or objects is the same everywhere."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Suite:
    """One call of pytest. ``limit`` in seconds, for emulation on a busy machine."""

    name: str
    arguments: tuple[str, ...]
    #: Which of its tests run where nobody asked for a suite (pytest's -k): "" all of them, None none.
    quick: str | None = None
    limit: int = 600
    #: Before any module of netfilter has been loaded.
    first: bool = False
    #: Only where the kernel must be refused, and nothing else there.
    refused: bool = False


_CASES = "tests/kernels/cases"
_UNIT = (
    "datapath/loader/test_btf.py",
    "datapath/test_preflight_modules.py",
    "test_cli_missing.py::test_the_kernel_has_no_btf",
)
# test_maps_libbpf.py calls the compiler, which guests have not. Counts: also by the meter of `top`.
_PACKET = ("connections", "flows", "bridge", "trace", "counts", "young_flows", "kernel_flows", "permits", "sweep")
_PACKET_QUICK = (
    "IPv4 and not xdp and not ports_of_one and not two_cpus and not kernel_flows and not permits"
    " and not young_flows and not sweep"
)
_NETNS = ("attach/test_attach_links.py", "attach/test_attach_tc.py", "attach/test_attach_udp.py", "test_agent.py")
SUITES = (
    Suite("start", (f"{_CASES}/test_guest_start.py",), "", first=True),
    Suite("refused", (f"{_CASES}/test_guest_refused.py",), "", refused=True),
    Suite("old", (f"{_CASES}/test_guest_old.py",), "", refused=True),
    Suite("load", (f"{_CASES}/test_guest_load.py",), "refused or plain or everything"),
    Suite("fast", (f"{_CASES}/test_guest_fast.py",), "not restart"),
    Suite("unit", tuple(f"tests/unit/{name}" for name in _UNIT), ""),
    # Two of them are about sixty thousand ports and about two processors.
    Suite(
        "packet",
        tuple(f"tests/packet/test_{name}.py" for name in _PACKET),
        _PACKET_QUICK,
    ),
    Suite("sctp", (f"{_CASES}/test_guest_sctp.py",), "ipv4 or refused"),
    Suite("underlays", (f"{_CASES}/test_guest_underlays.py",), "vxlan and not pod_keeps"),
    # The agent in the container of its pod, under the profiles of a container runtime: Debian's kernels have AppArmor.
    Suite("container", ("tests/netns/test_deploy_capabilities.py", "-k", "t13 or s11 or gives_it_serves")),
    Suite("netem", (f"{_CASES}/test_guest_netem.py",)),
    Suite("bridge", ("tests/netns/test_lab_bridge.py", "-k", "large or fragmented or talk")),
    Suite("netns", tuple(f"tests/netns/{name}" for name in _NETNS), "second_agent"),
)


def chosen(names: str) -> tuple[Suite, ...]:
    """The suites of a run: "all", some by their names, or what runs where nobody said anything."""
    if names == "all":
        return SUITES
    if names:
        return tuple(suite for suite in SUITES if suite.name in names.split())
    quick = [suite for suite in SUITES if suite.quick is not None]
    return tuple(replace(suite, arguments=(*suite.arguments, "-k", suite.quick or "")) for suite in quick)


def paths(names: str) -> list[str]:
    """The files of the tests that a run may need."""
    return [word.partition("::")[0] for suite in chosen(names) for word in suite.arguments if word.startswith("tests/")]


#: Loaded after the first suites, if the kernel has them: tests write settings that come with them.
MODULES = ("nf_conntrack", "nf_nat", "br_netfilter")
#: A command behind this one has the capabilities that the DaemonSet gives the agent, and no others.
_NAMES = "-all,+bpf,+net_admin,+perfmon"
THREE_CAPABILITIES = ("setpriv", f"--bounding-set={_NAMES}", f"--inh-caps={_NAMES}")
#: Kernels that must be refused: the agent has to say why, in one line.
REFUSED = ("5.10",)
