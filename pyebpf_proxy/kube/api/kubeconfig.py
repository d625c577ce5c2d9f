# SPDX-License-Identifier: Apache-2.0
"""A kubeconfig file as an ``Access``.

Only this file is read. As in kube-proxy, no other files are merged, and ``KUBECONFIG`` and ``~/.kube/config`` are
ignored.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections import Counter
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import field

from pyebpf_proxy.common.errors import FatalError
from pyebpf_proxy.config import yaml_text
from pyebpf_proxy.config.loader import content
from pyebpf_proxy.kube.api.access import Access, ExecPlugin, Tls, server_url, without_credentials

_EXEC_VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")
#: API versions that do not require interactiveMode.
_NOT_INTERACTIVE = tuple(f"client.authentication.k8s.io/{version}" for version in ("v1beta1", "v1alpha1"))
#: The most values of a kubeconfig, with aliases expanded. Real ones have far fewer.
MAX_VALUES = 100_000
_EXEC_EXTENSION = "client.authentication.k8s.io/exec"

_T = TypeVar("_T")


class _Extension(msgspec.Struct):
    name: str = ""
    extension: Any = None


class _Cluster(msgspec.Struct, rename="kebab"):
    server: str = ""
    tls_server_name: str = ""
    insecure_skip_tls_verify: bool = False
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    proxy_url: str = ""
    disable_compression: bool = False
    extensions: list[_Extension] = []


class _Variable(msgspec.Struct):
    name: str = ""
    value: str = ""


class _Exec(msgspec.Struct, rename="camel"):
    command: str = ""
    args: list[str] = []
    env: list[_Variable] = []
    api_version: str = ""
    install_hint: str = ""
    provide_cluster_info: bool = False
    interactive_mode: str = ""


class _User(msgspec.Struct, rename="kebab"):
    client_certificate: str = ""
    client_certificate_data: str = ""
    client_key: str = ""
    client_key_data: str = ""
    token: str = ""
    token_file: str = field(default="", name="tokenFile")
    username: str = ""
    password: str = ""
    impersonate: str = field(default="", name="as")
    impersonate_uid: str = field(default="", name="as-uid")
    impersonate_groups: list[str] = field(default_factory=list, name="as-groups")
    impersonate_extra: dict[str, list[str]] = field(default_factory=dict, name="as-user-extra")
    auth_provider: dict[str, Any] = {}
    exec: _Exec | None = None


class _Context(msgspec.Struct):
    cluster: str = ""
    user: str = ""


class _NamedCluster(msgspec.Struct):
    name: str = ""
    cluster: _Cluster = field(default_factory=_Cluster)


class _NamedUser(msgspec.Struct):
    name: str = ""
    user: _User = field(default_factory=_User)


class _NamedContext(msgspec.Struct):
    name: str = ""
    context: _Context = field(default_factory=_Context)


class _Config(msgspec.Struct, rename="kebab"):
    current_context: str = ""
    clusters: list[_NamedCluster] = []
    users: list[_NamedUser] = []
    contexts: list[_NamedContext] = []


def load(path: Path, master: str = "") -> Access | None:
    """Read a kubeconfig; ``master`` overrides its server. None if it is empty. Raises FatalError."""
    config = _read(path)
    if not (config.clusters or config.users or config.contexts or config.current_context or master):
        return None
    problems: list[str] = []
    chosen = config.current_context
    contexts = {entry.name: entry.context for entry in config.contexts}
    problem = f"context was not found for specified context: {chosen}"
    context = _chosen(contexts, chosen, problem, problems) or _Context()
    clusters = {entry.name: entry.cluster for entry in config.clusters}
    problem = f'cluster "{context.cluster}" was not found for context "{chosen}"'
    cluster = _chosen(clusters, context.cluster, problem, problems) or _Cluster()
    users = {entry.name: entry.user for entry in config.users}
    problem = f'user "{context.user}" was not found for context "{chosen}"'
    user = _chosen(users, context.user, problem, problems) or _User()
    if problems:
        raise FatalError(f"{path}: invalid configuration: {_aggregate(problems)}")
    if master:
        # As in client-go: the name in the certificate is that of the file's server.
        cluster.server, cluster.tls_server_name = master, ""
    if not cluster.server:
        which = f'no server found for cluster "{context.cluster}"' if context.cluster else "no server was given"
        raise FatalError(f"{path}: invalid configuration: {which}")
    folder = path.absolute().parent
    access = _access(path, folder, cluster, user, context, given=bool(master))
    return access if access.server.startswith("https:") else without_credentials(access)


def _read(path: Path) -> _Config:
    try:
        os.stat(path)
    except OSError as error:
        raise FatalError(f"stat {path}: {(error.strerror or str(error)).lower()}") from None
    try:
        written = content(path)
    except ValueError as error:
        raise FatalError(f'error loading config file "{path}": {error}') from None
    try:
        document = _plain(yaml_text.load(written).value)
    except (ValueError, RecursionError) as error:
        what = "yaml: nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise FatalError(f'error loading config file "{path}": {what}') from None
    if document is None:
        return _Config()
    if not isinstance(document, dict):
        raise FatalError(f'error loading config file "{path}": it is not a mapping, so not a kubeconfig')
    kind = document.get("kind")
    if kind not in (None, "", "Config"):
        raise FatalError(f'error loading config file "{path}": no kind "{kind}" is registered for version "v1"')
    try:
        config = msgspec.convert(document, _Config)
    except msgspec.ValidationError as error:
        text, _, place = str(error).replace("`", "").rpartition(" - at ")
        what = f"{place.removeprefix('$.')}: {text[:1].lower()}{text[1:]}" if text else str(error)
        raise FatalError(f'error loading config file "{path}": {what}') from None
    for what, entries in (("clusters", config.clusters), ("users", config.users), ("contexts", config.contexts)):
        names = Counter(entry.name for entry in entries)
        if twice := next((name for name, count in names.items() if count > 1), None):
            raise FatalError(f'error loading config file "{path}": {what}: duplicate name "{twice}"')
    return config


def _plain(value: object) -> Any:
    """Without nulls, which mean absent in Go, and with Python's numbers. ValueError for excessive aliases."""
    left = MAX_VALUES

    def copied(value: object) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError("yaml: document contains excessive aliasing")
        if isinstance(value, dict):
            return {key: copied(item) for key, item in value.items() if item is not None}
        if isinstance(value, list):
            return [copied(item) for item in value if item is not None]
        if isinstance(value, yaml_text.Number):
            return int(value) if value.lstrip("-").isdigit() else float(value)
        return value

    return copied(value)


