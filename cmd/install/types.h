/* SPDX-License-Identifier: Apache-2.0 */
/*
 * types.h - a type of step: its keys, and how it is checked. The shell functions that fetch and apply it are in
 * prelude.sh, and find its keys as variables.
 *
 * A check reads the machine through a `struct source` and runs none of its programs, so that it also works on a folder.
 * fetch, apply and undo are scripts for a POSIX shell. Each may be killed at any instant and run again: it has to end
 * in the same state. A script begins with what script_begin() writes (step_run.c), and finds these variables:
 *
 *     EPKIT_ROOT    folder in front of all paths, the first argument of the script; "" for this machine
 *     EPKIT_STATE   folder of the recipe below it, for downloads, builds and stamps
 *     EPKIT_STEP    id of the step
 *     EPKIT_BEFORE  folder for what the step has added, and what it replaced: uninstall needs nothing else
 *
 * The recipe's own text, except an undo, has a TMPDIR that only its user can write in, if one can be made; it is
 * removed at the text's end and at its deadline.
 */
#ifndef EP_INSTALL_TYPES_H
#define EP_INSTALL_TYPES_H

#include "common/embedded.h"
#include "machine/source/source.h"
#include "recipe.h"

#include <stdio.h>

enum step_now {
    STEP_DONE,    /* in place and live */
    STEP_TODO,    /* not there */
    STEP_PARTIAL, /* partly there: an installation was interrupted */
    STEP_WRONG,   /* there in another version, or with other content */
    STEP_REBOOT,  /* in place, but takes effect only with a reboot */
    STEP_UNKNOWN, /* can only be checked on the running machine */
    STEP_SKIPPED  /* its `when` does not hold */
};

struct step_state {
    enum step_now now;
    char text[256]; /* what the check found */
};

/* What a check may use besides files. */
struct check_context {
    struct source *source;
    const char *state;  /* folder of the recipe's state, below the root */
    const char *kernel; /* release; "" if not known */
    /*
     * Exit status of shell text that changes nothing, run on this machine with the recipe's variables; -1 if it could
     * not be run or took too long. NULL: nothing can be run, the machine is a folder.
     */
    int (*probe)(void *context, const struct recipe_step *step, const char *text);
    void *probe_context;
};

struct step_arg {
    const char *key; /* the table ends with NULL */
    enum value_shape shape;
    bool is_required;
};

struct step_type {
    const char *name;
    const struct step_arg *args;
    /* What cannot be said by a table; NULL if nothing. */
    ep_status (*validate)(const struct recipe *recipe, const struct recipe_step *step);
    /* The key that names the path that the step writes, or in which. With a prefix: of a name in PREFIXNAME.conf. */
    const char *path_key, *path_prefix;
    /* The step writes one file with this content, which ends with a newline (new). Or NULL. */
    char *(*content)(const struct recipe_step *step);
    void (*check)(const struct check_context *context, const struct recipe_step *step, struct step_state *ret_state);
    bool has_fetch;  /* epkit_fetch_NAME downloads, and nothing else: run again after a pause */
    bool needs_live; /* cannot be applied below a folder that has no programs of its own */
};

extern const struct step_type type_apt, type_deb, type_file, type_modprobe, type_module, type_pip, type_build,
    type_copyset, type_command;
extern const struct step_type *const step_types[]; /* ends with NULL */
extern const char *const step_reboots[];           /* names of enum step_reboot; ends with NULL */

/* --- for the types --- */

const char *arg_text(const struct recipe_step *step, const char *key); /* "" if it is not given */
bool arg_flag(const struct recipe_step *step, const char *key, bool otherwise);

/* Sets the state; printf-like. */
#define state_set(state, what, ...)                                                                                    \
    ((state)->now = (what), (void)snprintf((state)->text, sizeof((state)->text), __VA_ARGS__))

/* A number that changes with everything about the step that matters to what it makes: FNV-1a over its arguments. */
uint64_t step_digest(const struct recipe_step *step);

/* The recipes of the tree, and prelude.sh, compiled in. */
extern const struct embedded builtin_recipes[], builtin_shell[];

/* --- step_run.c: the text of scripts --- */

/* Writes the variables of a step. */
void script_begin(FILE *script, const struct recipe *recipe, const struct recipe_step *step, const char *state);

/* Write the rest of the script, after script_begin(). */
void script_apply(FILE *script, const struct recipe_step *step);
void script_undo(FILE *script, const struct recipe_step *step);

/* Checks the record that epkit_stamp() has written: STEP_DONE, or STEP_TODO, STEP_WRONG. */
void stamp_check(const struct check_context *context, const struct recipe_step *step, bool with_kernel,
                 struct step_state *ret_state);

/* --- builds.c --- */

/* Checks packages: a map of names to pins, in which * and ? match as in a file name. */
void dpkg_check(const struct check_context *context, const json_t *packages, struct step_state *ret_state);

#endif
