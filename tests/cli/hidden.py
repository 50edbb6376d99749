#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hidden characters: hidden.py FILE... fails if one has any; --answer and --long make answers of epkit doctor."""
import json
import sys
import unicodedata


def check(names):
    for name in names:
        with open(name, "rb") as file:
            lines = file.read().decode().split("\n")
        for line in lines:
            hidden = [c for c in line if c != "\t" and unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")]
            if hidden:
                sys.exit(f"{name}: {ascii(hidden)} in {ascii(line)}")


def answer():
    evil = "\x1b[31m\u202e\u2066\x9b1m\U000e0041"
    return {"schema_version": 1, "epkit": evil, "subcommand": "doctor",
            "checks": [{"id": evil, "outcome": "found", "severity": evil, "text": evil + "\nepkit: all is well"}],
            "facts": {"kernel": evil, "gpus": [evil], "nics": [{"name": evil, "state": evil}],
                      "environment": {evil: evil}}}


def long_answer(pad, node):
    text = pad + "\u20ac" * 40 + ("\u4e2d" if node == "node1" else "\u4e2e") + "\U0001f600" * 40
    return {"schema_version": 1, "epkit": text, "subcommand": "doctor",
            "checks": [{"id": "x", "outcome": "found", "severity": "warning", "text": text * 20}],
            "facts": {"kernel": text, "gpus": ["one"], "nics": [],
                      "environment": {"NCCL_X": text, pad + "\u20ac" * 200: node}}}


if sys.argv[1] == "--answer":
    print(json.dumps(answer()))
elif sys.argv[1] == "--long":
    print(json.dumps(long_answer(*sys.argv[2:4])))
else:
    check(sys.argv[1:])
