# SPDX-License-Identifier: Apache-2.0
"""Protocols and places of decisions as text.

The programs drop packets of every protocol that are for 127.0.0.0/8, also later fragments, which have no ports. Such a
packet has the protocol number 0.
"""

from __future__ import annotations

from pyebpf_proxy.services.addresses import format_address, format_address_port
from pyebpf_proxy.services.model import Protocol

#: A protocol that no Service has.
OTHER = "other"
_NAMES = {int(each): each.name for each in Protocol}


def protocol_name(number: int) -> str:
    """The name of a protocol of Services, else OTHER."""
    return _NAMES.get(number, OTHER)


def place(address: bytes, port: int, protocol: str) -> str:
    """``address:port``; the address alone if the protocol has no ports."""
    return format_address(address) if protocol == OTHER else format_address_port(address, port)
