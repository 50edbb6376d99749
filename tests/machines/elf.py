# SPDX-License-Identifier: Apache-2.0
"""Minimal ELF64 shared objects: what a dynamic linker reads of a library, and nothing that could run.

Layout by the System V ABI and the GNU version sections of the LSB; the container of GPU code (.nv_fatbin) by its
published descriptions: a header of 16 bytes, then entries with headers of 64 bytes.
"""
import struct

X86_64 = 62
AARCH64 = 183

PT_LOAD, PT_DYNAMIC = 1, 2
SHT_PROGBITS, SHT_STRTAB, SHT_DYNAMIC, SHT_DYNSYM = 1, 3, 6, 11
SHT_VERDEF, SHT_VERNEED, SHT_VERSYM = 0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF
DT_NULL, DT_NEEDED, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SYMENT, DT_SONAME, DT_RPATH, DT_RUNPATH = (
    0, 1, 5, 6, 10, 11, 14, 15, 29)
DT_GNU_HASH = 0x6FFFFEF5
SHT_GNU_HASH = 0x6FFFFFF6
DT_VERSYM, DT_VERDEF, DT_VERDEFNUM, DT_VERNEED, DT_VERNEEDNUM = (
    0x6FFFFFF0, 0x6FFFFFFC, 0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF)

FATBIN_MAGIC = 0xBA55ED50
FATBIN_PTX, FATBIN_ELF = 1, 2


def elf_hash(name):
    value = 0
    for byte in name.encode():
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ (high >> 24)) & ~high & 0xFFFFFFFF
    return value


class Strings:
    def __init__(self):
        self.data = b"\0"
        self.known = {"": 0}

    def add(self, text):
        if text not in self.known:
            self.known[text] = len(self.data)
            self.data += text.encode() + b"\0"
        return self.known[text]


def version_definitions(soname, names, strings):
    """The first entry is the library itself, as GNU ld writes it."""
    data = b""
    entries = [(soname, 1)] + [(name, 0) for name in names]
    for i, (name, flags) in enumerate(entries):
        following = 0 if i == len(entries) - 1 else 28
        data += struct.pack("<HHHHIII", 1, flags, i + 1, 1, elf_hash(name), 20, following)
        data += struct.pack("<II", strings.add(name), 0)
    return data, len(entries)


def version_needs(needs, first_index, strings):
    """needs: {library: [version, ...]}"""
    data = b""
    index = first_index
    for i, (library, versions) in enumerate(needs.items()):
        following = 0 if i == len(needs) - 1 else 16 + 16 * len(versions)
        data += struct.pack("<HHIII", 1, len(versions), strings.add(library), 16, following)
        for j, version in enumerate(versions):
            data += struct.pack("<IHHII", elf_hash(version), 0, index, strings.add(version),
                                0 if j == len(versions) - 1 else 16)
            index += 1
    return data, len(needs)


def fatbin(archs):
    """Containers as nvcc leaves them, one for each piece of code: 100 is a cubin for sm_100, -100 PTX for it."""
    data = b""
    for arch in archs:
        payload = b"\x7fELF".ljust(64, b"\0") if arch > 0 else b"//\n".ljust(64, b"\0")
        entry = struct.pack("<HHIQIIHHIIIQQQ", FATBIN_ELF if arch > 0 else FATBIN_PTX, 0x0101, 64, len(payload),
                            0, 0, 0, 1, abs(arch), 0, 0, 0x11, 0, 0)
        data += struct.pack("<IHHQ", FATBIN_MAGIC, 1, 16, len(entry) + len(payload)) + entry + payload
    return data


def gnu_hash(name):
    value = 5381
    for byte in name.encode():
        value = (value * 33 + byte) & 0xFFFFFFFF
    return value


