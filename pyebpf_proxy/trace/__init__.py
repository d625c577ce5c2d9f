# SPDX-License-Identifier: Apache-2.0
"""``trace``: live decisions of the programs, with kernel events of the same packets (docs/trace.md).

``session`` turns tracing on and off, ``filters`` selects events, ``events`` decodes them, ``lines`` and ``run`` print.
"""
