# SPDX-License-Identifier: Apache-2.0
"""Foreign names are only text: neither a terminal nor a reader of lines interprets them."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from struct import Struct

import pytest

from pyebpf_proxy.common import log
from pyebpf_proxy.common.printable import printable, printable_json
from pyebpf_proxy.kube.decode import decode_document
from pyebpf_proxy.kube.validation import quote
from pyebpf_proxy.see import model
from pyebpf_proxy.see.output import show
from pyebpf_proxy.see.text import Cell, Terminal, fields, safe, table, wrapped
from pyebpf_proxy.services import pods
from pyebpf_proxy.trace import events
from pyebpf_proxy.trace.lines import printed

#: A clear screen, a title, a new line, a NUL, a C1 control sequence, and right-to-left text.
EVIL = "web\x1b[2J\x1b]0;owned\x07\nnext\0x\x9b31m\u202egpj\x7f"
SHOWN = r"web\x1b[2J\x1b]0;owned\x07\nnext\x00x\x9b31m\u202egpj\x7f"
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u202e]")


def test_control_characters_are_escaped_and_text_stays() -> None:
    assert printable(EVIL) == SHOWN
    assert printable("größer, 漢字 ✓ a/b:c") == "größer, 漢字 ✓ a/b:c"
    assert printable("half \udc80") == r"half \udc80"
    text = json.dumps({"a": EVIL}, ensure_ascii=False, indent=2)
    assert json.loads(printable_json(text)) == {"a": EVIL}
    assert not CONTROL.search(printable_json(text).replace("\n", ""))


@pytest.fixture
def own_log() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger("pyebpf_proxy")
    before = root.handlers[:], root.level, own.level, logging.raiseExceptions
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    own.setLevel(before[2])
    logging.raiseExceptions = before[3]


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.usefixtures("own_log")
def test_a_log_message_is_one_printable_line(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """ESC and CR in values are escaped in both forms (finding S8)."""
    log.configure(form)  # type: ignore[arg-type]
    log.Logger("x").error(f"from {EVIL}", error="\x1b]0;owned\x07", name="a b\x9b31m")
    shown = capsys.readouterr().err
    assert shown.endswith("\n")
    assert not CONTROL.search(shown[:-1])
    if form == "json":
        entry = json.loads(shown)
        assert (entry["message"], entry["error"]) == (f"from {EVIL}", "\x1b]0;owned\x07")
    else:
        assert f"from {SHOWN} error=\\x1b]0;owned\\x07" in shown


@pytest.mark.usefixtures("own_log")
def test_the_text_of_an_exception_is_printable(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("text")
    try:
        raise ValueError("\x1b[2J\r")
    except ValueError:
        log.Logger().internal_error()
    shown = capsys.readouterr().err
    assert "ValueError: \\x1b[2J\\r" in shown
    assert not CONTROL.search(shown.replace("\n", ""))


def test_tables_and_sentences_show_escapes() -> None:
    """Control characters do not reach the terminal (finding S5)."""
    terminal = Terminal(60, colour=True)
    lines = [
        *table(terminal, ["POD", "STATE"], [[Cell(EVIL, "red"), EVIL]]),
        *fields(terminal, [("pod", EVIL), (EVIL, Cell(EVIL, "green"))]),
        *wrapped(terminal, EVIL),
        terminal.paint(EVIL, "bold"),
    ]
    assert lines
    for line in lines:
        assert not CONTROL.search(re.sub(r"\x1b\[\d+m", "", line)), line
        assert safe(line) == line


def test_only_the_commands_own_colours_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    line = Terminal(80, colour=True).paint("good", "green") + EVIL
    assert safe(line) == f"\x1b[32mgood\x1b[0m{SHOWN}"


@pytest.mark.parametrize("form", ["table", "json", "name"])
def test_an_answer_is_printable(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    import argparse

    show(argparse.Namespace(output=form), model.Lost(time="t", what=EVIL, count=1), [EVIL], [EVIL])
    shown = capsys.readouterr().out
    assert "owned" in shown
    assert not CONTROL.search(shown.replace("\n", ""))
    if form != "json":
        assert shown == f"{SHOWN}\n"


def test_the_name_of_a_process_in_trace_is_printable() -> None:
    """A process chooses its name (PR_SET_NAME), and any user may start one (finding S5)."""
    layout = Struct("=Q16s16s16sHHHBBIIIHIBBB16s")
    none = bytes(16)
    raw = layout.pack(1, none, none, none, 1, 2, 3, 6, 0, 0, 0, 0, 1, 7, 0, 0, 0, "x\x1b[2J\n\x9b1m".encode())
    event = events.decode(raw, layout, {1: "reject_no_endpoints_socket"})
    assert event.command == "x\x1b[2J\n\x9b1m"
    decision = model.Decision(
        time="2026-11-22T10:00:00Z", source="192.0.2.1:1", destination="10.96.0.1:80", protocol="TCP",
        service="", endpoint="", endpoint_name="", backend=0, masqueraded_as="",
        verdict="refused", reason="r", path="", masquerade=False,
        device="", process=event.command, pid=7, hook="socket", source_name=EVIL,
    )  # fmt: skip
    for form in ("table", "json"):
        line = printed(decision, form, Terminal(1000, colour=False))
        assert not CONTROL.search(line), line
    assert r"x\x1b[2J\n\x9b1m[7]" in printed(decision, "table", Terminal(1000))


def a_slice(*names: str | None) -> dict[str, object]:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "web-1", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4",
        "ports": [{"name": "", "port": 80}],
        "endpoints": [
            {"addresses": [f"10.0.0.{i}"], "targetRef": {"kind": "Pod", "name": name}}
            for i, name in enumerate(names, 1)
        ],
    }


@pytest.mark.parametrize("bad", [EVIL, "a\0b", "a/b", "Web", "web-", "x" * 254, "a\nb", "é"])
def test_an_invalid_pod_name_is_left_out_and_shifts_no_other(bad: str) -> None:
    """As NUL did, which separates the names in memory (finding S5)."""
    (found,) = decode_document(a_slice("web-1", bad, None, "web-3"))
    assert found.object is not None
    assert list(pods.unpacked(found.object.pods)) == ["web-1", "", "", "web-3"]
    (message,) = found.messages
    assert message.startswith("EndpointSlice default/web-1: endpoints[1].targetRef.name: ")
    assert message.endswith("is not a DNS subdomain (a-z, 0-9, - and ., at most 253 characters): left out")
    assert not CONTROL.search(message)


def test_valid_names_are_not_logged_and_leave_no_state() -> None:
    (found,) = decode_document(a_slice("web-1", "a.b-c.d", None))
    assert found.messages == ()
    assert found.object is not None
    assert all(endpoint.target_ref is None for endpoint in found.object.endpoints)


def test_a_bad_value_is_quoted_in_printable_letters() -> None:
    assert quote(EVIL) == (r'"web\u001b[2J\u001b]0;owned\u0007\nnext\u0000x\u009b31m\u202egpj\u007f"')
