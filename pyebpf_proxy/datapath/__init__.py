# SPDX-License-Identifier: Apache-2.0
"""The only package that touches the kernel. ``datapath.datapath.Datapath`` is its interface.

``loader`` loads the programs; ``maps`` writes the service maps; ``node`` attaches programs and applies the kernel's
settings; ``netfilter`` is the proxy's nft table; ``connections`` handles existing flows and sockets; ``rulesets`` reads
the rules of other software; ``migration`` handles kube-proxy's leftovers. They all use ``netlink``. Nothing is imported
here, so that a module can be imported without all others.
"""
