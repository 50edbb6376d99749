# SPDX-License-Identifier: Apache-2.0
"""corpus.py DIR: each row of failures.json within a run, and 500 logs as people post them, for the fuzz target of the parser."""
import json
import sys
from pathlib import Path

import forms

PASSED = "[ 1/1] bf16 random, sync ... passed 1 ms\n"
rows = json.loads((Path(__file__).parents[2] / "cmd/parse/failures.json").read_text(encoding="utf-8"))["failures"]
texts = [PASSED + row["sample"] + "\n" + PASSED for row in rows] + [text for seed in range(500) for text in forms.one(seed).files]
for number, text in enumerate(texts):
    (Path(sys.argv[1]) / f"row-{number}").write_text(text, encoding="utf-8", newline="")
