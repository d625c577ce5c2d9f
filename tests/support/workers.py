# SPDX-License-Identifier: Apache-2.0
"""Several workers run the tests at once (``pytest -n``, as ``make test`` does): which worker runs which tests.

Tests mostly wait, so there are more workers than CPUs. Each test has its own labs and agents. A test that measures time
or changes something that the whole machine shares is marked ``alone``.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

#: Long tests must not begin last. Of those with the real Kubernetes programs, CI runs the first ones (.ci/run).
_FIRST = (
    *("tests/cluster/test_handover.py", "tests/cluster/test_flows.py", "tests/cluster/test_agent_trouble.py"),
    *("tests/cluster/", "tests/netns/", "tests/packet/"),
)
#: Environment variable: the time (seconds since 1970) after which no test begins.
UNTIL = "PYEBPF_PROXY_UNTIL"
#: The share of that time for the tests in labs, so that the others run, too.
_SHARE_OF_LABS = 2 / 3


class AloneLock:
    """A lock between the workers: many tests run at once, or one alone. It consists of two files."""

    def __init__(self, folder: Path) -> None:
        self._entry, self._lock = (os.open(folder / name, os.O_RDWR | os.O_CREAT) for name in ("entry", "lock"))
        self._kept = False

    @contextlib.contextmanager
    def held(self, alone: bool, next_alone: bool) -> Iterator[None]:
        """Hold the lock. ``next_alone``: the next test of this worker runs alone too, with no test between the two."""
        if not self._kept:
            # A test that waits to run alone holds the entry lock: no other test starts meanwhile.
            fcntl.flock(self._entry, fcntl.LOCK_EX)
            fcntl.flock(self._lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            fcntl.flock(self._entry, fcntl.LOCK_UN)
        try:
            yield
        finally:
            self._kept = alone and next_alone
            if not self._kept:
                fcntl.flock(self._lock, fcntl.LOCK_UN)


class Controller:
    """Plugin of the controller: the lock, and the tests that its workers did not run."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="pyebpf-proxy-tests-")
        self.deselected: Counter[str] = Counter()

    @pytest.hookimpl
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["lock"] = self._folder.name

    @pytest.hookimpl
    def pytest_testnodedown(self, node: Any) -> None:
        # Every worker reports the same tests.
        self.deselected |= Counter(getattr(node, "workeroutput", {}).get("deselected", {}))

    @pytest.hookimpl
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        # A run without workers does not need xdist.
        from tests.support.scheduler import Modules

        return Modules(config, log)

    @pytest.hookimpl
    def pytest_unconfigure(self) -> None:
        self._folder.cleanup()


class Worker:
    """Plugin of a process that runs tests."""

    def __init__(self, config: Any) -> None:
        given = config.workerinput
        self._alone = AloneLock(Path(given["lock"]))
        self._number, self._count = int(given["workerid"].removeprefix("gw")), int(given["workercount"])
        self._output: dict[str, Any] = config.workeroutput
        self._output["deselected"] = {}
        self._begin, self._until = time.time(), float(os.environ.get(UNTIL) or "inf")

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self, session: pytest.Session) -> Any:
        unwritten = sys.dont_write_bytecode
        # What is made here exists until the end. The garbage collector would read all of it again and again, also in
        # the children that tests fork.
        gc.disable()
        try:
            self._import_share(session.config)
            return (yield)
        finally:
            gc.freeze()
            gc.enable()
            sys.dont_write_bytecode = unwritten

    def _import_share(self, config: pytest.Config) -> None:
        """Import every n-th test module first, so that not every one of n workers compiles all modules.

        pytest stores what it has compiled, and the other workers read it. This is done even if PYTHONDONTWRITEBYTECODE
        is set, except in the folder of another user.
        """
        root = config.rootpath
        if root.stat().st_uid != os.geteuid():
            return
        sys.dont_write_bytecode = False
        paths = sorted({path for argument in config.args for path in (root / argument).rglob("test_*.py")})
        for path in paths[self._number :: self._count]:
            # pytest tries again, and reports the error.
            with contextlib.suppress(Exception):
                importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        alone = {module_of(item.nodeid) for item in items if _is_alone(item)}
        items.sort(key=lambda item: _place(module_of(item.nodeid), alone))

    @pytest.hookimpl
    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        counts = Counter(self._output["deselected"])
        counts.update(module_of(item.nodeid) for item in items)
        self._output["deselected"] = dict(counts)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Any:
        with self._alone.held(_is_alone(item), nextitem is not None and _is_alone(nextitem)):
            return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.time() > last_begin(item.nodeid, self._begin, self._until):
            pytest.skip("no time is left")


def module_of(nodeid: str) -> str:
    """The path of a test's module."""
    return nodeid.partition("::")[0]


def _place(module: str, alone: Collection[str]) -> tuple[bool, int]:
    """Modules with tests that run alone come first: workers that wait for each other then do not wait for long."""
    folders = [place for place, folder in enumerate(_FIRST) if module.startswith(folder)]
    return module not in alone, folders[0] if folders else len(_FIRST)


def last_begin(nodeid: str, begin: float, until: float) -> float:
    """The time after which this test does not begin, in a run that began at ``begin`` and has time until ``until``."""
    return begin + (until - begin) * (_SHARE_OF_LABS if nodeid.startswith("tests/netns/") else 1)


def _is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


def plugin_of(config: pytest.Config) -> Controller | Worker | None:
    """The plugin for this process in a run with workers; None in a run without."""
    if hasattr(config, "workerinput"):
        return Worker(config)
    return Controller() if config.getoption("numprocesses", None) else None
