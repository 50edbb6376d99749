#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A metadata server that answers like that of Google Compute Engine, or wrongly.

usage: metadata.py PORT HOW [LOCATION]

HOW is good, page (an error page with status 404), lie (a page with status 200), empty, or hang. Without the header
Metadata-Flavor: Google the answer is 403, like that of the real server.
"""
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

PATH = "/computeMetadata/v1/instance/attributes/physical_host"
PAGE = "<!DOCTYPE html><html><body>The requested URL was not found</body></html>"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        how = sys.argv[2]
        if self.headers.get("Metadata-Flavor") != "Google" or self.path != PATH:
            return self.answer(403, PAGE)
        if how == "hang":
            time.sleep(1000)
        answers = {"page": (404, PAGE), "lie": (200, PAGE), "empty": (200, "")}
        return self.answer(*answers.get(how, (200, sys.argv[3] if len(sys.argv) > 3 else "")))

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Metadata-Flavor", "Google")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        pass


HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
