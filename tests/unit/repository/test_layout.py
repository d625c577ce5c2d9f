# SPDX-License-Identifier: Apache-2.0
"""The places of tests and their helpers (tests/README.md), and how modules import each other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT

TESTS = ROOT / "tests"
UNIT = TESTS / "unit"
#: Folders of tests/unit that mirror no package, and what they test instead.
OTHERS = {
    "bench": "the figures and tables of bench/",
    "bpf": "the C sources, without a kernel",
    "deploy": "the manifests of deploy/",
    "docs": "pages, and what is generated from the code",
    "repository": "what every file has to keep to",
    "suites": "helpers of the other suites and of the runners",
}


def problem(test: Path) -> str:
    """Why this test file, a path below tests/unit, is in the wrong place; empty if it is not."""
    *folders, name = test.parts
    if folders and folders[0] in OTHERS:
        return ""
    package = ROOT.joinpath("pyebpf_proxy", *folders)
    if not (package / "__init__.py").exists():
        return f"there is no package {package.relative_to(ROOT)}, and OTHERS does not name {folders[0]}"
    subject = name.removeprefix("test_").removesuffix(".py")
    known = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    if any(subject == each or subject.startswith(f"{each}_") for each in {*known, package.name}):
        return ""
    return f"{package.relative_to(ROOT)} has no module that {name} begins with; name it after a module or the package"


def test_unit_tests_mirror_the_package() -> None:
    files = [path.relative_to(UNIT) for path in sorted(UNIT.rglob("test_*.py"))]
    assert len(files) > 80
    assert {str(file): problem(file) for file in files if problem(file)} == {}


@pytest.mark.parametrize(
    "wrong", ["test_nothing.py", "nowhere/test_x.py", "services/test_zebra.py", "datapath/nowhere/test_btf.py"]
)
def test_a_test_in_the_wrong_place_is_found(wrong: str) -> None:
    assert problem(Path(wrong))


def test_other_folders_exist() -> None:
    assert {name for name in OTHERS if not (UNIT / name / "__init__.py").exists()} == set()
    assert {name for name in OTHERS if (ROOT / "pyebpf_proxy" / name / "__init__.py").exists()} == set()


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(TESTS.rglob("*.py")):
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The level and the full name of everything that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, each.name) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.level, f"{node.module or ''}.{each.name}") for each in node.names)


def test_every_folder_with_modules_is_a_package() -> None:
    # The folder of the Go module has only a script.
    folders = {path.parent for path in TESTS.rglob("*.py")} - {TESTS / "cluster" / "kubernetes"}
    assert {str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()} == set()


def test_imports_have_full_names_and_helpers_are_no_tests() -> None:
    found = []
    for name, tree in modules():
        for level, what in imported(tree):
            if level:
                found.append(f"{name}: {what} is imported relatively")
            elif re.match(r"tests\.(.*\.)?(test_\w+|conftest)(\.|$)", what):
                found.append(f"{name}: {what} is no helper")
    assert found == []


def test_no_module_changes_the_search_path() -> None:
    changed = []
    for name, tree in modules():
        for node in ast.walk(tree):
            target = getattr(node, "func", None) or getattr(node, "target", None)
            if target is not None and ast.unparse(target).startswith("sys.path"):
                changed.append(name)
    # atheris is in a separate environment (make fuzz).
    assert changed == ["tests/fuzz/__main__.py"]
