# SPDX-License-Identifier: Apache-2.0
"""Inspection commands, which need no agent (docs/commands.md).

``maps``, ``programs`` and ``wanted`` read the state; the other modules compute answers from it.
"""

#: Subcommands other than ``lab``. The list is here so that the agent starts without importing the commands.
COMMANDS = frozenset(
    (
        "status",
        "services",
        "backends",
        "frontends",
        "explain",
        "drops",
        "flows",
        "top",
        "trace",
        "doctor",
        "probe",
        "completion",
    )
)
