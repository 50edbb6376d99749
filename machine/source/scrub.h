/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scrub.h - removes from a snapshot what identifies the machine, its owner and its users.
 *
 * It works by allow-lists. A row of the table in scrub.c says for each kind of entry and each path which format its
 * values have; contents without a row are left out, and a machine read from the snapshot then gives
 * SOURCE_NOT_RECORDED. What does not have the format is left out or replaced. The names of folders stay if they are
 * those of common software. In all that stays, common/redact.h finds addresses, GUIDs and UUIDs.
 *
 * Replacements are consistent within a snapshot: equal values stay equal, different ones different, and an address of
 * some kind stays one of that kind. So the same conclusions follow from the snapshot as from the machine.
 *
 *     UUID        00000000-0000-0000-0000-000000000001; a short form as CUDA_VISIBLE_DEVICES takes it, in full
 *     IPv4, IPv6  192.0.2.1 (RFC 5737, then RFC 2544), 2001:db8::1 (RFC 3849); fe80:: and ::ffff: stay what they are
 *     MAC, GUID   00:00:5e:00:53:01 (RFC 7042), 0000:0000:0000:0001
 *     names       user1, host1, dir1, word1
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
    SCRUB_WORD,
    /* What is known before: all UUIDs, to expand short forms; users and hosts, with SCRUB_USER or SCRUB_HOST; names of
     * NICs and interfaces, which stay; configuration files, with their replacements. */
    SCRUB_UUIDS,
    SCRUB_NAMES,
    SCRUB_DEVICES,
    SCRUB_CONFS,
    SCRUB_MAPS
};

struct scrub {
    json_t *maps[SCRUB_MAPS]; /* number of the replacement by original; see the kinds */
};

/* An empty one. */
void scrub_init(struct scrub *scrub);
void scrub_done(struct scrub *scrub);

/* --- texts and names (scrub_text.c, scrub_names.c) --- */

#define SCRUB_VERSIONS 1 /* the text names software: identifier_at() */
#define SCRUB_NAME 2     /* a name, not a text: it contains no paths */

/*
 * Replaces identifiers in a text. With `words` (separated by blanks; '#' stands for digits) every other word becomes
 * word<n>, except numbers, units, and names of devices; NULL: words stay.
 */
void scrub_text(struct scrub *scrub, const char *text, size_t bytes, unsigned flags, const char *words, FILE *out);

/* Is it a word that scrub_text() leaves as it is? */
bool scrub_is_known(const struct scrub *scrub, const char *word, size_t n, const char *words);

/* One whole path: components that are not names of common software become dir<n>. */
void scrub_path(struct scrub *scrub, const char *path, size_t bytes, FILE *out);

/* A name in `folder`, as scrub_path() writes it in a path. */
void scrub_name(struct scrub *scrub, const char *folder, const char *name, FILE *out);

/* Does scrub_path() leave this name unchanged? */
bool scrub_is_common(const struct scrub *scrub, const char *folder, const char *name);

/* May it be a library for expert parallelism? Those of other names are listed as "ep1-0.dist-info". */
bool scrub_is_dist(const char *name);

/* The length of the name of a shared library at `text`, "libx.so.1"; 0 without one. And the name itself. */
size_t scrub_library_bytes(const char *text, size_t bytes);
void scrub_library(struct scrub *scrub, const char *name, size_t bytes, FILE *out);

/* Words in names of libraries, of versions of their symbols, and of plugins in variables. */
#define SCRUB_LIBRARY_WORDS                                                                                                         \
    "so c m dl rt pthread resolv util stdc gcc s z ssl crypto numa nl route ld x86 64 linux aarch64 glibc glibcxx "                 \
    "cxxabi private openssl libmlx# librdmacm libcuda libnccl libnvidia libnvshmem ibverbs rdmacm ibumad rdmav# mana "              \
    "hwloc nccl net gib spcx ibext tuner profiler nvshmem host device bootstrap transport uid mpi pmi# pmix shmem ibrc ucx ibdevx " \
    "ibgda libfabric fabric efa irdma bnxt re ionic erdma cxgb4 qedr hns gomp protobuf tcmalloc "                                   \
    "jemalloc custom cpu cuda cudart nvidia ml gdrapi torch python c# ucp uct ib gda"

/* Words in names of NICs and of their interfaces. */
#define SCRUB_DEVICE_WORDS "bnxt_re gpu#rdma# mana ionic"

/* Words in the releases of kernels: flavours of Debian, Ubuntu, RHEL, SUSE, Amazon, Google and Microsoft. */
#define SCRUB_RELEASE_WORDS                                                                                                   \
    "config generic lowlatency gcp gke cos aws azure oracle kvm cloud server hwe rt nvidia el# el#uek fc# amzn# deb#u# azl# " \
    "cm# x86 aarch64 amd64 arm64 default microsoft standard wsl#"

/* Names of configuration files (*.conf, *.driver): foreign names become others that sort in the same way. */
void scrub_learn_confs(struct scrub *scrub, json_t *const cached[CACHE_KINDS]);

/* Does `text` match? '*' is any run without '/', '#' a run of digits and dots, '**' any run. */
bool scrub_match(const char *pattern, const char *text);

/* Is it one of the words? Without regard to case; '#' stands for up to 6 digits, '*' at the end for anything. */
bool scrub_is_among(const char *word, size_t bytes, const char *words);

/* The replacement number of `key`, from 1. */
int scrub_number(struct scrub *scrub, enum scrub_map map, const char *key);

/* Registers the UUIDs in `text`; a name to remove. */
void scrub_learn_uuids(struct scrub *scrub, const char *text, size_t bytes);
void scrub_learn_name(struct scrub *scrub, enum scrub_map map, const char *name);

/* --- formats of values (scrub_formats.c) --- */

struct scrub_row;

/* A rule writes what of `text`, which is NUL-terminated, has its format. */
typedef void scrub_rule(struct scrub *scrub, const char *text, size_t bytes, const struct scrub_row *row, FILE *out);

struct scrub_row {
    const char *pattern; /* scrub_match() */
    scrub_rule *rule;
    const char *words; /* that stay */
    const char *keys;  /* of the rule */
};

scrub_rule scrub_any;       /* any text: scrub_text() */
scrub_rule scrub_words;     /* one line of `words` and names of devices; with keys, versions: 6.6.117.1-1.azl3 */
scrub_rule scrub_fields;    /* the lines that begin with one of `keys`, which commas separate */
scrub_rule scrub_lines;     /* lines of numbers and of `words`; with `keys`, numbers of 64 bits */
scrub_rule scrub_dwords;    /* registry keys of the driver, with numbers, after the text `keys`; and `words` */
scrub_rule scrub_path_list; /* paths divided by ':', which need not be absolute */
scrub_rule scrub_event;     /* of errors in a log: the time and the PCI address of the device; no other text */
scrub_rule scrub_version;   /* the version of a package */
scrub_rule scrub_symbol;    /* the name of a symbol that begins as one of `words` */
scrub_rule scrub_variable;  /* the value of the variable `keys` */

/* May an environment variable be saved? Only if its name or prefix is known, and it is not a secret. */
bool scrub_allows_variable(const char *name);

/* --- snapshots (scrub.c) --- */

/*
 * The scrubbed cache: an object of objects by cache_kind_names. For the machine that runs here (`is_live`) the names of
 * its host and user are removed even if no file contained them.
 */
json_t *scrub_snapshot(json_t *const cached[CACHE_KINDS], bool is_live);

#endif
