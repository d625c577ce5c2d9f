# SPDX-License-Identifier: Apache-2.0
"""Requests with the rights of the agent's ServiceAccount."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request

from tests.support.apiserver import ApiServer, Object


class Account:
    """Requests with a token of the pod's ServiceAccount."""

    def __init__(self, server: ApiServer) -> None:
        self._url = server.url
        self._token = server.token("pyebpf-proxy")
        self._context = ssl.create_default_context(cafile=str(server.ca))

    def status(self, method: str, path: str, body: Object | None = None, content: str = "application/json") -> int:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": content}
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, context=self._context, timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
