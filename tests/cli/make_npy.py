#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write a routing as numpy.save() would, without numpy.

usage: make_npy.py FILE TOKENS TOPK EXPERTS [TOKEN POSITION VALUE]

Token i selects the experts i, i + 1, ... modulo EXPERTS. VALUE replaces the one entry named.
"""
import struct
import sys


def main():
    path = sys.argv[1]
    tokens, topk, experts = map(int, sys.argv[2:5])
    rows = [[(token + k) % experts for k in range(topk)] for token in range(tokens)]
    if len(sys.argv) > 5:
        token, position, value = map(int, sys.argv[5:8])
        rows[token][position] = value
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({tokens}, {topk}), }}"
    # The data begins at a multiple of 64; the header ends with a line feed.
    header += " " * (-(10 + len(header) + 1) % 64) + "\n"
    with open(path, "wb") as file:
        file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode("latin-1"))
        for row in rows:
            file.write(struct.pack(f"<{topk}q", *row))


if __name__ == "__main__":
    main()
