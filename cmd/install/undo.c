/* SPDX-License-Identifier: Apache-2.0 */
/*
 * undo.c - restores the previous state. The steps that this recipe has changed are undone in reverse order; then its
 * state is removed. The record of what a step replaced is removed only when the step is undone, so that a run that is
 * killed can be repeated.
 */
#include "base/error.h"
#include "install.h"

#include <errno.h>
#include <ftw.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int remove_one(const char *path, const struct stat *stat, int kind, struct FTW *walk)
{
    (void)stat;
    (void)kind;
    (void)walk;
    return remove(path) == 0 || errno == ENOENT ? 0 : -1; /* another run may be removing it as well */
}

int remove_tree(const char *path)
{
    struct stat stat;

    if (lstat(path, &stat) != 0)
        return errno == ENOENT ? 0 : -1;
    if (nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS | FTW_MOUNT) == 0)
        return 0;
    return lstat(path, &stat) != 0 && errno == ENOENT ? 0 : -1;
}

static void below_state(const struct install *install, const char *name, const char *id, char ret_path[1024])
{
    snprintf(ret_path, 1024, "%.400s%.300s/%s%s%s", install->root, install->state, name, id ? "/" : "", id ? id : "");
}

/* Has this recipe changed anything for the step? */
static bool is_changed(const struct install *install, const struct recipe_step *step, const struct step_state *state)
{
    char path[1024];

    below_state(install, "before", step->id, path);
    if (access(path, F_OK) == 0)
        return true;
    below_state(install, "stamp", step->id, path);
    if (access(path, F_OK) == 0)
        return true;
    /* No record says that this recipe made it: it may have existed before. */
    return install->options.force &&
           (state->now == STEP_DONE || state->now == STEP_PARTIAL || state->now == STEP_REBOOT);
}

static enum install_result undo_step(struct install *install, const struct recipe_step *step, size_t index)
{
    enum install_result result;
    enum run_result run;
    char path[1024], log[1024], script[1400];
    bool waited, is_undone;
    int status;

    run_log_path(install, step, log);
    if (!run_wait_for_orphans(install, step, index, &waited)) {
        snprintf(install->failure, sizeof(install->failure), "step '%s' of an earlier run does not end", step->id);
        return INSTALL_FAILED;
    }
    result = earlier_undo(install, step, index, &is_undone);
    if (result != INSTALL_FINE || is_undone)
        return result;
    journal_add(&install->journal, "undo", step->id, NULL);
    run = run_script(install, step, index, PHASE_UNDO, step->deadline_s, &status);
    /* No space for a new script: the saved one needs none. */
    if (run == RUN_NOT_STARTED && earlier_script(install, step, script))
        run = run_file(install, step, index, PHASE_UNDO, script, step->deadline_s, &status);
    if (run == RUN_INTERRUPTED)
        return INSTALL_INTERRUPTED;
    if (run != RUN_FINE) {
        snprintf(install->failure, sizeof(install->failure), "step '%s' could not be undone (exit status %d)", step->id,
                 status);
        snprintf(install->hint, sizeof(install->hint), "its log is %.200s", log);
        return INSTALL_FAILED;
    }
    below_state(install, "before", step->id, path);
    if (remove_tree(path) != 0) {
        snprintf(install->failure, sizeof(install->failure), "%.400s: %s", path, strerror(errno));
        return INSTALL_FAILED;
    }
    journal_add(&install->journal, "undone", step->id, NULL);
    return INSTALL_FINE;
}

void install_removed_path(const struct install *install, char ret_path[1024])
{
    const char *name = install->recipe->name;

    snprintf(ret_path, 1024, "%.400s%.*s.%.64s.removed", install->root, (int)(strlen(install->state) - strlen(name)),
             install->state, name);
}

/* Removes the state atomically for other runs; also removes what an uninstall that was killed here has left. */
static bool remove_state(struct install *install)
{
    char path[1024], removed[1024];

    snprintf(path, sizeof(path), "%.400s%.300s", install->root, install->state);
    install_removed_path(install, removed);
    if (remove_tree(removed) == 0 && rename(path, removed) == 0 && remove_tree(removed) == 0)
        return true;
    snprintf(install->failure, sizeof(install->failure), "%.400s: %s", path, strerror(errno));
    return false;
}

enum install_result install_undo(struct install *install)
{
    char path[1024];
    enum install_result result;

    if (!install->is_live && !install->can_chroot) {
        for (size_t i = 0; i < install->recipe->n_steps; i++) {
            const struct recipe_step *step = &install->recipe->steps[i];

            if (step->type->needs_live && is_changed(install, step, &install->states[i])) {
                snprintf(install->failure, sizeof(install->failure), "step '%s' of type %s needs the machine itself",
                         step->id, step->type->name);
                return INSTALL_REFUSED;
            }
        }
    }
    unit_remove(install);
    result = earlier_undo_dropped(install);
    if (result != INSTALL_FINE)
        return result;
    for (size_t i = install->recipe->n_steps; i-- > 0;) {
        size_t index = install->recipe->order[i];
        const struct recipe_step *step = &install->recipe->steps[index];

        /* Includes a step that the current values skip: it was applied with other values. */
        if (!is_changed(install, step, &install->states[index]))
            continue;
        result = undo_step(install, step, index);
        if (result != INSTALL_FINE)
            return result;
    }
    journal_add(&install->journal, "uninstalled", NULL, NULL);
    if (!remove_state(install))
        return INSTALL_FAILED;
    snprintf(path, sizeof(path), "%.400s%.300s", install->root, install->state);
    /* The parent folders, if they are empty. */
    for (int i = 0; i < 2; i++) {
        *strrchr(path, '/') = '\0';
        if (rmdir(path) != 0)
            break;
    }
    return INSTALL_FINE;
}
