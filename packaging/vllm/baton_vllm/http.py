"""As much of HTTP/1.1 as the node protocol needs: a server with limits on everything that comes from outside."""

import asyncio
import json
from dataclasses import dataclass

from .errors import NodeError, invalid

MAX_HEAD_BYTES = 16 << 10
# The tokens of a prompt in JSON: a million of them, with what surrounds them.
MAX_BODY_BYTES = 16 << 20
MAX_CONNECTIONS = 256
HEAD_SECONDS = 10
# How long a TLS connection is kept for a peer that does not close its end.
CLOSE_SECONDS = 2
# How long a connection may wait for its next request.
IDLE_SECONDS = 60
BODY_SECONDS = 30
# The longest that a peer may take nothing of what it is sent, as in engines/link/src/handoff/read_ahead.rs.
READ_SECONDS = 7
# What a peer must take within that time.
SEND_BYTES = 256 << 10

REASONS = {200: "OK", 101: "Switching Protocols", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found",
           426: "Upgrade Required", 500: "Internal Server Error", 501: "Not Implemented", 503: "Service Unavailable"}


@dataclass
class Request:
    method: str
    path: str
    query: str
    headers: dict
    body: bytes

    def json(self):
        try:
            value = json.loads(self.body)
        except ValueError:
            raise invalid("the body is not JSON") from None
        if not isinstance(value, dict):
            raise invalid("the body is not an object")
        return value

    def offers(self, protocol):
        """Whether the connection may carry this protocol from here on."""
        words = [word.strip().lower() for word in self.headers.get("connection", "").split(",")]
        return "upgrade" in words and self.headers.get("upgrade", "").strip().lower() == protocol


class Peer:
    """The other end of a connection."""

    def __init__(self, reader, writer):
        self.reader, self._writer = reader, writer

    async def send(self, *pieces):
        """Sends, and waits until the peer has taken most of it. Errors: it takes too little for too long."""
        for piece in map(memoryview, pieces):
            for at in range(0, len(piece), SEND_BYTES):
                self._writer.write(piece[at : at + SEND_BYTES])
                await asyncio.wait_for(self._writer.drain(), READ_SECONDS)

    async def reply(self, status, body, content_type="application/json", close=False):
        head = f"HTTP/1.1 {status} {REASONS[status]}\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n"
        await self.send((head + ("connection: close\r\n" if close else "") + "\r\n").encode(), body)

    async def switch(self, protocol, extra=""):
        head = f"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: {protocol}\r\n{extra}\r\n"
        await self.send(head.encode())

    async def left(self):
        """Returns when the peer closes the connection, or sends anything."""
        await self.reader.read(1)

    def close(self):
        self._writer.close()


def parse_head(head):
    """The method, path, query and headers of a request's head."""
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or words[2] not in ("HTTP/1.1", "HTTP/1.0"):
        raise invalid("the request line is malformed")
    headers = {}
    for line in lines[1:]:
        if not line:
            continue
        name, colon, value = line.partition(":")
        if not colon or name != name.strip():
            raise invalid("a header is malformed")
        headers[name.lower()] = value.strip()
    path, _, query = words[1].partition("?")
    return words[0], path, query, headers


async def read_request(reader, seconds, admit):
    """The next request, if `admit` lets its headers pass. `None`: the peer has closed, or sent nothing for so long."""
    try:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), seconds)
    except (asyncio.IncompleteReadError, asyncio.TimeoutError, ConnectionError):
        return None
    except asyncio.LimitOverrunError:
        raise invalid("the request's head is too long") from None
    method, path, query, headers = parse_head(head)
    # Before memory is used for a stranger's body.
    admit(headers)
    if "transfer-encoding" in headers:
        raise invalid("a body must have a content-length")
    length = headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit() or len(length) > 9 or int(length) > MAX_BODY_BYTES:
        raise invalid(f"a body may have {MAX_BODY_BYTES} bytes")
    body = await asyncio.wait_for(reader.readexactly(int(length)), BODY_SECONDS)
    return Request(method, path, query, headers, body)


class Server:
    """Serves requests with `handle(request, peer)`, which replies and returns whether the connection may be used again.

    `admit(headers)` raises an error for callers that may not use the server.
    """

    def __init__(self, handle, admit):
        self._handle, self._admit = handle, admit
        self._n_connections = 0

    async def listen(self, host, port, tls=None):
        """Errors: the address is in use or not of this machine."""
        timeouts = {"ssl_handshake_timeout": HEAD_SECONDS, "ssl_shutdown_timeout": CLOSE_SECONDS} if tls else {}
        return await asyncio.start_server(self._serve, host, port, limit=MAX_HEAD_BYTES, ssl=tls, **timeouts)

    async def _serve(self, reader, writer):
        peer = Peer(reader, writer)
        if self._n_connections >= MAX_CONNECTIONS:
            return peer.close()
        self._n_connections += 1
        try:
            seconds = HEAD_SECONDS
            while await self._serve_one(peer, seconds):
                seconds = IDLE_SECONDS
        except (ConnectionError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            # The peer has left, or takes nothing.
            pass
        finally:
            self._n_connections -= 1
            peer.close()

    async def _serve_one(self, peer, seconds):
        try:
            request = await read_request(peer.reader, seconds, self._admit)
            return request is not None and await self._handle(request, peer)
        except NodeError as error:
            await peer.reply(error.status, json.dumps({"error": error.body}).encode(), close=True)
            return False
