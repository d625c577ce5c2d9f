# SPDX-License-Identifier: Apache-2.0
"""Converts the output of ``gates`` (the Go program in this folder) into pyebpf_proxy/config/gate_table.py."""

from __future__ import annotations

import sys
import textwrap

_HEAD = '''# SPDX-License-Identifier: Apache-2.0
"""Feature gates of kube-proxy {release}; made by tests/cluster/kubernetes/gates.py, not by hand."""

from __future__ import annotations

#: Stage, default, and whether that default is locked → the gates.
GATES: dict[tuple[str, bool, bool], str] = {{
'''


def main() -> None:
    groups: dict[tuple[str, bool, bool], list[str]] = {}
    needs: dict[str, list[str]] = {}
    for line in sys.stdin:
        name, default, stage, locked, *needed = line.split()
        groups.setdefault((stage, default == "true", locked == "true"), []).append(name)
        if needed:
            needs[name] = sorted(needed)
    print(_HEAD.format(release=sys.argv[1]), end="")
    for key, names in sorted(groups.items()):
        print(f'    ("{key[0]}", {key[1]}, {key[2]}): """')
        print(textwrap.fill(" ".join(names), 112, initial_indent="        ", subsequent_indent="        "))
        print('    """,')
    print("}\n\n#: A gate → the gates without which it cannot be on.\nNEEDS: dict[str, tuple[str, ...]] = {")
    for name, needed in sorted(needs.items()):
        names = "".join(f'"{one}", ' for one in needed).strip()
        names = names if len(needed) == 1 else names.rstrip(",")
        line = f'    "{name}": ({names}),'
        if len(line) > 120:
            line = f'    "{name}": (\n' + "".join(f'        "{one}",\n' for one in needed) + "    ),"
        print(line)
    print("}")


if __name__ == "__main__":
    main()
