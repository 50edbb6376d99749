/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scrub.h - a snapshot without what identifies the machine, its owner and its users.
 *
 * What may stay is listed, nothing else does. For each kind of entry and each path a row of the table in scrub.c says
 * how it is saved; contents of which no row knows are left out, and a machine read from the snapshot then answers
 * ROOT_UNASKED. Over everything that stays, keys included, goes a general pass (scrub_text.c), which replaces
 * addresses, GUIDs, UUIDs, users, hosts, secrets, and the names of folders that are not those of common software.
 *
 * Replacements are consistent within a snapshot: what was equal stays equal, what differed differs, an address of some
 * kind stays one of that kind. So whatever is concluded from the machine is concluded from its snapshot.
 *
 *     UUID             00000000-0000-0000-0000-000000000001; a short form as CUDA_VISIBLE_DEVICES takes it, in full
 *     IPv4, IPv6       192.0.2.1 (RFC 5737, then RFC 2544), 2001:db8::1 (RFC 3849); fe80:: and ::ffff: stay what they
 * are MAC, GUID        00:00:5e:00:53:01 (RFC 7042), 0000:0000:0000:0001 names            user1, host1, dir1, secret1
 */
#ifndef EP_ROOT_SCRUB_H
#define EP_ROOT_SCRUB_H

#include "root/keep.h"

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
    SCRUB_MAPS
};

struct scrub {
    json_t *maps[SCRUB_MAPS]; /* number by what it stands for */
    json_t *uuids;            /* all that occur, for short forms */
    json_t *names;            /* of users and hosts that are known: SCRUB_USER or SCRUB_HOST by name */
    bool failed;              /* for lack of memory: nothing may be saved */
};

/* Flags of the general pass. */
#define SCRUB_VERSIONS 1 /* names of software: 12.8.0.38 behind '-', '.' or a letter is a version */
#define SCRUB_CODE 2     /* a program: "a.b.io" is no host, "token = 1" no secret */
#define SCRUB_NAME 4     /* a name, not a text: no paths in it */

/* The general pass. */
void scrub_text(struct scrub *scrub, const char *text, size_t bytes, unsigned flags, FILE *out);

/* One whole path: components that are not those of common software become dir<n>. */
void scrub_path(struct scrub *scrub, const char *path, size_t bytes, FILE *out);

/* A name below `folder`, as scrub_path() has it in a path. */
void scrub_name(struct scrub *scrub, const char *folder, const char *name, FILE *out);

/* Would it stay as it is? */
bool scrub_is_common(const char *folder, const char *name);

/* Does `text` match? '*' is any run without '/', '#' a run of digits and dots, '**' any run. */
bool scrub_match(const char *pattern, const char *text);

/* The number that stands for `key`, from 1 on. */
int scrub_number(struct scrub *scrub, enum scrub_map map, const char *key);

/* The address that stands for an IPv4 address; both in the byte order of numbers. */
uint32_t scrub_ipv4(struct scrub *scrub, uint32_t address);

/* Remembers UUIDs that occur in `text`, and a name that has to go. */
void scrub_learn_uuids(struct scrub *scrub, const char *text, size_t bytes);
void scrub_learn_name(struct scrub *scrub, enum scrub_map map, const char *name);

/* The next line without its end, from *text on, which moves behind it; false when there is none left. */
bool scrub_line(const char **text, const char *end, const char **ret_line, size_t *ret_bytes);

/*
 * Rules for the contents of files (scrub_rules.c). They write what stays of `text`, which is as long as it is and has a
 * NUL behind it. Unless they say otherwise, the general pass is part of them.
 */
typedef void scrub_rule(struct scrub *scrub, const char *text, size_t bytes, FILE *out);

scrub_rule scrub_as_is;       /* no general pass */
scrub_rule scrub_words;       /* general pass alone */
scrub_rule scrub_versions;    /* general pass for names and versions of software */
scrub_rule scrub_host;        /* the name of a host */
scrub_rule scrub_pci_config;  /* header, PCI Express capability, ACS */
scrub_rule scrub_environ;     /* variables that are known by name or prefix */
scrub_rule scrub_cmdline;     /* parameters that are known */
scrub_rule scrub_mounts;      /* without sources, places that are known, options that are known */
scrub_rule scrub_route;       /* /proc/net/route */
scrub_rule scrub_maps;        /* files of libraries, no addresses */
scrub_rule scrub_status;      /* /proc/self/status without names and numbers of processes */
scrub_rule scrub_modules;     /* /proc/modules without addresses */
scrub_rule scrub_modprobe;    /* without comments and commands */
scrub_rule scrub_paths;       /* lists of paths, without comments: ld.so.conf */
scrub_rule scrub_dpkg;        /* packages that matter */
scrub_rule scrub_metadata;    /* Python's: name and version */
scrub_rule scrub_python;      /* programs without comments and texts of several lines */
scrub_rule scrub_information; /* /proc/driver/nvidia/gpus/<address>/information */
scrub_rule scrub_kernel_log;  /* NVRM lines: Xid and its number */
scrub_rule scrub_defines;     /* C headers: #define NAME number */

/*
 * What is kept, scrubbed: an object of objects by keep_kind_names. Of the machine that runs here (`is_live`) the names
 * of host and user are known beyond what was read. NULL with ep_fail() for lack of memory.
 */
json_t *scrub_snapshot(json_t *const kept[KEEP_KINDS], bool is_live);

#endif
