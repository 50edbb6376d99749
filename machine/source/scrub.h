/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scrub.h - a snapshot without what identifies the machine, its owner and its users.
 *
 * What may stay is listed, nothing else does. For each kind of entry and each path a row of the table in scrub.c says
 * how it is saved; contents of which no row knows are left out, and a machine read from the snapshot then answers
 * SOURCE_NOT_RECORDED. Over everything that stays, keys included, goes a general pass (scrub_text.c), which replaces
 * addresses, GUIDs, UUIDs, users, hosts, secrets, and the names of folders that are not those of common software.
 *
 * Replacements are consistent within a snapshot: what was equal stays equal, what differed differs, an address of some
 * kind stays one of that kind. So whatever is concluded from the machine is concluded from its snapshot.
 *
 *     UUID             00000000-0000-0000-0000-000000000001; a short form as CUDA_VISIBLE_DEVICES takes it, in full
 *     IPv4, IPv6       192.0.2.1 (RFC 5737, then RFC 2544), 2001:db8::1 (RFC 3849); fe80:: and ::ffff: stay what they
 * are MAC, GUID        00:00:5e:00:53:01 (RFC 7042), 0000:0000:0000:0001 names            user1, host1, dir1, secret1,
 * word1, custom1 (in the release of a kernel)
 *
 * Names of NICs and network interfaces stay, but for names of users and hosts in them: the order of devices and
 * prefixes in variables depend on them.
 */
#ifndef EP_MACHINE_SOURCE_SCRUB_H
#define EP_MACHINE_SOURCE_SCRUB_H

#include "source/cache.h"

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
    json_t *maps[SCRUB_MAPS]; /* number by what it stands for */
    json_t *uuids;            /* all that occur, for short forms */
    json_t *names;            /* of users and hosts that are known: SCRUB_USER or SCRUB_HOST by name */
    json_t *stems;            /* what stands before the numbers of hosts: "acme" of "acme[01-64]" */
    json_t *devices;          /* names of NICs and interfaces, which stay */
    json_t *releases;         /* of kernels: what stays of each */
    json_t *confs;            /* names of configuration files: what stands for each */
    bool failed;              /* for lack of memory: nothing may be saved */
};

/* Flags of the general pass. */
#define SCRUB_VERSIONS 1 /* names of software: 12.8.0.38 behind '-', '.' or a letter is a version */
#define SCRUB_NAME 4     /* a name, not a text: no paths in it */
#define SCRUB_WORDS 8    /* somebody chose the words: those that are not known become word<n> */

/* The general pass. */
void scrub_text(struct scrub *scrub, const char *text, size_t bytes, unsigned flags, FILE *out);

/* One whole path: components that are not those of common software become dir<n>. */
void scrub_path(struct scrub *scrub, const char *path, size_t bytes, FILE *out);

/* A name below `folder`, as scrub_path() has it in a path. */
void scrub_name(struct scrub *scrub, const char *folder, const char *name, FILE *out);

/* Words between '-', '_', '.', spaces and the like: those that are not of common software become word<n>. */
void scrub_parts(struct scrub *scrub, const char *text, size_t bytes, FILE *out);

/* The name of a shared library, "libx.so.1", of such parts, after the general pass. */
void scrub_library(struct scrub *scrub, const char *name, size_t bytes, FILE *out);

/* The length of the name of a shared library at `text`, "libx.so.1"; 0: there is none. */
size_t scrub_library_bytes(const char *text, size_t bytes);

/* Would it stay as it is? */
bool scrub_is_common(const char *folder, const char *name);

/*
 * A rule writes what stays of `text`, which is as long as it is and has a NUL behind it. Unless a rule says otherwise,
 * the general pass is part of it.
 */
typedef void scrub_rule(struct scrub *scrub, const char *text, size_t bytes, FILE *out);

/* Does `text` match? '*' is any run without '/', '#' a run of digits and dots, '**' any run. */
bool scrub_match(const char *pattern, const char *text);

/* Is a name made of words, numbers and names of devices that say nothing about their owner? (scrub_words.c) */
bool scrub_is_plain(const char *word, size_t n);

/* The same, or (the beginning of) the name of a device of this machine. */
bool scrub_is_known(const struct scrub *scrub, const char *word, size_t n);

