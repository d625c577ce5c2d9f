# SPDX-License-Identifier: Apache-2.0
"""Requests to the API server, by the kubernetes library: objects are plain dictionaries.

A request is repeated while the server does not answer: each one here may be made twice. One that is refused for lack of
rights ends the command.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pyebpf_proxy.cluster.errors import ClusterError, StoppedError
from pyebpf_proxy.cluster.kubeconfig import client_of, read_kubeconfig
from pyebpf_proxy.common.nesting import decode_nested
from pyebpf_proxy.see.answers import NO_ANSWER

Object = dict[str, Any]

#: For how long a server that has answered before may be away.
PATIENCE = 300.0
_REQUEST_SECONDS = 30.0
#: Of a request that is not worth waiting for.
_LAST_SECONDS = 5.0
_PAUSE = 1.0
#: How often a command in a pod looks whether its answer is still wanted.
_LOOK_SECONDS = 0.5
#: The most bytes that a command in a pod may print.
_MOST_PRINTED = 64 << 20
#: Statuses after which the same request may succeed.
_BUSY = 429
_UNAUTHORIZED = 401
_LATER = frozenset({0, _BUSY, 500, 502, 503, 504})
#: How often a change is repeated that another one has overtaken.
_CONFLICTS = 5
JSON, MERGE, APPLY = "application/json", "application/merge-patch+json", "application/apply-patch+yaml"
MANAGER = "pyebpf-proxy-cluster"
#: The protocol of commands in pods: output, errors and the exit status in channels.
_CHANNELS = "v4.channel.k8s.io"


class Kind(NamedTuple):
    """A resource: API group and version (``apps/v1``), its name, and whether it is in namespaces."""

    version: str
    name: str
    namespaced: bool = True

    def path(self, namespace: str = "", name: str = "") -> str:
        """The path of a collection or an object."""
        root = f"/apis/{self.version}" if "/" in self.version else f"/api/{self.version}"
        place = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return f"{root}{place}/{self.name}{f'/{name}' if name else ''}"


NODES = Kind("v1", "nodes", namespaced=False)
PODS = Kind("v1", "pods")
CONFIG_MAPS = Kind("v1", "configmaps")
SERVICES = Kind("v1", "services")
NAMESPACES = Kind("v1", "namespaces", namespaced=False)
DAEMON_SETS = Kind("apps/v1", "daemonsets")
SLICES = Kind("discovery.k8s.io/v1", "endpointslices")
LEASES = Kind("coordination.k8s.io/v1", "leases")
EVENTS = Kind("v1", "events")
BINDINGS = Kind("rbac.authorization.k8s.io/v1", "clusterrolebindings", namespaced=False)
_KINDS = {
    "ServiceAccount": Kind("v1", "serviceaccounts"),
    "ConfigMap": CONFIG_MAPS,
    "ClusterRole": Kind("rbac.authorization.k8s.io/v1", "clusterroles", namespaced=False),
    "ClusterRoleBinding": BINDINGS,
    "DaemonSet": DAEMON_SETS,
}


def kind_of(item: Mapping[str, Any]) -> Kind:
    """The kind of an object that these commands create."""
    return _KINDS[item["kind"]]


class RefusedError(Exception):
    """The API server's refusal: its status, its reason (``NotFound``) and its message."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason

    @property
    def by_webhook(self) -> bool:
        """Whether an admission webhook could not be asked: the API server itself answers."""
        return self.status == 500 and "failed calling webhook" in str(self)


