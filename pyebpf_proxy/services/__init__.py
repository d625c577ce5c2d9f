# SPDX-License-Identifier: Apache-2.0
"""Objects to frontends, endpoints and policies. Pure: no I/O, no clock, no kernel."""
