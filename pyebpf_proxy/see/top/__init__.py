# SPDX-License-Identifier: Apache-2.0
"""``top``: live rates of services and their endpoints.

``meter`` and ``service_counters`` count, ``rates`` computes, ``watch`` measures one interval after the other, and
``screen`` shows them on a terminal.
"""
