# SPDX-License-Identifier: Apache-2.0
"""kube-proxy's leftovers in the kernel, by mode: finds and removes exactly those, and touches nothing else.

==============  =====================================================================================
module          duty
==============  =====================================================================================
``rules``       pure: which chains and jumps of a saved iptables ruleset are kube-proxy's
``iptables``    both families and both variants (nft, legacy), with their own save and restore tools
``nftables``    the tables ``ip kube-proxy`` and ``ip6 kube-proxy``
``ipvs``        virtual servers, the device kube-ipvs0, the ipsets
``leftovers``   all of them together: ``remove`` and ``running``
==============  =====================================================================================
"""