def _chosen(entries: dict[str, _T], name: str, problem: str, problems: list[str]) -> _T | None:
    """The entry with this name. None if ``name`` is empty, even if there is only one entry, or if it is missing; a
    missing entry is added to ``problems``."""
    if name and name not in entries:
        problems.append(problem)
    return entries.get(name) if name else None


def _access(path: Path, folder: Path, cluster: _Cluster, user: _User, context: _Context, *, given: bool) -> Access:
    """``given``: the server is not the file's own."""
    problems: list[str] = []
    tls = Tls(
        ca_file="" if cluster.certificate_authority_data else _resolve(folder, cluster.certificate_authority),
        ca_data=_decode(cluster.certificate_authority_data, "certificate-authority-data", problems),
        certificate_file="" if user.client_certificate_data else _resolve(folder, user.client_certificate),
        certificate_data=_decode(user.client_certificate_data, "client-certificate-data", problems),
        key_file="" if user.client_key_data else _resolve(folder, user.client_key),
        key_data=_decode(user.client_key_data, "client-key-data", problems),
        server_name=cluster.tls_server_name,
        insecure=cluster.insecure_skip_tls_verify,
    )
    problems += _tls_problems(tls, context)
    if cluster.proxy_url and (what := _proxy_problem(cluster.proxy_url)):
        problems.append(f'invalid \'proxy-url\' "{cluster.proxy_url}" for cluster "{context.cluster}": {what}')
    methods = [
        name
        for name, given in (("token", user.token or user.token_file), ("basicAuth", user.username or user.password))
        if given
    ]
    if len(methods) > 1:
        problems.append(
            f"more than one authentication method found for {context.user};"
            f" found [{' '.join(methods)}], only one is allowed"
        )
    if user.auth_provider:
        problems.append(f'no Auth Provider found for name "{user.auth_provider.get("name", "")}"')
    if user.impersonate == "" and (user.impersonate_uid or user.impersonate_groups or user.impersonate_extra):
        problems.append(f"requesting uid, groups or user-extra for {context.user} without impersonating a user")
    plugin = _plugin(folder, user.exec, cluster, context, problems) if user.exec is not None else None
    if problems:
        raise FatalError(f"{path}: invalid configuration: {_aggregate(problems)}")
    token_file = _resolve(folder, user.token_file)
    if token_file and not user.token:
        try:
            content(Path(token_file))
        except ValueError as error:
            raise FatalError(str(error)) from None
    # client-go chooses the scheme of --master before it reads these options. For the file's own server it does so, too,
    # but there they can only mean https.
    secure = not given and (tls.has_ca or tls.has_certificate or tls.insecure)
    return Access(
        server_url(cluster.server, tls=secure),
        tls,
        user.token.strip(),
        token_file,
        user.username,
        user.password,
        tuple(_impersonation(user)),
        plugin,
        cluster.proxy_url,
        not cluster.disable_compression,
    )


