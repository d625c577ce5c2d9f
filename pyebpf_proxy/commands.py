# SPDX-License-Identifier: Apache-2.0
"""The inspection commands: arguments, help, exit statuses. Each command's module does the work."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pyebpf_proxy.common.arguments import Parser, RawHelpFormatter, fail
from pyebpf_proxy.common.closed_pipe import closed_pipe
from pyebpf_proxy.see.answers import SeeError, UnknownServiceError

STATUSES = "exit status: 0 no problem found, 1 a problem was found, 2 wrong usage, 3 no answer"
DIRECTORY = "PYEBPF_PROXY_DIRECTORY"


class Command:
    """One command: its help, its arguments, and the function that runs it (imported on use)."""

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


def _named(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="[NAMESPACE/]NAME[:PORT], or a prefix of it")
    parser.add_argument("-n", "--namespace", help="only services of this namespace")


def _source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--manifests", metavar="FOLDER", help="folder with the objects (default: the agent's)")
    parser.add_argument("--config", metavar="FILE", help="the agent's configuration (default: the running agent's)")
    text = "with --manifests or --config: the node's name, if it differs from the hostname"
    parser.add_argument("--hostname-override", metavar="NAME", help=text)


def _check_source(parsed: argparse.Namespace) -> None:
    """SeeError for a wrong path of :func:`_source`, before anything else that is missing, such as an agent."""
    config, manifests = (getattr(parsed, name, None) for name in ("config", "manifests"))
    if config or manifests:
        from pyebpf_proxy.see.wanted import check_source

        check_source(config, manifests)


def _services_arguments(parser: argparse.ArgumentParser) -> None:
    _named(parser)
    parser.add_argument("--diff", action="store_true", help="only differences from the desired state")
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
    parser.add_argument("source", metavar="SRC[:PORT]", help="the source; IPv6 addresses with a port in brackets")
    parser.add_argument("destination", metavar="DST:PORT", help="the destination")
    parser.add_argument("protocol", nargs="?", default="TCP", metavar="PROTO", help="TCP (default), UDP or SCTP")
    parser.add_argument("--device", help="the ingress device (default: the device of the route to SRC)")
    _source(parser)


def _explain(arguments: argparse.Namespace) -> int:
    from pyebpf_proxy.see import explain

    return explain.run(arguments)


def _drops(arguments: argparse.Namespace) -> int:
    from pyebpf_proxy.see import drops

    return drops.run(arguments)


def _flows_arguments(parser: argparse.ArgumentParser) -> None:
    text = "an address, a service, a pod, a protocol or a state; or FIELD=VALUE with service, client, endpoint,"
    text += " destination, protocol, state, age or path; a flow must match all filters"
    parser.add_argument("filter", nargs="*", metavar="FILTER", help=text)
    _source(parser)


def _flows(arguments: argparse.Namespace) -> int:
    from pyebpf_proxy.see import run_flows

    return run_flows.run(arguments)


def _top_arguments(parser: argparse.ArgumentParser) -> None:
    from pyebpf_proxy.see.top import arguments

    _named(parser)
    arguments.add(parser)


def _top(arguments: argparse.Namespace) -> int:
    from pyebpf_proxy.see.top import run

    return run.run(arguments)


def _doctor(arguments: argparse.Namespace) -> int:
    from pyebpf_proxy.see.doctor import checks

    return checks.run(arguments)


def _trace_arguments(parser: argparse.ArgumentParser) -> None:
    from pyebpf_proxy.trace import run

    run.arguments(parser)


def _trace(arguments: argparse.Namespace) -> int:
    from pyebpf_proxy.trace import run

    return run.run(arguments)


def _probe_arguments(parser: argparse.ArgumentParser) -> None:
    from pyebpf_proxy.probe import PAGES

    text = "live: the agent is healthy (/livez); ready: it has also programmed the node and serves the health address;"
    text += " kube-proxy: wait until kube-proxy has programmed the node"
    parser.add_argument("what", choices=(*PAGES, "kube-proxy"), help=text)


def _probe(arguments: argparse.Namespace) -> int:
    from pyebpf_proxy.common.kube_proxy_health import wait
    from pyebpf_proxy.probe import probe

    if arguments.what == "kube-proxy":
        from pyebpf_proxy.datapath.migration import leftovers

        return wait(serving=leftovers.serving)
    return probe(arguments.what, str(arguments.directory))


def _completion(arguments: argparse.Namespace) -> int:
    from pyebpf_proxy.see import completion

    commands = completion.read({name: command_parser(name) for name in COMMANDS})
    print(completion.SHELLS[arguments.shell](commands))
    return 0


def _shell(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell to print a script for")


COMMANDS = {
    "status": Command(
        "the node's health: agent, devices, programs, fast path, map usage, drops; a remedy for each warning",
        "pyebpf-proxy status              # exit status 0: no warnings",
        _status,
    ),
    "services": Command(
        "the service ports in the kernel: addresses, endpoints, policies, session affinity",
        "pyebpf-proxy services web        # one Service in detail\n"
        "  pyebpf-proxy services --diff     # differences between kernel and desired state; exit status 1 if any",
        _services,
        _services_arguments,
    ),
    "backends": Command(
        "the endpoints in the kernel, with their backend ids",
        "pyebpf-proxy backends default/web:http",
        _backends,
        _named,
    ),
    "frontends": Command(
        "the frontend addresses, with their services",
        "pyebpf-proxy frontends --address 10.96.0.10",
        _frontends,
        _frontends_arguments,
    ),
    "explain": Command(
        "what would happen to a packet, and why, rule by rule; checked by a dry run of the real program",
        "pyebpf-proxy explain 198.51.100.2 203.0.113.10:80\n"
        "  pyebpf-proxy explain [2001:db8:2::2]:40000 [2001:db8:3::10]:53 UDP",
        _explain,
        _explain_arguments,
    ),
    "drops": Command(
        "refused and dropped packets by reason: counts, the latest packet, meaning and remedy",
        "pyebpf-proxy drops               # exit status 1: drops in the last minute",
        _drops,
    ),
    "flows": Command(
        "flows to services, from conntrack and the flow table, with names of services and pods",
        "pyebpf-proxy flows default/web state=ESTABLISHED",
        _flows,
        _flows_arguments,
    ),
    "top": Command(
        "live rates by service: new flows, packets, bytes and drops a second, and each endpoint's share",
        "pyebpf-proxy top                 # keys: f p b d n order, e endpoints, + - interval, space pause, q quit\n"
        "  pyebpf-proxy top web --once      # one interval, in plain text\n"
        "  pyebpf-proxy top -o json -i 10   # an object every ten seconds, each on a line",
        _top,
        _top_arguments,
    ),
    "doctor": Command(
        "check this machine: kernel, loading of the programs, mounts, sysctls, other proxies, limits",
        "pyebpf-proxy doctor              # before or after installation; exit status 0: every check is good",
        _doctor,
    ),
    "trace": Command(
        "show decisions live, one per line: source, service, endpoint, path, masquerade, reason",
        "pyebpf-proxy trace default/web            # until Ctrl-C\n"
        "  pyebpf-proxy trace drop,reject            # drops and refusals; with --count 1 only the next one\n"
        "  pyebpf-proxy trace client=198.51.100.2 port=80 --duration 30s -o json",
        _trace,
        _trace_arguments,
    ),
    "probe": Command(
        "whether the agent is live or ready, for kubelet probes; exit status 1 also if no agent answers",
        "pyebpf-proxy probe ready",
        _probe,
        _probe_arguments,
    ),
    "completion": Command(
        "print a shell completion script; it also completes names of services",
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
    parser = Parser(
        prog=f"pyebpf-proxy {name}",
        description=command.text[0].upper() + command.text[1:] + ".",
        epilog=f"example:\n  {command.example}\n\n{STATUSES}",
        formatter_class=RawHelpFormatter,
        allow_abbrev=False,
    )
    command.arguments(parser)
    if name not in ("completion", "probe"):
        parser.add_argument(
            "-o",
            "--output",
            choices=("table", "json", "name"),
            default="table",
            help="format (default: table); docs/commands.schema.json describes json",
        )
    if name != "completion":
        parser.add_argument(
            "--directory",
            type=Path,
            default=Path(os.environ.get(DIRECTORY) or "/run/pyebpf-proxy"),
            help=f"the agent's run folder (default: ${DIRECTORY}, else /run/pyebpf-proxy)",
        )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command that the first argument names. The result is the exit status (docs/commands.md)."""
    name, *rest = arguments
    try:
        try:
            parsed = command_parser(name).parse_args(rest)
            _check_source(parsed)
            return COMMANDS[name].run(parsed)
        finally:
            sys.stdout.flush()  # also for --help, which raises SystemExit
    except UnknownServiceError as error:
        from pyebpf_proxy.see import unserved

        return fail(unserved.completed(parsed.directory, error), error.status)
    except SeeError as error:
        return fail(str(error), error.status)
    except BrokenPipeError:
        return closed_pipe()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
