# SPDX-License-Identifier: Apache-2.0
"""Shell completion: generates scripts for bash, zsh and fish from the commands' arguments. The functions are pure."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

Kind = Literal["", "folder", "file", "namespace"]

#: Options whose values can be completed.
_KINDS: Mapping[str, Kind] = {
    "--directory": "folder",
    "--manifests": "folder",
    "--config": "file",
    "--namespace": "namespace",
}
_LAB = "a cluster of network namespaces"
#: Positional arguments that may be a Service's name.
_NAMES = ("NAME", "FILTER")


class Option(NamedTuple):
    """An option of a command. ``takes``: it has a value. Either ``values`` has the choices, or ``kind`` its kind."""

    names: Sequence[str]
    help: str
    takes: bool
    values: Sequence[str]
    kind: Kind

    @property
    def metavar(self) -> str:
        """The name of the option's value."""
        return self.names[-1].lstrip("-")


class Command(NamedTuple):
    """A command. ``services``: it takes a Service's name; ``many``: several names; ``words``: other arguments."""

    name: str
    help: str
    options: Sequence[Option]
    words: Sequence[str]
    services: bool
    many: bool


def read(parsers: Mapping[str, argparse.ArgumentParser]) -> list[Command]:
    """The commands of these parsers."""
    found = []
    for name, parser in parsers.items():
        positional = [action for action in parser._actions if not action.option_strings]
        options = [
            Option(
                action.option_strings,
                action.help or "",
                action.nargs != 0,
                [str(choice) for choice in action.choices or ()],
                _KINDS.get(action.option_strings[-1], ""),
            )
            for action in parser._actions
            if action.option_strings
        ]
        words = [str(choice) for action in positional for choice in action.choices or ()]
        services = any(action.metavar in _NAMES for action in positional)
        many = any(action.nargs == "*" for action in positional)
        found.append(Command(name, _short(parser.description or ""), options, words, services, many))
    return found


def _short(text: str) -> str:
    """The first part of a description, for a narrow column."""
    begin = text.rstrip(".").partition(": ")[0].partition("; ")[0].partition("? ")[0]
    return begin[:1].lower() + begin[1:]


# ---- bash -------------------------------------------------------------------------------------------------------

_BASH = """# bash completion of pyebpf-proxy: source <(pyebpf-proxy completion bash)
_pyebpf_proxy() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} options= values=
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        mapfile -t COMPREPLY < <(compgen -W "@COMMANDS@ lab" -- "$word")
        return
    fi
    case "$before" in
    @FILES@)
        mapfile -t COMPREPLY < <(compgen -f -- "$word")
        return ;;
    esac
    case "${COMP_WORDS[1]}" in
@CASES@
    *) return ;;
    esac
    mapfile -t COMPREPLY < <(compgen -W "$values" -- "$word")
}
complete -o default -F _pyebpf_proxy pyebpf-proxy"""

#: Bash splits words at ":", so names are completed without ports.
_BASH_NAMES = "$(pyebpf-proxy services -o name 2>/dev/null | cut -d: -f1 | sort -u)"
_BASH_NAMESPACES = _BASH_NAMES.replace("-d:", "-d/")


def bash(commands: Sequence[Command]) -> str:
    """The script for bash."""
    cases = []
    for command in commands:
        options = " ".join(name for option in command.options for name in option.names)
        lines = [f"    {command.name})", '        case "$before" in']
        for option in command.options:
            if option.takes and option.kind not in ("file", "folder"):
                values = _BASH_NAMESPACES if option.kind else " ".join(option.values)
                lines.append(f'        {" | ".join(option.names)}) values="{values}" ;;')
        values = " ".join([*command.words, *([_BASH_NAMES] if command.services else [])])
        lines.append(f'        *) case "$word" in -*) values="{options}" ;; *) values="{values}" ;; esac ;;')
        cases += [*lines, "        esac ;;"]
    files = (name for name, kind in _KINDS.items() if kind in ("file", "folder"))
    text = _BASH.replace("@COMMANDS@", " ".join(command.name for command in commands))
    return text.replace("@FILES@", " | ".join(files)).replace("@CASES@", "\n".join(cases))


# ---- zsh --------------------------------------------------------------------------------------------------------

