"""Gives prompts to vLLM, over its own HTTP API on this machine: the one way in that is public and can cancel."""

import asyncio
import json

from .errors import NodeError, invalid, unavailable

CONNECT_SECONDS = 3
HEAD_BYTES = 16 << 10
REPLY_BYTES = 1 << 20
HEALTH_SECONDS = 2
# The longest that a prompt may take. The decode node gives up much earlier.
COMPUTE_SECONDS = 3600


class VllmApi:
    """vLLM's API server."""

    def __init__(self, host, port, key=None):
        self._host, self._port, self._key = host, port, key

    async def is_healthy(self):
        try:
            status, _ = await asyncio.wait_for(self._call("GET", "/health"), HEALTH_SECONDS)
        except (OSError, asyncio.TimeoutError, NodeError):
            return False
        return status == 200

    async def compute(self, handoff, tokens, cache_salt):
        """Has vLLM compute a prompt. Returns when it has; cancelling this aborts the prompt. Errors: vLLM refused or lost it."""
        body = {"prompt": tokens, "max_tokens": 1, "temperature": 0, "kv_transfer_params": {"baton_handoff": handoff}}
        if cache_salt:
            body["cache_salt"] = cache_salt
        try:
            status, reply = await asyncio.wait_for(self._call("POST", "/v1/completions", body), COMPUTE_SECONDS)
        except (OSError, asyncio.TimeoutError):
            raise unavailable("vLLM's API does not answer") from None
        if status == 400:
            raise invalid("vLLM refused the prompt")
        if status != 200:
            raise NodeError("internal", detail=f"vLLM answered with the status {status}")

    async def _call(self, method, path, body=None):
        connecting = asyncio.open_connection(self._host, self._port, limit=HEAD_BYTES)
        reader, writer = await asyncio.wait_for(connecting, CONNECT_SECONDS)
        try:
            payload = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
            head = f"{method} {path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\nconnection: close\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n"
            if self._key:
                head += f"authorization: Bearer {self._key}\r\n"
            writer.write((head + "\r\n").encode() + payload)
            await writer.drain()
            status = (await reader.readline()).split()
            if len(status) < 2 or not status[1].isdigit():
                raise unavailable("vLLM's API closed the connection")
            # The reply itself is one token, which nobody wants.
            return int(status[1]), await self._read(reader)
        finally:
            writer.close()

    @staticmethod
    async def _read(reader):
        reply = b""
        while len(reply) < REPLY_BYTES and (piece := await reader.read(REPLY_BYTES)):
            reply += piece
        return reply
