# SPDX-License-Identifier: Apache-2.0
"""The server's side of a WebSocket, as an API server opens one for a command in a pod."""

from __future__ import annotations

import base64
import hashlib
import struct
from http.server import BaseHTTPRequestHandler

#: Opcodes of final frames (RFC 6455 §5.2).
BINARY, CLOSE = 0x82, 0x88
_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def accept(handler: BaseHTTPRequestHandler) -> None:
    """Answer the request that opens a WebSocket."""
    key = handler.headers["Sec-WebSocket-Key"] + _GUID
    handler.send_response(101)
    handler.send_header("Upgrade", "websocket")
    handler.send_header("Connection", "Upgrade")
    handler.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
    handler.send_header("Sec-WebSocket-Protocol", handler.headers["Sec-WebSocket-Protocol"])
    handler.end_headers()


def send(handler: BaseHTTPRequestHandler, kind: int, data: bytes) -> None:
    """Send one frame of at most 65535 bytes. OSError."""
    size = struct.pack(">BH", 126, len(data)) if len(data) > 125 else struct.pack(">B", len(data))
    handler.wfile.write(bytes([kind]) + size + data)
