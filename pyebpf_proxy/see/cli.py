# SPDX-License-Identifier: Apache-2.0
"""The commands that look: arguments, help, exit statuses. What each does is in the module that it names."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from pyebpf_proxy.closed_pipe import closed_pipe
from pyebpf_proxy.printable import printable
from pyebpf_proxy.see.answers import QUESTION, SeeError

STATUSES = "exit status: 0 all is right, 1 something is not, 2 the question is wrong, 3 there is no answer"
DIRECTORY = "PYEBPF_PROXY_DIRECTORY"


class Command:
    """One command: its help, its arguments, the function that answers (imported when it is asked)."""

    def __init__(
        self,
        text: str,
        example: str,
        run: Callable[[argparse.Namespace], int],
        arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
    ) -> None:
        self.text = text
        self.example = example
        self.run = run
        self.arguments = arguments


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SystemExit(_say(f"{message}; see {self.prog} --help", QUESTION))


def _say(text: str, status: int) -> int:
    print(f"Error: {printable(text)}", file=sys.stderr)
    return status


def _named(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="[NAMESPACE/]NAME[:PORT], or its beginning")
    parser.add_argument("-n", "--namespace", help="only services of this namespace")


def _source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--manifests", metavar="FOLDER", help="where the objects are (default: as the agent's)")
    parser.add_argument("--config", metavar="FILE", help="the agent's configuration (default: as the agent's)")
    text = "with --manifests or --config: this node's name, if it is not the host's"
    parser.add_argument("--hostname-override", metavar="NAME", help=text)


def _services_arguments(parser: argparse.ArgumentParser) -> None:
    _named(parser)
    parser.add_argument("--diff", action="store_true", help="only where the kernel differs from what is wanted")
    _source(parser)


def _frontends_arguments(parser: argparse.ArgumentParser) -> None:
    _named(parser)
    parser.add_argument("--address", metavar="IP", help="only this address")


def _services(arguments: argparse.Namespace) -> int:
    from pyebpf_proxy.see import run_services

    return run_services.services(arguments)


def _backends(arguments: argparse.Namespace) -> int:
    from pyebpf_proxy.see import run_services

    return run_services.backends(arguments)


def _frontends(arguments: argparse.Namespace) -> int:
    from pyebpf_proxy.see import run_services

    return run_services.frontends(arguments)


def _status(arguments: argparse.Namespace) -> int:
    from pyebpf_proxy.see import status

    return status.run(arguments)


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC[:PORT]", help="who sends; an IPv6 address with a port in brackets")
    parser.add_argument("destination", metavar="DST:PORT", help="what is asked for")
    parser.add_argument("protocol", nargs="?", default="TCP", metavar="PROTO", help="TCP (default), UDP, SCTP")
    parser.add_argument("--device", help="where it comes in (default: where this node would answer to)")
    _source(parser)


def _explain(arguments: argparse.Namespace) -> int:
    from pyebpf_proxy.see import explain

    return explain.run(arguments)


def _drops(arguments: argparse.Namespace) -> int:
    from pyebpf_proxy.see import drops

    return drops.run(arguments)


def _flows_arguments(parser: argparse.ArgumentParser) -> None:
    text = "address, name of a service, protocol or state; or FIELD=VALUE: service, client, endpoint, destination, …"
    parser.add_argument("filter", nargs="*", metavar="FILTER", help=text + "; all must fit")
    _source(parser)


def _flows(arguments: argparse.Namespace) -> int:
    from pyebpf_proxy.see import flows

    return flows.run(arguments)


def _top_arguments(parser: argparse.ArgumentParser) -> None:
    from pyebpf_proxy.see import top_arguments

    _named(parser)
    top_arguments.add(parser)


def _top(arguments: argparse.Namespace) -> int:
    from pyebpf_proxy.see import top

    return top.run(arguments)


def _doctor(arguments: argparse.Namespace) -> int:
    from pyebpf_proxy.see import doctor

    return doctor.run(arguments)


def _trace_arguments(parser: argparse.ArgumentParser) -> None:
    from pyebpf_proxy.trace import run

    run.arguments(parser)


def _trace(arguments: argparse.Namespace) -> int:
    from pyebpf_proxy.trace import run

    return run.run(arguments)


def _probe_arguments(parser: argparse.ArgumentParser) -> None:
    from pyebpf_proxy.probe import PAGES

    parser.add_argument("what", choices=tuple(PAGES), help="live: it answers; ready: it has programmed the node")


def _probe(arguments: argparse.Namespace) -> int:
    from pyebpf_proxy.probe import probe

    return probe(arguments.what, str(arguments.directory))


def _completion(arguments: argparse.Namespace) -> int:
    from pyebpf_proxy.see import completion

    commands = completion.read({name: command_parser(name) for name in COMMANDS})
    print(completion.SHELLS[arguments.shell](commands))
    return 0


def _shell(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="whose script is printed")


COMMANDS = {
    "status": Command(
        "is it right? paths, devices, programs, agent, how full everything is, and what to do about what is not right",
        "pyebpf-proxy status              # status 0: no warnings",
        _status,
    ),
    "services": Command(
        "the service ports as the kernel has them: addresses, endpoints, policies, affinity",
        "pyebpf-proxy services web        # everything of one Service\n"
        "  pyebpf-proxy services --diff     # where the kernel differs from what is wanted; status 1 if it does",
        _services,
        _services_arguments,
    ),
    "backends": Command(
        "the endpoints as the kernel has them, with their numbers",
        "pyebpf-proxy backends default/web:http",
        _backends,
        _named,
    ),
    "frontends": Command(
        "the addresses that services are reached at, and whose they are",
        "pyebpf-proxy frontends --address 10.96.0.10",
        _frontends,
        _frontends_arguments,
    ),
    "explain": Command(
        "what would happen to a packet, and why, rule by rule; the real program is asked, too, and leaves nothing",
        "pyebpf-proxy explain 198.51.100.2 203.0.113.10:80\n"
        "  pyebpf-proxy explain [2001:db8:2::2]:40000 [2001:db8:3::10]:53 UDP",
        _explain,
        _explain_arguments,
    ),
    "drops": Command(
        "what was refused or dropped, how often, the newest packet of each, and what it means",
        "pyebpf-proxy drops               # status 1: something within the last minute",
        _drops,
    ),
    "flows": Command(
        "flows to services, as conntrack has them, with the services' names",
        "pyebpf-proxy flows default/web state=ESTABLISHED",
        _flows,
        _flows_arguments,
    ),
    "top": Command(
        "services by what happens just now: new flows, packets, bytes, drops a second, and their endpoints' shares",
        "pyebpf-proxy top                 # keys: f p b d n order, e endpoints, + - interval, space pause, q quit\n"
        "  pyebpf-proxy top web --once      # one interval, in plain text\n"
        "  pyebpf-proxy top -o json -i 10   # an object every ten seconds, each on a line",
        _top,
        _top_arguments,
    ),
    "doctor": Command(
        "can this machine carry services? kernel, programs by loading them, mounts, settings, other proxies, limits",
        "pyebpf-proxy doctor              # before or after installing; status 0: everything is good",
        _doctor,
    ),
    "trace": Command(
        "live, a line a decision: where from, which service, endpoint, path, masquerade, reason",
        "pyebpf-proxy trace default/web            # until Ctrl-C\n"
        "  pyebpf-proxy trace drop,reject             # whatever gets no further; --count 1: the next one\n"
        "  pyebpf-proxy trace client=198.51.100.2 port=80 --duration 30s -o json",
        _trace,
        _trace_arguments,
    ),
    "probe": Command(
        "is the agent live, or ready? for probes of the kubelet; status 1 also where no agent answers",
        "pyebpf-proxy probe ready",
        _probe,
        _probe_arguments,
    ),
    "completion": Command(
        "shell completion of these commands, names of services too",
        "source <(pyebpf-proxy completion bash)\n"
        "  source <(pyebpf-proxy completion zsh)    # after compinit\n"
        "  pyebpf-proxy completion fish | source",
        _completion,
        _shell,
    ),
}


def command_parser(name: str) -> argparse.ArgumentParser:
    """The parser of one command, without its name."""
    command = COMMANDS[name]
    parser = _Parser(
        prog=f"pyebpf-proxy {name}",
        description=command.text[0].upper() + command.text[1:] + ".",
        epilog=f"example:\n  {command.example}\n\n{STATUSES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.arguments(parser)
    if name not in ("completion", "probe"):
        parser.add_argument(
            "-o", "--output", choices=("table", "json", "name"), default="table", help="json: docs/commands.schema.json"
        )
    if name != "completion":
        parser.add_argument(
            "--directory",
            type=Path,
            default=Path(os.environ.get(DIRECTORY) or "/run/pyebpf-proxy"),
            help=f"run folder of the agent (default: ${DIRECTORY}, else /run/pyebpf-proxy)",
        )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run one command, the first word; the exit status (docs/commands.md)."""
    name, *rest = arguments
    try:
        try:
            return COMMANDS[name].run(command_parser(name).parse_args(rest))
        finally:
            sys.stdout.flush()  # of --help, too, which ends by SystemExit
    except SeeError as error:
        return _say(str(error), error.status)
    except BrokenPipeError:
        return closed_pipe()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
