# SPDX-License-Identifier: Apache-2.0
"""Our programs in the tcx chains of devices (Linux 6.6): first at ingress, last at egress, by links that are pinned.

The pin ``<folder>/<ifindex>-ingress`` or ``-egress`` keeps a link when the agent is gone; the next run puts its program
in the place of the former one with no packet in between. No qdisc is needed or made.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Container, Iterable
from pathlib import Path

from pyebpf_proxy.datapath.loader import kernel_objects, tcx
from pyebpf_proxy.datapath.loader.libbpf import BpfError
from pyebpf_proxy.datapath.loader.tcx import EGRESS, INGRESS

HOOKS = {INGRESS: "ingress", EGRESS: "egress"}
_MOVED = "-moved"
# Of `top` (bpf/meter.bpf.c): they look before ours does, and let everything pass.
METERS = frozenset({"meter_ethernet", "meter_l3"})
_METER = "meter-"
_GONE = (errno.ENODEV, errno.ENXIO, errno.ENOLINK)


class Links:
    """The links of one instance. ``folder`` is in a bpffs; it is made when the first link is.

    ``chain`` is how a chain is asked for, by device and hook.
    """

    def __init__(self, folder: Path, chain: Callable[[int, int], tuple[int, ...]] = tcx.chain) -> None:
        self._folder = folder
        self._chain = chain
        self._names: dict[int, str] = {}
        #: The program that each of our links runs, by device and hook.
        self.programs: dict[tuple[int, int], int] = {}
        for pin in sorted(folder.iterdir()) if folder.is_dir() else ():
            index, _, name = pin.name.removesuffix(_MOVED).partition("-")
            hook = next((hook for hook, known in HOOKS.items() if known == name), 0)
            found = _described(pin) if index.isdigit() and hook else {}
            if found.get("ifindex") and str(found["ifindex"]) == index:
                self.programs.setdefault((int(index), hook), found["prog_id"])

    def tidy(self, devices: Container[int]) -> None:
        """Removes the pins of devices that are gone."""
        for pin in sorted(self._folder.iterdir()) if self._folder.is_dir() else ():
            index = pin.name.partition("-")[0]
            if index.isdigit() and int(index) not in devices:
                pin.unlink(missing_ok=True)

    def attach(self, ifindex: int, hook: int, program_fd: int) -> None:
        """Puts the program at its end of the chain, or in the place of a former one. BpfError."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        number = tcx.described(program_fd)["prog_id"]
        self._finish_move(ifindex, hook)
        if not self._replace(ifindex, hook, program_fd):
            self._create(ifindex, hook, program_fd, self._pin(ifindex, hook))
        self._table(ifindex, hook).unlink(missing_ok=True)
        self.programs[ifindex, hook] = number
        if not self.is_in_place(ifindex, hook):
            self._move(ifindex, hook, program_fd)

    def detach(self, ifindex: int, hook: int) -> bool:
        """Takes our program off. False if there was none."""
        self._finish_move(ifindex, hook)
        self._table(ifindex, hook).unlink(missing_ok=True)
        found = self.programs.pop((ifindex, hook), None) is not None
        pin = self._pin(ifindex, hook)
        if not pin.exists():
            return found
        try:
            link = tcx.open_pinned(pin)
            try:
                tcx.detach(link)
            finally:
                os.close(link)
        except BpfError:
            pass  # its device is gone
        pin.unlink(missing_ok=True)
        return True

    def forget(self, ifindex: int) -> None:
        """The device is gone, and with it the links."""
        for hook in HOOKS:
            self.programs.pop((ifindex, hook), None)
            for pin in (self._pin(ifindex, hook), self._moved(ifindex, hook), self._table(ifindex, hook)):
                pin.unlink(missing_ok=True)

    def is_there(self, ifindex: int, hook: int) -> bool:
        """Whether our program is in the chain, anywhere. BpfError."""
        return self.programs.get((ifindex, hook)) in self._chain(ifindex, hook)

    def is_in_place(self, ifindex: int, hook: int) -> bool:
        """Whether nobody's program is before ours at ingress, or behind it at egress. BpfError."""
        chain = self._chain(ifindex, hook)
        own = self.programs.get((ifindex, hook))
        if own not in chain:
            return False
        at = chain.index(own)
        beyond = chain[:at] if hook == INGRESS else chain[at + 1 :]
        return all(self._is_meter(number) for number in beyond)

    def others(self, ifindex: int, hook: int) -> tuple[str, ...]:
        """Who else is there, in words: at ingress those behind ours, at egress all. BpfError."""
        chain = self._chain(ifindex, hook)
        own = self.programs.get((ifindex, hook))
        if hook == INGRESS and own in chain:
            chain = chain[chain.index(own) + 1 :]
        found = []
        for number in chain:
            name = self._name(number)
            if number != own and name is not None and not self._is_meter(number):
                found.append(f"tcx program {name or f'number {number}'}")
        return tuple(found)

    def _pin(self, ifindex: int, hook: int) -> Path:
        return self._folder / f"{ifindex}-{HOOKS[hook]}"

    def _moved(self, ifindex: int, hook: int) -> Path:
        return self._folder / f"{ifindex}-{HOOKS[hook]}{_MOVED}"

    def _table(self, ifindex: int, hook: int) -> Path:
        return self._folder / f"{ifindex}-{HOOKS[hook]}-table"

    def _finish_move(self, ifindex: int, hook: int) -> None:
        """An agent was killed while it moved a link: the one of the two that is attached stays."""
        moved, pin = self._moved(ifindex, hook), self._pin(ifindex, hook)
        if not moved.exists():
            return
        if _described(pin).get("ifindex"):
            moved.unlink()
        else:
            os.rename(moved, pin)

    def _replace(self, ifindex: int, hook: int, program_fd: int) -> bool:
        """False: there is no link, or its device is gone and the number another's now."""
        pin = self._pin(ifindex, hook)
        try:
            link = tcx.open_pinned(pin)
        except BpfError as error:
            if error.errno == errno.ENOENT:
                return False
            raise
        try:
            if tcx.described(link).get("ifindex") == ifindex:
                tcx.update(link, program_fd)
                return True
        except BpfError as error:
            if error.errno not in _GONE:
                raise
        finally:
            os.close(link)
        pin.unlink(missing_ok=True)
        return False

    @staticmethod
    def _create(ifindex: int, hook: int, program_fd: int, pin: Path) -> None:
        link = tcx.attach(program_fd, ifindex, hook, tcx.BEFORE if hook == INGRESS else tcx.AFTER)
        try:
            tcx.pin(link, pin)
        finally:
            os.close(link)

    def _move(self, ifindex: int, hook: int, program_fd: int) -> None:
        """To its end of the chain: a second link there, and the first one goes after that.

        In between the program runs twice on a packet; the second run leaves what the first one decided
        (is_decided() in bpf/tc.bpf.c).
        """
        pin, moved, table = self._pin(ifindex, hook), self._moved(ifindex, hook), self._table(ifindex, hook)
        table.unlink(missing_ok=True)
        with tcx.stand_in(program_fd, table) as program:
            self._create(ifindex, hook, program, moved)
        old = tcx.open_pinned(pin)
        try:
            tcx.detach(old)
        finally:
            os.close(old)
        link = tcx.open_pinned(moved)
        try:
            tcx.update(link, program_fd)
        finally:
            os.close(link)
        os.rename(moved, pin)
        table.unlink()

    def _is_meter(self, number: int) -> bool:
        name = self._name(number)
        return name in METERS or (name == "" and (self._folder / f"{_METER}{number}").is_symlink())

    def _name(self, number: int) -> str | None:
        """A program's name; "": we may not know (that takes CAP_SYS_ADMIN); None: it has just gone."""
        if number not in self._names:
            try:
                self._names[number] = kernel_objects.program_info(number).name
            except BpfError as error:
                if error.errno == errno.ENOENT:
                    return None
                self._names[number] = ""
        return self._names[number]


