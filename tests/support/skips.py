# SPDX-License-Identifier: Apache-2.0
"""The reasons for which a test may be skipped in CI. With PYEBPF_PROXY_STRICT=1 any other skip fails the run.

Each reason is a property of the machine or of a parameter, not of the code. Root, namespaces, BTF and what `make setup`
installs (fish, zsh, ipset, python3-bpfcc, the BPF objects) are no reasons: CI has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple


class Allowed(NamedTuple):
    """``reason`` as pytest reports it, ``*`` for any text; ``why`` CI may lack what the test needs."""

    reason: str
    why: str


_NOT_SETUP = "make setup does not install it: the agent and its suites do without"
_LIBRARY_PLACE = "the place of a library is Debian's, and another on some architectures"
_BUILT = "built or fetched for make test-cluster, and kept in the cache; CI may begin without a cache"
_MINUTES = "it takes minutes to build, and only its own tests need it; they are run by hand"
_MODULE = "a module or an option of the kernel; make test-kernels has kernels with it"
_LIMIT = "a limit of the machine, which the test does not change"
_TIME = "CI takes 25 minutes on a quiet machine; it lists the tests that it had no time for"
_NO_GIT = "the sources may be an unpacked archive"
_PARAMETER = "a parameter of the test that does not apply to the other one"
_GUEST = "guests of make test-kernels differ; each suite says which kernels it is for"

ALLOWED = (
    Allowed("kubectl is missing: *", _NOT_SETUP),
    Allowed("no other clang is installed: *", _NOT_SETUP),
    Allowed("mandoc is not installed: *", _NOT_SETUP),
    Allowed("qemu-system-x86 is not installed", _NOT_SETUP),
    Allowed("vagrant is not installed: *", _NOT_SETUP),
    Allowed("libvirtd is not installed: *", _NOT_SETUP),
    Allowed("libfaketime is not installed", _NOT_SETUP),
    Allowed("* is not where it is on Debian", _LIBRARY_PLACE),
    Allowed("helm is missing: *", _BUILT),
    Allowed("kube-proxy's plan is missing: *", _BUILT),
    Allowed("prometheus is missing: *", _BUILT),
    Allowed("* is not built: make test-api-versions builds it (Go)", _MINUTES),
    Allowed("this kernel has no ipset loaded (/sys/module/ip_set)", _MODULE),
    Allowed("this kernel has no IPVS loaded (/proc/net/ip_vs): only the decision is tested", _MODULE),
    Allowed("this kernel has no VLAN devices (CONFIG_VLAN_8021Q)", _MODULE),
    Allowed("this kernel has no tcx: *", _MODULE),
    Allowed("this kernel has no AppArmor; suite container of make test-kernels has it", _MODULE),
    Allowed("this kernel has no IPsec: *", _MODULE),
    Allowed("this kernel has no nft_queue", _MODULE),
    Allowed("no bonding in this kernel: *", _MODULE),
    Allowed("this kernel renames no device that is up: *", _MODULE),
    Allowed("before Linux 6.4 fdinfo has *", _MODULE),
    Allowed("io_uring_setup: *", _MODULE),
    Allowed("nf_conntrack_max of this machine is *: too many entries to make", _LIMIT),
    Allowed("fs.inotify.max_queued_events is *: filling that takes too long", _LIMIT),
    Allowed("the root cgroup gives no * controller to others", _LIMIT),
    Allowed("this machine makes * changes a second", _LIMIT),
    Allowed("this machine has been up for less than * s, which a flow cannot have been idle for", _LIMIT),
    Allowed("no time is left", _TIME),
    Allowed("not a git checkout", _NO_GIT),
    Allowed("this tree is no git checkout: which files are tracked is not known", _NO_GIT),
    Allowed("mode iptables never looks at such addresses", _PARAMETER),
    Allowed("is IPv4 on an IPv6 socket", _PARAMETER),
    Allowed("the guard is of IPv4", _PARAMETER),
    Allowed("IPv6 has no UDP without a checksum", _PARAMETER),
    Allowed("conntrack is built in, or was loaded before: this is for the first agent after a boot", _GUEST),
    Allowed("this kernel is not one that has to be refused", _GUEST),
    Allowed("ipip carries IPv4 only", _GUEST),
    Allowed("this kernel has no module *", _GUEST),
)

_PATTERNS = [re.compile(".*".join(map(re.escape, each.reason.split("*"))), re.DOTALL) for each in ALLOWED]


def is_allowed(reason: str) -> bool:
    """Whether a test may be skipped for this reason in CI."""
    return any(pattern.fullmatch(reason) for pattern in _PATTERNS)


def unexpected(reasons: Iterable[str]) -> list[str]:
    """The reasons that are not on the list, sorted."""
    return sorted({reason for reason in reasons if not is_allowed(reason)})
