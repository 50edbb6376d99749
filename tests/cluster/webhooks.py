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


def main():
    changed = []
    for kind in ("mutatingwebhookconfigurations", "validatingwebhookconfigurations"):
        for item in items(kind):
            if PATTERN.search(item["metadata"]["name"]):
                for webhook in item.get("webhooks", []):
                    redirect(webhook["clientConfig"])
                changed.append(item)
    for item in items("crd"):
        conversion = item["spec"].get("conversion", {})
        if PATTERN.search(item["metadata"]["name"]) and conversion.get("strategy") == "Webhook":
            redirect(conversion["webhook"]["clientConfig"])
            changed.append(item)
    for item in changed:
        item["metadata"].pop("managedFields", None)
    if changed:
        subprocess.run(["kubectl", "replace", "-f", "-"], check=True, stdout=subprocess.DEVNULL,
                       input=json.dumps({"apiVersion": "v1", "kind": "List", "items": changed}).encode())


main()
