/* SPDX-License-Identifier: Apache-2.0 */
/*
 * install.h - applies a recipe to a machine, and undoes it.
 *
 * The state is determined by checks of the machine, never by records of earlier runs: so a run may be killed, lose
 * power, lose its journal or find half of another installation, and the next run continues from what the checks find.
 *
 *     install_open()     reads the recipe's state: paths and the journal; changes nothing
 *     install_probe()    runs the check of each step
 *     install_check()    says whether apply may begin
 *     install_begin()    acquires the lock; probes again, because another run may have ended
 *     install_apply()    applies what is not done, in order; may reboot
 *     install_verify()   runs the recipe's own tests
 *     install_undo()     removes what apply has added
 *
 * Where systemd is the machine's init, a step runs as a transient unit: it survives the death of the session or pod
 * that started epkit, and the next run waits for it.
 */
#ifndef EP_INSTALL_INSTALL_H
#define EP_INSTALL_INSTALL_H

#include "common/cmd.h"
#include "journal.h"
#include "recipe.h"
#include "types.h"

#define INSTALL_STATE "/var/lib/epkit/install" /* default of the state */
#define INSTALL_STATE_MAX 250                  /* characters of another folder */
#define INSTALL_ROOT_MAX 380                   /* characters of the path of a root */
#define INSTALL_LOGS "/var/log/epkit/install"
#define INSTALL_REBOOT_TEXT "Rebooting the node to load driver and modules..."

enum install_reboot {
    INSTALL_REBOOT_NOW,      /* systemctl reboot */
    INSTALL_REBOOT_SENTINEL, /* /run/reboot-required, for kured or another agent that drains the node first */
    INSTALL_REBOOT_NEVER
};

enum install_phase { PHASE_FETCH, PHASE_APPLY, PHASE_UNDO, PHASE_VERIFY };

struct install_options {
    const char *root;  /* NULL: this machine */
    const char *state; /* folder of the states of all recipes */
    int reboot;        /* enum install_reboot */
    bool no_unit;      /* apply installs no unit that resumes after a reboot */
    bool again;        /* forget the reboots made so far */
    bool keep;         /* write nothing to the state at the beginning: for undo, on a disk that may be full */
};

struct preflight_row {
    const char *name;
    enum { PREFLIGHT_OK, PREFLIGHT_REFUSE, PREFLIGHT_UNKNOWN } result;
    char text[320];
};

#define PREFLIGHT_MAX 16

struct verify_result {
    const struct recipe_step *step;
    const struct step_verify *verify;
    bool passed;
    char text[256]; /* its result */
};

struct install {
    const struct recipe *recipe;
    struct install_options options;
    char root[4096]; /* "" for this machine, else the folder without a slash at the end */
    char state[512]; /* folder of this recipe's state, below the root, without links */
    char logs[512];
    char kernel[128], boot[64];
    bool is_live;          /* this machine, not a folder */
    bool has_systemd;      /* steps run by systemd-run */
    bool can_chroot;       /* the root is a folder with its own shell */
    int lock_fd, state_fd; /* of the state: the folder, through which its files are read and written; -1: none */
    struct journal journal;
    struct step_state states[RECIPE_STEPS_MAX]; /* by index of the step */
    struct preflight_row preflight[PREFLIGHT_MAX];
    size_t n_preflight;
    char failure[512]; /* why apply, undo or verify failed */
    char hint[256];
    json_t *left; /* array of texts: what undo has not removed */
};

enum install_result {
    INSTALL_FINE,
    INSTALL_FAILED,       /* a step failed: `failure` */
    INSTALL_REBOOTING,    /* the machine reboots now */
    INSTALL_NEEDS_REBOOT, /* an agent or the user has to reboot it */
    INSTALL_STOPPED,      /* too many reboots */
    INSTALL_REFUSED,      /* by preflight, or a value is missing: nothing was changed or written */
    INSTALL_BUSY,         /* another run holds the lock */
    INSTALL_INTERRUPTED
};