def _proxy_problem(url: str) -> str:
    """Why the URL cannot be that of a proxy; empty if it can."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return f"could not parse: {url}"
    return "" if parts.scheme in ("http", "https") else f'unsupported scheme "{parts.scheme}", must be http or https'


def _tls_problems(tls: Tls, context: _Context) -> list[str]:
    problems = []
    if tls.insecure and tls.has_ca:
        problems.append("specifying a root certificates file with the insecure flag is not allowed")
    if tls.has_certificate and not (tls.key_file or tls.key_data):
        problems.append(
            f"client-key-data or client-key must be specified for {context.user}"
            " to use the clientCert authentication method."
        )
    for name, file, owner in (
        ("certificate-authority", tls.ca_file, context.cluster),
        ("client-cert", tls.certificate_file, context.user),
        ("client-key", tls.key_file if tls.has_certificate else "", context.user),
    ):
        if file:
            try:
                content(Path(file))
            except ValueError as error:
                problems.append(f"unable to read {name} {file} for {owner} due to {error}")
    return problems


def _plugin(folder: Path, given: _Exec, cluster: _Cluster, context: _Context, problems: list[str]) -> ExecPlugin:
    if not given.command:
        problems.append(f"command must be specified for {context.user} to use exec authentication plugin")
    if not given.api_version:
        problems.append(f"apiVersion must be specified for {context.user} to use exec authentication plugin")
    elif given.api_version not in _EXEC_VERSIONS:
        problems.append(f'exec plugin: invalid apiVersion "{given.api_version}"')
    if any(not variable.name for variable in given.env):
        problems.append(f"env variable name must be specified for {context.user} to use exec authentication plugin")
    if given.interactive_mode == "" and given.api_version not in _NOT_INTERACTIVE:
        problems.append(f"interactiveMode must be specified for {context.user} to use exec authentication plugin")
    elif given.interactive_mode == "Always":
        problems.append("exec plugin cannot support interactive mode: standard input is unavailable")
    elif given.interactive_mode not in ("", "Never", "IfAvailable"):
        problems.append(f'invalid interactiveMode for {context.user}: "{given.interactive_mode}"')
    command = given.command
    if "/" in command:
        command = _resolve(folder, command)
    config = next((entry.extension for entry in cluster.extensions if entry.name == _EXEC_EXTENSION), None)
    return ExecPlugin(
        command,
        tuple(given.args),
        tuple((variable.name, variable.value) for variable in given.env),
        given.api_version,
        given.install_hint,
        given.provide_cluster_info,
        config,
    )


def _impersonation(user: _User) -> list[tuple[str, str]]:
    headers = []
    if user.impersonate:
        headers.append(("Impersonate-User", user.impersonate))
    if user.impersonate_uid:
        headers.append(("Impersonate-Uid", user.impersonate_uid))
    headers += [("Impersonate-Group", group) for group in user.impersonate_groups]
    headers += [
        (f"Impersonate-Extra-{key}", value) for key, values in user.impersonate_extra.items() for value in values
    ]
    return headers


def _decode(text: str, name: str, problems: list[str]) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        problems.append(f"{name}: illegal base64 data")
        return b""


def _resolve(folder: Path, path: str) -> str:
    """The path, which is relative to the folder of the file that names it."""
    return str(folder / path) if path else ""


def _aggregate(problems: list[str]) -> str:
    """Several errors, joined as in Go."""
    return problems[0] if len(problems) == 1 else f"[{', '.join(problems)}]"
