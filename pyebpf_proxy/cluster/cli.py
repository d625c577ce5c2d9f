# SPDX-License-Identifier: Apache-2.0
"""``pyebpf-proxy cluster COMMAND``: arguments, help, exit statuses."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from pyebpf_proxy.cluster.canary import Canary, canary
from pyebpf_proxy.cluster.errors import ClusterError
from pyebpf_proxy.common.arguments import Parser, RawHelpFormatter, fail
from pyebpf_proxy.common.closed_pipe import closed_pipe
from pyebpf_proxy.see.answers import NO_ANSWER, NOT_RIGHT, QUESTION

if TYPE_CHECKING:
    from pyebpf_proxy.cluster.api import Api
    from pyebpf_proxy.cluster.output import Output

COMMANDS = {
    "check": "check whether this cluster meets the requirements; changes nothing",
    "status": "show what runs on each node, what its agent reports, and where nodes differ; exit status 1: a problem",
    "services": "compare the service ports of all nodes; exit status 1 if nodes differ",
    "explain": "explain a connection of a pod to a Service: the answer of its node's agent, then where nodes differ",
    "install": "take nodes over from kube-proxy, one after the other, each verified; continues an interrupted run",
    "upgrade": "replace the agents by those of another image, one after the other, each verified",
    "rollback": "give nodes back to kube-proxy; after the last one, remove all objects",
    "test": "test connectivity from pods and nodes to test Services, on every node; cleans up after itself",
    "sysdump": "write an archive for a bug report: objects, logs and each agent's report, without secrets",
}
_CHANGING = frozenset({"install", "upgrade", "rollback", "test"})
_STATUSES = "exit status: 0 done, no problem found; 1 a problem; 2 wrong usage; 3 no answer; 130 Ctrl-C"
EXAMPLE = """\
  pyebpf-proxy cluster check --image REGISTRY/pyebpf-proxy:0.1.0
  pyebpf-proxy cluster install --image REGISTRY/pyebpf-proxy:0.1.0 --canary 1
  pyebpf-proxy cluster status
  pyebpf-proxy cluster install
  pyebpf-proxy cluster rollback"""

_NO_PACKAGE = (
    "the Python package kubernetes is not installed: install the wheel of pyebpf-proxy with its extra, as in"
    ' pip install "pyebpf_proxy.whl[cluster]"'
)
#: What --image means for a command.
_IMAGE = {
    "check": "also try this image, with its tag, in a pod on each node",
    "install": "the agent's image, with its tag (default: the one that is installed)",
    "upgrade": "the new image, with its tag (default: the one that is installed)",
    "rollback": "the agent's image, with its tag; needed only if the agent's DaemonSet is gone",
    "test": "image of the test's pods, with its tag; needed only if the agent is not installed by cluster install",
}


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    top = Parser(
        prog="pyebpf-proxy cluster",
        description="Manage all nodes of a cluster, from an administrator's machine with a kubeconfig.",
        epilog=f"example:\n{EXAMPLE}\n\n{_STATUSES}",
        formatter_class=RawHelpFormatter,
        allow_abbrev=False,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        each = commands.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", epilog=_STATUSES, allow_abbrev=False
        )
        each.add_argument(
            "--kubeconfig",
            default="",
            metavar="FILE",
            help="kubeconfig file (default: $KUBECONFIG, else ~/.kube/config)",
        )
        each.add_argument(
            "--context", default="", metavar="NAME", help="context of the kubeconfig (default: the current one)"
        )
        each.add_argument("--nodes", default="", metavar="SELECTOR", help="only nodes with these labels")
        each.add_argument(
            "--timeout", type=_seconds, default=300.0, metavar="SECONDS", help="time limit of each step (default: 300)"
        )
        each.add_argument(
            "-o",
            "--output",
            choices=("text", "json"),
            default="text",
            help="text, or one JSON document at the end (default: text)",
        )
        if name in _IMAGE:
            each.add_argument("--image", default="", metavar="NAME", help=_IMAGE[name])
        if name == "services":
            each.add_argument(
                "name", nargs="?", default="", metavar="NAME", help="[NAMESPACE/]NAME[:PORT], or a prefix of it"
            )
        if name == "explain":
            each.add_argument("pod", metavar="POD", help="[NAMESPACE/]NAME; default namespace: default")
            each.add_argument(
                "service", metavar="SERVICE", help="[NAMESPACE/]NAME[:PORT]; default namespace: the pod's"
            )
        if name == "sysdump":
            each.add_argument(
                "--file", default="", metavar="FILE", help="the archive (default: pyebpf-proxy-sysdump-TIME.tar.gz)"
            )
        if name == "install":
            each.add_argument(
                "--canary", type=_canary, metavar="N", help="stop when N nodes, or N%% of all, are taken over"
            )
            each.add_argument(
                "--datapath-config",
                default="",
                metavar="FILE",
                help="the agents' DatapathConfiguration (default: the one that the cluster has, if any)",
            )
            each.add_argument("--dry-run", action="store_true", help="print objects and nodes; change nothing")
        if name in _CHANGING:
            each.add_argument(
                "--yes", action="store_true", help="do not ask for confirmation; required without a terminal"
            )
    return top


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"must be a number from 1 to 86400, not {text}")
    return value


def _canary(text: str) -> Canary:
    try:
        return canary(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number from 1, or a share from 1% to 100%, not {text}") from None


def main(arguments: Sequence[str]) -> int:
    """Run one command. The result is the exit status."""
    if arguments[:1] == ["on-node"]:
        from pyebpf_proxy.cluster.on_node import main as on_node

        return on_node(list(arguments[1:]))
    if sys.stdout is None:  # it is closed, and must not make a command end halfway
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        try:
            return _run(parser().parse_args(list(arguments)))
        finally:
            sys.stdout.flush()  # also for --help, which raises SystemExit
    except BrokenPipeError:
        return closed_pipe()
    except KeyboardInterrupt as ended:
        return _status_of(ended)


@contextlib.contextmanager
def _ended_as_by_ctrl_c() -> Iterator[None]:
    """SIGTERM and SIGHUP, of a closed terminal, end a command as Ctrl-C does, so that it cleans up."""

    def end(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(number)

    numbers = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) == signal.SIG_DFL]
    for number in numbers:  # not with nohup, which ignores it
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _status_of(ended: KeyboardInterrupt) -> int:
    """The exit status: 130 for Ctrl-C."""
    return 128 + int(ended.args[0] if ended.args else signal.SIGINT)


def _run(options: argparse.Namespace) -> int:
    try:
        import kubernetes  # noqa: F401
    except ImportError:
        return fail(_NO_PACKAGE, NO_ANSWER)
    from pyebpf_proxy.cluster.api import Api, RefusedError
    from pyebpf_proxy.cluster.output import Output

    output = Output(options.output == "json")
    output.document["command"] = options.command
    status = 0
    try:
        if options.command == "install":
            # Before the question: a file with an error must not be confirmed.
            options.datapath_text = _datapath_text(options.datapath_config)
        api = Api(options.kubeconfig, options.context, output.say)
        if options.command in _CHANGING and not getattr(options, "dry_run", False):
            _ask(api.context, api.url, options)
        with _ended_as_by_ctrl_c():
            status = _CALLS[options.command](api, output, options)
    except (ClusterError, RefusedError) as error:
        status = error.status if isinstance(error, ClusterError) else NOT_RIGHT
        text = str(error)
        if isinstance(error, RefusedError) and error.status in (401, 403):
            refused = "the API server does not accept the kubeconfig's credentials" if error.status == 401 else error
            status, text = NO_ANSWER, f"not allowed: {refused}"
        output.document["error"] = text
        fail(text, status)
    except KeyboardInterrupt as ended:
        output.document["error"] = output.document.get("error") or "interrupted"
        status = _status_of(ended)
    output.end()
    return status or output.status


def _datapath_text(file: str) -> str | None:
    if not file:
        return None
    from pyebpf_proxy.cluster import datapath

    return datapath.read(file)


def _ask(context: str, url: str, options: argparse.Namespace) -> None:
    """ClusterError if this is not the cluster that was meant."""
    if options.yes:
        return
    # None: it is closed.
    if sys.stdin is None or not sys.stdin.isatty():
        raise ClusterError(
            f"context {context}, {url}: not confirmed, because stdin is not a terminal; use --yes", QUESTION
        )
    print(
        f"context {context}, {url}: run {options.command} on this cluster? [y/N] ", end="", file=sys.stderr, flush=True
    )
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ClusterError("not confirmed; nothing was changed", NOT_RIGHT)


def _check(api: Api, output: Output, options: argparse.Namespace) -> int:
    from pyebpf_proxy.cluster import check
    from pyebpf_proxy.cluster.model import view

    check.rights(api, check.READ)
    found = view(api, options.nodes)
    findings = []
    with output.progress("nodes have run the image", len(found.nodes) if options.image else 0) as step:
        for finding in check.examine(api, found, options.image, options.timeout):
            findings.append(finding)
            if finding.what == check.IMAGE:
                step()
    output.findings(findings)
    return NOT_RIGHT if any(each.state == "bad" for each in findings) else 0


def _status(api: Api, output: Output, options: argparse.Namespace) -> int:
    from pyebpf_proxy.cluster import agents, check, status

    check.rights(api, check.READ)
    found = check.selected(api, options.nodes)
    return NOT_RIGHT if status.show(found, agents.ask_all(api, found, options.timeout), output) else 0


def _services(api: Api, output: Output, options: argparse.Namespace) -> int:
    from pyebpf_proxy.cluster import ask, check, services
    from pyebpf_proxy.cluster.model import view

    check.rights(api, (*check.READ, *ask.RIGHTS, *services.RIGHTS))
    compared = services.read(api, view(api, options.nodes), options.name, options.timeout)
    services.show(compared, output)
    return NOT_RIGHT if compared.is_bad else 0


def _explain(api: Api, output: Output, options: argparse.Namespace) -> int:
    from pyebpf_proxy.cluster import ask, check, explain, services
    from pyebpf_proxy.cluster.model import view

    check.rights(api, (*check.READ, *ask.RIGHTS, *services.RIGHTS, *explain.RIGHTS))
    found = view(api, options.nodes)
    return 0 if explain.run(api, output, found, options.pod, options.service, options.timeout) else NOT_RIGHT


def _install(api: Api, output: Output, options: argparse.Namespace) -> int:
    from pyebpf_proxy.cluster.install import Install

    command = Install(api, output, options.nodes, options.timeout)
    command.run(options.image, options.canary, options.dry_run, options.datapath_text)
    return 0


def _upgrade(api: Api, output: Output, options: argparse.Namespace) -> int:
    from pyebpf_proxy.cluster.upgrade import Upgrade

    Upgrade(api, output, options.nodes, options.timeout).run(options.image)
    return 0


def _rollback(api: Api, output: Output, options: argparse.Namespace) -> int:
    from pyebpf_proxy.cluster.rollback import Rollback

    Rollback(api, output, options.nodes, options.timeout).run(options.image)
    return 0


def _test(api: Api, output: Output, options: argparse.Namespace) -> int:
    from pyebpf_proxy.cluster import connectivity
    from pyebpf_proxy.cluster.model import view

    passed = connectivity.run(api, output, view(api, options.nodes), options.image, options.timeout)
    return 0 if passed else NOT_RIGHT


def _sysdump(api: Api, output: Output, options: argparse.Namespace) -> int:
    from pyebpf_proxy.cluster import sysdump

    return NOT_RIGHT if sysdump.write(api, output, options.file, options.nodes, options.timeout) else 0


_CALLS: dict[str, Callable[..., int]] = {
    "check": _check,
    "status": _status,
    "services": _services,
    "explain": _explain,
    "install": _install,
    "upgrade": _upgrade,
    "rollback": _rollback,
    "test": _test,
    "sysdump": _sysdump,
}
