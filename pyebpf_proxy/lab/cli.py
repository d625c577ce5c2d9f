# SPDX-License-Identifier: Apache-2.0
"""``pyebpf-proxy lab``: a demonstration, and a cluster for experiments."""

from __future__ import annotations

import argparse
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from pyebpf_proxy.common.arguments import Parser
from pyebpf_proxy.lab import leftovers
from pyebpf_proxy.lab.cluster import Lab
from pyebpf_proxy.lab.example import EXAMPLES, open_example, populate
from pyebpf_proxy.lab.namespace import LabError, note


def main(argv: list[str]) -> int:
    """Run one subcommand. The result is the exit status."""
    arguments = _parser().parse_args(argv)
    if os.geteuid() != 0:
        note("pyebpf-proxy lab: it creates network namespaces, which requires root: use sudo")
        return 1
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        status: int = arguments.function(arguments)
    except LabError as error:
        note(f"pyebpf-proxy lab: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return status


#: Environment variable with the name of the lab, set in a shell of `lab shell`.
OF_THIS_SHELL = "PYEBPF_PROXY_LAB"
END = b"\0"  # end of the output of `lab up`: the lab's processes keep the pipe open


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # so that context managers clean up


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="pyebpf-proxy lab", description="A cluster of network namespaces.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, function: object, text: str, runs_examples: bool = False) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(function=function)
        if runs_examples:
            command.add_argument("--examples", type=Path, default=EXAMPLES, help="folder with config.yaml, manifests/")
            command.add_argument("--pod-network", choices=("routed", "bare", "bridge"), default="routed",
                                 help="how pods are connected to their node (docs/lab.md)")  # fmt: skip
        return command

    add("demo", _demo, "send requests to the services of examples/ and compare the results with the rules", True)
    add("shell", _shell, "start a lab and open a shell in the external client; Ctrl-D removes the lab", True)
    add(
        "inspect",
        _inspect,
        "show a node's maps with bpftool: from a VIP to its backends, then every map",
        True,
    )
    add("up", _up, "start a lab in the background", True)
    add("down", _down, "remove the labs that `up` started")
    run = add("exec", _exec, "run a command on a node, in a pod, the client or the core router of a running lab")
    run.add_argument("name", help="node1, node2, web-1, web-2, web-3, toolbox, client, core")
    run.add_argument("command", nargs=argparse.REMAINDER, help="default: $SHELL")
    add("clean", _clean, "remove leftovers of crashed labs")
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    from pyebpf_proxy.lab import demo

    leftovers.clean()
    with open_example(arguments.examples, arguments.pod_network) as lab:
        return 0 if demo.run(lab, arguments.examples) else 1


def _shell(arguments: argparse.Namespace) -> int:
    with open_example(arguments.examples, arguments.pod_network) as lab:
        populate(lab, arguments.examples)
        print(_guide(lab, "You are the external client.", "Ctrl-D"), flush=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the commands in the shell react to Ctrl-C
        shell = ["ip", "netns", "exec", lab.client.name, os.environ.get("SHELL", "/bin/sh")]
        subprocess.call(shell, env={**os.environ, OF_THIS_SHELL: lab.tag})
        print("Removing the lab.")
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    from pyebpf_proxy.lab.inspect import tour

    with open_example(arguments.examples, arguments.pod_network) as lab:
        populate(lab, arguments.examples)
        tour(lab)
    return 0


def _program() -> str:
    """How a shell runs this program."""
    script = Path(sys.argv[0]).resolve()
    return str(script) if os.access(script, os.X_OK) else f"{sys.executable} -m pyebpf_proxy"


def _guide(lab: Lab, place: str, end: str) -> str:
    """What to try. The first commands are for the external client: `place` says where that is."""
    script = _program()
    folder = lab.manifests
    first = lab.nodes[0].agent
    return f"""
The lab {lab.tag} is up: node1 (web-1, toolbox), node2 (web-2, web-3), and an external client. {place}

  curl http://203.0.113.10/                        LB VIP, policy Cluster: the pod sees a node's address
  curl http://[2001:db8:3::10]/                    the same over IPv6
  curl http://203.0.113.20/                        policy Local: the pod sees your address
  curl http://192.0.2.12:30080/                    NodePort on node2
  curl http://203.0.113.30/                        no endpoints: refused at once
  bash -c 'exec 3<>/dev/udp/203.0.113.10/53; echo hi >&3; timeout 1 dd count=1 status=none <&3'   UDP
  {script} lab exec toolbox curl -s http://10.96.0.10/       from a pod to the ClusterIP
  {script} lab exec node1 conntrack -L                       the kernel's conntrack entries
  {script} lab exec node1 bpftool map dump pinned {first.pin("frontends4")}
  $EDITOR {folder / "web-endpoints.yaml"}   add web-3 (10.244.2.11), save, curl again
  tail -f {first.log_file}

{end} removes the lab.
"""


def _up(arguments: argparse.Namespace) -> int:
    read, write = os.pipe()
    if os.fork() == 0:
        os.close(read)
        os.setsid()
        # The terminal may be closed. Errors during the start go through the pipe.
        with open(os.devnull, "r+b") as null:
            for fd in (0, 1, 2):
                os.dup2(null.fileno(), fd)
        status = 1
        try:
            with open_example(arguments.examples, arguments.pod_network) as lab:
                populate(lab, arguments.examples)
                (lab.folder / "pid").write_text(str(os.getpid()))
                place = f"This command starts a shell there:\n  {_program()} lab exec client\nIn this shell:"
                os.write(write, _guide(lab, place, f"{_program()} lab down").encode() + END)
                while True:
                    signal.pause()
        except LabError as error:
            os.write(write, f"pyebpf-proxy lab: {error}\n".encode() + END)
        except SystemExit:
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    received = b""
    while not received.endswith(END) and (data := os.read(read, 65536)):
        received += data
    text = received.removesuffix(END).decode()
    print(text, end="")
    return 0 if "is up" in text else 1


def _living() -> list[str]:
    return [tag for tag in leftovers.all_tags() if not leftovers.is_dead(tag)]


def _down(arguments: argparse.Namespace) -> int:
    status = 0
    for tag in _living():
        file = leftovers.folder_of(tag) / "pid"
        if not file.exists():
            continue  # the lab of a shell or of a test run
        pid = int(file.read_text())
        watch = os.pidfd_open(pid)
        signal.pidfd_send_signal(watch, signal.SIGTERM)
        if not select.select([watch], [], [], 30)[0]:
            note(f"{tag} (process {pid}) did not end")
            status = 1
        else:
            print(f"{tag} removed")
    return status


def _exec(arguments: argparse.Namespace) -> int:
    # A shell of `lab shell` uses its own lab; otherwise, use that of `lab up`. Labs of tests may also be running.
    tags = sorted(
        _living(), key=lambda tag: (tag == os.environ.get(OF_THIS_SHELL), (leftovers.folder_of(tag) / "pid").exists())
    )
    found = [name for tag in tags for name in leftovers.namespaces_of(tag) if name == f"{tag}-{arguments.name}"]
    if not found:
        raise LabError(f"no running lab contains {arguments.name!r}: start one with `lab up` or `lab shell`")
    command = arguments.command or [os.environ.get("SHELL", "/bin/sh")]
    return subprocess.call(["ip", "netns", "exec", found[-1], *command], env=_environment(found[-1]))


def _environment(namespace: str) -> dict[str, str]:
    """An environment in which commands find this interpreter's pyebpf-proxy and the run folder of the node's agent."""
    tag, _, name = namespace.rpartition("-")
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    state = leftovers.folder_of(tag) / name / "state"
    return {**os.environ, "PATH": path, **({"PYEBPF_PROXY_DIRECTORY": str(state)} if state.is_dir() else {})}


def _clean(arguments: argparse.Namespace) -> int:
    for tag in leftovers.clean():
        print(f"removed leftovers of {tag}")
    return 0
