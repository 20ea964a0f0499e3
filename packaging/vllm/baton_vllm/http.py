"""As much of HTTP/1.1 as the node protocol needs: a server with limits on everything that comes from outside."""

import asyncio
import json
import socket
from dataclasses import dataclass

from .errors import NodeError, invalid

MAX_HEAD_BYTES = 16 << 10
# The tokens of a prompt in JSON: a million of them, with what surrounds them.
MAX_BODY_BYTES = 16 << 20
# Connections whose caller has presented the key. Each is a descriptor of vLLM's process.
MAX_KEYED = 192
# Connections whose caller has not, counted from the accept on: in a handshake, or before a whole head. The oldest makes room, so
# strangers who wait cannot shut out a caller with the key, who needs milliseconds.
MAX_STRANGERS = 64
# Connections from one address. IPv6 addresses count by their first 64 bits, since a machine chooses the others itself.
MAX_STRANGERS_OF_ADDRESS = 16
# How long the handshake may take, and then the first head.
HEAD_SECONDS = 5
# The pause after an accept that failed, as when the process has no descriptor left.
ACCEPT_PAUSE_SECONDS = 0.1
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
        self._listeners, self._tasks = [], set()
        # Tasks of connections without the key and their addresses, the oldest first; and of those with it.
        self._strangers, self._keyed = {}, set()

    async def listen(self, host, port, tls=None):
        """Errors: the address is in use or not of this machine."""
        loop = asyncio.get_running_loop()
        places = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((place[0], place[4]) for place in places):
            listener = socket.create_server(address[:2], family=family)
            listener.setblocking(False)
            self._listeners.append(listener)
            self._spawn(self._accept(listener, tls))
        return self

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        for task in self._tasks:
            task.cancel()
        for listener in self._listeners:
            listener.close()

    def _spawn(self, work):
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task):
        self._tasks.discard(task)
        self._strangers.pop(task, None)
        self._keyed.discard(task)
        if not task.cancelled():
            # Whatever it was, it has ended this connection alone.
            task.exception()

    async def _accept(self, listener, tls):
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            self._make_room(network := network_of(address[0]))
            self._strangers[self._spawn(self._serve(connection, tls))] = network

    def _make_room(self, network):
        """Ends the oldest connection without the key: of this address if it has its share, or of all."""
        of_network = [task for task, its in self._strangers.items() if its == network]
        if len(of_network) >= MAX_STRANGERS_OF_ADDRESS:
            oldest = of_network[0]
        elif len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
        else:
            return
        # No longer counted: its end takes a turn of the loop.
        del self._strangers[oldest]
        oldest.cancel()

    def _admit_caller(self, headers):
        """Errors: the caller does not present the key, or too many do."""
        self._admit(headers)
        task = asyncio.current_task()
        if task not in self._keyed:
            if len(self._keyed) >= MAX_KEYED:
                raise NodeError("queue_full", limit=MAX_KEYED)
            self._strangers.pop(task, None)
            self._keyed.add(task)

    async def _serve(self, connection, tls):
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=MAX_HEAD_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        timeouts = {"ssl_handshake_timeout": HEAD_SECONDS, "ssl_shutdown_timeout": CLOSE_SECONDS} if tls else {}
        try:
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=tls, **timeouts)
        except OSError:
            # The handshake has failed, or took too long.
            return connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise
        peer = Peer(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
        try:
            seconds = HEAD_SECONDS
            while await self._serve_one(peer, seconds):
                seconds = IDLE_SECONDS
        except (ConnectionError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            # The peer has left, or takes nothing.
            pass
        except asyncio.CancelledError:
            # It makes room: nothing waits for the peer.
            transport.abort()
            raise
        finally:
            peer.close()

    async def _serve_one(self, peer, seconds):
        try:
            request = await read_request(peer.reader, seconds, self._admit_caller)
            return request is not None and await self._handle(request, peer)
        except NodeError as error:
            await peer.reply(error.status, json.dumps({"error": error.body}).encode(), close=True)
            return False


def network_of(host):
    """What counts as one address."""
    try:
        return socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:8]
    except OSError:
        return host
