"""A server with OpenAI's API that plays a script."""

import contextlib
import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from script import MODEL


@contextlib.contextmanager
def playing(script):
    """The server's URL."""
    ids = itertools.count()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.reply(200, json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}))

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            n = next(ids)
            turn = script.turn(body)
            message = {"role": "assistant", "content": turn.text or None}
            if turn.calls:
                message["tool_calls"] = [
                    {
                        "index": i,
                        "id": f"call_{n}_{i}",
                        "type": "function",
                        "function": {"name": name, "arguments": json.dumps(arguments)},
                    }
                    for i, (name, arguments) in enumerate(turn.calls)
                ]
            finish = "tool_calls" if turn.calls else "stop"
            usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
            head = {"id": f"chatcmpl-{n}", "created": 0, "model": MODEL}
            if not body.get("stream"):
                choice = {"index": 0, "message": message, "finish_reason": finish}
                return self.reply(200, json.dumps({**head, "object": "chat.completion", "choices": [choice], "usage": usage}))
            chunk = {**head, "object": "chat.completion.chunk"}
            events = [
                {**chunk, "choices": [{"index": 0, "delta": message, "finish_reason": None}]},
                {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]},
                {**chunk, "choices": [], "usage": usage},
            ]
            text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
            return self.reply(200, text + "data: [DONE]\n\n", "text/event-stream")

        def reply(self, status, text, kind="application/json"):
            data = text.encode()
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
