# SPDX-License-Identifier: Apache-2.0
"""The agent's nftables table: what it does to packets with a program's decision, and which packets it leaves alone.

Instead of the programs, a chain of the test sets the packet's priority and mark, early in prerouting.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import resource
import socket
import struct
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from pyebpf_proxy.datapath.netfilter import nft, table_watch
from pyebpf_proxy.datapath.netfilter.nft import NftError, Table
from pyebpf_proxy.datapath.netfilter.nft_rules import Behaviour, Target
from pyebpf_proxy.datapath.netlink.messages import message
from pyebpf_proxy.datapath.netlink.uapi import NFGENMSG, NFT_MSG_GETTABLE, NLM_F_DUMP, NLM_F_REQUEST
from tests.netns.attach.datagrams import BACKEND, MARK, SECONDS, af, decide, exchange, packed
from tests.netns.attach.router import Router, Shell

pytestmark = [pytest.mark.needs_netns, pytest.mark.usefixtures("namespace")]

SCTP = 132


def counted(shell: Shell, comment: str) -> int:
    found = re.search(rf'packets (\d+) bytes \d+ comment "{comment}"', shell("nft list chain inet decision late"))
    assert found
    return int(found[1])


# ---- translating ---------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_the_chosen_backend_is_reached_with_the_client_s_address(
    protocol: str, family: int, router: Router, table: Table, shell: Shell
) -> None:
    table.ensure(Behaviour(MARK))
    table.update({BACKEND: (packed(router.SERVER[family]), 8080)})
    decide(shell, "meta priority set eb12:3456")
    seen, answered = exchange(router, family, protocol, (router.VIP[family], 80))
    assert seen == router.CLIENT[family]
    assert answered == router.VIP[family]


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_the_masquerade_bit_masquerades_and_only_that_bit_is_cleared(
    protocol: str, family: int, router: Router, table: Table, shell: Shell
) -> None:
    table.ensure(Behaviour(MARK))
    table.update({BACKEND: (packed(router.SERVER[family]), 8080)})
    decide(shell, f"meta priority set eb12:3456 meta mark set {MARK | 8:#x}")
    seen, answered = exchange(router, family, protocol, (router.VIP[family], 80))
    assert seen == router.TOWARDS_SERVER[family]
    assert answered == router.VIP[family]
    assert counted(shell, "proxy bit left") == 0
    assert counted(shell, "others kept") > 0


def test_sctp_is_translated(family: int, router: Router, table: Table, shell: Shell) -> None:
    table.ensure(Behaviour(MARK))
    table.update({BACKEND: (packed(router.SERVER[family]), 9999)})
    decide(shell, "meta priority set eb12:3456")
    with router.inside("server"):
        server = socket.socket(af(family), socket.SOCK_RAW, SCTP)
    with router.inside("client"):
        client = socket.socket(af(family), socket.SOCK_RAW, SCTP)
    with closing(server), closing(client):
        server.settimeout(SECONDS)
        client.sendto(sctp_init(40000, 7), (router.VIP[family], 0))
        data = server.recv(2000)
    offset = 20 if family == 4 else 0
    assert struct.unpack_from("!HH", data, offset) == (40000, 9999)


def sctp_init(source: int, destination: int) -> bytes:
    chunk = struct.pack("!BBHIIHHI", 1, 0, 20, 0xABCD, 65536, 1, 1, 1)
    head = struct.pack("!HHI", source, destination, 0)
    return head + struct.pack("<I", crc32c(head + bytes(4) + chunk)) + chunk


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_other_packets_are_left_alone(family: int, router: Router, table: Table, shell: Shell) -> None:
    table.ensure(Behaviour(MARK))
    table.update({BACKEND: (packed(router.VIP[family]), 1)})
    decide(shell, "meta priority set eb12:3457 meta mark set 8")
    seen, _ = exchange(router, family, "udp", (router.SERVER[family], 8080))
    assert seen == router.CLIENT[family]
    assert counted(shell, "others kept") > 0


# ---- the hooks that entries written into conntrack need ----------------------


def test_an_entry_written_into_conntrack_is_translated_and_its_bit_cleared(
    family: int, router: Router, table: Table, shell: Shell
) -> None:
    """Such a flow passes no nat chain: it looks to the kernel like a promoted flow."""
    table.ensure(Behaviour(MARK))
    decide(shell, f"meta mark set {MARK | 8:#x}")
    with router.inside("server"):
        server = socket.socket(af(family), socket.SOCK_DGRAM)
    with router.inside("client"):
        client = socket.socket(af(family), socket.SOCK_DGRAM)
    with closing(server), closing(client):
        server.bind((router.SERVER[family], 8080))
        client.bind((router.CLIENT[family], 40001))
        backend = router.SERVER[family] if family == 4 else f"[{router.SERVER[family]}]"
        shell(
            f"conntrack -I -p udp -t 60 -s {router.CLIENT[family]} -d {router.VIP[family]} "
            f"--sport 40001 --dport 80 --dst-nat {backend}:8080"
        )
        server.settimeout(SECONDS)
        client.settimeout(SECONDS)
        client.sendto(b"question", (router.VIP[family], 80))
        _, source = server.recvfrom(100)
        assert source[:2] == (router.CLIENT[family], 40001)
        server.sendto(b"answer", source)
        assert client.recvfrom(100)[1][:2] == (router.VIP[family], 80)
    assert counted(shell, "proxy bit left") == 0
    assert counted(shell, "others kept") > 0


def test_conntrack_is_active_only_with_the_table(family: int, router: Router, table: Table, shell: Shell) -> None:
    def tracked() -> bool:
        exchange(router, family, "udp", (router.SERVER[family], 8080))
        return router.CLIENT[family] in shell(f"conntrack -L -f ipv{family} 2>/dev/null")

    assert not tracked()
    table.ensure(Behaviour(MARK))
    assert tracked()


# ---- rejecting ---------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("local", [False, True], ids=["forwarded", "local"])
def test_reject_is_a_port_unreachable_from_the_node(
    local: bool, protocol: str, family: int, router: Router, table: Table, shell: Shell
) -> None:
    table.ensure(Behaviour(MARK))
    decide(shell, "meta priority set ec00:1", match="meta l4proto { tcp, udp }")
    target = router.TOWARDS_SERVER[family] if local else router.VIP[family]
    kind = socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM
    icmp = socket.IPPROTO_ICMP if family == 4 else socket.IPPROTO_ICMPV6
    with closing(socket.socket(af(family), kind)) as listener:
        # A listener on the node must not get the packet: otherwise a closed port would explain the rejection.
        listener.bind((router.TOWARDS_SERVER[family], 9090))
        if protocol == "tcp":
            listener.listen()
        with router.inside("client"):
            client = socket.socket(af(family), kind)
            watcher = socket.socket(af(family), socket.SOCK_RAW, icmp)
        with closing(client), closing(watcher):
            client.settimeout(SECONDS)
            watcher.settimeout(SECONDS)
            with pytest.raises(ConnectionRefusedError):
                client.connect((target, 9090))
                client.send(b"question")
                client.recv(100)
            unreachable = (3, 3) if family == 4 else (1, 4)
            while True:
                data, source = watcher.recvfrom(2000)
                if struct.unpack_from("BB", data, 20 if family == 4 else 0) == unreachable:
                    break
            assert source[0] == (target if local else router.TOWARDS_CLIENT[family])


# ---- the table itself ----------------------------------------------------------------

TARGETS = {1: Target(packed("10.0.0.1"), 80), 0xFFFFFF: Target(packed("fd00::1"), 65535)}


def test_a_restart_keeps_elements_and_renews_rules(table: Table, shell: Shell) -> None:
    table.ensure(Behaviour(MARK))
    table.update(TARGETS)
    shell(f"nft flush chain inet {table.name} translate")
    again = Table()
    again.ensure(Behaviour(0x8000))
    assert again.elements == TARGETS
    rules = shell(f"nft list table inet {table.name}")
    assert rules.count("dnat ip") == 2
    assert "0x00008000" in rules
    assert "0x00004000" not in rules


def test_ensure_twice_changes_nothing(table: Table, shell: Shell) -> None:
    table.ensure(Behaviour(MARK))
    table.update(TARGETS)
    before = shell("nft list ruleset")
    table.ensure(Behaviour(MARK))
    Table().ensure(Behaviour(MARK))
    assert shell("nft list ruleset") == before


def test_nothing_is_written_without_a_change(table: Table, shell: Shell) -> None:
    def handles() -> str:
        return shell("nft -a list ruleset")

    table.ensure(Behaviour(MARK))
    table.update(TARGETS)
    before = handles()
    table.ensure(Behaviour(MARK))
    assert handles() == before
    shell("nft add table inet foreign")
    table.ensure(Behaviour(MARK))
    fresh = handles()
    assert fresh != before, "after any change the rules are rewritten"
    table.ensure(Behaviour(MARK))
    assert handles() == fresh
    generation = table._generation()
    table.update(TARGETS, [5])
    assert table._generation() == generation, "existing elements are not written"


def test_a_foreign_change_before_the_agents_own_is_noticed(table: Table, shell: Shell) -> None:
    table.ensure(Behaviour(MARK))
    shell(f"nft flush chain inet {table.name} translate")
    table.update(TARGETS)
    table.ensure(Behaviour(MARK))
    assert shell(f"nft list table inet {table.name}").count("dnat ip") == 2


def test_a_table_that_is_deleted_right_after_a_change_without_effect_is_restored(
    table: Table, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a change does not increase the ruleset's generation, but the deletion does: together they look like a
    change.
    """
    other = Table()
    for each in (table, other):
        each.ensure(Behaviour(MARK))
    other.update(TARGETS)
    table.ensure(Behaviour(MARK))
    change = table._channel.change

    def change_and_lose(*arguments: Any) -> None:
        change(*arguments)
        shell(f"nft delete table inet {table.name}")

    monkeypatch.setattr(table._channel, "change", change_and_lose)
    table.update(TARGETS)
    monkeypatch.undo()
    assert table.ensure(Behaviour(MARK))
    assert shell(f"nft list table inet {table.name}").count("dnat ip") == 2


