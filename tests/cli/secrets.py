#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""secrets.py - words of a command line with a secret in each, in the forms that issuers document.

secrets.py words: the words, one a line.  secrets.py find FILE...: the secrets that are in the files; exit code 1 if any.
The secrets are put together here, so that nothing in this tree looks like one.
"""
import sys

BODY = "aB3dE5fG7hJ9kL1mN2pQ4rS6tU8vW0xYzC" * 4
HEX = "0f1e2d3c4b5a69788796a5b4c3d2e1f0" * 2

# Tokens whose beginning says what they are: beginning, length of the rest.
TOKENS = [("hf_", 34), ("sk-", 48), ("sk-proj-", 60), ("sk-ant-api03-", 80), ("ghp_", 36), ("gho_", 36), ("ghs_", 36),
          ("github_pat_", 82), ("glpat-", 20), ("gldt-", 20), ("xoxb-", 40), ("xoxp-", 40), ("xapp-1-", 40), ("AIza", 35),
          ("ya29.", 60), ("GOCSPX-", 28), ("npm_", 36), ("pypi-AgEIcHlwaS5vcmc", 60), ("nvapi-", 64), ("dckr_pat_", 27),
          ("sk_" + "live_", 24), ("rk_" + "live_", 24), ("hvs.", 90), ("glsa_", 40), ("lin_api_", 40), ("gsk_", 52), ("glimt-", 25),
          ("glagent-", 50), ("glft-", 25)]
# What a word or an option in front announces: the word with '{}' for the secret.
ANNOUNCED = ["--password={}", "--token={}", "--api-key={}", "HF_TOKEN={}", "WANDB_API_KEY={}", "DB_PASSWORD={}",
             "AWS_SECRET_ACCESS_KEY={}", "https://me:{}@host.example/x", "https://x.example/a?token={}&b=1",
             "Authorization: Bearer {}", "X-Api-Key: {}", "curl -H 'Authorization: Basic {}' x", "run --password {} now",
             '{{"password": "{}"}}', "export SLACK_SECRET='{}'", "AccountKey={}", "--password -{}", "--password --{}",
             "--password\t{}", "postgres://me:hun#{}@host.example/x", "postgres://me:a/b?{}@host.example/x", "--user=me:{}",
             "curl -u me:{} x", "curl --proxy-user me:{} x", "--pwd {}", '{{\\"api_key\\":\\"{}\\"}}', '{{"pass":"{}"}}',
             "Cookie: a=x; b={}", "curl -H 'Cookie: a=x; b={}' x", "API_TOKENS={}", "https://{}0123456789abc@host.example/x",
             "https://hooks.slack.com/services/T01234567/B01234567/{}",
             "https://discord.com/api/webhooks/123456789012345678/{}"]
# Of letters alone
LETTERS = ["X-Api-Key: {}", "PRIVATE-TOKEN: {}"]


def secrets():
    """(word, secret) of each form."""
    for i, (beginning, length) in enumerate(TOKENS):
        body = (BODY[i % 7:] + BODY)[:length]
        yield beginning + body, body
    yield "AKIA" + "IOSFODNN7EXAMPL4", "IOSFODNN7EXAMPL4"
    yield "dop_v1_" + HEX, HEX
    yield "wJalrXUtnFEMI/K7MDENG/" + "bPxRfiCYzTESTKEYAB"[:18], "K7MDENG/bPxRfiCY"
    yield "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0NTY3ODkwIn0." + BODY[:43], "eyJzdWIiOiIxMjM0NTY3ODkwIn0"
    yield "SG." + BODY[:22] + "." + BODY[:43], BODY[:22] + "." + BODY[:43]
    key = "-----BEGIN " + "PRIVATE KEY-----"
    yield key + " MIIE" + BODY[:64] + " " + key.replace("BEGIN", "END"), "MIIE" + BODY[:64]
    for i, form in enumerate(ANNOUNCED):
        secret = "pw" + BODY[i:i + 9] + str(100 + i)
        yield form.format(secret), secret
    for form in LETTERS:
        yield form.format("abcdefghijklmnop"), "abcdefghijklmnop"


if sys.argv[1] == "words":
    for word, _ in secrets():
        print(word)
else:
    found = False
    for path in sys.argv[2:]:
        text = open(path, encoding="utf-8", errors="replace").read()
        for word, secret in secrets():
            if secret in text:
                print(f"{path}: the secret of {word}")
                found = True
    sys.exit(found)
