# SPDX-License-Identifier: Apache-2.0
"""What kube-proxy's modes leave in the kernel: found and removed exactly, nothing of others touched.

==============  =====================================================================================
module          what it knows
==============  =====================================================================================
``rules``       pure: which chains and jumps of a saved iptables ruleset are kube-proxy's
``iptables``    both families and both variants (nft, legacy), by their own save and restore tools
``nftables``    the tables ``ip kube-proxy`` and ``ip6 kube-proxy``
``ipvs``        virtual servers, the device kube-ipvs0, the ipsets
``leftovers``   all of them together: ``remove`` and ``running``
``beside``      when: after the agent's start, and a look at every refresh
==============  =====================================================================================
"""
