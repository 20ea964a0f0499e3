"""curl as a person pastes it, and raw bytes on a socket."""

import contextlib
import io
import json
import socket
import subprocess
import textwrap
from urllib.parse import urlsplit

from conftest import MODEL


def curl(*args):
    done = subprocess.run(["curl", "-sS", "--max-time", "60", *args], capture_output=True, text=True, check=True)
    return done.stdout


def test_the_printed_curl_line_works_when_pasted(short_banner):
    line = next(line for line in short_banner.splitlines() if line.strip().startswith("curl"))
    out = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=240, check=True).stdout
    events = [line for line in out.splitlines() if line]
    assert events[-1] == "data: [DONE]" and len(events) > 5


def test_the_printed_python_lines_work_when_pasted(short_banner):
    snippet = textwrap.dedent(short_banner[short_banner.index("  from openai"):short_banner.index("  # Ollama's")])
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(snippet, {})
    assert len(said.getvalue()) > 10


def test_curl_without_a_content_type(base_url):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    reply = json.loads(curl(f"{base_url}/chat/completions", "-d", json.dumps(body)))
    assert reply["choices"][0]["message"]["content"]
    health = curl("-i", base_url.removesuffix("/v1") + "/health")
    assert health.startswith("HTTP/1.1 200") and '{"status":"ok"}' in health and "x-request-id:" in health.lower()


def test_errors_have_the_envelope(base_url):
    for body, status in [("{", 400), ('{"model": "nope", "messages": [{"role": "user", "content": "x"}]}', 404)]:
        out = curl("-w", "\n%{http_code}", f"{base_url}/chat/completions", "-d", body)
        text, _, code = out.rpartition("\n")
        assert int(code) == status
        assert set(json.loads(text)["error"]) >= {"message", "type", "param", "code"}
    assert "403" in curl("-o", "/dev/null", "-w", "%{http_code}", "-H", "Host: evil.example", f"{base_url}/models")


def test_the_bytes_of_a_stream(endpoint, base_url):
    """Checks the order of events and the headers, on a connection that stays usable."""
    address = urlsplit(base_url)
    body = json.dumps({"model": MODEL, "stream": True, "max_tokens": 3, "temperature": 0,
                       "stream_options": {"include_usage": True}, "messages": [{"role": "user", "content": "Hi"}]})
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        for _ in range(2):
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body.encode())
            received = b""
            while not received.endswith(b"0\r\n\r\n"):
                chunk = connection.recv(65536)
                assert chunk, "the connection was closed after a stream"
                received += chunk
            head, _, rest = received.partition(b"\r\n\r\n")
            head = head.decode().lower()
            assert head.startswith("http/1.1 200 ok")
            for wanted in ["content-type: text/event-stream", "cache-control: no-cache", "x-accel-buffering: no",
                           "x-request-id:"]:
                assert wanted in head, head
            assert endpoint.took_its_route(head), head
            events = [line[6:] for line in rest.decode().splitlines() if line.startswith("data: ")]
            assert events[-1] == "[DONE]"
            chunks = [json.loads(event) for event in events[:-1]]
            assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert all(set(c["choices"][0]["delta"]) == {"content"} for c in chunks[1:-2])
            assert chunks[-2]["choices"][0]["delta"] == {} and chunks[-2]["choices"][0]["finish_reason"] == "length"
            assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 3
