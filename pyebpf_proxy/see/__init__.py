# SPDX-License-Identifier: Apache-2.0
"""What the person on call asks of a node: commands that need no agent (docs/commands.md).

``maps``, ``programs`` and ``wanted`` read; everything else makes answers of what they have read.
"""

#: Words that the command line may begin with, beside ``lab``. Here, because kube-proxy's flags must not wait for more.
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
