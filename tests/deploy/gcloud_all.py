# SPDX-License-Identifier: Apache-2.0
"""gcloud, for each line of a file, a list of arguments in JSON: prints what is refused for another reason than an account.

Run by gcloud's own Python (CLOUDSDK_PYTHON_ARGS), which imports gcloud once: a start takes a second of processor time.
"""
import json
import os
import sys

sys.path.insert(0, os.path.dirname(sys.argv[1]))
import gcloud  # noqa: E402

gcloud._import_gcloud_main()
with open(sys.argv[2], encoding="utf-8") as commands:
    for words in map(json.loads, commands):
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.dup2(writer, 1)
            os.dup2(writer, 2)
            os.close(writer)
            sys.argv = ["gcloud", *words]
            gcloud.main()
        os.close(writer)
        with open(reader, encoding="utf-8", errors="replace") as said:
            text = said.read()
        os.wait()
        if "active account" not in text and "Updated property" not in text:
            print("gcloud", *words, ":", text)
