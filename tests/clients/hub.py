"""A stand-in for the hub, with one repository that has one file."""

import http.server
import json
import threading

PULLED = "hf.co/somebody/some-model:Q4_1"
FILE = "some-model-Q4_1.gguf"


def hub_of(path):
    """Serves one repository with one file. HF_ENDPOINT names it."""

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if "/api/models/" in self.path:
                listing = {"sha": "c0ffee", "siblings": [{"rfilename": FILE, "size": path.stat().st_size}]}
                body = json.dumps(listing).encode()
            else:
                body = path.read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    hub = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    return hub
