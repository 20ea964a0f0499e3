"""What callers without the key cost, and what one with the key may leave unread."""

import contextlib
import resource
import socket
import ssl
import struct
import threading

import pytest

from baton_vllm import http, streams
from certificates import self_signed
from scripted import Scripted, eventually, received, request
from test_node import frame, open_streams, start


@pytest.fixture(autouse=True)
def descriptors():
    """The test holds the other ends, too."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 8_192), most))


def stranger(node, i):
    """A connection from the i-th address of this machine."""
    return socket.create_connection(("127.0.0.1", node.port), timeout=10, source_address=(f"127.0.1.{i % 200 + 1}", 0))


def n_open(connections):
    """How many the server has not closed."""
    n = 0
    for connection in connections:
        connection.settimeout(0)
        try:
            n += bool(connection.recv(1))
        except BlockingIOError:
            n += 1
        except OSError:
            pass
    return n


@pytest.mark.parametrize("n_addresses, most", [(1, http.MAX_STRANGERS_OF_ADDRESS), (200, http.MAX_STRANGERS)])
@pytest.mark.parametrize("head", [b"", b"GET /node/v1/load HTTP/1.1\r\n"], ids=["silent", "half_a_head"])
def test_idle_strangers_shut_nobody_out(n_addresses, most, head):
    node = Scripted()
    with contextlib.ExitStack() as held:
        strangers = []
        for i in range(600):
            strangers.append(held.enter_context(contextlib.closing(stranger(node, i % n_addresses))))
            with contextlib.suppress(OSError):
                strangers[-1].sendall(head)
            if i % 100 == 99:
                assert node.call("GET", "/load")[0] == 200
        eventually(lambda: n_open(strangers) <= most)
        pulls = [held.enter_context(contextlib.closing(node.open())) for _ in range(8)]
        for pull in pulls:
            pull.sendall(request("GET", "/load", headers="connection: keep-alive\r\n"))
            assert received(pull).startswith(b"HTTP/1.1 200 ")
        more = [held.enter_context(contextlib.closing(stranger(node, i % n_addresses))) for i in range(300)]
        for pull in pulls:
            pull.sendall(request("GET", "/load"))
            assert received(pull).startswith(b"HTTP/1.1 200 "), "a caller with the key makes no room for strangers"
        eventually(lambda: n_open(strangers + more) <= most)


def test_two_thousand_connections_without_a_handshake_are_few_descriptors(tmp_path):
    files = self_signed(tmp_path, "node")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    node = Scripted(tls=context, trusts=files[0])
    with contextlib.ExitStack() as held:
        strangers = [held.enter_context(contextlib.closing(stranger(node, i))) for i in range(2_000)]
        eventually(lambda: n_open(strangers) <= http.MAX_STRANGERS)
        assert node.call("GET", "/load")[0] == 200


def test_callers_with_the_key_are_counted_too(monkeypatch):
    monkeypatch.setattr(http, "MAX_KEYED", 2)
    node = Scripted()
    with contextlib.ExitStack() as held:
        for _ in range(2):
            kept = held.enter_context(node.connect())
            kept.sendall(request("GET", "/load", headers="connection: keep-alive\r\n"))
            assert received(kept).startswith(b"HTTP/1.1 200 ")
        status, reply = node.call("GET", "/load")
        assert (status, reply["error"]) == (503, {"kind": "queue_full", "limit": 2})
    eventually(lambda: node.call("GET", "/load")[0] == 200)


def test_starts_of_a_caller_that_does_not_read_wait(monkeypatch):
    seen = []

    class Watched(streams.Streams):
        def receive(self, *frame):
            super().receive(*frame)
            seen.append(len(self._out))

    monkeypatch.setattr(streams, "Streams", Watched)
    node = Scripted()
    connection, _ = open_streams(node)
    n = 20_000
    starts = b"".join(frame(1, i + 1, start(1, 1)) for i in range(n))
    sending = threading.Thread(target=lambda: connection.sendall(starts), daemon=True)
    sending.start()
    eventually(lambda: len(seen) >= streams.MAX_UNSENT)
    assert max(seen) <= streams.MAX_UNSENT
    # Whoever reads gets every answer.
    connection.settimeout(10)
    n_refused, data = 0, b""
    while n_refused < 1_000:
        data += connection.recv(1 << 16)
        while len(data) >= 12 and len(data) >= 12 + (length := struct.unpack_from("<I", data)[0]):
            n_refused += data[4] == streams.ERROR
            data = data[12 + length :]
    assert max(seen) <= streams.MAX_UNSENT
    connection.close()
