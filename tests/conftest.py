# SPDX-License-Identifier: Apache-2.0
"""What all suites share: markers for what a test needs of the machine, and the list of skipped tests with reasons.

A test declares what it needs by a marker. If the machine lacks it, the test is skipped with that reason. The end of the
run lists every reason and how many tests were skipped for it. What `make` must have provided (the BPF objects) is no
reason to skip: a missing object is an error.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import CACHE, ROOT
from tests.support import skips, workers

BTF = Path("/sys/kernel/btf/vmlinux")
CLONE_NEWNET = 0x40000000
WORKERS = "pyebpf-proxy-workers"
DESELECTED = "deselected on the command line: "

# Time limits of single examples would depend on the machine. No database: each run has the same examples.
settings.register_profile("project", deadline=None, database=None, derandomize=True)
# CI also runs this profile once with --hypothesis-seed (.ci/run): each run then has other examples.
settings.register_profile("fresh", deadline=None, database=None, derandomize=False, print_blob=True)
settings.load_profile("fresh" if os.environ.get("PYEBPF_PROXY_FRESH") else "project")
#: If it is set, a machine without root, network namespaces or BPF is an error instead of a skip. A test that is skipped
#: for a reason that is not in tests/support/skips.py fails the run.
STRICT = bool(os.environ.get("PYEBPF_PROXY_STRICT"))
_PRIVILEGES = ("needs_root", "needs_netns", "needs_bpf")


def _not_root() -> str | None:
    return None if os.geteuid() == 0 else "not root: run as root, or install sudo and use make test"


def _no_netns() -> str | None:
    """Whether this process may create a network namespace: tried in a child process. Containers often forbid it."""
    reason = _not_root()
    if reason is not None:
        return reason
    child = os.fork()
    if child == 0:
        os._exit(0 if ctypes.CDLL(None).unshare(CLONE_NEWNET) == 0 else 1)
    _, status = os.waitpid(child, 0)
    return None if status == 0 else "the kernel refuses a new network namespace (a container without CAP_SYS_ADMIN?)"


def _no_bpf() -> str | None:
    reason = _not_root()
    if reason is not None:
        return reason
    return None if BTF.exists() else f"{BTF} is missing: the kernel was built without CONFIG_DEBUG_INFO_BTF"


def _no_kubectl() -> str | None:
    return None if shutil.which("kubectl") else "kubectl is missing: it builds the kustomizations of deploy/"


def _no_zsh() -> str | None:
    return None if shutil.which("zsh") else "zsh is missing: make setup, or apt-get install zsh"


def _no_fish() -> str | None:
    return None if shutil.which("fish") else "fish is missing: make setup, or apt-get install fish"


def _no_helm() -> str | None:
    return None if (CACHE / "go/helm").exists() else "helm is missing: tests/cluster/build.sh helm builds it (Go)"


def _no_prometheus() -> str | None:
    return None if (CACHE / "bin/prometheus").exists() else "prometheus is missing: tests/cluster/tools.sh fetches it"


NEEDS = {
    "needs_root": _not_root,
    "needs_netns": _no_netns,
    "needs_bpf": _no_bpf,
    "needs_kubectl": _no_kubectl,
    "needs_zsh": _no_zsh,
    "needs_fish": _no_fish,
    "needs_helm": _no_helm,
    "needs_prometheus": _no_prometheus,
}


def pytest_configure(config: pytest.Config) -> None:
    """With ``-n``, add what a controller or a worker needs (``tests/support/workers.py``)."""
    # Programs that a shell starts in the background ignore SIGINT, and so would those that tests send it to.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    plugin = workers.plugin_of(config)
    if plugin is not None:
        config.pluginmanager.register(plugin, WORKERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that this machine cannot run, with the reason. Each requirement is checked once."""
    answers: dict[str, str | None] = {}
    for item in items:
        for marker, question in NEEDS.items():
            if item.get_closest_marker(marker) is None:
                continue
            if marker not in answers:
                answers[marker] = question()
            reason = answers[marker]
            if reason is not None and STRICT and marker in _PRIVILEGES:
                raise pytest.UsageError(f"PYEBPF_PROXY_STRICT is set, and {marker}: {reason}")
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def _skipped(config: pytest.Config) -> Counter[str]:
    """Every reason for skips, and the number of tests."""
    reasons: Counter[str] = Counter()
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    for report in reporter.stats.get("skipped", []) if reporter is not None else ():
        longrepr = report.longrepr
        text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
        reasons[text.removeprefix("Skipped: ")] += 1
    return reasons


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI, an unexpected skip is a failure."""
    # A worker has no reporter: the process that started it has all reports.
    if STRICT and skips.unexpected(_skipped(session.config)) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List every reason for skips, with the number of tests."""
    reasons = _skipped(terminalreporter.config)
    unexpected = skips.unexpected(reasons) if STRICT else []
    for report in terminalreporter.stats.get("deselected", []):
        reasons[DESELECTED + report.nodeid.split("::")[0]] += 1
    controller = terminalreporter.config.pluginmanager.get_plugin(WORKERS)
    if isinstance(controller, workers.Controller):
        reasons.update({DESELECTED + module: count for module, count in controller.deselected.items()})
    terminalreporter.section("skipped here")
    if not reasons:
        terminalreporter.line("nothing")
    for reason, count in sorted(reasons.items(), key=lambda entry: (-entry[1], entry[0])):
        terminalreporter.line(f"{count:5d} × {reason}")
    for reason in unexpected:
        terminalreporter.line(f"UNEXPECTED, not in tests/support/skips.py: {reason}", red=True)
    without = sum(count for reason, count in reasons.items() if reason in (_not_root(), _no_netns(), _no_bpf()))
    if without:
        terminalreporter.line(
            f"NOT TESTED: {without} tests need rights that this run has not; no packet was sent in them"
        )


@pytest.fixture(scope="session")
def bpf_objects() -> Path:
    """The folder of the built BPF objects. If they are not built, this is an error, not a skip."""
    folder = ROOT / "pyebpf_proxy" / "bpf"
    missing = [name for name in ("tc.bpf.o", "sock.bpf.o") if not (folder / name).exists()]
    if missing:
        pytest.fail(f"{', '.join(missing)} not built: run make build")
    return folder


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """Restore the logging configuration after a test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("pyebpf_proxy").setLevel(logging.NOTSET)
    logging.raiseExceptions = True
