/* SPDX-License-Identifier: Apache-2.0 */
/* read_software.h - internal to this folder: a function for each component, in the order of the calls. */
#ifndef EP_MACHINE_SOFTWARE_READ_SOFTWARE_H
#define EP_MACHINE_SOFTWARE_READ_SOFTWARE_H

#include "advice.h"
#include "common/text.h"
#include "machine/source/source.h"
#include "software.h"

void software_read_driver(struct source *source, const struct topo *topo, struct software_driver *driver);
void software_read_verbs(struct source *source, struct software_verbs *verbs);

/* Python's search path as far as it can be determined from files, then the folders where install scripts put DeepEP. */
#define PYTHON_MAX_FOLDERS 128

struct python_folder {
    const char *path;
    bool on_path;
};

struct python {
    size_t n;
    struct python_folder folders[PYTHON_MAX_FOLDERS];
};

void software_read_python(struct source *source, struct python *python);

void software_read_deepep(struct source *source, const struct python *python, struct software_deepep *deepep);
/* Call after software_read_deepep(): NVSHMEM may be found through DeepEP's extension. */
void software_read_nvshmem(struct source *source, const struct python *python, const struct software_deepep *deepep,
                           struct software_nvshmem *nvshmem);
void software_read_nccl(struct source *source, const struct topo *topo, const struct python *python,
                        struct software_nccl *nccl);

/* Call when everything else of Python is known. */
void software_read_stacks(const struct python *python, struct software *software);

/* The first file `name` (which may contain folders) below a folder of Python's path; "" if there is none. */
const char *python_find(struct source *source, const struct python *python, const char *name);

/* The version of the package `name` (as in its .dist-info or .egg-info) in `folder`; "" if not known. */
const char *python_version(struct source *source, const char *folder, const char *name);

/* `path` without the suffix `end`; "" if it does not end so, or consists of it. */
const char *software_without(struct source *source, const char *path, const char *end);

/* The first name in a folder that begins and ends so; "" if there is none. */
const char *software_first_with(struct source *source, const char *folder, const char *prefix, const char *end);

/* --- the advice --- */

struct advice_work {
    struct source *source;
    const struct topo *topo;
    const struct software *software;
    const struct map *map;
    const struct map *ibgda; /* for NVSHMEM and DeepEP */
    struct advice *advice;
};

/* Adds a row with this name and reason. */
struct advice_row *advice_add(struct advice_work *work, const char *name, const char *reason);

/* The copy of deep_ep to import: the one that Python imports, otherwise the first installed one. -1: none. */
int advice_deepep_copy(const struct software_deepep *deepep);

/* LD_LIBRARY_PATH, LD_PRELOAD and PYTHONPATH (advice_paths.c). */
void advice_paths(struct advice_work *work);

/*
 * --- parsers of text files (software_text.c) ---
 *
 * Pure functions on NUL-terminated text that return slices of it (`n` bytes at `text`). They only scan forward, so they
 * terminate on any input.
 */

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
