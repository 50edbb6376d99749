/* SPDX-License-Identifier: Apache-2.0 */
/*
 * parse.h - inside of stack_read(): texts of a machine, taken apart. Pure functions on NUL-terminated text; what they
 * give are pieces of it (`n` bytes at `text`). They look only forward, so any text ends them.
 */
#ifndef EP_STACK_PARSE_H
#define EP_STACK_PARSE_H

#include "source/root.h"
#include "source/text.h"

bool piece_is(struct piece piece, const char *text);
bool piece_begins(struct piece piece, const char *text);

/* A copy that lives as long as the root, cut at 4 KiB and safe to print. */
const char *piece_keep(struct root *root, struct piece piece);

/* --- modprobe.d(5) and the kernel command line --- */

struct parse_option {
    struct piece name, value; /* of one parameter, the value without quotes */
};

/* The next parameter that an "options" line sets for `module`. False at the end. */
struct parse_modprobe {
    const char *at;
    struct piece rest; /* of the line that is being read */
};
bool parse_modprobe_next(struct parse_modprobe *state, const char *module, struct parse_option *ret_option);

/* The next "<module>.<name>=<value>" of a kernel command line. */
bool parse_cmdline_next(const char **at, const char *module, struct parse_option *ret_option);

/* The value of a key in "Key=1;Other=0x2", as the NVIDIA driver reads RegistryDwords; false: not in it. */
bool parse_dword(struct piece dwords, const char *key, struct piece *ret_value);

/* The same keys with `setting` ("Key=1") in place of what they say of its key; each with ';' behind it. */
const char *parse_dwords_with(struct root *root, struct piece dwords, const char *setting);

/* --- dpkg's status file --- */

struct parse_package {
    struct piece name, version;
    bool installed;
};

bool parse_package_next(const char **at, struct parse_package *ret_package);

/* --- small things --- */

/* The value of the first line "Name: value" ("Name = value" and the like with another divider). Empty: none. */
struct piece parse_field(const char *text, const char *name, char divider);

/* The first run of digits and dots with a dot in it, which follows white space: "580.126.09". Empty: none. */
struct piece parse_version(const char *text);

/* What follows "#define <name>" as a number in C. Empty: none. */
struct piece parse_define(const char *text, const char *name);

/* --- DeepEP's buffer.py --- */

struct parse_buffer {
    bool defines_mapping, calls_mapping, decorator_stolen;
};

/*
 * Looks for the method _setup_device_hca_mapping (DeepEP pull request 466): is it defined, is it called in __init__,
 * and does a decorator that takes no `self` stand above it, which belonged to another method before a patch was
 * applied. Comments and text in triple quotes do not count.
 */
struct parse_buffer parse_buffer_py(const char *text);

#endif
