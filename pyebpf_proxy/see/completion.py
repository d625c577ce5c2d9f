# SPDX-License-Identifier: Apache-2.0
"""Shell completion: a script made of the commands' own arguments."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

_SCRIPT = """# bash completion of pyebpf-proxy: source <(pyebpf-proxy completion bash)
_pyebpf_proxy() {
    local word=${COMP_WORDS[COMP_CWORD]} command=${COMP_WORDS[1]} options= values=
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        mapfile -t COMPREPLY < <(compgen -W "@COMMANDS@ lab" -- "$word")
        return
    fi
    case "${COMP_WORDS[COMP_CWORD-1]}" in
    --directory | --manifests | --config)
        mapfile -t COMPREPLY < <(compgen -f -- "$word")
        return ;;
    -o | --output) values="table json name" ;;
    *)
        case "$command" in
@CASES@
        *) return ;;
        esac ;;
    esac
    case "$word" in -*) values=$options ;; esac
    mapfile -t COMPREPLY < <(compgen -W "$values" -- "$word")
}
complete -o default -F _pyebpf_proxy pyebpf-proxy"""

#: Bash takes : for the end of a word, so names are offered without ports.
_NAMES = "$(pyebpf-proxy services -o name 2>/dev/null | cut -d: -f1 | sort -u)"


def bash(parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """The script for bash."""
    cases = []
    for name, parser in parsers.items():
        options = [text for action in parser._actions for text in action.option_strings]
        positional = [action for action in parser._actions if not action.option_strings]
        values = " ".join(str(choice) for action in positional for choice in action.choices or ())
        if any(action.metavar == "NAME" for action in positional):
            values = _NAMES
        cases.append(f'        {name}) options="{" ".join(options)}"; values="{values}" ;;')
    return _SCRIPT.replace("@COMMANDS@", " ".join(parsers)).replace("@CASES@", "\n".join(cases))
