# SPDX-License-Identifier: Apache-2.0
"""``--cleanup`` of the real kube-proxy and of pyebpf-proxy: from the same rules to the same rules.

The rules are kube-proxy's own (tests/support/kube_proxy), among rules of other software.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyebpf_proxy.lab.agent import command
from pyebpf_proxy.lab.namespace import Namespace
from tests.support import reference
from tests.support.kube_proxy_tools import DATA, FOREIGN, FOREIGN_AFTER, load_kube_proxy, restore, saved

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_netns]

FAMILIES = (4, 6)
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def kube_proxy() -> Path:
    """The real program. If it is not built, this is an error, not a skip."""
    program = reference.kube_proxy()
    if not program.exists():
        pytest.fail(f"{program} is missing: run tests/cluster/build.sh")
    return program


@pytest.fixture
def namespaces() -> Iterator[tuple[Namespace, Namespace]]:
    """Two namespaces with the same rules: one for kube-proxy, one for pyebpf-proxy."""
    made = [Namespace(f"pep-clean-{os.getpid()}-{next(_numbers)}") for _ in range(2)]
    try:
        for namespace in made:
            namespace.create()
        yield made[0], made[1]
    finally:
        for namespace in made:
            namespace.remove()


def test_both_clean_ups_leave_the_same_rules(
    kube_proxy: Path, namespaces: tuple[Namespace, Namespace], tmp_path: Path
) -> None:
    """Here the program ``iptables`` is iptables-nft, which kube-proxy cleans up."""
    for namespace in namespaces:
        for family in FAMILIES:
            restore(namespace, "nft", family, FOREIGN)
            load_kube_proxy(namespace, "nft", family)
            restore(namespace, "nft", family, FOREIGN_AFTER)
        namespace.run("nft", "-f", str(DATA / "nftables.nft"))
        namespace.run("nft", "add table ip kube-proxy-of-others; add table inet kube-proxy")
    before = [saved(namespaces[0], "nft", family) for family in FAMILIES]
    assert before == [saved(namespaces[1], "nft", family) for family in FAMILIES]

    reference = [str(kube_proxy), "--cleanup"]
    subject = [*command(), "--cleanup", "--directory", str(tmp_path / "state")]
    for namespace, program in zip(namespaces, (reference, subject), strict=True):
        done = subprocess.run(
            ["ip", "netns", "exec", namespace.name, *program], capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr
    after = [saved(namespaces[0], "nft", family) for family in FAMILIES]
    assert after != before
    assert [saved(namespaces[1], "nft", family) for family in FAMILIES] == after
    tables = [sorted(namespace.run("nft", "list", "tables").splitlines()) for namespace in namespaces]
    assert tables[0] == tables[1]
