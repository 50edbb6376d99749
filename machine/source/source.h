/* SPDX-License-Identifier: Apache-2.0 */
/*
 * source.h - a machine as it can be read: this one, one below a folder, or one that somebody saved.
 *
 * Everything that epkit knows about a machine comes through a `struct source`. What is read is kept, so a machine does
 * not change while it is looked at, and what is kept can be saved: a snapshot holds exactly what was asked. Read back,
 * it answers the same questions in the same way; a question that was not asked then has the answer SOURCE_NOT_RECORDED.
 *
 *     live     "/"            files, and what the driver and the kernel answer
 *     folder   a tree         files below it. It may hold a file epkit-overlay.json, in the format of a snapshot, whose
 *                             entries come before the files: for what is no file, and for tests
 *     saved    a snapshot     nothing else
 *
 * Paths are absolute and are looked up below the source; no link leads out of it (openat2 RESOLVE_IN_ROOT). Nothing
 * here waits for a device: only regular files are read, never a FIFO or a socket, and sizes are bounded. A file that is
 * truncated, vanishes or turns binary while it is read is an answer like any other.
 *
 * A path is given as a printf format with its arguments. Strings returned belong to the source and live as long as it
 * does. Never NULL: a failed read gives "", so that a parser needs no special case. Not for use by several threads.
 */
#ifndef EP_MACHINE_SOURCE_SOURCE_H
#define EP_MACHINE_SOURCE_SOURCE_H

#include <epkit/status.h>
#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Bytes of a file; a larger one is SOURCE_FAILED. The largest that is read whole is dpkg's status, 2 to 4 MB. */
#define SOURCE_FILE_MAX (8u << 20)
#define SOURCE_LOG_MAX (1u << 20)    /* bytes of a log that are searched, from its end */
#define SOURCE_NAMES_MAX 16384       /* entries of a folder; a larger one is SOURCE_FAILED */
#define SOURCE_CACHE_MAX (64u << 20) /* bytes of everything kept; then every new read is SOURCE_FAILED */
#define SOURCE_OVERLAY "epkit-overlay.json"

enum source_state {
    SOURCE_OK,
    SOURCE_ABSENT,      /* it is not there */
    SOURCE_DENIED,      /* it is there, but not for this user */
    SOURCE_FAILED,      /* it is there and could not be read: `why` says what happened */
    SOURCE_NOT_RECORDED /* the snapshot does not say */
};

struct source;

/* --- opening --- */

/*
 * The machine that `from` names: NULL or "/" this one, a folder, or the file of a snapshot. EP_E_ARG with the reason in
 * ep_last_error() when it is neither or no snapshot (what is wrong with it is said with line or key).
 */
ep_status source_open(const char *from, struct source **ret_source);
void source_free(struct source *source);

/* Is it the machine that this process runs on? Only then are the driver and the kernel asked. */
bool source_is_live(const struct source *source);

/* For messages: "this machine", or what was given as `from`. */
const char *source_name(const struct source *source);

/*
 * Files below /proc/self/ are from now on those of process `pid` of this machine. Before the first read. A snapshot
 * saved later has them as /proc/self/.
 */
ep_status source_set_process(struct source *source, pid_t pid);

/* The path that is being read just now, "" if none. The one function that another thread may call (a watchdog). */
const char *source_current_path(const struct source *source);

/* --- files --- */

struct source_text {
    enum source_state state;
    const char *text; /* NUL-terminated; may hold more NULs (`bytes`) */
    size_t bytes;
    const char *why; /* "" or the reason in words: "Permission denied", "larger than 8 MiB" */
};

/* A whole file. */
struct source_text source_read(struct source *source, const char *path, ...) __attribute__((format(printf, 2, 3)));

/* A number that tells texts apart, FNV-1a of 64 bits. */
uint64_t text_hash(const char *text, size_t bytes);

/* The first line of a file without white space around it; characters that are not printable become '?'. */
struct source_text source_line(struct source *source, const char *path, ...) __attribute__((format(printf, 2, 3)));

/* The first line as a number, decimal or 0x...; a line that is none is SOURCE_FAILED. *ret_value is set on SOURCE_OK
 * only.
 */
enum source_state source_number(struct source *source, int64_t *ret_value, const char *path, ...)
    __attribute__((format(printf, 3, 4)));

/*
 * The lines of a log that contain `needle`; a regular file, or /dev/kmsg without waiting. Only they are kept. Of a log
 * larger than SOURCE_LOG_MAX the end is searched.
 */
struct source_text source_lines(struct source *source, const char *needle, const char *path, ...)
    __attribute__((format(printf, 3, 4)));

/*
 * A number as it is at this moment, neither kept nor taken from what was kept (a snapshot gives what it holds): for
 * counters, which use all 64 bits.
 */
enum source_state source_number_uncached(struct source *source, uint64_t *ret_value, const char *path, ...)
    __attribute__((format(printf, 3, 4)));

struct source_names {
    enum source_state state;
    size_t n;
    const char *const
        *names; /* sorted: numbers inside names by value (mlx5_2 before mlx5_10), else bytes; no . and .. */
    const char *why;
};

struct source_names source_list(struct source *source, const char *path, ...) __attribute__((format(printf, 2, 3)));

