# SPDX-License-Identifier: Apache-2.0
"""Which rules of others on this node must see every packet, so that no packet of their family may pass them by.

================  ==================================================================================
module            what it knows
================  ==================================================================================
``model``         tables, chains, rules and their parts, whatever tool made them
``xtables``       matches and targets of iptables by name: what each of them does
``expressions``   expressions of nftables as the kernel dumps them
``nft``           pure: dumps of tables, chains, sets and rules -> the model
``legacy``        pure: the blob of a table of iptables-legacy -> the model
``judge``         pure: the model -> the rules that close the fast path, by family, in their own words
``kernel``        asks the kernel: netlink and socket options, no program, no module loaded, no table made
``watch``         follows commits to nftables, and looks at iptables-legacy every two seconds
================  ==================================================================================
"""
