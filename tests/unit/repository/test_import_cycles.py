# SPDX-License-Identifier: Apache-2.0
"""No module is part of an import cycle. ``make lint`` checks the layers of packages, which are in pyproject.toml."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp


def test_no_module_is_part_of_a_cycle() -> None:
    graph = grimp.build_graph("pyebpf_proxy", cache_dir=None)
    modules = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(modules) > 100
    found = []
    while True:
        try:
            TopologicalSorter(modules).prepare()
            break
        except CycleError as error:
            cycle: list[str] = error.args[1]
            found.append(" <- ".join(cycle))
            modules[cycle[1]] = modules[cycle[1]] - {cycle[0]}
    assert found == []
