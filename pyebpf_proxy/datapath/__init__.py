# SPDX-License-Identifier: Apache-2.0
"""The only room that touches the kernel: libbpf, maps, attachment, nftables, sysctls, mounts.

``datapath.datapath.Datapath`` is the door. It is not imported here, so that one module can be had without all.
"""
