# SPDX-License-Identifier: Apache-2.0
"""The kernel's connections and sockets: counted, and ended where they lead to nobody."""