def announce(folder: Path, programs: Iterable[int]) -> None:
    """Says which programs (by id) are `top`'s, to an agent that may not ask for their names. OSError.

    By symbolic links beside the pins of the instance, in ``folder``: a bpffs has no plain files, a pin would keep the
    program when `top` was killed, and nothing else is sure to be seen by both. What killed ones left is removed.
    Without the folder nothing of the instance is in a tcx chain.
    """
    if not folder.is_dir():
        return
    for left in folder.glob(f"{_METER}[0-9]*"):
        try:
            kernel_objects.program_info(int(left.name.removeprefix(_METER)))
        except BpfError as error:
            if error.errno == errno.ENOENT:
                left.unlink(missing_ok=True)
    for number in programs:
        (folder / f"{_METER}{number}").symlink_to(f"process-{os.getpid()}")


def withdraw(folder: Path, programs: Iterable[int]) -> None:
    """They are gone. What cannot be removed says nothing of any other program: the next `top` tries again."""
    with contextlib.suppress(OSError):
        for number in programs:
            (folder / f"{_METER}{number}").unlink(missing_ok=True)


def _described(pin: Path) -> dict[str, int]:
    try:
        link = tcx.open_pinned(pin)
    except BpfError:
        return {}
    try:
        return tcx.described(link)
    finally:
        os.close(link)
