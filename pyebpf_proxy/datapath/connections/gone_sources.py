# SPDX-License-Identifier: Apache-2.0
"""Conntrack entries of masqueraded flows whose source address has left the node.

The kernel deletes the entries that it has masqueraded itself when the address or its device goes. It does not do so
with entries that were created by ctnetlink, which do not name the device: those of promoted flows. A client that keeps
sending would keep such an entry alive, with a source address that receives no replies.
"""

from __future__ import annotations

from collections.abc import Collection

from pyebpf_proxy.datapath.connections.ctnetlink import delete_entries
from pyebpf_proxy.datapath.connections.masqueraded import IsEndpoint, masqueraded


def end_promoted(addresses: Collection[bytes], ports: range, is_endpoint: IsEndpoint) -> int:
    """Delete the entries of promoted flows that were masqueraded to one of these (packed) addresses; how many.

    ``ports``: the source ports of promoted flows, which the kernel's own masquerading does not use. Entries of other
    software stay, since the kernel would keep them as well. In the network namespace of the calling thread. OSError.
    """
    return delete_entries([(family, entry.key) for family, entry in masqueraded(addresses, ports, is_endpoint)])
