# SPDX-License-Identifier: Apache-2.0
"""Finds rules of other software on this node that must see every packet, so that the fast path is closed for them.

================  ==================================================================================
module            duty
================  ==================================================================================
``model``         tables, chains, rules and their parts, independent of the tool that made them
``xtables``       matches and targets of iptables by name: what each of them does
``expressions``   expressions of nftables as the kernel dumps them
``nft``           pure: dumps of tables, chains, sets and rules -> the model
``legacy``        pure: the blob of a table of iptables-legacy -> the model
``judge``         pure: the model -> the rules that close the fast path, by family, as text
``kernel``        queries the kernel: netlink and socket options; runs no tool, loads no module, creates no table
``watch``         follows commits to nftables, and checks iptables-legacy every two seconds
================  ==================================================================================
"""
