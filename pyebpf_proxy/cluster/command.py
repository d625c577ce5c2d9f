# SPDX-License-Identifier: Apache-2.0
"""What ``cluster install``, ``upgrade`` and ``rollback`` have in common: one node after the other, under a Lease."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from pyebpf_proxy.cluster import check, datapath, model, objects, takeover, task_pod
from pyebpf_proxy.cluster.api import Api, Object, RefusedError
from pyebpf_proxy.cluster.errors import ClusterError, NodeGoneError, StoppedError
from pyebpf_proxy.cluster.lease import Lease
from pyebpf_proxy.cluster.model import View, view
from pyebpf_proxy.cluster.output import Output
from pyebpf_proxy.cluster.takeover import Say, Site
from pyebpf_proxy.see.answers import QUESTION

_ROLE_SECONDS = 10.0
_INTERRUPTED = "interrupted"


class Command:
    """One run of one command: where, what it may do, and what it has done."""

    #: As on the command line.
    name = ""

    def __init__(self, api: Api, output: Output, selector: str, seconds: float) -> None:
        self.api = api
        self.output = output
        self.seconds = seconds
        self.lease = Lease(api, self.name, output.say)
        self._selector = selector
        self._done: list[str] = []
        output.document |= {"context": api.context, "done": self._done, "error": None}

    def view(self) -> View:
        """The selected nodes. ClusterError: there is none, a right is missing, or the role is another one's."""
        check.rights(self.api, check.RIGHTS)
        check.own_role(self.api)
        return check.selected(self.api, self._selector)

    def again(self) -> View:
        """The same, now that no other command changes it."""
        return view(self.api, self._selector)

    def site(self, image: str) -> Site:
        """What the steps on all nodes need. Read before anything is changed: it may be refused."""
        health = model.kube_proxy_health(model.kube_proxy_configuration(self.api))
        return Site(self.api, image, task_pod.targets(self.api), health, self.seconds)

    def datapath_digest(self) -> str:
        """Of the DatapathConfiguration that the cluster has. ClusterError if no agent would start with it."""
        return datapath.digest(datapath.stored(self.api))

    @staticmethod
    def require_template(present: Object | None, image: str) -> None:
        """ClusterError: this command has no pod template for the image. ``present``: the agent's DaemonSet."""
        if not objects.fits(present, image):
            raise ClusterError(
                f"{image} is older than this command, whose pod template it may not understand; use the pyebpf-proxy"
                " command of that version",
                QUESTION,
            )

    def apply(self, items: list[Object], dry_run: bool = False) -> None:
        """Create or change objects. ClusterError names one that is refused.

        The API server may look at a ClusterRole for who binds it, and knows a new one only a moment later. The
        controller of a DaemonSet has seen the change at the end: it makes no pod of the former template any more.
        """
        end = time.monotonic() + _ROLE_SECONDS
        for item in items:
            while True:
                try:
                    made = self.api.apply(item, dry_run)
                except RefusedError as refused:
                    if item["kind"] == "ClusterRoleBinding" and refused.status == 404:
                        if dry_run:
                            break
                        if time.monotonic() < end:
                            time.sleep(task_pod.POLL_SECONDS)
                            continue
                    raise ClusterError(f"{item['kind']} {item['metadata']['name']} was rejected: {refused}") from None
                if item["kind"] == "DaemonSet" and not dry_run:
                    takeover.wait_observed(self.api, made, self.seconds)
                break

    def leave_out(self, nodes: list[str], why: str) -> None:
        """Name nodes that the command skips."""
        if nodes:
            self.output.say(f"skipped, because {why}: {', '.join(nodes)}")

    def leave_out_down(self, found: View) -> None:
        """Name those on which nothing would happen."""
        self.leave_out([node for node in found.nodes if not found.is_up(node)], "they are not ready")

    def leave_out_leaving(self, found: View) -> None:
        """Name those on which no agent would become ready."""
        self.leave_out([node for node in found.nodes if found.is_leaving(node)], "they are being removed")

    def each(self, todo: list[str], what: str, do: Callable[[str, Say], None]) -> None:
        """``do`` for one node after the other; one that does not exist any more is named. ``what``: for the bar."""
        with self.output.progress(what, len(todo)) as step:
            for number, node in enumerate(todo, 1):
                try:
                    self.lease.check()
                except StoppedError as stopped:
                    raise StoppedError(f"{stopped}{self.done_before}", stopped.status) from None
                say = self._prefixed(f"[{number}/{len(todo)}] {node}: ")
                try:
                    do(node, say)
                except NodeGoneError as gone:
                    say(str(gone))
                else:
                    self._done.append(node)
                step()

    @contextlib.contextmanager
    def changing(self, again: str) -> Iterator[None]:
        """Under the Lease. Ctrl-C is said also where no node is in progress. ``again``: how to continue."""
        with self.lease:
            try:
                yield
            except KeyboardInterrupt:
                if self.output.document["error"] is None:
                    self._tell(f"{_INTERRUPTED}; {again}{self.done_before}")
                raise
            except (ClusterError, RefusedError):
                raise
            except Exception:
                self._tell(f"an internal error has ended the command; {again}{self.done_before}")
                raise

    def _tell(self, text: str) -> None:
        """Why the command ends, also in the document."""
        self.output.document["error"] = text
        self.output.say(text)

    def _prefixed(self, prefix: str) -> Say:
        """For the lines about one node."""

        def say(text: str) -> None:
            (self._tell if text.startswith(_INTERRUPTED) else self.output.say)(prefix + text)

        return say

    @property
    def done_before(self) -> str:
        """For the end of an error: the nodes that are done."""
        return f"; done before: {', '.join(self._done)}" if self._done else ""


def naming(node: str, end: str, end_if_stopped: str = "") -> contextlib.AbstractContextManager[None]:
    """Errors in the block begin with the node's name, and end with what they mean for the node."""
    return ending(end, end_if_stopped, f"{node}: ")


@contextlib.contextmanager
def ending(end: str, end_if_stopped: str = "", begin: str = "") -> Iterator[None]:
    """Errors in the block end with what they mean for the cluster, or for a node."""
    try:
        yield
    except NodeGoneError:
        raise
    except StoppedError as stopped:
        raise StoppedError(f"{begin}{stopped}; {end_if_stopped or end}", stopped.status) from None
    except (ClusterError, RefusedError) as error:
        raise ClusterError(f"{begin}{error}; {end}") from None


@contextlib.contextmanager
def telling(say: Say, what: str) -> Iterator[None]:
    """Ctrl-C in the block is said, with what it means for the node."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"{_INTERRUPTED}; {what}")
        raise