/* "6.8.0-1041-acme" becomes "6.8.0-1041-custom1"; what is learned, everywhere. */
scrub_rule scrub_release;
void scrub_learn_release(struct scrub *scrub, const char *release);

/* Names of configuration files (*.conf, *.driver): foreign ones become others that sort in the same way. */
bool scrub_is_conf(const char *name);
bool scrub_is_plain_conf(const char *name);
void scrub_learn_confs(struct scrub *scrub, json_t *const kept[CACHE_KINDS]);
void scrub_write_conf(struct scrub *scrub, const char *name, FILE *out);

/* The number that stands for `key`, from 1 on. */
int scrub_number(struct scrub *scrub, enum scrub_map map, const char *key);

/* The address that stands for an IPv4 address; both in the byte order of numbers. */
uint32_t scrub_ipv4(struct scrub *scrub, uint32_t address);

/* Remembers UUIDs that occur in `text`, and a name that has to go. */
void scrub_learn_uuids(struct scrub *scrub, const char *text, size_t bytes);
void scrub_learn_name(struct scrub *scrub, enum scrub_map map, const char *name);

/* Hosts of a list as Slurm writes it: "acme[001-064,070],login". */
void scrub_learn_hosts(struct scrub *scrub, const char *list);

/* The next line without its end, from *text on, which moves behind it; false when there is none left. */
bool scrub_line(const char **text, const char *end, const char **ret_line, size_t *ret_bytes);

/* Rules for the contents of files (scrub_rules.c, scrub_files.c, scrub_log.c). */

scrub_rule scrub_as_is;       /* no general pass */
scrub_rule scrub_attribute;   /* of sysfs: one line, of the kernel's words and numbers */
scrub_rule scrub_counter;     /* of sysfs: one decimal number of 64 bits */
scrub_rule scrub_numbers;     /* of /proc: lines of numbers and of the words that the kernel has with them */
scrub_rule scrub_driver;      /* /proc/driver/nvidia/version */
scrub_rule scrub_params;      /* /proc/driver/nvidia/params */
scrub_rule scrub_gid;         /* of sysfs: a GID */
scrub_rule scrub_path_list;   /* paths divided by ':', which need not be absolute */
scrub_rule scrub_words;       /* general pass, and of words those that are known */
scrub_rule scrub_versions;    /* general pass for names and versions of software */
scrub_rule scrub_pci_config;  /* header, PCI Express capability, ACS */
scrub_rule scrub_cmdline;     /* parameters that are known */
scrub_rule scrub_mounts;      /* without sources, places that are known, options that are known */
scrub_rule scrub_route;       /* /proc/net/route */
scrub_rule scrub_ipv6_route;  /* /proc/net/ipv6_route */
scrub_rule scrub_maps;        /* files of libraries, no addresses */
scrub_rule scrub_status;      /* /proc/self/status without names and numbers of processes */
scrub_rule scrub_paths;       /* lists of paths, without comments: ld.so.conf */
scrub_rule scrub_hypervisor;  /* /proc/cpuinfo: the flag of virtual machines, and no other */
scrub_rule scrub_information; /* /proc/driver/nvidia/gpus/<address>/information */
scrub_rule scrub_event;       /* of errors in a log: when, and the PCI address of the device; no other text */
scrub_rule scrub_journal;     /* of epkit install: kinds of events, steps, boots */
scrub_rule scrub_version;     /* a fact: the version of a package */
scrub_rule scrub_dwords;      /* a fact: registry keys of the driver, with numbers */
scrub_rule scrub_variable;    /* a fact: the value of a variable, given as NAME=value */

/* Is a variable of the environment known by its name or prefix, and no secret? No other one gets into a snapshot. */
bool scrub_keeps_variable(const char *name);

/* The patterns of paths whose contents a rule knows, for tests; NULL behind the last. Of files and lines alone. */
const char *scrub_pattern(enum cache_kind kind, size_t i);

/*
 * What is kept, scrubbed: an object of objects by cache_kind_names. Of the machine that runs here (`is_live`) the names
 * of host and user are known beyond what was read. NULL with ep_fail() for lack of memory.
 */
json_t *scrub_snapshot(json_t *const kept[CACHE_KINDS], bool is_live);

#endif