def test_a_table_of_another_shape_is_replaced_with_its_elements(table: Table, shell: Shell) -> None:
    table.ensure(Behaviour(MARK))
    table.update(TARGETS)
    wanted = shell("nft list ruleset")
    shell(f"nft add chain inet {table.name} left_over")
    shell(f"nft delete chain inet {table.name} reject_local")
    again = Table()
    again.ensure(Behaviour(MARK))
    assert sorted(shell("nft list ruleset").splitlines()) == sorted(wanted.splitlines())


def test_update_changes_adds_and_removes(table: Table, shell: Shell) -> None:
    table.ensure(Behaviour(MARK))
    table.update(TARGETS)
    table.update({1: (packed("10.0.0.2"), 81), 2: (packed("10.0.0.3"), 82)}, [0xFFFFFF, 77])
    expected = {1: Target(packed("10.0.0.2"), 81), 2: Target(packed("10.0.0.3"), 82)}
    again = Table()
    again.ensure(Behaviour(MARK))
    assert table.elements == again.elements == expected
    again.replace(TARGETS)
    third = Table()
    third.ensure(Behaviour(MARK))
    assert third.elements == TARGETS


@pytest.mark.parametrize("how", ["nft flush ruleset", f"nft flush table inet {nft.TABLE}"])
def test_a_flushed_table_is_restored_completely(how: str, table: Table, shell: Shell) -> None:
    table.ensure(Behaviour(MARK))
    table.update(TARGETS)
    wanted = shell("nft list ruleset")
    shell(how)
    table.ensure(Behaviour(MARK))
    assert sorted(shell("nft list ruleset").splitlines()) == sorted(wanted.splitlines())
    shell("nft flush ruleset")
    table.update({}, [1])
    assert "dnat ip6" in shell("nft list ruleset")
    again = Table()
    again.ensure(Behaviour(MARK))
    assert again.elements == {0xFFFFFF: TARGETS[0xFFFFFF]}


