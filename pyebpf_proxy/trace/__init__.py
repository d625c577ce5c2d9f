# SPDX-License-Identifier: Apache-2.0
"""``trace``: decisions as the programs make them, with what the kernel says of the same packets (docs/trace.md).

``session`` turns it on and off, ``filters`` says what is wanted, ``events`` makes views of what comes, ``lines`` and
``run`` print it.
"""