def symbols(undefined, exports, strings):
    """.dynsym, .gnu.version and .gnu.hash as GNU ld writes them: undefined symbols first, the others by bucket."""
    n_buckets = max(1, len(exports) // 2)
    exports = sorted(exports, key=lambda name: gnu_hash(name) % n_buckets)
    table = bytes(24)
    for name in undefined:
        table += struct.pack("<IBBHQQ", strings.add(name), 0x12, 0, 0, 0, 0)
    for name in exports:
        table += struct.pack("<IBBHQQ", strings.add(name), 0x12, 0, 1, 0x1000, 16)
    first, bloom, buckets, chains = 1 + len(undefined), 0, [0] * n_buckets, b""
    for i, name in enumerate(exports):
        value = gnu_hash(name)
        bloom |= 1 << (value % 64) | 1 << ((value >> 6) % 64)
        buckets[value % n_buckets] = buckets[value % n_buckets] or first + i
        last = i + 1 == len(exports) or gnu_hash(exports[i + 1]) % n_buckets != value % n_buckets
        chains += struct.pack("<I", value & ~1 | last)
    table_hash = struct.pack("<IIIIQ", n_buckets, first, 1, 6, bloom) + struct.pack(f"<{n_buckets}I", *buckets) + chains
    return table, struct.pack("<H", 0) + struct.pack("<H", 1) * (len(undefined) + len(exports)), table_hash


def shared_object(soname="", needed=(), rpath="", runpath="", defines=(), needs=None, archs=(), machine=X86_64,
                  undefined=(), exports=()):
    """Bytes of a library. defines: versions; needs: {library: [versions]}; archs: of the GPU code in it; undefined and
    exports: names of symbols."""
    strings = Strings()
    needs = needs or {}
    dynamic = [(DT_NEEDED, strings.add(name)) for name in needed]
    for tag, text in ((DT_SONAME, soname), (DT_RPATH, rpath), (DT_RUNPATH, runpath)):
        if text:
            dynamic.append((tag, strings.add(text)))
    verdef, n_verdef = version_definitions(soname, defines, strings) if defines else (b"", 0)
    verneed, n_verneed = version_needs(needs, n_verdef + 1 if n_verdef else 2, strings)

    table, versions, table_hash = symbols(undefined, exports, strings)

    # name, type, data, address of what its link field names, info, entry size
    sections = [(".dynsym", SHT_DYNSYM, table, ".dynstr", 1, 24),
                (".dynstr", SHT_STRTAB, strings.data, "", 0, 0),
                (".gnu.version", SHT_VERSYM, versions, ".dynsym", 0, 2)]
    if undefined or exports:
        sections.append((".gnu.hash", SHT_GNU_HASH, table_hash, ".dynsym", 0, 0))
    if verdef:
        sections.append((".gnu.version_d", SHT_VERDEF, verdef, ".dynstr", n_verdef, 0))
    if verneed:
        sections.append((".gnu.version_r", SHT_VERNEED, verneed, ".dynstr", n_verneed, 0))
    if archs:
        sections.append((".nv_fatbin", SHT_PROGBITS, fatbin(archs), "", 0, 0))
    offset = 64 + 2 * 56
    places = {}
    for name, _, data, *_ in sections:
        offset = (offset + 7) & ~7
        places[name] = offset
        offset += len(data)

    dynamic += [(DT_STRTAB, places[".dynstr"]), (DT_SYMTAB, places[".dynsym"]), (DT_STRSZ, len(strings.data)),
                (DT_SYMENT, 24), (DT_VERSYM, places[".gnu.version"])]
    if undefined or exports:
        dynamic.append((DT_GNU_HASH, places[".gnu.hash"]))
    if verdef:
        dynamic += [(DT_VERDEF, places[".gnu.version_d"]), (DT_VERDEFNUM, n_verdef)]
    if verneed:
        dynamic += [(DT_VERNEED, places[".gnu.version_r"]), (DT_VERNEEDNUM, n_verneed)]
    dynamic.append((DT_NULL, 0))
    sections.append((".dynamic", SHT_DYNAMIC, b"".join(struct.pack("<QQ", *row) for row in dynamic), ".dynstr", 0, 16))
    places[".dynamic"] = (offset + 7) & ~7
    return assemble(sections, places, machine)


def assemble(sections, places, machine):
    names = Strings()
    index = {section[0]: i + 1 for i, section in enumerate(sections)}
    headers = bytes(64)
    body = b""
    for name, kind, data, link, info, entry in sections:
        body = body.ljust(places[name] - 64 - 2 * 56, b"\0") + data
        flags = 3 if kind == SHT_DYNAMIC else 2
        headers += struct.pack("<IIQQQQIIQQ", names.add(name), kind, flags, places[name], places[name], len(data),
                               index.get(link, 0), info, 8, entry)
    strings_at = 64 + 2 * 56 + len(body)
    name_of_names = names.add(".shstrtab")
    headers += struct.pack("<IIQQQQIIQQ", name_of_names, SHT_STRTAB, 0, 0, strings_at, len(names.data), 0, 0, 1, 0)
    loaded = strings_at
    body += names.data
    body = body.ljust((len(body) + 7) & ~7, b"\0")
    n_sections = len(sections) + 2
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, machine, 1, 0, 64, 64 + 2 * 56 + len(body), 0,
                         64, 56, 2, 64, n_sections, n_sections - 1)
    dynamic = next(len(data) for name, _, data, *_ in sections if name == ".dynamic")
    segments = struct.pack("<IIQQQQQQ", PT_LOAD, 6, 0, 0, 0, loaded, loaded, 0x1000)
    segments += struct.pack("<IIQQQQQQ", PT_DYNAMIC, 6, places[".dynamic"], places[".dynamic"], places[".dynamic"],
                            dynamic, dynamic, 8)
    return header + segments + body + headers
