# SPDX-License-Identifier: Apache-2.0
"""Features of a device that netlink does not report, by ioctl (include/uapi/linux/ethtool.h)."""

from __future__ import annotations

import fcntl
import socket
import struct
from array import array

_SIOCETHTOOL = 0x8946  # include/uapi/linux/sockios.h
_IFREQ = struct.Struct("@16sP16x")
#: TCP segmentation offload: 1 or 0.
GTSO = 0x1E
#: The bits of several features.
GFLAGS = 0x25
RXVLAN = 1 << 8


def get(device: str, command: int) -> int:
    """The answer to a command with a struct ethtool_value, in this network namespace. OSError."""
    value = array("I", [command, 0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as asker:
        # ifr_data points at the value.
        fcntl.ioctl(asker, _SIOCETHTOOL, _IFREQ.pack(device.encode(), value.buffer_info()[0]))
    return value[1]
