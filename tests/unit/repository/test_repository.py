# SPDX-License-Identifier: Apache-2.0
"""The repository: requirements for every file, the targets of the Makefile, the contents of a wheel."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests import ROOT
from tests.changes import mutants as agent_mutants
from tests.kernels.suites import SUITES
from tests.packet import mutants as packet_mutants
from tests.unit.repository.files import own_files, relative

# A package host in the tree would tie every build to it; mirrors are the machine's own configuration. The pattern has
# classes of one letter, so that this file does not name the hosts either.
PACKAGE_HOST = re.compile(
    r"p[y]pi\.org|p[y]thonhosted\.|deb\.[d]ebian\.org|security\.[d]ebian\.org|archive\.[u]buntu|"
    r"--(extra-)?index-[u]rl|--trusted-[h]ost|proxy\.[g]olang|registry\.[n]pmjs|crates\.[i]o",
    re.IGNORECASE,
)
# docs/data-plane.md names the function that makes each decision.
HEADING = "## The decision table as it is implemented"
NAMED = re.compile(r"`(\w+)\(\)`")
DEFINED_IN_C = re.compile(r"^(?:[a-z_]\w*[ \t*]+)+(\w+)\([^;{}]*\)\s*\{", re.MULTILINE)
DEFINED_IN_PYTHON = re.compile(r"^ *(?:async )?def (\w+)\(", re.MULTILINE)


def test_every_source_file_names_its_licence() -> None:
    def licence(path: Path) -> str:
        head = "\n".join(path.read_text().splitlines()[:2])  # a shebang may come first
        found = re.search(r"SPDX-License-Identifier: (.*?)(?: \*/)?$", head, re.MULTILINE)
        return found.group(1) if found else "none"

    def wanted(path: Path) -> str:
        in_bpf = path.relative_to(ROOT).parts[0] == "bpf"
        return "(GPL-2.0-only OR BSD-2-Clause)" if in_bpf else "Apache-2.0"

    sources = [*own_files(".py", ".c", ".h", ".sh"), ROOT / "Makefile", ROOT / ".ci" / "run"]
    assert {relative(path): licence(path) for path in sources if licence(path) != wanted(path)} == {}


def test_no_package_host_is_named() -> None:
    named = {}
    for path in own_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:  # plots
            continue
        if found := PACKAGE_HOST.search(text):
            named[relative(path)] = found.group()
    named.pop("tools/lock.sh", None)  # contains --no-emit-…, which keeps them out of the lock
    assert named == {}


def test_package_host_pattern_finds_them() -> None:
    assert PACKAGE_HOST.search("pip install --index-" + "url https://somewhere")
    assert PACKAGE_HOST.search("https://py" + "pi.org/simple")
    assert not PACKAGE_HOST.search("python3-nftables")


def test_make_help_lists_every_target() -> None:
    phony = " ".join(re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = subprocess.run(["make", "-C", ROOT, "-s", "help"], check=True, capture_output=True, text=True).stdout
    listed = re.findall(r"^  make (\S+) +\S", shown, re.MULTILINE)
    assert sorted(listed) == sorted(phony.split())
    assert {"help", "setup", "build", "demo", "test", "lint", "clean", "bench"} <= set(listed)


def test_lock_holds_every_dependency_with_exact_version_and_hash() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lock = (ROOT / "requirements.lock").read_text()
    blocks = re.findall(r"^([a-z0-9-]+)==\S+((?: \\\n +--hash=sha256:[0-9a-f]{64})+)$", lock, re.MULTILINE)
    locked = {name for name, _ in blocks}
    pinned = set(re.findall(r"^([A-Za-z0-9._-]+)==", lock, re.MULTILINE))
    assert pinned == locked
    wanted = {
        re.split(r"[<>=!~ ]", requirement)[0].lower()
        for requirement in [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    }
    assert wanted <= locked, wanted - locked


def test_debian_packages_are_listed_once() -> None:
    lines = (ROOT / "tools" / "debian-packages.txt").read_text().splitlines()
    names = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9+.-]+", name) for name in names)
    assert len(names) == len(set(names))
    assert {"clang", "libbpf-dev", "libbpf1", "bpftool", "nftables", "python3-nftables", "python3-venv"} <= set(names)


def test_setup_reports_what_is_missing_in_one_line(tmp_path: Path) -> None:
    """Without dpkg: exit status 1 and one line with the remedy."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "setup.sh", tmp_path / "tools")
    shutil.copy(ROOT / "tools" / "debian-packages.txt", tmp_path / "tools")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "dirname", "sed", "mkdir", "id"):
        found = shutil.which(name)
        assert found is not None
        (programs / name).symlink_to(found)
    ran = subprocess.run(
        [programs / "bash", tmp_path / "tools" / "setup.sh", "packages"],
        env={"PATH": str(programs)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert len(ran.stderr.splitlines()) == 1
    assert "tools/debian-packages.txt" in ran.stderr


def test_build_reports_a_missing_clang_in_one_line(bpf_objects: Path) -> None:
    """`bpf_objects` first: the object of an earlier build stays."""
    source = "pyebpf_proxy/bpf/tc.bpf.o"
    ran = subprocess.run(
        [
            "make",
            "-C",
            ROOT,
            "-s",
            "--no-print-directory",
            "-W",
            "bpf/tc.bpf.c",
            "CLANG=clang-that-is-not-here",
            source,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode != 0
    own = [line for line in ran.stderr.splitlines() if not line.startswith("make")]
    assert own == ["clang-that-is-not-here is missing: run make setup, or apt-get install clang"]
    assert (bpf_objects / "tc.bpf.o").exists()


@pytest.fixture(scope="module")
def wheel(bpf_objects: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy of the tree: a build leaves folders behind, and other tests use this tree."""
    tree = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tree)
    for folder in ("pyebpf_proxy", "bpf"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    python = ROOT / ".venv" / "bin" / "python"
    subprocess.run(
        [
            python,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "-w",
            tree / "dist",
            tree,
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    (built,) = (tree / "dist").glob("*.whl")
    return zipfile.ZipFile(built)


def test_wheel_carries_the_objects_as_built(wheel: zipfile.ZipFile, bpf_objects: Path) -> None:
    for name in ("tc.bpf.o", "sock.bpf.o"):
        assert wheel.read(f"pyebpf_proxy/bpf/{name}") == (bpf_objects / name).read_bytes()


def test_wheel_carries_every_module_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    modules = {relative(path) for path in own_files(".py") if relative(path).startswith("pyebpf_proxy/")}
    carried = {name for name in wheel.namelist() if name.endswith(".py")}
    assert carried == modules


def test_wheel_carries_licences_and_the_console_script(wheel: zipfile.ZipFile) -> None:
    (entry_points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "pyebpf-proxy = pyebpf_proxy.cli:main" in wheel.read(entry_points).decode()
    licences = {name.split("/licenses/")[1] for name in wheel.namelist() if "/licenses/" in name}
    assert licences == {"LICENSE", "NOTICE", "bpf/LICENSE.BSD-2-Clause", "bpf/LICENSE.GPL-2.0"}


def decisions() -> str:
    text = (ROOT / "docs" / "data-plane.md").read_text()
    assert text.count(HEADING) == 1
    return text.partition(HEADING)[2].partition("\n## ")[0]


def functions() -> set[str]:
    sources = (*(ROOT / "bpf").glob("*.[ch]"), *(ROOT / "pyebpf_proxy").rglob("*.py"))
    found: set[str] = set()
    for path in sources:
        how = DEFINED_IN_PYTHON if path.suffix == ".py" else DEFINED_IN_C
        found.update(how.findall(path.read_text()))
    return found


def test_every_function_that_the_packet_page_names_exists() -> None:
    named = set(NAMED.findall((ROOT / "docs" / "data-plane.md").read_text()))
    assert len(named) > 40
    there = functions()
    assert {"decide", "choose_lists", "tc_ethernet"} <= there
    assert named - there == set()


def test_every_mutant_changes_something() -> None:
    """Mutants are run by hand, so an outdated one would be noticed late."""
    sources = {path.name: path.read_text() for path in (ROOT / "bpf").glob("*.[ch]")}
    assert [name for name, (file, old, _) in packet_mutants.MUTANTS.items() if old not in sources[file]] == []
    texts = {each.file: (ROOT / "pyebpf_proxy" / each.file).read_text() for each in agent_mutants.MUTANTS.values()}
    assert [name for name, each in agent_mutants.MUTANTS.items() if each.there not in texts[each.file]] == []


def test_every_row_of_the_packet_page_names_the_deciding_function() -> None:
    rows = [line for line in decisions().splitlines() if line.startswith("| ")]
    deciders = [line.rstrip(" |").rpartition(" | ")[2] for line in rows]
    headings = {"decided by", "where it is so"}
    assert len(rows) > 30
    unnamed = [decider for decider in deciders if not NAMED.search(decider) and decider not in headings]
    assert [row for row, decider in zip(rows, deciders, strict=True) if decider in unnamed] == [
        "| InterfaceNamePrefix | the same with the beginning of the name | the same |"
    ]


def selected_words() -> set[str]:
    """The words by which CI and the guests' suites select tests (pytest's -k)."""
    expressions = re.findall(r"""-k [\\"']*([a-z0-9_ ]+)""", (ROOT / ".ci" / "run").read_text())
    for suite in SUITES:
        options = dict(zip(suite.arguments, suite.arguments[1:], strict=False))
        expressions += [suite.quick or "", options.get("-k", "")]
    return {word for expression in expressions for word in re.findall(r"\w+", expression)} - {"and", "or", "not"}


def test_the_tests_that_are_selected_by_name_exist() -> None:
    """A test that was renamed would not run any more, and nothing would say so."""
    words = selected_words()
    assert {"random_cases", "anything", "reach_each_other"} <= words
    python = [path for path in own_files() if path.suffix == ".py" and relative(path).startswith("tests/")]
    texts = "\n".join(path.read_text() for path in python if path.name not in ("suites.py", Path(__file__).name))
    assert [word for word in words if not re.search(rf'def test_\w*{word}|"[^"\n]*{word}', texts)] == []


#: Pages that programs write.
GENERATED_PAGES = {"docs/performance.md", "docs/configuration.md"}


def too_long(page: str) -> list[int]:
    """The numbers of prose lines with more than 120 characters. Tables, code and long words may be longer."""
    found, code = [], False
    for number, line in enumerate(page.splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code and len(line) > 120 and not line.startswith(("|", "    ")) and max(map(len, line.split())) < 60:
            found.append(number)
    return found


def test_lines_of_pages_are_short() -> None:
    pages = [path for path in own_files() if path.suffix == ".md" and relative(path) not in GENERATED_PAGES]
    assert len(pages) > 30
    assert {relative(page): lines for page in pages if (lines := too_long(page.read_text()))} == {}


def test_a_long_line_of_prose_is_found() -> None:
    long = "word " * 30
    assert too_long(f"short\n{long}\n| {long} |\n```\n{long}\n```\n{long}") == [2, 7]
