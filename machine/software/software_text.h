/* SPDX-License-Identifier: Apache-2.0 */
/*
 * software_text.h - parsers for text files of a machine. Pure functions on NUL-terminated
 * text that return slices of it (`n` bytes at `text`). They only scan forward, so they terminate on any input.
 */
#ifndef EP_MACHINE_SOFTWARE_SOFTWARE_TEXT_H
#define EP_MACHINE_SOFTWARE_SOFTWARE_TEXT_H

#include "common/text.h"
#include "machine/source/source.h"

bool piece_begins(struct piece piece, const char *text);

/* A copy with the lifetime of the source, truncated to 4 KiB and safe to print. */
const char *piece_copy(struct source *source, struct piece piece);

/* --- modprobe.d(5) and the kernel command line --- */

struct parse_option {
    struct piece name, value; /* of one parameter, the value without quotes */
};

/* The next parameter that an "options" line sets for `module`. Returns false at the end. */
struct parse_modprobe {
    const char *at;
    struct piece rest; /* of the current line */
};
bool parse_modprobe_next(struct parse_modprobe *state, const char *module, struct parse_option *ret_option);

/* The next "<module>.<name>=<value>" of a kernel command line. */
bool parse_cmdline_next(const char **at, const char *module, struct parse_option *ret_option);

/* The value of a key in "Key=1;Other=0x2", as RegistryDwords. Returns false if it is not set. */
bool parse_dword(struct piece dwords, const char *key, struct piece *ret_value);

/* parse_dwords_with() puts `setting` ("Key=1") in place of the old value of its key; ';' follows each key. */
const char *parse_dwords_with(struct source *source, struct piece dwords, const char *setting);

/* --- dpkg's status file --- */

struct parse_package {
    struct piece name, version, status; /* status: "install ok installed", "hold ok installed" */
    bool installed;
};

bool parse_package_next(const char **at, struct parse_package *ret_package);

/* --- other --- */

/* A value of os-release(5), without the quotes that it may have. */
struct piece parse_release(const char *text, const char *name);

/* The value of the first line "Name: value", or "Name = value" with another divider. Empty if there is none. */
struct piece parse_field(const char *text, const char *name, char divider);

/* The number that follows "#define <name>" in C source. Empty if there is none. */
struct piece parse_define(const char *text, const char *name);

/* --- DeepEP's buffer.py --- */

struct parse_buffer {
    bool defines_mapping, calls_mapping, decorator_stolen;
};

/*
 * Looks for the method _setup_device_hca_mapping of DeepEP's pull request 466 (commit 8a07e7e): is it defined, is it
 * called, and is it directly below a decorator for methods without `self`? A patch script that is in circulation adds
 * only the method, below the @staticmethod of its neighbour, which thus loses its decorator.
 */
struct parse_buffer parse_buffer_py(const char *text);

#endif