class Api:
    """One cluster, as the chosen context of the kubeconfig names it."""

    #: Of each thread: whether these are its last requests.
    _saying = threading.local()

    def __init__(self, kubeconfig: str = "", context: str = "", say: Callable[[str], None] = lambda text: None) -> None:
        self._kubeconfig = kubeconfig
        self.context, configuration = read_kubeconfig(kubeconfig, context)
        self.url = str(configuration.host)
        self._client = client_of(configuration)
        self._say = say
        self._answered = False
        self._away = False
        self._hung_up = threading.Event()
        #: Asked before each change: StoppedError if this command may change nothing any more.
        self.guard: Callable[[], None] = unguarded

    # ---- requests ------------------------------------------------------------------------------------------------

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        content: str = JSON,
        query: Mapping[str, str] | None = None,
        text: bool = False,
        later: frozenset[int] = _LATER,
    ) -> Any:
        """The answer, decoded. ``text``: as it is. RefusedError; ClusterError if the server does not answer in time.

        ``later``: statuses after which the request is repeated. A change asks ``guard`` each time: while the server did
        not answer, another command may have taken over.
        """
        end = time.monotonic() + (0.0 if self._is_last else PATIENCE)
        is_renewed = False
        while True:
            self._ask_guard(method, path)
            try:
                answer = self._once(method, path, body, content, query or {}, text)
            except RefusedError as refused:
                # The status of a log may be that of the kubelet, for the API server's own credentials.
                if refused.status == _UNAUTHORIZED and self._answered and not text:
                    if is_renewed:
                        why = "the API server no longer accepts the kubeconfig's credentials"
                        raise StoppedError(why, NO_ANSWER) from None
                    is_renewed = True
                    self._renew()
                    continue
                if refused.status not in later or refused.by_webhook:
                    raise
                why = str(refused)
                self._answered |= refused.status == _BUSY
            else:
                self._answered = True
                if self._away:
                    self._away = False
                    self._say("the API server answers again")
                return answer
            if not self._answered:
                raise StoppedError(f"the API server at {self.url} does not answer: {why}", NO_ANSWER)
            if time.monotonic() > end:
                raise StoppedError(f"the API server has not answered for {PATIENCE:.0f} s: {why}", NO_ANSWER)
            if not self._away:
                self._away = True
                self._say(f"the API server does not answer ({why}); retrying")
            time.sleep(_PAUSE)

    def _renew(self) -> None:
        """Read the kubeconfig's credentials again: a token's file may have a new one. StoppedError."""
        try:
            _, configuration = read_kubeconfig(self._kubeconfig, self.context)
            renewed = client_of(configuration)
        except ClusterError as error:
            raise StoppedError(f"the credentials have expired, and cannot be read again: {error}", NO_ANSWER) from None
        if str(configuration.host) != self.url:
            text = f"the credentials have expired, and the kubeconfig now names another server: {configuration.host}"
            raise StoppedError(text, NO_ANSWER)
        self._client = renewed

    def _ask_guard(self, method: str, path: str) -> None:
        """Before a change. That of a Lease is made for the version that was read, and needs no guard."""
        if method != "GET" and f"/{LEASES.name}/" not in path:
            self.guard()

    @contextlib.contextmanager
    def last_words(self) -> Iterator[None]:
        """For what a command that ends leaves behind: this thread makes each request once, and none raises an error."""
        before, self._saying.last = self._is_last, True
        try:
            with contextlib.suppress(ClusterError, RefusedError):
                yield
        finally:
            self._saying.last = before

    @property
    def _is_last(self) -> bool:
        return bool(getattr(self._saying, "last", False))

    def _once(self, method: str, path: str, body: Any, content: str, query: Mapping[str, str], text: bool) -> Any:
        from kubernetes.client.exceptions import OpenApiException
        from urllib3.exceptions import HTTPError

        headers = {"Accept": "*/*" if text else JSON} | ({"Content-Type": content} if body is not None else {})
        try:
            serialized = self._client.param_serialize(
                method,
                path,
                query_params=list(query.items()),
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
            )
            seconds = _LAST_SECONDS if self._is_last else _REQUEST_SECONDS
            response = self._client.call_api(*serialized, _request_timeout=seconds)
            data: bytes = response.read()
        except (HTTPError, OSError, OpenApiException) as error:
            raise RefusedError(0, "NoAnswer", _shortened(error)) from None
        if not 200 <= response.status < 300:
            raise _refused(response.status, data)
        if text:
            return data.decode(errors="replace")
        try:
            return decode_nested(json.loads, data)
        except ValueError:
            raise RefusedError(0, "NoAnswer", "the answer was truncated") from None

    def get(self, kind: Kind, name: str, namespace: str = "") -> Object | None:
        """One object; None if it does not exist."""
        try:
            return dict(self.request("GET", kind.path(namespace, name)))
        except RefusedError as refused:
            if refused.status == 404:
                return None
            raise

    def objects(self, kind: Kind, namespace: str = "", labels: str = "", fields: str = "") -> list[Object]:
        """All objects that match the selectors."""
        query = {"labelSelector": labels, "fieldSelector": fields}
        answer = self.request("GET", kind.path(namespace), query={key: each for key, each in query.items() if each})
        return list(answer["items"])

    def apply(self, item: Object, dry_run: bool = False) -> Object:
        """Server-side apply, with validation of every field."""
        metadata = item["metadata"]
        query = {"fieldManager": MANAGER, "force": "true", "fieldValidation": "Strict"}
        if dry_run:
            query["dryRun"] = "All"
        path = kind_of(item).path(metadata.get("namespace", ""), metadata["name"])
        return dict(self._despite_conflicts("PATCH", path, item, APPLY, query))

    def create(self, kind: Kind, item: Object, dry_run: bool = False) -> Object:
        """A new object. That it exists already is no error: a former attempt may have made it."""
        query = {"fieldManager": MANAGER, "fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
        metadata = item["metadata"]
        try:
            return dict(self._despite_conflicts("POST", kind.path(metadata.get("namespace", "")), item, JSON, query))
        except RefusedError as refused:
            if refused.status == 409 and refused.reason == "AlreadyExists":
                return dict(self.request("GET", kind.path(metadata.get("namespace", ""), metadata["name"])))
            raise

    def patch(
        self, kind: Kind, name: str, change: Object, namespace: str = "", part: str = "", dry_run: bool = False
    ) -> Object:
        """A merge patch. ``part``: of that subresource, such as ``status``."""
        query = {"fieldManager": MANAGER} | ({"dryRun": "All"} if dry_run else {})
        path = f"{kind.path(namespace, name)}/{part}".rstrip("/")
        if change.get("metadata", {}).get("resourceVersion"):
            return dict(self.request("PATCH", path, change, MERGE, query))
        return dict(self._despite_conflicts("PATCH", path, change, MERGE, query))

    def _despite_conflicts(self, method: str, path: str, body: Object, content: str, query: Mapping[str, str]) -> Any:
        """A change of any version. The server refuses it if others change the object, or a quota, all the time."""
        for _ in range(_CONFLICTS):
            try:
                return self.request(method, path, body, content, query)
            except RefusedError as refused:
                if refused.status != 409 or refused.reason != "Conflict":
                    raise
            time.sleep(_PAUSE)
        return self.request(method, path, body, content, query)

    def delete(self, kind: Kind, name: str, namespace: str = "", uid: str = "") -> bool:
        """False: it did not exist. ``uid``: only that object, not another one of its name."""
        body = {"preconditions": {"uid": uid}} if uid else None
        try:
            self.request("DELETE", kind.path(namespace, name), body)
        except RefusedError as refused:
            if refused.status == 404 or (uid and refused.status == 409):
                return False
            raise
        return True

    def log(
        self,
        pod: str,
        namespace: str,
        container: str,
        most_bytes: int = 1 << 20,
        previous: bool = False,
        last_lines: int = 0,
    ) -> str:
        """The beginning of a container's log; "" while it has none, or while its kubelet does not give it.

        ``last_lines``: instead of the beginning, this number of lines at the end.
        """
        query = {"container": container, "limitBytes": str(most_bytes)} | ({"previous": "true"} if previous else {})
        query |= {"tailLines": str(last_lines)} if last_lines else {}
        path = f"{PODS.path(namespace, pod)}/log"
        try:
            return str(self.request("GET", path, query=query, text=True, later=frozenset({0, _BUSY})))
        except RefusedError as refused:
            if refused.status in (400, 404) or refused.status >= 500:
                return ""
            raise

    # ---- commands in pods ----------------------------------------------------------------------------------------

    def hang_up(self) -> None:
        """End the commands in pods that run in other threads: their answers are not wanted any more."""
        self._hung_up.set()

    def execute(
        self, pod: str, namespace: str, container: str, command: Sequence[str], seconds: float
    ) -> tuple[int, str, str]:
        """Run a command in a pod's container: its exit status, what it printed, its errors. RefusedError."""
        from kubernetes.stream import ws_client
        from websocket import WebSocketBadStatusException, WebSocketException

        stream: Any = ws_client
        end = time.monotonic() + seconds
        path = f"{PODS.path(namespace, pod)}/exec"
        _, url, headers, *_ = self._client.param_serialize("GET", path, auth_settings=["BearerToken"])
        words = (("command", word) for word in command)
        query = [("container", container), *words, ("stdout", "true"), ("stderr", "true")]
        # v4: every API server has it, and passes it to the kubelet as it is.
        wanted = {name.lower(): value for name, value in headers.items()} | {"sec-websocket-protocol": _CHANNELS}
        try:
            place = stream.get_websocket_url(url, query)
            printed = self._printed(self._opened(place, wanted, seconds, end), seconds, end)
            ended = json.loads(printed[stream.ERROR_CHANNEL] or b"{}")
        except WebSocketBadStatusException as error:
            raise _refused(error.status_code, error.resp_body or b"") from None
        except (OSError, WebSocketException, ValueError) as error:
            raise RefusedError(0, "NoAnswer", _shortened(error)) from None
        said, errors = printed[stream.STDOUT_CHANNEL], printed[stream.STDERR_CHANNEL]
        return _exit_status(ended), said.decode(errors="replace"), errors.decode(errors="replace")

    def _opened(self, place: str, headers: Mapping[str, str], seconds: float, end: float) -> Any:
        """A WebSocket. RefusedError, OSError and the like.

        The API server waits for the kubelet without a limit, and the library has none either, so a thread waits for it.
        It is a daemon, which does not keep a command from ending.
        """
        from kubernetes.stream import ws_client

        stream: Any = ws_client
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def open_it() -> None:
            try:
                answers.put(stream.create_websocket(self._client.configuration, place, headers))
            except Exception as error:
                answers.put(error)

        threading.Thread(target=open_it, daemon=True).start()
        while True:
            left = self._left(seconds, end)
            try:
                answer = answers.get(timeout=min(left, _LOOK_SECONDS))
            except queue.Empty:
                continue
            if isinstance(answer, Exception):
                raise answer
            return answer

    def _left(self, seconds: float, end: float) -> float:
        """For how long a command in a pod may still run. RefusedError if its answer is not wanted any more."""
        left = end - time.monotonic()
        if left <= 0 or self._hung_up.is_set():
            raise RefusedError(0, "NoAnswer", f"the command did not finish within {seconds:.0f} s")
        return left

    def _printed(self, socket: Any, seconds: float, end: float) -> Mapping[int, bytearray]:
        """What a command prints, by channel, until it ends. Closes the WebSocket. RefusedError, OSError and the like.

        The library's own loop does not end while a pod prints without pause.
        """
        from websocket import ABNF, WebSocketTimeoutException

        printed: defaultdict[int, bytearray] = defaultdict(bytearray)
        size = 0
        try:
            while size <= _MOST_PRINTED:
                socket.settimeout(min(self._left(seconds, end), _LOOK_SECONDS))
                try:
                    kind, frame = socket.recv_data_frame(True)
                except WebSocketTimeoutException:
                    continue
                if kind == ABNF.OPCODE_CLOSE:
                    return printed
                if kind in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT) and frame.data:
                    printed[frame.data[0]] += frame.data[1:]
                    size += len(frame.data)
            raise RefusedError(0, "NoAnswer", f"the command printed more than {_MOST_PRINTED >> 20} MiB")
        finally:
            socket.shutdown()  # close() waits for an answer of the server

    # ---- rights --------------------------------------------------------------------------------------------------

    def missing_rights(self, wanted: Iterable[tuple[str, str, str, str]]) -> list[str]:
        """What this user may not do: of (verb, API group, resource, namespace), in words, one text per resource."""
        missing: dict[str, list[str]] = {}
        for verb, group, resource, namespace in wanted:
            name, _, part = resource.partition("/")
            asked = {"verb": verb, "group": group, "resource": name, "subresource": part, "namespace": namespace}
            body = {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": asked},
            }
            answer = self.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)
            if not answer["status"].get("allowed"):
                what = f"{resource}.{group}" if group else resource
                missing.setdefault(f"{what}{f' in {namespace}' if namespace else ''}", []).append(verb)
        return [f"{', '.join(verbs)} {what}" for what, verbs in missing.items()]


def unguarded() -> None:
    """For a command that needs no Lease."""


def _exit_status(ended: Object) -> int:
    """Of a command, as the status object at its end has it. RefusedError if it was not run."""
    if ended.get("status") == "Success":
        return 0
    for cause in (ended.get("details") or {}).get("causes") or ():
        if cause.get("reason") == "ExitCode":
            return int(cause["message"])
    raise RefusedError(0, ended.get("reason", "NoAnswer"), ended.get("message") or "the connection was closed")


def _refused(status: int, body: bytes) -> RefusedError:
    text = body.decode(errors="replace")
    try:
        answer = json.loads(text)
        return RefusedError(status, answer.get("reason", ""), answer.get("message", text))
    except (ValueError, AttributeError):
        return RefusedError(status, "", text.strip()[:300])


def _shortened(error: Exception) -> str:
    """The innermost reason: urllib3 wraps it several times."""
    reason = getattr(error, "reason", None)
    if isinstance(reason, Exception):
        return _shortened(reason)
    text = str(reason or error).rpartition("Failed to establish a new connection: ")[2]
    text = re.sub(r"^\[Errno \d+\] | \(_ssl\.c:\d+\)?$", "", text.rpartition(": ")[2].strip(")'"))
    return text or type(error).__name__
