# SPDX-License-Identifier: Apache-2.0
"""Netlink: the only place that opens its sockets and knows its encoding. Everything is bytes; no library is used.

================  ==================================================================================
module            duty
================  ==================================================================================
``uapi``          numbers and structs of the kernel's headers, under the kernel's names
``messages``      messages and attributes: encode, decode
``request``       a socket for requests and their answers
``subscription``  a socket for notifications of multicast groups, which may be lost
``rtnetlink``     requests about devices, addresses and tc; a refusal names the request and the kernel's reason
``genetlink``     families of generic netlink by name
================  ==================================================================================
"""
