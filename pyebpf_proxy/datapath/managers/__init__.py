# SPDX-License-Identifier: Apache-2.0
"""The managers of the running data plane, a module for each concept. ``datapath.py`` lists them in order.

A manager calls the packages that know the kernel (``loader``, ``maps``, ``node``, ``netfilter``, ``connections``) at
the right time. What it needs of another manager, it gets from that manager, which is earlier in the list.
"""
