/* SPDX-License-Identifier: Apache-2.0 */
/*
 * root.h - a machine as it can be read: this one, one below a folder, or one that somebody saved.
 *
 * Everything that epkit knows about a machine comes through a `struct root`. What is read is kept, so a machine does
 * not change while it is looked at, and what is kept can be saved: a snapshot holds exactly what was asked. Read back,
 * it answers the same questions in the same way; a question that was not asked then has the answer ROOT_UNASKED.
 *
 *     live     "/"            files, and what the driver and the kernel answer
 *     folder   a tree         files below it. It may hold a file epkit-overlay.json, in the format of a snapshot, whose
 *                             entries come before the files: for what is no file, and for tests
 *     saved    a snapshot     nothing else
 *
 * Paths are absolute and are looked up below the root; no link leads out of it (openat2 RESOLVE_IN_ROOT). Nothing here
 * waits for a device: only regular files are read, never a FIFO or a socket, and sizes are bounded. A file that is
 * truncated, vanishes or turns binary while it is read is an answer like any other.
 *
 * A path is given as a printf format with its arguments. Strings returned belong to the root and live as long as it
 * does. Never NULL: a failed read gives "", so that a parser needs no special case. Not for use by several threads.
 */
#ifndef EP_ROOT_ROOT_H
#define EP_ROOT_ROOT_H

#include <epkit/status.h>
#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Bytes of a file; a larger one is ROOT_FAILED. The largest that is read whole is dpkg's status, 2 to 4 MB. */
#define ROOT_FILE_MAX (8u << 20)
#define ROOT_LOG_MAX (1u << 20)   /* bytes of a log that are searched, from its end */
#define ROOT_NAMES_MAX 16384      /* entries of a folder; a larger one is ROOT_FAILED */
#define ROOT_KEPT_MAX (64u << 20) /* bytes of everything kept; then every new read is ROOT_FAILED */
#define ROOT_OVERLAY "epkit-overlay.json"

enum root_state {
    ROOT_OK,
    ROOT_ABSENT, /* it is not there */
    ROOT_DENIED, /* it is there, but not for this user */
    ROOT_FAILED, /* it is there and could not be read: `why` says what happened */
    ROOT_UNASKED /* the snapshot does not say */
};

struct root;

/* --- opening --- */

/*
 * The machine that `from` names: NULL or "/" this one, a folder, or the file of a snapshot. EP_E_ARG with the reason in
 * ep_last_error() when it is neither or no snapshot (what is wrong with it is said with line or key).
 */
ep_status root_open(const char *from, struct root **ret_root);
void root_free(struct root *root);

/* Is it the machine that this process runs on? Only then are the driver and the kernel asked. */
bool root_is_live(const struct root *root);

/* For messages: "this machine", or what was given as `from`. */
const char *root_name(const struct root *root);

/*
 * Files below /proc/self/ are from now on those of process `pid` of this machine. Before the first read. A snapshot
 * saved later has them as /proc/self/.
 */
ep_status root_set_process(struct root *root, pid_t pid);

/* The path that is being read just now, "" if none. The one function that another thread may call (a watchdog). */
const char *root_now_reading(const struct root *root);

/* --- files --- */

struct root_text {
    enum root_state state;
    const char *text; /* NUL-terminated; may hold more NULs (`bytes`) */
    size_t bytes;
    const char *why; /* "" or the reason in words: "Permission denied", "larger than 8 MiB" */
};

/* A whole file. */
struct root_text root_read(struct root *root, const char *path, ...) __attribute__((format(printf, 2, 3)));

/* A number that tells texts apart, FNV-1a of 64 bits. */
uint64_t root_hash(const char *text, size_t bytes);

/* The first line of a file without white space around it; characters that are not printable become '?'. */
struct root_text root_line(struct root *root, const char *path, ...) __attribute__((format(printf, 2, 3)));

/* The first line as a number, decimal or 0x...; a line that is none is ROOT_FAILED. *ret_value is set on ROOT_OK only.
 */
enum root_state root_number(struct root *root, int64_t *ret_value, const char *path, ...)
    __attribute__((format(printf, 3, 4)));

/*
 * The lines of a log that contain `needle`; a regular file, or /dev/kmsg without waiting. Only they are kept. Of a log
 * larger than ROOT_LOG_MAX the end is searched.
 */
struct root_text root_lines(struct root *root, const char *needle, const char *path, ...)
    __attribute__((format(printf, 3, 4)));

/*
 * A number as it is at this moment, neither kept nor taken from what was kept (a snapshot gives what it holds): for
 * counters, which use all 64 bits.
 */
enum root_state root_number_now(struct root *root, uint64_t *ret_value, const char *path, ...)
    __attribute__((format(printf, 3, 4)));

struct root_names {
    enum root_state state;
    size_t n;
    const char *const
        *names; /* sorted: numbers inside names by value (mlx5_2 before mlx5_10), else bytes; no . and .. */
    const char *why;
};

struct root_names root_list(struct root *root, const char *path, ...) __attribute__((format(printf, 2, 3)));

/* The path below the root that `path` leads to when all links in it have been followed. */
struct root_text root_resolve(struct root *root, const char *path, ...) __attribute__((format(printf, 2, 3)));

enum root_kind { ROOT_FILE, ROOT_FOLDER, ROOT_CHAR_DEVICE, ROOT_OTHER };

struct root_stat {
    enum root_state state;
    enum root_kind kind; /* of what links lead to */
    int64_t bytes;
    bool may_read, may_write, may_execute; /* this user, now */
    const char *why;
};

