/* SPDX-License-Identifier: Apache-2.0 */
/*
 * source.h - where the facts about a machine come from: this machine, a folder, or a saved snapshot.
 *
 * Everything that epkit knows about a machine comes through a `struct source`. Results are cached, so a machine does
 * not change while it is read, and the cache can be saved: a snapshot holds exactly the queries that were made. Read
 * back, it gives the same results; a query that was not made then gives SOURCE_NOT_RECORDED.
 *
 *     live      "/"           files, and queries of the driver and the kernel
 *     folder    a tree        files below it. It may hold a file epkit-overlay.json, in the format of a snapshot, whose
 *                             entries take precedence: for results that are not files, and for tests
 *     snapshot  a file        nothing else
 *
 * Paths are absolute, within the root directory of the source; no link leads out of it (openat2 RESOLVE_IN_ROOT).
 * Nothing here waits for a device: only regular files are read, never a FIFO or a socket, and sizes are bounded. A file
 * may be truncated, vanish or turn binary while it is read.
 *
 * A path is a printf format with its arguments (source_path()). Returned strings belong to the source, live as long as
 * it does, and are never NULL: a failed read gives "", so that a parser needs no special case. Not thread-safe.
 */
#ifndef EP_MACHINE_SOURCE_SOURCE_H
#define EP_MACHINE_SOURCE_SOURCE_H

#include "common/json.h"

#include <epkit/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Bytes of a file; a larger one is SOURCE_FAILED. The largest that is read whole is dpkg's status, 2 to 4 MB. */
#define SOURCE_FILE_MAX (8u << 20)
#define SOURCE_LOG_MAX (1u << 20)    /* bytes of a log that are searched, from its end */
#define SOURCE_NAMES_MAX 16384       /* entries of a folder; a larger one is SOURCE_FAILED */
#define SOURCE_CACHE_MAX (64u << 20) /* bytes of the cache; when it is full, every new read is SOURCE_FAILED */
#define SOURCE_OVERLAY "epkit-overlay.json"

enum source_state {
    SOURCE_OK,
    SOURCE_ABSENT,      /* it does not exist */
    SOURCE_DENIED,      /* it exists, but this user may not read it */
    SOURCE_FAILED,      /* it exists and could not be read: `why` says what happened */
    SOURCE_NOT_RECORDED /* the query is not in the snapshot */
};

struct source;

/* --- opening --- */

/*
 * Opens the machine that `from` names: NULL or "/" this one, a folder, or the file of a snapshot. EP_E_ARG when it is
 * none of these; for a damaged snapshot ep_last_error() names the line or key.
 */
ep_status source_open(const char *from, struct source **ret_source);
void source_free(struct source *source);

/* Is it the machine that this process runs on? Only then are the driver and the kernel queried. */
bool source_is_live(const struct source *source);

/* And are the files below /proc/self/ its own? Those of another process may name what its user has written. */
bool source_is_self(const struct source *source);

/* For messages: "this machine", or what was given as `from`. */
const char *source_name(const struct source *source);

/* Files below /proc/self/ are those of process `pid` from now on, also in a snapshot. Before the first read. */
ep_status source_set_process(struct source *source, pid_t pid);

/* The path that is being read, or "". The only function that another thread (a watchdog) may call. */
const char *source_current_path(const struct source *source);

/* --- files --- */

/*
 * The source, with the path of the query that follows: two queries in one expression, whose order C leaves open, are
 * two statements.
 */
struct source *source_path(struct source *source, const char *format, ...) __attribute__((format(printf, 2, 3)));

struct source_text {
    enum source_state state;
    const char *text; /* NUL-terminated; may hold more NULs (`bytes`) */
    size_t bytes;
    const char *why; /* "" or the reason in words: "Permission denied", "larger than 8 MiB" */
};

/* A whole file. */
#define source_read(source, ...) path_read(source_path(source, __VA_ARGS__))
struct source_text path_read(struct source *source);

