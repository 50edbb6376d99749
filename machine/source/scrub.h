/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scrub.h - removes from a snapshot what identifies the machine, its owner and its users.
 *
 * It works by allow-lists. A row of the table in scrub.c says for each kind of entry and each path how it is saved;
 * contents without a row are left out, and a machine read from the snapshot then gives SOURCE_NOT_RECORDED. Everything
 * that stays, keys included, goes through a general pass (scrub_text.c), which replaces addresses, GUIDs, UUIDs, users,
 * hosts, secrets, and the names of folders that are not those of common software.
 *
 * Replacements are consistent within a snapshot: equal values stay equal, different ones different, and an address of
 * some kind stays one of that kind. So the same conclusions follow from the snapshot as from the machine.
 *
 *     UUID        00000000-0000-0000-0000-000000000001; a short form as CUDA_VISIBLE_DEVICES takes it, in full
 *     IPv4, IPv6  192.0.2.1 (RFC 5737, then RFC 2544), 2001:db8::1 (RFC 3849); fe80:: and ::ffff: stay what they are
 *     MAC, GUID   00:00:5e:00:53:01 (RFC 7042), 0000:0000:0000:0001
 *     names       user1, host1, dir1, secret1, word1, custom1 (in the release of a kernel)
 *
 * Names of NICs and network interfaces stay, except for names of users and hosts in them: the order of devices and
 * prefixes in variables depend on them.
 */
#ifndef EP_MACHINE_SOURCE_SCRUB_H
#define EP_MACHINE_SOURCE_SCRUB_H

#include "cache.h"

#include <stdio.h>

enum scrub_map {
    SCRUB_UUID,
    SCRUB_IPV4,
    SCRUB_IPV6,
    SCRUB_MAC,
    SCRUB_GUID,
    SCRUB_FOLDER,
    SCRUB_USER,
    SCRUB_HOST,
    SCRUB_SECRET,
    SCRUB_RELEASE,
    SCRUB_WORD,
    SCRUB_MAPS
};

struct scrub {
    json_t *maps[SCRUB_MAPS]; /* replacement number by original */
    json_t *uuids;            /* all that occur, to expand short forms */
    json_t *names;            /* known users and hosts: SCRUB_USER or SCRUB_HOST by name */
    json_t *stems;            /* prefixes of numbered hosts: "acme" of "acme[01-64]" */
    json_t *devices;          /* names of NICs and interfaces, which stay */
    json_t *releases;         /* replacements of kernel releases */
    json_t *confs;            /* replacements of names of configuration files */
    bool failed;              /* out of memory: nothing may be saved */
};

/* Flags of the general pass. */
#define SCRUB_VERSIONS 1 /* the text names software: 12.8.0.38 after '-', '.' or a letter is a version */
#define SCRUB_NAME 4     /* a name, not a text: it contains no paths */
#define SCRUB_WORDS 8    /* the words are user-chosen: unknown ones become word<n> */

/* The general pass. */
void scrub_text(struct scrub *scrub, const char *text, size_t bytes, unsigned flags, FILE *out);

/* One whole path: components that are not names of common software become dir<n>. */
void scrub_path(struct scrub *scrub, const char *path, size_t bytes, FILE *out);

/* A name in `folder`, as scrub_path() writes it in a path. */
void scrub_name(struct scrub *scrub, const char *folder, const char *name, FILE *out);

/* Words separated by '-', '_', '.', spaces and the like: those that are not of common software become word<n>. */
void scrub_parts(struct scrub *scrub, const char *text, size_t bytes, FILE *out);

/* The general pass for the name of a shared library, "libx.so.1", then scrub_parts(). */
void scrub_library(struct scrub *scrub, const char *name, size_t bytes, FILE *out);

/* The length of the name of a shared library at `text`, "libx.so.1"; 0 without one. */
size_t scrub_library_bytes(const char *text, size_t bytes);

/* Does scrub_path() leave this name unchanged? */
bool scrub_is_common(const char *folder, const char *name);

/*
 * A rule writes what stays of `text`, which is NUL-terminated. Unless stated otherwise, it includes the general pass.
 */
typedef void scrub_rule(struct scrub *scrub, const char *text, size_t bytes, FILE *out);

/* Does `text` match? '*' is any run without '/', '#' a run of digits and dots, '**' any run. */
bool scrub_match(const char *pattern, const char *text);