/* Set `failure` and return INSTALL_FAILED: printf-like; "PATH: reason"; ep_last_error(). */
enum install_result install_fail(struct install *install, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
enum install_result install_fail_errno(struct install *install, int error, const char *path);
enum install_result install_fail_status(struct install *install);

/*
 * The path of a file of the state, or one in a folder of it, for messages and scripts; with NULL the folder, or the
 * state itself.
 */
void install_path(const struct install *install, const char *name, const char *id, char ret_path[1024]);
/* Open the folder of the logs below the root, and make it: a descriptor, or -1 with errno. */
int install_open_logs(struct install *install, bool make);
/* What errno of a file of the state means. */
const char *install_state_error(int error);

/* The kernel release of the machine, which a recipe needs before it is parsed. */
void install_kernel(const char *root, char ret_kernel[128]);

enum install_result install_open(const struct recipe *recipe, const struct install_options *options,
                                 struct install *ret_install);
/* Was it applied, and not uninstalled since? */
bool install_is_known(const struct install *install);
/*
 * Acquires the lock (waits for a step that outlived its run), repairs the journal, saves the recipe's text, runs the
 * checks. Nothing is written before that.
 */
enum install_result install_begin(struct install *install);
void install_close(struct install *install);

/*
 * Runs the checks and fills `states`, which are "unknown" before. Fails only when the root cannot be opened: `failure`.
 */
enum install_result install_probe(struct install *install);

/* Number of steps that apply would change. */
size_t install_changes(const struct install *install);
const char *install_state_name(enum step_now now);

/* --- observe.c --- */

/* Handles signals that interrupt. `quiet`: lines go to standard error. */
void observe(bool quiet);
int observed_signal(void); /* number of the signal that interrupted, 0 if none */
bool observe_is_interrupted(void);
/* An event that deserves its own line. */
void observe_line(const char *format, ...) __attribute__((format(printf, 1, 2)));
void observe_begin(const struct recipe *recipe, const struct recipe_step *step, enum install_phase phase,
                   const char *log);
/* While a step runs, a few times a second. */
void observe_tick(int64_t seconds, int budget_s);

/* --- preflight.c: may this recipe be applied here? Fills `preflight`. --- */
ep_status
preflight_check_target(const struct recipe *recipe); /* checks the syntax of `target`, when a recipe is read */
enum install_result preflight_run(struct install *install);
bool preflight_refuses(const struct install *install);

/* --- apply_steps.c --- */
/* May apply begin, by the results of the checks: do all variables have a value, and is the recipe for this machine? */
enum install_result install_check(struct install *install);
enum install_result install_apply(struct install *install);
enum install_result install_verify(struct install *install, struct verify_result *ret_results, size_t max,
                                   size_t *ret_n);
/* Removes the unit that resumes after a reboot. */
void unit_remove(struct install *install);

/* --- undo.c --- */
enum install_result install_undo(struct install *install);

/* --- step_run.c: one script --- */

enum run_result { RUN_FINE, RUN_FAILED, RUN_LATE, RUN_INTERRUPTED, RUN_NOT_STARTED };

/*
 * Writes the script of a phase atomically. That of undo is written before apply changes anything: it needs no space
 * then, and neither the recipe nor its values.
 */
ep_status run_write_script(const struct install *install, const struct recipe_step *step, enum install_phase phase);
/*
 * Runs it until its end or the deadline of the step; that of fetch and apply is written first. *ret_status: its exit
 * status (-1: unknown, because an earlier run started it). The log holds its output.
 */
enum run_result run_script(struct install *install, const struct recipe_step *step, enum install_phase phase,
                           int *ret_status);

/*
 * Waits for the step's unit if an earlier run left it running: *ret_waited. False: interrupted, or not finished in
 * time.
 */
bool run_wait_for_orphans(struct install *install, const struct recipe_step *step, bool *ret_waited);
void run_log_path(const struct install *install, const struct recipe_step *step, char ret_path[1024]);

/* Runs a program without output, for at most `seconds`. Returns its exit status, or -1. */
int run_quietly(const char *const *argv, int seconds);
/* Runs shell text with the recipe's variables; returns up to `bytes` of its output. */
int run_probe(struct install *install, const struct recipe_step *step, const char *text, int seconds, char *ret_output,
              size_t bytes);

#endif