/* The first line of a file without surrounding white space; characters that are not printable become '?'. */
#define source_line(source, ...) path_line(source_path(source, __VA_ARGS__))
struct source_text path_line(struct source *source);

/* The value after "name:" in a text of such lines, as source_line() gives lines; "" without one. */
const char *source_field(struct source *source, const char *text, const char *name);

/* The first line as a number, decimal or 0x...; SOURCE_FAILED if it is not a number. *ret_value is set on SOURCE_OK
 * only.
 */
#define source_number(source, ret_value, ...) path_number(source_path(source, __VA_ARGS__), ret_value)
enum source_state path_number(struct source *source, int64_t *ret_value);

/* The current value of a counter of 64 bits, not cached; a snapshot gives the value that it holds. */
#define source_number_uncached(source, ret_value, ...) path_counter(source_path(source, __VA_ARGS__), ret_value)
enum source_state path_counter(struct source *source, uint64_t *ret_value);

struct source_names {
    enum source_state state;
    size_t n;
    const char *const
        *names; /* sorted: numbers inside names by value (mlx5_2 before mlx5_10), else bytes; no . and .. */
    const char *why;
};

#define source_list(source, ...) path_list(source_path(source, __VA_ARGS__))
struct source_names path_list(struct source *source);

/* Each name of a struct source_names. */
#define FOR_NAMES(name, list)                                                                                          \
    for (struct source_names name##_all = (list); name##_all.names; name##_all.names = NULL)                           \
        for (const char *name, *const *name##_at = name##_all.names;                                                   \
             name##_at < name##_all.names + name##_all.n && (name = *name##_at, true); name##_at++)

/* The path within the source that `path` resolves to, as realpath(3). */
#define source_resolve(source, ...) path_resolve(source_path(source, __VA_ARGS__))
struct source_text path_resolve(struct source *source);

enum source_kind { SOURCE_FILE, SOURCE_FOLDER, SOURCE_CHAR_DEVICE, SOURCE_OTHER };

struct source_stat {
    enum source_state state;
    enum source_kind kind; /* of the target of links */
    int64_t bytes;         /* of a file; of a character device its major number, or 0 if that is not known */
    bool may_read, may_write, may_execute; /* this user, now */
    const char *why;
};

#define source_stat(source, ...) path_stat(source_path(source, __VA_ARGS__))
struct source_stat path_stat(struct source *source);

static inline bool source_is_folder(struct source_stat stat)
{
    return stat.state == SOURCE_OK && stat.kind == SOURCE_FOLDER;
}

/* --- environment of the inspected process (/proc/self/environ) --- */

/* NULL if it is not set or unknown. */
const char *source_env(struct source *source, const char *name);

struct source_variable {
    const char *name, *value;
};

struct source_environment {
    enum source_state state;
    size_t n;
    const struct source_variable *variables; /* sorted by name; of duplicates the first, as getenv() */
    const char *why;
};

struct source_environment source_environment(struct source *source);

/* --- shared libraries and programs --- */

struct elf_version {
    const char *file; /* of a needed version: the library that must define it; of a definition "" */
    const char *name; /* "IBVERBS_PRIVATE_34" */
};

/* Facts from the headers of an ELF file. */
struct elf_facts {
    enum source_state state; /* SOURCE_FAILED with `why` when it is not an ELF file of 64 bits, or damaged */
    const char *why;
    const char *soname, *rpath, *runpath; /* "" if it has none */
    size_t n_needed, n_needs, n_definitions, n_archs;
    const char *const *needed; /* in their order */
    const struct elf_version *needs, *definitions;
    const int *archs; /* of the GPU code in it: 90 for sm_90, 10090 for sm_90a, 20100 for sm_100f; PTX as the negative,
                         -90 for compute_90; sorted */
    bool archs_known; /* false: GPU code in an unknown format, or no section headers that would name it */
    int machine;      /* EM_X86_64, EM_AARCH64 of <elf.h>; 0 unknown */
};

/* The beginning of `why` for a file that ld.so skips when it searches: 32 bits, big-endian. */
#define ELF_FOREIGN "for another kind of processor"

/* Added to an architecture: code for exactly this architecture (sm_90a), or for its family (sm_100f). */
#define ELF_ARCH_EXACT 10000
#define ELF_ARCH_FAMILY 20000

#define source_elf(source, ...) path_elf(source_path(source, __VA_ARGS__))
struct elf_facts path_elf(struct source *source);

/*
 * The symbols that the library at `path` needs and neither it nor one of the `n` libraries `providers` defines; the
 * first few are named. A snapshot holds these, not the symbols of the libraries.
 */
struct source_names source_missing_symbols(struct source *source, const char *path, const char *const *providers,
                                           size_t n);

/* --- queries of libraries --- */

/*
 * Runs `query` in a child process with a deadline, so that a library that hangs or crashes does no harm here. `query`
 * returns a new JSON value; NULL is SOURCE_FAILED. Only the live machine is queried; otherwise the answer is that of
 * the snapshot or the overlay under `name`, or SOURCE_NOT_RECORDED. The answer is borrowed from the source.
 */
struct source_answer {
    enum source_state state;
    const json_t *value; /* on SOURCE_OK, else NULL */
    const char *why;     /* "killed by signal 11 (Segmentation fault)", "no answer within 2000 ms" */
};

struct source_answer source_query(struct source *source, const char *name, json_t *(*query)(void *argument),
                                  void *argument, int deadline_ms);

/* --- facts --- */

/*
 * The fact that `read` extracts from a file: the fact is cached and saved, the text is not, because it may identify the
 * machine. `read` gets the whole file and returns a new JSON value; NULL if it is not a text. `name` names the kind of
 * fact; a fact that holds text needs a row in scrub.c. The answer is borrowed from the source.
 */
typedef json_t *source_reader(struct source_text file);

/* Each line of a file, as a struct piece (common/text.h), also behind a NUL. */
#define FOR_LINES(line, file)                                                                                          \
    for (struct piece line = {(file).text, strcspn((file).text, "\n")}; line.text < (file).text + (file).bytes;        \
         line.text += line.n + 1, line.n = line.text < (file).text + (file).bytes ? strcspn(line.text, "\n") : 0)

/* A reader of facts, that only looks at `file`: what it returns, or whether the file says it. */
#define READER(name, value)                                                                                            \
    static json_t *name(struct source_text file)                                                                       \
    {                                                                                                                  \
        return (value);                                                                                                \
    }
#define READER_BOOL(name, condition) READER(name, json_boolean(condition))
#define source_fact(source, name, read, ...) source_log_fact(source, name, read, NULL, __VA_ARGS__)

/* With `needle`: from the lines of a log that contain it, of a large log at its end; also /dev/kmsg, without waiting.
 */
#define source_log_fact(source, name, read, needle, ...) path_fact(source_path(source, __VA_ARGS__), name, read, needle)
struct source_answer path_fact(struct source *source, const char *name, source_reader *read, const char *needle);

/* The fact as a boolean, false if it is unknown, and as a text, "" if it is unknown. */
bool source_fact_bool(struct source_answer fact);
const char *source_fact_text(struct source_answer fact);

/* --- snapshots --- */

/*
 * Saves everything that was read so far as one JSON document, scrubbed (scrub.h): {"epkit_snapshot": 1, ...}. It is
 * written to a temporary file next to `file` and renamed, so `file` is never incomplete.
 */
ep_status source_save(struct source *source, const char *file);

/* --- memory --- */

/* Zeroed memory, aligned for any type, that lives as long as the source (memory.h). */
void *source_alloc(struct source *source, size_t bytes);

/* A copy that lives as long as the source. printf-like. */
const char *source_printf(struct source *source, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