@pytest.mark.parametrize("how", ["flush ruleset", "flush map inet {name} backends4"])
@pytest.mark.parametrize("step", ["generation", "has_table", "chains", "sets", "elements", "change", "cmd"])
def test_a_flushed_table_that_could_not_be_restored_at_once_is_restored_later(
    step: str, how: str, table: Table, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever call of a kind fails once."""
    table.ensure(Behaviour(MARK))
    table.update({1: (bytes((192, 0, 2, 1)), 80)})
    assert not table.ensure(Behaviour(MARK))
    complete = shell("nft list ruleset")
    for failing in range(1, 9):
        shell(f"nft {how.format(name=table.name)}")
        # After a failure the library is another one.
        of = table._nft if step == "cmd" else table._channel
        calls = 0

        def fail(*arguments: Any, failing: int = failing, real: Callable[..., Any] = getattr(of, step)) -> Any:  # noqa: B008
            nonlocal calls
            calls += 1
            if calls != failing:
                return real(*arguments)
            if step == "cmd":
                return 1, "", "netlink: Error: Device or resource busy"
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

        with monkeypatch.context() as once, contextlib.suppress(NftError):
            once.setattr(of, step, fail)
            table.ensure(Behaviour(MARK))
        table.ensure(Behaviour(MARK))
        assert shell("nft list ruleset") == complete, f"call {failing}"


def test_a_check_of_the_table_that_failed_is_repeated(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_watch, "INTERVAL", 0.02)
    monkeypatch.setattr(table_watch, "LONGEST_RETRY", 0.04)
    checks: list[float] = []

    def check() -> bool:
        checks.append(time.monotonic())
        return len(checks) > 4

    async def watch() -> None:
        with closing(table_watch.TableWatch("checked", check)) as watching:
            watching.follow(asyncio.get_running_loop())
            shell("nft add table inet checked")
            await asyncio.sleep(0.4)

    asyncio.run(watch())
    assert len(checks) == 5
    # The first pauses: 20, 20, 40 and 40 ms.
    assert checks[-1] - checks[0] > 0.1


def test_an_answer_that_was_not_read_fails_one_call_and_no_later_one(shell: Shell) -> None:
    """After an error of libnftables' socket, such as ENOBUFS for lack of memory, the rest of an answer stays in it."""
    before = set(os.listdir("/proc/self/fd"))
    table = Table("unread")
    mine = table._channel._socket._socket.fileno()
    (library,) = (int(fd) for fd in set(os.listdir("/proc/self/fd")) - before - {str(mine)} if is_netlink(int(fd)))
    # Sets of addresses are read by libnftables.
    known = Behaviour(MARK, refuse_unknown=True)
    table.ensure(known)
    table.set_addresses("cluster_ips", [(bytes((10, 96, 0, 1)), 32)])
    with socket.socket(fileno=os.dup(library)) as unread:
        unread.send(message(NFT_MSG_GETTABLE, NLM_F_REQUEST | NLM_F_DUMP, 12345, NFGENMSG.pack(0, 0, 0)))
    shell("nft flush chain inet unread translate")
    with pytest.raises(NftError):
        table.ensure(known)
    table.ensure(known)
    assert "dnat" in shell("nft list chain inet unread translate")


def is_netlink(descriptor: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as found:
            return found.family == socket.AF_NETLINK
    except OSError:
        return False


def test_remove_leaves_other_tables(table: Table, shell: Shell) -> None:
    shell("nft add table inet pyebpf-proxy-other; nft add chain inet pyebpf-proxy-other x")
    before = shell("nft list ruleset")
    table.ensure(Behaviour(MARK))
    assert table.remove()
    assert shell("nft list ruleset") == before
    assert not table.remove()


def test_without_permission_the_error_names_it() -> None:
    child = os.fork()
    if child == 0:
        os.setresuid(65534, 65534, 65534)
        try:
            Table().ensure(Behaviour(MARK))
        except NftError as error:
            os._exit(0 if error.errno == errno.EPERM and "not permitted" in str(error) else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("why", "found"),
    [
        ("Error: Could not process rule: No such file or directory", False),
        ("Error: Could not process rule: Operation not supported", False),
        ("netlink: Error: Could not send: No buffer space available", None),
        ("netlink: Error: cache initialization failed: Cannot allocate memory", None),
    ],
)
def test_only_a_refusal_shows_that_the_kernel_cannot_match_sockets(
    why: str, found: bool | None, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert table.knows_sockets()
    monkeypatch.setattr(table._nft, "cmd", lambda text: (1, "", why))
    if found is None:
        with pytest.raises(NftError, match=r"probe the socket expression: .*(space|memory)"):
            table.knows_sockets()
    else:
        assert table.knows_sockets() is found


def test_without_a_descriptor_a_table_that_others_flushed_is_an_error_and_restored_later(
    table: Table, shell: Shell
) -> None:
    """libnftables would end the process: the rules name a device, and it opens a socket to look that up."""
    table.ensure(Behaviour(MARK, conntrack_ports=(1024, 60000)))
    shell(f"nft flush table inet {table.name}")
    child = os.fork()
    if child == 0:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
            with pytest.raises(NftError, match="a socket cannot be opened: Too many open files"):
                table.ensure(Behaviour(MARK, conntrack_ports=(1024, 60000)))
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            os._exit(0 if table.ensure(Behaviour(MARK, conntrack_ports=(1024, 60000))) is not None else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert "masquerade" in shell(f"nft list table inet {table.name}")


def test_twenty_thousand_backends_fit_in_one_transaction(table: Table) -> None:
    wanted = {i: Target((0x0A000000 + i).to_bytes(4, "big"), 80) for i in range(1, 20_001)}
    table.ensure(Behaviour(MARK))
    table.replace(wanted)
    again = Table()
    again.ensure(Behaviour(MARK))
    assert again.elements == wanted
