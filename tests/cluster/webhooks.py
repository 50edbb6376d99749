#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""webhooks.py PATTERN CERTIFICATES PORT - lets the webhooks and conversions of a project, whose names match, lead to its
process on this machine instead of to a Service."""
import base64
import json
import re
import subprocess
import sys

PATTERN, CERTIFICATES, PORT = re.compile(sys.argv[1]), sys.argv[2], sys.argv[3]
with open(f"{CERTIFICATES}/ca.crt", "rb") as stream:
    AUTHORITY = base64.b64encode(stream.read()).decode()


def items(kind):
    return json.loads(subprocess.check_output(["kubectl", "get", kind, "-o", "json"]))["items"]


def redirect(client):
    service = client.pop("service", None)
    if service:
        client["url"] = f"https://127.0.0.1:{PORT}{service.get('path', '')}"
    client["caBundle"] = AUTHORITY


def change(kind, item):
    """Is there anything to change in it?"""
    if not PATTERN.search(item["metadata"]["name"]):
        return False
    item["metadata"].pop("managedFields", None)
    if kind == "crd":
        conversion = item["spec"].get("conversion", {})
        if conversion.get("strategy") != "Webhook":
            return False
        redirect(conversion["webhook"]["clientConfig"])
        return True
    for webhook in item.get("webhooks", []):
        redirect(webhook["clientConfig"])
    return True


def replace(kind, item):
    """Controllers write status and certificates into the same objects: after a conflict it is read again."""
    name = item["metadata"]["name"]
    for _ in range(50):
        answer = subprocess.run(["kubectl", "replace", "-f", "-"], input=json.dumps(item).encode(), capture_output=True)
        if answer.returncode == 0:
            return
        if b"(Conflict)" not in answer.stderr:
            break
        item = json.loads(subprocess.check_output(["kubectl", "get", kind, name, "-o", "json"]))
        change(kind, item)
    sys.exit(f"{kind} {name}: {answer.stderr.decode()}")


def main():
    for kind in ("mutatingwebhookconfigurations", "validatingwebhookconfigurations", "crd"):
        for item in items(kind):
            if change(kind, item):
                replace(kind, item)


main()
