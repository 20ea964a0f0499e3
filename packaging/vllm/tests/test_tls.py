"""The node over TLS, and the options that decide who can reach it."""

import os
import socket
import ssl
import time

import pytest

from baton_vllm import http
from baton_vllm.errors import Unsupported
from baton_vllm.options import read_options
from certificates import self_signed
from scripted import FINGERPRINT, LAYOUT, Scripted, end_step, holds_right_rows, kinds, received, request, step

TOKENS = list(range(100))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return self_signed(tmp_path_factory.mktemp("tls"), "node")


@pytest.fixture(scope="module")
def node(files):
    cert, key = files
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_CLUSTER_KEY", "a cluster key of a test")
        options = read_options({"tls_cert": cert, "tls_key": key})
    return Scripted(tls=options["tls"], trusts=cert)


def test_calls_and_rows_come_over_tls(node):
    status, info = node.call("GET", "/info")
    assert status == 200 and info["fingerprint"] == FINGERPRINT
    assert node.call("GET", "/info", key="another key")[0] == 401
    with node.connect() as connection:
        assert connection.version() in ("TLSv1.2", "TLSv1.3")
    pull = node.prefill(TOKENS)
    handoff = node.handoff(node.api.prompt())
    step(handoff, 0, 100, n_layers=2, ends=False)
    pull.reaches(2 * LAYOUT.row_bytes * 100)
    handoff.layer_done(3, None)
    end_step(handoff)
    events = pull.events()
    assert kinds(events) == ["head", "frame", "end"] and holds_right_rows(events)


def test_plain_http_gets_no_answer(node):
    with socket.create_connection(("127.0.0.1", node.port), timeout=10) as connection:
        connection.sendall(request("GET", "/info"))
        try:
            reply = received(connection)
        except ConnectionError:
            reply = b""
    assert b"HTTP/" not in reply
    assert node.call("GET", "/load")[0] == 200, "the node goes on"


def test_a_client_that_trusts_another_authority_refuses_it(node, tmp_path):
    other, _ = self_signed(tmp_path, "other")
    with socket.create_connection(("127.0.0.1", node.port), timeout=10) as connection:
        with pytest.raises(ssl.SSLCertVerificationError):
            ssl.create_default_context(cafile=other).wrap_socket(connection, server_hostname="localhost")
    assert node.call("GET", "/load")[0] == 200, "the node goes on"


def test_old_versions_of_tls_are_refused(node, files):
    context = ssl.create_default_context(cafile=files[0])
    with pytest.warns(DeprecationWarning):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection(("127.0.0.1", node.port), timeout=10) as connection, pytest.raises((ssl.SSLError, OSError)):
        context.wrap_socket(connection, server_hostname="localhost")


def test_a_connection_without_a_handshake_is_closed(files, monkeypatch):
    monkeypatch.setattr(http, "HEAD_SECONDS", 0.3)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    node = Scripted(tls=context, trusts=files[0])
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", node.port), timeout=10) as connection:
        assert connection.recv(1) == b"" and time.monotonic() - began < 5


@pytest.fixture
def keyed(monkeypatch):
    monkeypatch.setenv("BATON_CLUSTER_KEY", "a cluster key of a test")


@pytest.mark.parametrize("listen", ["0.0.0.0:9000", "[::]:9000", "192.0.2.7:9000", "spark.local:9000"])
def test_other_machines_are_not_served_without_tls(listen, files, keyed):
    with pytest.raises(Unsupported, match="plain HTTP.*give tls_cert and tls_key, or set allow_plain_http"):
        read_options({"listen": listen})
    assert read_options({"listen": listen, "allow_plain_http": True})["tls"] is None
    assert read_options({"listen": listen, "tls_cert": files[0], "tls_key": files[1]})["tls"] is not None


@pytest.mark.parametrize("listen", ["127.0.0.1:9000", "localhost:9000", "[::1]:9000"])
def test_this_machine_is_served_without_tls(listen, keyed):
    assert read_options({"listen": listen})["tls"] is None


def test_wrong_options_are_refused_in_words(files, tmp_path, monkeypatch):
    cert, key = files
    monkeypatch.setenv("BATON_CLUSTER_KEY", "a cluster key of a test")
    refused = [
        ({"tls_key": key}, "belong together"),
        ({"tls_cert": cert}, "belong together"),
        ({"tls_cert": cert, "tls_key": str(tmp_path / "none")}, "cannot be used"),
        ({"tls_cert": cert, "tls_key": self_signed(tmp_path, "other")[1]}, "cannot be used"),
        ({"listen": "9000"}, "not HOST:PORT"),
        ({"vllm": "http://192.0.2.7:8000"}, "on this machine"),
        ({"kv_dtype": "q8_0"}, "f16, bf16 and f32"),
        ({"lisen": "127.0.0.1:9000"}, "unknown keys"),
        ({"cluster_key_file": str(tmp_path / "none")}, "cannot be read"),
    ]
    for given, words in refused:
        with pytest.raises(Unsupported, match=words):
            read_options(given)
    monkeypatch.delenv("BATON_CLUSTER_KEY")
    with pytest.raises(Unsupported, match="cluster key"):
        read_options({})
    (tmp_path / "key").write_text("a key from a file\n")
    assert read_options({"cluster_key_file": str(tmp_path / "key")})["key"] == "a key from a file"
    assert "BATON_CLUSTER_KEY" not in os.environ


def test_a_short_key_is_refused_as_by_every_other_process(tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_CLUSTER_KEY", "x" * 15)
    with pytest.raises(Unsupported, match="BATON_CLUSTER_KEY has 15 characters and could be guessed: it needs 16 at least"):
        read_options({})
    # Characters count, not bytes; white space around the key of a file does not.
    monkeypatch.setenv("BATON_CLUSTER_KEY", "é" * 16)
    assert read_options({})["key"] == "é" * 16
    (tmp_path / "key").write_text("x" * 15 + "\n \n")
    with pytest.raises(Unsupported, match="the key of cluster_key_file has 15 characters") as refused:
        read_options({"cluster_key_file": str(tmp_path / "key")})
    assert "xxx" not in str(refused.value)
