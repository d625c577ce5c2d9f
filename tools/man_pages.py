# SPDX-License-Identifier: Apache-2.0
"""``make man``: writes the manual pages from the arguments and help texts of the commands.

.venv/bin/python tools/man_pages.py FOLDER
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from argparse_manpage.manpage import Manpage

from pyebpf_proxy import __version__
from pyebpf_proxy.cluster.cli import EXAMPLE as CLUSTER_EXAMPLE
from pyebpf_proxy.cluster.cli import parser as cluster_parser
from pyebpf_proxy.commands import COMMANDS, command_parser
from pyebpf_proxy.config.flag_table import GROUPS
from pyebpf_proxy.lab.cli import _parser as lab_parser

NAME = "pyebpf-proxy"
_DESCRIPTION = (
    "pyebpf-proxy is an eBPF replacement for kube-proxy. Without a command it runs the agent of this node. It reads"
    " kube-proxy's configuration and accepts its flags, and serves Services with BPF programs and maps. SIGTERM ends"
    " the agent and leaves everything attached: traffic continues, and the next start adopts the state."
)
_AGENT_STATUS = "0: ended by a signal, or request carried out. 1: an error, which the last line of the log names."
_STATUS = {
    "0": "No problem found.",
    "1": "A problem was found.",
    "2": "Wrong usage.",
    "3": "No answer.",
    "130": "Ctrl-C.",
}
_FILES = {
    "/run/pyebpf-proxy": "The run folder: the lock that prevents a second agent, and the socket that commands use.",
    "/sys/fs/bpf/pyebpf-proxy": "Pinned maps, programs and links. They outlive the agent.",
}

#: Commands with subcommands: their description, their parser, and their examples.
GROUPS_OF_COMMANDS = {
    "cluster": ("all nodes of a cluster, from an administrator's machine", cluster_parser, CLUSTER_EXAMPLE),
    "lab": ("a test cluster of network namespaces on this machine", lab_parser, ""),
}
#: Words are not broken and spaces not stretched, so that commands and paths can be copied from the page.
_PLAIN_LINES = ".nh\n.ad l\n"


def pages() -> dict[str, str]:
    """The text of each page, by file name."""
    found = {f"{NAME}.1": _agent()}
    for name, command in COMMANDS.items():
        parser = command_parser(name)
        sections = {"EXAMPLES": _examples(command.example)}
        if name not in ("probe", "completion"):
            sections["EXIT STATUS"] = _list(_STATUS)
        found[f"{NAME}-{name}.1"] = _page(parser, command.text, sections)
    for name, (text, parser, example) in GROUPS_OF_COMMANDS.items():
        sections = {"EXAMPLES": _examples(example), "EXIT STATUS": _list(_STATUS)} if example else {}
        found[f"{NAME}-{name}.1"] = _page(_with_commands(parser()), text, sections)
    return found


def _examples(text: str) -> str:
    lines = "\n".join(line.strip() for line in text.splitlines())
    return f".nf\n{_escaped(lines)}\n.fi"


def _with_commands(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            parser._positionals.title = "commands"
            for command in action.choices.values():
                command.description = None  # it is the same as the help
    return parser


def _agent() -> str:
    """The page of the agent. Its flags are not in argparse, which does not support kube-proxy's parsing rules."""
    parser = argparse.ArgumentParser(prog=NAME, description=_DESCRIPTION, add_help=False)
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(f"{title} flags")
        for flag in flags:
            names = [*([f"-{flag.short}"] if flag.short else []), f"--{flag.name}"]
            default = f" (default {flag.default})" if flag.default not in ("", "0s", "false") else ""
            text = (flag.help + default).replace("%", "%%")
            if flag.name == "help":
                # The library omits every --help. Here, it is a flag of kube-proxy.
                names[-1] += "\u200b"
            if flag.type:
                group.add_argument(*names, metavar=flag.type, help=text)
            else:
                group.add_argument(*names, action="store_true", help=text)
    commands = {f"{NAME}-{name}(1)": command.text for name, command in COMMANDS.items()}
    commands |= {f"{NAME}-{name}(1)": text for name, (text, *_) in GROUPS_OF_COMMANDS.items()}
    synopsis = f".B {_escaped(NAME)}\n[FLAGS]\n.br\n.B {_escaped(NAME)}\nCOMMAND [ARGUMENTS]"
    sections = {"SYNOPSIS": synopsis, "COMMANDS": _list(commands), "EXIT STATUS": _AGENT_STATUS, "FILES": _list(_FILES)}
    return _page(parser, "eBPF replacement for kube-proxy", sections).replace("\u200b", "")


def _page(parser: argparse.ArgumentParser, summary: str, sections: Mapping[str, str]) -> str:
    name = parser.prog.replace(" ", "-")
    parser.epilog = None
    page = Manpage(parser, {"manual_title": "pyebpf-proxy manual", "version": __version__}, "single-commands-section")
    page.prog, page.source, page.description = name, f"{NAME} {__version__}", summary
    page.date = _date()
    for heading, content in {**sections, "SEE ALSO": _also(name)}.items():
        page.add_section(heading, "=", content)
    # The usage of a subcommand is broken for a terminal of 80 columns: the page breaks it for the reader's.
    text = re.sub(r"^usage: .*(?:\n {2,}.*)+", lambda usage: " ".join(usage[0].split()), str(page), flags=re.MULTILINE)
    # Macros separate paragraphs: an empty line before them would separate them twice.
    head, _, rest = re.sub(r"\n+(?=\n\.)", "", text).partition("\n")
    return f"{head}\n{_PLAIN_LINES}{rest}"


def _date() -> str:
    """The day of SOURCE_DATE_EPOCH, else today, in a format without hyphens, which the library would escape."""
    day = time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH") or time.time()))
    return time.strftime("%B ", day) + f"{day.tm_mday}, {day.tm_year}"


def _also(name: str) -> str:
    names = [NAME, *(f"{NAME}-{command}" for command in COMMANDS)]
    return ",\n".join(f".BR {_escaped(each)} (1)" for each in names if each != name)


def _list(items: Mapping[str, str]) -> str:
    return "\n".join(f".TP\n\\fB{_escaped(name)}\\fR\n{_escaped(text)}" for name, text in items.items())


def _escaped(text: str) -> str:
    return text.replace("\\", "\\e").replace("-", "\\-")


def main(arguments: list[str]) -> int:
    """Write all pages into the folder."""
    (folder,) = map(Path, arguments)
    os.environ["COLUMNS"] = "80"  # argparse wraps lines at the terminal's width before they become roff
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