/* Is the name made of words, numbers and device names that do not identify an owner? (scrub_words.c) */
bool scrub_is_plain(const char *word, size_t n);

/* As scrub_is_plain(), or the beginning of the name of a device of this machine. */
bool scrub_is_known(const struct scrub *scrub, const char *word, size_t n);

/* "6.8.0-1041-acme" becomes "6.8.0-1041-custom1"; a learned release is replaced everywhere. */
scrub_rule scrub_release;
void scrub_learn_release(struct scrub *scrub, const char *release);

/* Names of configuration files (*.conf, *.driver): foreign names become others that sort in the same way. */
bool scrub_is_conf(const char *name);
bool scrub_is_plain_conf(const char *name);
void scrub_learn_confs(struct scrub *scrub, json_t *const cached[CACHE_KINDS]);
void scrub_write_conf(struct scrub *scrub, const char *name, FILE *out);

/* The replacement number of `key`, from 1. */
int scrub_number(struct scrub *scrub, enum scrub_map map, const char *key);

/* The replacement of an IPv4 address; both in host byte order. */
uint32_t scrub_ipv4(struct scrub *scrub, uint32_t address);

/* Registers the UUIDs in `text`, and a name to remove. */
void scrub_learn_uuids(struct scrub *scrub, const char *text, size_t bytes);
void scrub_learn_name(struct scrub *scrub, enum scrub_map map, const char *name);

/* Registers the hosts of a Slurm host list: "acme[001-064,070],login". */
void scrub_learn_hosts(struct scrub *scrub, const char *list);

/* The next line without its end; advances *text. False after the last. */
bool scrub_line(const char **text, const char *end, const char **ret_line, size_t *ret_bytes);

/* Rules for the contents of files (scrub_rules.c, scrub_files.c, scrub_log.c). */

scrub_rule scrub_as_is;       /* no general pass */
scrub_rule scrub_attribute;   /* of sysfs: one line of words of the kernel and numbers */
scrub_rule scrub_counter;     /* of sysfs: one decimal number of 64 bits */
scrub_rule scrub_numbers;     /* of /proc: lines of numbers and of the kernel's words for them */
scrub_rule scrub_driver;      /* /proc/driver/nvidia/version */
scrub_rule scrub_params;      /* /proc/driver/nvidia/params */
scrub_rule scrub_gid;         /* of sysfs: a GID */
scrub_rule scrub_path_list;   /* paths divided by ':', which need not be absolute */
scrub_rule scrub_words;       /* general pass, then only known words */
scrub_rule scrub_versions;    /* general pass for names and versions of software */
scrub_rule scrub_pci_config;  /* header, PCI Express capability, ACS */
scrub_rule scrub_cmdline;     /* known parameters */
scrub_rule scrub_mounts;      /* known mount points and options, without sources */
scrub_rule scrub_route;       /* /proc/net/route */
scrub_rule scrub_ipv6_route;  /* /proc/net/ipv6_route */
scrub_rule scrub_maps;        /* files of libraries, no addresses */
scrub_rule scrub_status;      /* /proc/self/status without names and numbers of processes */
scrub_rule scrub_paths;       /* lists of paths, without comments: ld.so.conf */
scrub_rule scrub_hypervisor;  /* /proc/cpuinfo: only the hypervisor flag */
scrub_rule scrub_information; /* /proc/driver/nvidia/gpus/<address>/information */
scrub_rule scrub_event;       /* of errors in a log: the time and the PCI address of the device; no other text */
scrub_rule scrub_journal;     /* of epkit install: kinds of events, steps, boots */
scrub_rule scrub_version;     /* a fact: the version of a package */
scrub_rule scrub_dwords;      /* a fact: registry keys of the driver, with numbers */
scrub_rule scrub_variable;    /* a fact: the value of a variable, given as NAME=value */

/* May an environment variable be saved? Only if its name or prefix is known, and it is not a secret. */
bool scrub_allows_variable(const char *name);

/* For tests: the patterns of paths that have a rule, for files and lines; NULL after the last. */
const char *scrub_pattern(enum cache_kind kind, size_t i);

/*
 * The scrubbed cache: an object of objects by cache_kind_names. For the machine that runs here (`is_live`) the names of
 * its host and user are removed even if no file contained them. NULL with ep_fail() for lack of memory.
 */
json_t *scrub_snapshot(json_t *const cached[CACHE_KINDS], bool is_live);

#endif
