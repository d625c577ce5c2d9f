# SPDX-License-Identifier: Apache-2.0
"""The proxy's programs in the tcx chains of devices (Linux 6.6): first at ingress, last at egress, with pinned links.

The pin ``<folder>/<ifindex>-ingress`` or ``-egress`` keeps a link when the agent is gone; the next run replaces the
program of the link atomically. No qdisc is needed or created.
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
# The programs of `top` (bpf/meter.bpf.c): they run before the proxy's, and let everything pass.
METERS = frozenset({"meter_ethernet", "meter_l3"})
_METER = "meter-"
_GONE = (errno.ENODEV, errno.ENXIO, errno.ENOLINK)


class Links:
    """The links of one instance. ``folder`` is in a bpffs; it is created with the first link.

    ``chain`` is the function that queries a chain, by device and hook.
    """

    def __init__(self, folder: Path, chain: Callable[[int, int], tuple[int, ...]] = tcx.chain) -> None:
        self._folder = folder
        self._chain = chain
        self._names: dict[int, str] = {}
        #: Links that could not be pinned: held open, so that their programs serve until the agent ends.
        self._unpinned: dict[tuple[int, int], int] = {}
        #: The program of each link, by device and hook.
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
        """Attaches the program at its end of the chain, or replaces a former one. BpfError."""
        self.pin()
        number = tcx.described(program_fd)["prog_id"]
        self._finish_move(ifindex, hook)
        if not self._replace(ifindex, hook, program_fd):
            self._create(ifindex, hook, program_fd, self._pin(ifindex, hook))
        self._table(ifindex, hook).unlink(missing_ok=True)
        self.programs[ifindex, hook] = number
        if not self.is_in_place(ifindex, hook):
            self._move(ifindex, hook, program_fd)

    def pin(self) -> None:
        """Pins the links that could not be pinned. One that still cannot be stays held."""
        for key, link in list(self._unpinned.items()):
            with contextlib.suppress(OSError):
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                tcx.pin(link, self._pin(*key))
                self._release(key)

    def close(self) -> None:
        """Programs whose links are pinned stay attached."""
        for key in list(self._unpinned):
            self._release(key)

    def detach(self, ifindex: int, hook: int) -> bool:
        """Detaches the program. False if there was none."""
        self._release((ifindex, hook))
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
        """Removes what is left of a device that is gone."""
        for hook in HOOKS:
            self.programs.pop((ifindex, hook), None)
            self._release((ifindex, hook))
            for pin in (self._pin(ifindex, hook), self._moved(ifindex, hook), self._table(ifindex, hook)):
                pin.unlink(missing_ok=True)

    def is_there(self, ifindex: int, hook: int) -> bool:
        """Whether the program is anywhere in the chain. BpfError."""
        return self.programs.get((ifindex, hook)) in self._chain(ifindex, hook)

    def is_in_place(self, ifindex: int, hook: int) -> bool:
        """Whether no other program is before it at ingress, or after it at egress. BpfError."""
        chain = self._chain(ifindex, hook)
        own = self.programs.get((ifindex, hook))
        if own not in chain:
            return False
        at = chain.index(own)
        beyond = chain[:at] if hook == INGRESS else chain[at + 1 :]
        return all(self._is_meter(number) for number in beyond)

    def others(self, ifindex: int, hook: int) -> tuple[str, ...]:
        """Other programs in the chain, as text: at ingress those after the proxy's, at egress all. BpfError."""
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

    def keep_names(self, programs: Container[int]) -> None:
        """Forgets the names of all other programs: a CNI plugin may load new ones for each pod."""
        for number in [number for number in self._names if number not in programs]:
            del self._names[number]

    def _pin(self, ifindex: int, hook: int) -> Path:
        return self._folder / f"{ifindex}-{HOOKS[hook]}"

    def _moved(self, ifindex: int, hook: int) -> Path:
        return self._folder / f"{ifindex}-{HOOKS[hook]}{_MOVED}"

    def _table(self, ifindex: int, hook: int) -> Path:
        return self._folder / f"{ifindex}-{HOOKS[hook]}-table"

    def _finish_move(self, ifindex: int, hook: int) -> None:
        """Completes a move after the agent was killed: of the two links, keeps the one that is attached."""
        moved, pin = self._moved(ifindex, hook), self._pin(ifindex, hook)
        if not moved.exists():
            return
        if _described(pin).get("ifindex"):
            moved.unlink()
        else:
            os.rename(moved, pin)

    def _replace(self, ifindex: int, hook: int, program_fd: int) -> bool:
        """False: there is no link, or its device is gone and the ifindex was reused."""
        pin = self._pin(ifindex, hook)
        held = self._unpinned.get((ifindex, hook))
        try:
            link = tcx.open_pinned(pin) if held is None else os.dup(held)
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
        self._release((ifindex, hook))
        pin.unlink(missing_ok=True)
        return False

    def _create(self, ifindex: int, hook: int, program_fd: int, pin: Path) -> None:
        link = tcx.attach(program_fd, ifindex, hook, tcx.BEFORE if hook == INGRESS else tcx.AFTER)
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            tcx.pin(link, pin)
        except OSError:
            if pin == self._moved(ifindex, hook):
                os.close(link)
                raise
            # The bpffs is gone. A device without a pin is served better than not at all.
            self._release((ifindex, hook))
            self._unpinned[ifindex, hook] = link
        else:
            os.close(link)

    def _release(self, key: tuple[int, int]) -> None:
        """Close a link that is held without a pin."""
        if key in self._unpinned:
            os.close(self._unpinned.pop(key))

    def _move(self, ifindex: int, hook: int, program_fd: int) -> None:
        """Moves the program to its end of the chain: attaches a second link there, then detaches the first one.

        Meanwhile the program runs twice on a packet; the second run keeps the decision of the first one
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
        """A program's name; "": unknown without CAP_SYS_ADMIN; None: it is gone."""
        if number not in self._names:
            try:
                self._names[number] = kernel_objects.program_info(number).name
            except BpfError as error:
                if error.errno == errno.ENOENT:
                    return None
                self._names[number] = ""
        return self._names[number]


def announce(folder: Path, programs: Iterable[int]) -> None:
    """Publishes which programs (by id) are `top`'s, for an agent that may not query their names. OSError.

    Uses symbolic links next to the pins of the instance, in ``folder``: a bpffs has no plain files, a pin would keep
    the program after `top` was killed, and no other place is visible to both. Links of killed processes are removed.
    Without the folder the instance has nothing in a tcx chain.
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
    """The programs are gone. A link that cannot be removed does no harm: the next `top` tries again."""
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
