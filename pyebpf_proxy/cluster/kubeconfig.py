# SPDX-License-Identifier: Apache-2.0
"""The kubeconfig, as the kubernetes library reads it, and why it cannot be used, in one line without credentials."""

from __future__ import annotations

import binascii
import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

from pyebpf_proxy.cluster.errors import ClusterError
from pyebpf_proxy.common.blotted import blotted_end
from pyebpf_proxy.see.answers import NO_ANSWER

#: How much of what the library logs is shown, in characters.
_LONGEST = 300
_NO_CURRENT = "the kubeconfig has no current context; specify one with --context"


def read_kubeconfig(kubeconfig: str, context: str) -> tuple[str, Any]:
    """The context's name, and what the library reads of it. ClusterError."""
    import yaml
    from kubernetes import client, config
    from kubernetes.config import kube_config
    from urllib3.util import Retry

    try:
        # Not the library's list of contexts: it requires a current one, even where another one is wanted.
        place = _place(kubeconfig)
        found: dict[str, Any] = kube_config.KubeConfigMerger(place).config.value  # type: ignore[no-untyped-call]
        names = [each["name"] for each in found["contexts"]]
        name = context or found.get("current-context") or ""
        if name not in names:
            lacks = f"no context {name} in the kubeconfig" if name else _NO_CURRENT
            raise ClusterError(f"{lacks}; it has: {', '.join(names) or 'none'}", NO_ANSWER)
        configuration = client.Configuration()
        with _library_errors() as errors:
            config.load_kube_config(  # type: ignore[no-untyped-call]
                place, name, client_configuration=configuration
            )
    except (
        config.ConfigException,
        yaml.YAMLError,
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
    ) as error:
        remedy = "specify one with --kubeconfig or the environment variable KUBECONFIG"
        raise ClusterError(f"no kubeconfig: {_unusable(_place(kubeconfig), error)}; {remedy}", NO_ANSWER) from None
    if errors and not (configuration.api_key or configuration.cert_file):
        # The library goes on without credentials.
        who = _exec_plugin(found, name)
        raise ClusterError(f"{who or 'the kubeconfig'} gives no credentials{_in_short(errors[-1])}", NO_ANSWER)
    configuration.retries = Retry(0)
    _strip_tokens(configuration)
    return name, configuration


def client_of(configuration: Any) -> Any:
    """The library's client. ClusterError if it cannot use the proxy, which may have a password in its URL."""
    from kubernetes import client
    from urllib3.exceptions import HTTPError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the package that is missing
            return client.ApiClient(configuration)
    except ImportError:
        why = "a SOCKS proxy needs the Python package PySocks"
    except HTTPError as error:
        why = blotted_end(str(error), _LONGEST)
    where = "from proxy-url in the kubeconfig, or from the environment"
    raise ClusterError(f"the proxy ({where}) cannot be used: {why}", NO_ANSWER)


@contextlib.contextmanager
def _library_errors() -> Iterator[list[str]]:
    """What the library logs meanwhile. It would print that: also what an exec plugin has written, line by line."""
    found: list[str] = []

    class Collected(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Collected()
    logging.getLogger().addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger().removeHandler(handler)


def _exec_plugin(kubeconfig: dict[str, Any], context: str) -> str:
    """The program that gives the context's credentials, in words; "" if there is none."""
    from kubernetes import config

    try:
        named = next(each["context"]["user"] for each in kubeconfig["contexts"] if each["name"] == context)
        user = next(each["user"] for each in kubeconfig["users"] if each["name"] == named)
        return f"the exec plugin {user['exec']['command']}"
    except (config.ConfigException, KeyError, StopIteration):
        return ""


def _in_short(text: str) -> str:
    """The end of a text on one line, without credentials, as the end of an error."""
    if "'NoneType' object has no attribute 'strip'" in text:
        return ""  # on a terminal, the plugin writes there, and the library stumbles over it
    return f": {blotted_end(text, _LONGEST)}"


def _strip_tokens(configuration: Any) -> None:
    """A token's file may end with a newline, which no header may have. The library reads the token for each request."""
    read = configuration.refresh_api_key_hook

    def refresh(now: Any) -> None:
        if read is not None:
            with _library_errors():  # the API server then refuses the request, and the reason is found again
                read(now)
        now.api_key = {name: text.strip() for name, text in now.api_key.items()}

    configuration.refresh_api_key_hook = refresh


def _place(kubeconfig: str) -> str:
    """The files that are read. An empty variable is none, as for kubectl; the library would open no file then."""
    return kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"


def _unusable(name: str, error: Exception) -> str:
    """Why the file is no kubeconfig."""
    import yaml

    if not any(os.path.exists(os.path.expanduser(each)) for each in name.split(os.pathsep)):
        return f"{name} does not exist"
    if isinstance(error, OSError):
        return f"{name} cannot be read: {error.strerror}"
    if isinstance(error, yaml.YAMLError):
        mark = getattr(error, "problem_mark", None)
        return f"{name} is not valid YAML{f': line {mark.line + 1}' if mark else ''}"
    if isinstance(error, UnicodeDecodeError):
        return f"{name} is not UTF-8 text"
    if isinstance(error, binascii.Error):
        return f"{name} has a field …-data that is not valid base64"
    if isinstance(error, TypeError | KeyError | AttributeError):
        return f"{name} is not a kubeconfig"
    return f"{name}: {str(error).splitlines()[0].removeprefix('Invalid kube-config file. ').rstrip('.')}"