struct root_stat root_stat(struct root *root, const char *path, ...) __attribute__((format(printf, 2, 3)));

static inline bool root_is_folder(struct root_stat stat)
{
    return stat.state == ROOT_OK && stat.kind == ROOT_FOLDER;
}

/* --- environment of the process that is looked at (/proc/self/environ) --- */

/* NULL if it is not set or not known. */
const char *root_env(struct root *root, const char *name);

struct root_variable {
    const char *name, *value;
};

struct root_environment {
    enum root_state state;
    size_t n;
    const struct root_variable *variables; /* sorted by name; of several of one name the first, as getenv() sees it */
    const char *why;
};

struct root_environment root_environment(struct root *root);

/* --- shared libraries and programs --- */

struct elf_version {
    const char *file; /* of a need: the library that must define it; of a definition "" */
    const char *name; /* "IBVERBS_PRIVATE_34" */
};

/* What the headers of an ELF file say. */
struct elf_facts {
    enum root_state state; /* ROOT_FAILED with `why` when it is no ELF file, not one of 64 bits, or damaged */
    const char *why;
    const char *soname, *rpath, *runpath; /* "" if it has none */
    size_t n_needed, n_needs, n_definitions, n_archs;
    const char *const *needed; /* in their order */
    const struct elf_version *needs, *definitions;
    const int *archs; /* of the GPU code in it: 90 for sm_90, 10090 for sm_90a, 20100 for sm_100f; PTX as the negative,
                         -90 for compute_90; sorted */
    bool archs_known; /* false: GPU code that could not be understood, or no section headers that would name it */
    int machine;      /* EM_X86_64, EM_AARCH64 of <elf.h>; 0 not known */
};

/* How `why` begins for a file that ld.so passes over when it searches: 32 bits, big-endian. */
#define ELF_FOREIGN "for another kind of processor"

/* Added to an architecture: code for exactly this one (sm_90a), or for its family (sm_100f). */
#define ELF_ARCH_EXACT 10000
#define ELF_ARCH_FAMILY 20000

struct elf_facts root_elf(struct root *root, const char *path, ...) __attribute__((format(printf, 2, 3)));

/* --- what is no file --- */

/*
 * Asks a question by running `ask` in a child process that has `deadline_ms`, so that a library that hangs or crashes
 * takes nobody along. `ask` returns a new JSON value; NULL is ROOT_FAILED. Only the live machine is asked; else the
 * answer is what the snapshot or the overlay has under `name`, or ROOT_UNASKED. The answer is borrowed from the root.
 */
struct root_answer {
    enum root_state state;
    const json_t *value; /* on ROOT_OK, else NULL */
    const char *why;     /* "killed by signal 11 (Segmentation fault)", "no answer within 2000 ms" */
};

struct root_answer root_ask(struct root *root, const char *name, json_t *(*ask)(void *argument), void *argument,
                            int deadline_ms);

/* --- facts --- */

/*
 * What `read` finds in a file whose text says more than anybody needs to know of this machine: the fact is kept, and
 * the text is not. `read` gets the whole text, with a NUL behind it, and returns a new JSON value; NULL for lack of
 * memory. `name` names the kind of fact: of those that hold text a row in scrub.c says what it is. The answer is
 * borrowed from the root.
 */
typedef json_t *root_reader(const char *text, size_t bytes);
struct root_answer root_fact(struct root *root, const char *name, root_reader *read, const char *path, ...)
    __attribute__((format(printf, 4, 5)));

/* The same of the lines of a log that contain `needle`, found as root_lines() finds them; they are not kept either. */
struct root_answer root_log_fact(struct root *root, const char *name, root_reader *read, const char *needle,
                                 const char *path, ...) __attribute__((format(printf, 5, 6)));

/* The fact as a truth, false if it is not known, and as a text, "" if it is not known. */
bool root_fact_is(struct root_answer fact);
const char *root_fact_text(struct root_answer fact);

/* --- snapshots --- */

/*
 * Everything that was read so far as one JSON document, scrubbed (scrub.h): {"epkit_snapshot": 1, ...}. Written to a
 * temporary file beside `file` and renamed, so that `file` is never half a snapshot.
 */
ep_status root_save(struct root *root, const char *file);

/* --- text --- */

/* `text` safe for terminals and JSON, cut at `bytes`: '?' for each byte that is no UTF-8 and each hidden character. */
void root_clean(const char *text, char *ret_text, size_t bytes);

/* Takes the beginning of a character away from the end of a text that was cut. */
void root_cut(char *text);

/*
 * The UTF-8 sequence at `text`, of at most `bytes` bytes: its length and its code. 0: there is none. ROOT_INCOMPLETE:
 * the bytes are the beginning of one.
 */
#define ROOT_INCOMPLETE ((size_t)-1)
size_t root_decode(const char *text, size_t bytes, uint32_t *ret_code);

/* False for control and format characters, such as those that reverse the direction of writing, and noncharacters. */
bool root_is_shown(uint32_t code);

/*
 * The character at `text` as it may be written to a terminal: itself, or '?' for one that is not shown and for a byte
 * that is no UTF-8; newlines and tabs stay. How many bytes of `text` it takes, never fewer than are shown; 0: they are
 * the beginning of a character.
 */
size_t root_show(const char *text, size_t bytes, const char **ret_shown, size_t *ret_shown_bytes);

/* Memory that lives as long as the root, zeroed and aligned for anything; NULL for lack of memory. */
void *root_alloc(struct root *root, size_t bytes);

/* A copy that lives as long as the root. printf-like. */
const char *root_printf(struct root *root, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
