# SPDX-License-Identifier: Apache-2.0
"""The order in which leftovers of mode ipvs are removed."""

from __future__ import annotations

import pytest

from pyebpf_proxy.datapath.migration import iptables, ipvs, leftovers, nftables
from pyebpf_proxy.datapath.report import Report


def test_the_addresses_are_removed_first_and_the_device_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its virtual server, an address that the node still has would refuse the node's connections. Without the
    rules, these would not be masqueraded. The device shows a later start that something is left.
    """
    monkeypatch.setattr(iptables, "remove", lambda report, keep_forward: report.removed.append("rules"))
    for name in ("ipvs_loaded", "ipset_loaded", "device_exists"):
        monkeypatch.setattr(ipvs, name, lambda: True)
    monkeypatch.setattr(ipvs, "remove_servers", lambda cidrs, report: report.removed.append("servers"))
    monkeypatch.setattr(ipvs, "remove_addresses", lambda cidrs, report: report.removed.append("addresses"))
    monkeypatch.setattr(ipvs, "remove_device", lambda cidrs, report: report.removed.append("device"))
    monkeypatch.setattr(ipvs, "remove_sets", lambda report: report.removed.append("sets"))
    monkeypatch.setattr(nftables, "remove", lambda report: None)
    assert leftovers.remove([], at_start=True) == Report(["addresses", "rules", "servers", "sets", "device"])
