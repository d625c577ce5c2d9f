# SPDX-License-Identifier: Apache-2.0
"""The only room that touches the kernel. ``datapath.datapath.Datapath`` is the door.

``loader`` loads the programs; ``tables`` are the service maps; ``node`` is where programs are attached, and the
kernel's settings; ``netfilter`` is our nft table; ``connections`` are the flows and sockets that exist; ``kube_proxy``
is what that one leaves behind. Nothing is imported here, so that one module can be had without all.
"""