/* The path below the source that `path` leads to when all links in it have been followed. */
struct source_text source_resolve(struct source *source, const char *path, ...) __attribute__((format(printf, 2, 3)));

enum source_kind { SOURCE_FILE, SOURCE_FOLDER, SOURCE_CHAR_DEVICE, SOURCE_OTHER };

struct source_stat {
    enum source_state state;
    enum source_kind kind; /* of what links lead to */
    int64_t bytes;
    bool may_read, may_write, may_execute; /* this user, now */
    const char *why;
};

struct source_stat source_stat(struct source *source, const char *path, ...) __attribute__((format(printf, 2, 3)));

static inline bool source_is_folder(struct source_stat stat)
{
    return stat.state == SOURCE_OK && stat.kind == SOURCE_FOLDER;
}

/* --- environment of the process that is looked at (/proc/self/environ) --- */

/* NULL if it is not set or not known. */
const char *source_env(struct source *source, const char *name);

struct source_variable {
    const char *name, *value;
};

struct source_environment {
    enum source_state state;
    size_t n;
    const struct source_variable *variables; /* sorted by name; of several of one name the first, as getenv() sees it */
    const char *why;
};

struct source_environment source_environment(struct source *source);

/* --- shared libraries and programs --- */

struct elf_version {
    const char *file; /* of a need: the library that must define it; of a definition "" */
    const char *name; /* "IBVERBS_PRIVATE_34" */
};

/* What the headers of an ELF file say. */
struct elf_facts {
    enum source_state state; /* SOURCE_FAILED with `why` when it is no ELF file, not one of 64 bits, or damaged */
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

struct elf_facts source_elf(struct source *source, const char *path, ...) __attribute__((format(printf, 2, 3)));

/* --- what is no file --- */

/*
 * Asks a question by running `ask` in a child process that has `deadline_ms`, so that a library that hangs or crashes
 * takes nobody along. `ask` returns a new JSON value; NULL is SOURCE_FAILED. Only the live machine is asked; else the
 * answer is what the snapshot or the overlay has under `name`, or SOURCE_NOT_RECORDED. The answer is borrowed from the
 * source.
 */
struct source_answer {
    enum source_state state;
    const json_t *value; /* on SOURCE_OK, else NULL */
    const char *why;     /* "killed by signal 11 (Segmentation fault)", "no answer within 2000 ms" */
};

struct source_answer source_query(struct source *source, const char *name, json_t *(*ask)(void *argument),
                                  void *argument, int deadline_ms);

/* --- facts --- */

/*
 * What `read` finds in a file whose text says more than anybody needs to know of this machine: the fact is kept, and
 * the text is not. `read` gets the whole text, with a NUL behind it, and returns a new JSON value; NULL for lack of
 * memory. `name` names the kind of fact: of those that hold text a row in scrub.c says what it is. The answer is
 * borrowed from the source.
 */
typedef json_t *source_reader(const char *text, size_t bytes);
struct source_answer source_fact(struct source *source, const char *name, source_reader *read, const char *path, ...)
    __attribute__((format(printf, 4, 5)));

/* The same of the lines of a log that contain `needle`, found as source_lines() finds them; they are not kept either.
 */
struct source_answer source_log_fact(struct source *source, const char *name, source_reader *read, const char *needle,
                                     const char *path, ...) __attribute__((format(printf, 5, 6)));

/* The fact as a truth, false if it is not known, and as a text, "" if it is not known. */
bool source_fact_bool(struct source_answer fact);
const char *source_fact_text(struct source_answer fact);

/* --- snapshots --- */

/*
 * Everything that was read so far as one JSON document, scrubbed (scrub.h): {"epkit_snapshot": 1, ...}. Written to a
 * temporary file beside `file` and renamed, so that `file` is never half a snapshot.
 */
ep_status source_save(struct source *source, const char *file);

/* --- text --- */

/* `text` safe for terminals and JSON, cut at `bytes`: '?' for each byte that is no UTF-8 and each hidden character. */
void text_clean(const char *text, char *ret_text, size_t bytes);

/* Takes the beginning of a character away from the end of a text that was cut. */
void text_cut(char *text);

/*
 * The UTF-8 sequence at `text`, of at most `bytes` bytes: its length and its code. 0: there is none. TEXT_INCOMPLETE:
 * the bytes are the beginning of one.
 */
#define TEXT_INCOMPLETE ((size_t)-1)
size_t text_decode(const char *text, size_t bytes, uint32_t *ret_code);

/* False for control and format characters, such as those that reverse the direction of writing, and noncharacters. */
bool text_is_printable(uint32_t code);

/*
 * The character at `text` as it may be written to a terminal: itself, or '?' for one that is not shown and for a byte
 * that is no UTF-8; newlines and tabs stay. How many bytes of `text` it takes, never fewer than are shown; 0: they are
 * the beginning of a character.
 */
size_t text_printable(const char *text, size_t bytes, const char **ret_shown, size_t *ret_shown_bytes);

/* Memory that lives as long as the source, zeroed and aligned for anything; NULL for lack of memory. */
void *source_alloc(struct source *source, size_t bytes);

/* A copy that lives as long as the source. printf-like. */
const char *source_printf(struct source *source, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
