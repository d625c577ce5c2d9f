# SPDX-License-Identifier: Apache-2.0
"""Which tests run in a guest: those that depend on the kernel, not those that only read files or objects."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyebpf_proxy.lab.agent import FEW_RIGHTS
from tests.support.conversation import PACE


@dataclass(frozen=True)
class Suite:
    """One call of pytest. ``limit`` in seconds, for emulation on a busy machine."""

    name: str
    arguments: tuple[str, ...]
    #: Which of its tests run if no suite is named (pytest's -k): "" all of them, None none.
    quick: str | None = None
    limit: int = 600
    #: Before any netfilter module has been loaded.
    first: bool = False
    #: Only on kernels that must be refused; nothing else runs there.
    refused: bool = False
    #: Every agent of a lab has exactly the DaemonSet's capabilities.
    few_rights: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the tests."""
        return {FEW_RIGHTS: "1", PACE: "0.05"} if self.few_rights else {}


#: Seconds for suites with labs under traffic, and suites of some hundred tests.
_LONG = 1800
_CASES = "tests/kernels/cases"
_UNIT = (
    "datapath/loader/test_btf.py",
    "datapath/test_preflight_modules.py",
    "test_cli_missing.py::test_the_kernel_has_no_btf",
)
# test_maps_libbpf.py needs the compiler, which guests lack. Counts: also by the meter of `top`.
_PACKET = (
    *("connections", "flows", "bridge", "trace", "counts", "kernel_flows", "permits", "promotion", "sweep"),
    *("exchanges", "renewal", "tracked_flows", "untracked_flows", "young_ends", "young_flows", "young_ports"),
    *("xdp", "xdp_flows"),
)
_PACKET_QUICK = (
    "IPv4 and not xdp and not ports_of_one and not kernel_flows and not permits"
    " and not promotion and not young and not sweep and not tracked and not exchanges and not renewal"
)
_NETNS = ("attach/test_attach_links.py", "attach/test_attach_tc.py", "attach/test_attach_udp.py", "test_agent.py")
# The fast path of a node with traffic: what netfilter denies, and what affects flows that netfilter does not see.
_POLICY = ("test_lab_network_policy.py", "test_lab_fast_path_beside_others.py")
_LAB = (
    *("test_conntrack_create.py", "test_lab_fast_path_handover.py", "test_lab_fast_path_full.py"),
    *("test_lab_fast_path_trouble.py", "test_lab_foreign_programs.py"),
)
SUITES = (
    Suite("start", (f"{_CASES}/test_guest_start.py",), "", first=True),
    Suite("refused", (f"{_CASES}/test_guest_refused.py",), "", refused=True),
    Suite("old", (f"{_CASES}/test_guest_old.py",), "", refused=True),
    Suite("load", ("tests/packet/test_settings_load.py",), "refused or plain or everything"),
    Suite("fast", (f"{_CASES}/test_guest_fast.py",), "not restart"),
    Suite(
        "policy",
        tuple(f"tests/netns/{name}" for name in _POLICY),
        "new_policy_applies_at_once and ipv4 and iptables-legacy",
        limit=_LONG,
        few_rights=True,
    ),
    Suite("spoofing", ("tests/netns/test_lab_fast_path_spoofing.py",), limit=_LONG, few_rights=True),
    Suite("lab", tuple(f"tests/netns/{name}" for name in _LAB), limit=_LONG, few_rights=True),
    Suite("unit", tuple(f"tests/unit/{name}" for name in _UNIT), ""),
    # Two of them are about sixty thousand ports and about two processors.
    Suite(
        "packet",
        tuple(f"tests/packet/test_{name}.py" for name in _PACKET),
        _PACKET_QUICK,
        limit=_LONG,
    ),
    Suite("sctp", (f"{_CASES}/test_guest_sctp.py",), "ipv4 or refused"),
    Suite("underlays", (f"{_CASES}/test_guest_underlays.py",), "vxlan and not pod_keeps"),
    # The agent in its pod's container, with a container runtime's profiles: Debian's kernels have AppArmor.
    Suite("container", ("tests/netns/test_deploy_capabilities.py", "-k", "t13 or s11 or pod_of_the_manifest_serves")),
    Suite("netem", (f"{_CASES}/test_guest_netem.py",)),
    Suite("bridge", ("tests/netns/test_lab_bridge.py", "-k", "large or fragmented or reach_each_other")),
    # The development machine's kernel has no nft_queue.
    Suite("queue", ("tests/netns/attach/test_rulesets.py", "-k", "queue or aws"), "policy_with_a_queue"),
    Suite("netns", tuple(f"tests/netns/{name}" for name in _NETNS), "second_agent"),
)


def chosen(names: str) -> tuple[Suite, ...]:
    """The suites of a run: "all", some by their names, or the default."""
    if names == "all":
        return SUITES
    if names:
        return tuple(suite for suite in SUITES if suite.name in names.split())
    quick = [suite for suite in SUITES if suite.quick is not None]
    return tuple(replace(suite, arguments=(*suite.arguments, "-k", suite.quick or "")) for suite in quick)


def paths(names: str) -> list[str]:
    """The files of the tests that a run may need."""
    return [word.partition("::")[0] for suite in chosen(names) for word in suite.arguments if word.startswith("tests/")]


#: Loaded after the first suites, if the kernel has them: tests write their settings.
MODULES = ("nf_conntrack", "nf_nat", "br_netfilter")
#: Kernels that must be refused: the agent has to log the reason, in one line.
REFUSED = ("5.10",)
