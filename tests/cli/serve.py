#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""serve.py FILE: an HTTP server at a port of 127.0.0.1, which it prints, that gives FILE as its paths say: /good; /cut-N and
/error-N, whose first N answers end in the middle or are 500; /half, of the right length and half the content; /open, half
the content and no length; /loop, which redirects to itself; /mute, which never answers. Anything else is 404."""
import http.server
import sys
import threading

CONTENT = open(sys.argv[1], "rb").read()
HALF = CONTENT[: len(CONTENT) // 2]
counts = {}
never = threading.Event()


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, code, content=b"", length=None, location=None):
        self.send_response(code)
        if length != -1:
            self.send_header("Content-Length", str(len(content) if length is None else length))
        if location:
            self.send_header("Location", location)
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        name, _, number = self.path.strip("/").partition("-")
        counts[self.path] = counts.get(self.path, 0) + 1
        faulty = number and counts[self.path] <= int(number)
        if name == "cut" and faulty:
            self.answer(200, HALF, len(CONTENT))
        elif name == "error" and faulty:
            self.answer(500)
        elif name in ("good", "cut", "error"):
            self.answer(200, CONTENT)
        elif name == "half":
            self.answer(200, HALF)
        elif name == "open":
            self.answer(200, HALF, -1)
        elif name == "loop":
            self.answer(302, location=self.path)
        elif name == "mute":
            never.wait()
        else:
            self.answer(404)


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True


server = Server(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