_ZSH = """#compdef pyebpf-proxy
# zsh completion of pyebpf-proxy: source <(pyebpf-proxy completion zsh), after compinit;
# or as a file _pyebpf-proxy in a folder of $fpath.
_pyebpf-proxy-names() {
    local -a names
    names=(${(fu)"$(pyebpf-proxy services -o name 2>/dev/null)"})
    compadd -a names
}

_pyebpf-proxy-namespaces() {
    local -a names
    names=(${(fu)"$(pyebpf-proxy services -o name 2>/dev/null | cut -d/ -f1)"})
    compadd -a names
}

_pyebpf-proxy() {
    local curcontext="$curcontext" state
    local -a commands line
    commands=(
@COMMANDS@
    )
    _arguments -C '1:command:->command' '*::argument:->argument'
    case $state in
    command) _describe -t commands command commands ;;
    argument)
        case $words[1] in
@CASES@
        esac ;;
    esac
}

if [ "$funcstack[1]" = _pyebpf-proxy ]; then
    _pyebpf-proxy "$@"
else
    compdef _pyebpf-proxy pyebpf-proxy
fi"""


def zsh(commands: Sequence[Command]) -> str:
    """The script for zsh, also usable as a file in $fpath."""
    texts = {command.name: command.help for command in commands} | {"lab": _LAB}
    listed = [f"        {_zsh_quoted(f'{name}:{text}')}" for name, text in texts.items()]
    cases = []
    for command in commands:
        lines = [f"            {_zsh_option(option)}" for option in command.options]
        if command.services:
            lines.append(f"            '{'*' if command.many else '1'}:name:_pyebpf-proxy-names'")
        elif command.words:
            lines.append(f"            '1:word:({' '.join(command.words)})'")
        cases.append(f"        {command.name}) _arguments \\\n" + " \\\n".join(lines) + " ;;")
    return _ZSH.replace("@COMMANDS@", "\n".join(listed)).replace("@CASES@", "\n".join(cases))


_ZSH_KINDS: Mapping[Kind, str] = {
    "folder": "_files -/",
    "file": "_files",
    "namespace": "_pyebpf-proxy-namespaces",
}


def _zsh_option(option: Option) -> str:
    description = option.help.replace("[", "\\[").replace("]", "\\]")
    text = f"[{description}]"
    if option.takes:
        values = f"({' '.join(option.values)})" if option.values else " "
        text += f":{option.metavar}:{_ZSH_KINDS.get(option.kind, values)}"
    if len(option.names) == 1:
        return _zsh_quoted(option.names[0] + text)
    together = _zsh_quoted(f"({' '.join(option.names)})")
    return f"{together}{{{','.join(option.names)}}}{_zsh_quoted(text)}"


def _zsh_quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# ---- fish -------------------------------------------------------------------------------------------------------

_FISH = """# fish completion of pyebpf-proxy: pyebpf-proxy completion fish | source
function __pyebpf_proxy_names
    pyebpf-proxy services -o name 2>/dev/null | sort -u
end
function __pyebpf_proxy_asked
    set -l words (commandline -opc)
    test (count $words) -ge 2; and test $words[2] = $argv[1]
end
complete -c pyebpf-proxy -f
@LINES@"""


def fish(commands: Sequence[Command]) -> str:
    """The script for fish."""
    texts = {command.name: command.help for command in commands} | {"lab": _LAB}
    lines = [f"{_FISH_FIRST} -a {name} -d {_fish_quoted(text)}" for name, text in texts.items()]
    for command in commands:
        begin = f"complete -c pyebpf-proxy -n '__pyebpf_proxy_asked {command.name}'"
        lines += [f"{begin} {words}" for words in _fish_words(command)]
    return _FISH.replace("@LINES@", "\n".join(lines))


_FISH_FIRST = "complete -c pyebpf-proxy -n 'test (count (commandline -opc)) -eq 1'"


_FISH_KINDS: Mapping[Kind, str] = {
    "folder": " -x -a '(__fish_complete_directories)'",
    "file": " -r -F",
    "namespace": ' -x -a \'(__pyebpf_proxy_names | string replace -r "/.*" "" | sort -u)\'',
}


def _fish_words(command: Command) -> Iterator[str]:
    for option in command.options:
        names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
        takes = _FISH_KINDS.get(option.kind, " -x" if option.takes else "")
        if option.values:
            takes += f" -a {_fish_quoted(' '.join(option.values))}"
        yield f"{names}{takes} -d {_fish_quoted(option.help)}"
    if command.words:
        yield f"-a {_fish_quoted(' '.join(command.words))}"
    if command.services:
        yield "-a '(__pyebpf_proxy_names)'"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: Mapping[str, Callable[[Sequence[Command]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
