/* SPDX-License-Identifier: Apache-2.0 */
/* recipe_open.c - opens and closes an installation: paths, the lock, the journal, the results of the checks. */
#include "base/clock.h"
#include "base/error.h"
#include "common/memory.h"
#include "common/temporary.h"
#include "dir_below.h"
#include "install.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define PROBE_SECONDS 60
#define LOCK "lock"

/* --- the caller --- */

enum install_result install_fail(struct install *install, const char *format, ...)
{
    WITH_ARGS(args, format, vsnprintf(install->failure, sizeof(install->failure), format, args));
    return INSTALL_FAILED;
}

enum install_result install_fail_errno(struct install *install, int error, const char *path)
{
    return install_fail(install, "%.400s: %s", path, write_reason(error));
}

enum install_result install_fail_status(struct install *install)
{
    return install_fail(install, "%.500s", ep_last_error());
}

const char *install_state_name(enum step_now now)
{
    static const char *const names[] = {"done", "todo", "partial", "wrong", "reboot", "unknown", "skipped"};

    return names[now];
}

const char *install_state_error(int error)
{
    return error == ELOOP ? "a link; epkit makes none there" : write_reason(error);
}

/* Consumes the file, which may be NULL. */
static void read_line(FILE *file, char *ret_text, size_t bytes)
{
    ret_text[0] = '\0';
    if (!file)
        return;
    if (!fgets(ret_text, (int)bytes, file))
        ret_text[0] = '\0';
    ret_text[strcspn(ret_text, "\n")] = '\0';
    fclose(file);
}

static void first_line(const char *path, char *ret_text, size_t bytes)
{
    read_line(fopen(path, "re"), ret_text, bytes);
}

/* The running kernel; for a folder the one that it names, else the newest one that has modules there. */
void install_kernel(const char *root, char ret_kernel[128])
{
    struct source_names names;
    struct source *source;

    first_line(root ? "" : "/proc/sys/kernel/osrelease", ret_kernel, 128);
    if (!root || source_open(root, &source) != EP_OK)
        return;
    snprintf(ret_kernel, 128, "%s", source_line(source, "/proc/sys/kernel/osrelease").text);
    names = source_list(source, "/lib/modules");
    if (!*ret_kernel && names.n)
        snprintf(ret_kernel, 128, "%s", names.names[names.n - 1]);
    source_free(source);
}

static int probe(void *install, const struct recipe_step *step, const char *text)
{
    char output[256];

    return run_probe(install, step, text, PROBE_SECONDS, output, sizeof(output));
}

/* --- lock --- */

/* Is the process that wrote the lock still a running epkit? */
static bool is_holder_alive(const struct install *install, int *ret_pid)
{
    char text[64], comm_path[64], comm[64];

    read_line(file_open_within(install->state_fd, LOCK), text, sizeof(text));
    *ret_pid = atoi(text);
    if (*ret_pid <= 1)
        return false;
    snprintf(comm_path, sizeof(comm_path), "/proc/%d/comm", *ret_pid);
    first_line(comm_path, comm, sizeof(comm));
    return strcmp(comm, "epkit") == 0;
}

static int longest_deadline(const struct recipe *recipe)
{
    int longest = 0;

    for (size_t i = 0; i < recipe->n_steps; i++)
        longest = recipe->steps[i].deadline_s > longest ? recipe->steps[i].deadline_s : longest;
    return longest;
}

/* An uninstall removes the lock file with the state, possibly between open() and flock(). */
static bool is_unlinked(const struct install *install)
{
    struct stat held, there;

    return fstat(install->lock_fd, &held) != 0 || fstatat(install->state_fd, LOCK, &there, AT_SYMLINK_NOFOLLOW) != 0 ||
           held.st_ino != there.st_ino || held.st_dev != there.st_dev;
}

static enum install_result just_uninstalled(struct install *install)
{
    install_fail(install, "another run has just uninstalled this recipe");
    snprintf(install->hint, sizeof(install->hint), "nothing was changed; run this again");
    return INSTALL_BUSY;
}

/* A step that outlived its run holds the lock that it inherited: waits for it. */
static enum install_result acquire_lock(struct install *install)
{
    uint64_t start = ep_now_ns();
    char path[1024], text[32];
    bool is_reported = false;
    int pid;

    install_path(install, LOCK, NULL, path);
    /* Who may read a file may lock it. */
    install->lock_fd = dir_append_in(install->state_fd, LOCK, 0600);
    if (install->lock_fd < 0 && errno == ENOENT)
        return just_uninstalled(install);
    if (install->lock_fd < 0)
        return install_fail_errno(install, errno, path);
    while (flock(install->lock_fd, LOCK_EX | LOCK_NB) != 0) {
        if (errno != EWOULDBLOCK && errno != EINTR)
            return install_fail_errno(install, errno, path);
        if (is_holder_alive(install, &pid)) {
            install_fail(install, "process %d is installing this recipe now", pid);
            snprintf(install->hint, sizeof(install->hint), "'epkit install status %s' shows the progress",
                     install->recipe->name);
            return INSTALL_BUSY;
        }
        if (ep_now_ns() - start > (uint64_t)longest_deadline(install->recipe) * 1000000000u) {
            install_fail(install,
                         "no epkit is installing this recipe, but a process that one of its steps started still runs");
            snprintf(install->hint, sizeof(install->hint),
                     "'fuser -v %.150s' shows the process; end it, then run this again", path);
            return INSTALL_BUSY;
        }
        if (!is_reported)
            observe_line("a step of an earlier run is still running: waiting for it");
        is_reported = true;
        if (observe_is_interrupted()) {
            /* Without the lock nothing was begun. */
            close(install->lock_fd);
            install->lock_fd = -1;
            return INSTALL_INTERRUPTED;
        }
        poll(NULL, 0, 200);
    }
    if (is_unlinked(install))
        return just_uninstalled(install);
    snprintf(text, sizeof(text), "%d\n", (int)getpid());
    if (ftruncate(install->lock_fd, 0) != 0 || write(install->lock_fd, text, strlen(text)) < 0)
        return install_fail_errno(install, errno, path);
    return INSTALL_FINE;
}

/* --- opening --- */

static enum install_result set_root(struct install *install, const char *root)
{
    char path[PATH_MAX], shell[PATH_MAX];
    int fd, number;

    if (!root) {
        install->is_live = true;
        install->has_systemd = access("/run/systemd/system", F_OK) == 0 && access("/usr/bin/systemd-run", X_OK) == 0;
        first_line("/proc/sys/kernel/random/boot_id", install->boot, sizeof(install->boot));
        return INSTALL_FINE;
    }
    fd = dir_open(root, false);
    number = fd < 0 ? errno : dir_path(fd, path);
    dir_close(fd);
    if (number)
        return install_fail(install, "%.300s: %s", root, write_reason(number));
    if (strlen(path) > INSTALL_ROOT_MAX)
        return install_fail(install, "%.300s...: its path is longer than %d characters", path, INSTALL_ROOT_MAX);
    snprintf(install->root, sizeof(install->root), "%s", path);
    snprintf(shell, sizeof(shell), "%.380s/bin/sh", install->root);
    install->can_chroot = access(shell, X_OK) == 0 && geteuid() == 0;
    snprintf(install->boot, sizeof(install->boot), "folder");
    return INSTALL_FINE;
}

/* Writes a file of the state atomically. */
static ep_status save(const struct install *install, const char *name, const char *text, size_t bytes, mode_t mode)
{
    int error = temporary_save_in(install->state_fd, name, text, bytes, mode);
    char path[1024];

    install_path(install, name, NULL, path);
    return error ? ep_fail_errno(EP_E_SYSTEM, error, "%s", path) : EP_OK;
}

/* Saves the recipe's text with its state, so that a resume needs nothing else. */
static ep_status save_recipe(const struct install *install)
{
    json_t *values = json_object();
    ep_status status;
    char *text;

    FOR_EACH (variable, install->recipe->variables, install->recipe->n_variables)
        if (variable->value && (variable->source == FROM_ENVIRONMENT || variable->source == FROM_COMMAND_LINE))
            json_object_set_new(values, variable->name, json_string(variable->value));
    text = json_dumps(values, JSON_INDENT(1) | JSON_SORT_KEYS);
    json_decref(values);
    /* Values may be secrets. */
    status = save(install, "settings.json", text, strlen(text), 0600);
    free(text);
    if (status != EP_OK)
        return status;
    return save(install, "recipe.yaml", install->recipe->text, install->recipe->bytes, 0644);
}

/*
 * Opens a folder below the root: links lead to where they would lead on that machine. The name without links is valid
 * for programs outside of the root as well.
 */
static int open_folder(const struct install *install, const char *folder, bool make, char *ret_folder, size_t bytes)
{
    char path[PATH_MAX];
    int fd = dir_open_below(*install->root ? install->root : "/", folder, make, path);

    if (fd < 0 && (errno != ENOENT || make))
        return -1;
    if (snprintf(ret_folder, bytes, "%s", path + strlen(install->root)) < (int)bytes)
        return fd;
    dir_close(fd);
    errno = ENAMETOOLONG;
    return -1;
}

/* 0, or an errno; a missing folder is none. */
static int open_state(struct install *install, bool make)
{
    char folder[512];

    snprintf(folder, sizeof(folder), "%.250s/%s", install->options.state, install->recipe->name);
    dir_close(install->state_fd);
    /* An uninstall may be removing the folders. */
    for (int i = 0; i < 4; i++) {
        install->state_fd = open_folder(install, folder, make, install->state, sizeof(install->state));
        if (install->state_fd >= 0 || !make || errno != ENOENT)
            break;
    }
    return install->state_fd >= 0 || (errno == ENOENT && !make) ? 0 : errno;
}

int install_open_logs(struct install *install, bool make)
{
    char folder[512];

    snprintf(folder, sizeof(folder), INSTALL_LOGS "/%s", install->recipe->name);
    return open_folder(install, folder, make, install->logs, sizeof(install->logs));
}

void install_path(const struct install *install, const char *name, const char *id, char ret_path[1024])
{
    snprintf(ret_path, 1024, "%.400s%.300s%s%s%s%s", install->root, install->state, name ? "/" : "", name ? name : "",
             id ? "/" : "", id ? id : "");
}

static void forget_states(struct install *install)
{
    for (size_t i = 0; i < install->recipe->n_steps; i++)
        state_set(&install->states[i], STEP_UNKNOWN, "not checked");
}

enum install_result install_open(const struct recipe *recipe, const struct install_options *options,
                                 struct install *ret_install)
{
    struct install *install = ret_install;
    char path[1024];
    int error, logs;

    memset(install, 0, sizeof(*install));
    install->recipe = recipe;
    install->options = *options;
    install->lock_fd = install->state_fd = -1;
    install->journal.fd = -1;
    install->left = json_array();
    forget_states(install);
    CMD_TRY(set_root(install, options->root));
    error = open_state(install, false);
    logs = error ? -1 : install_open_logs(install, false);
    if (!error && logs < 0 && errno != ENOENT)
        error = errno;
    dir_close(logs);
    if (error)
        return install_fail(install, "%.250s of %s: %s", options->state, *install->root ? install->root : "/",
                            error == ENOTDIR ? "not a folder, or a link that leads nowhere" : write_reason(error));
    install_kernel(install->is_live ? NULL : install->root, install->kernel);
    install_path(install, NULL, NULL, path);
    if (journal_open(install->state_fd, path, install->boot, false, &install->journal) != EP_OK)
        return install_fail_status(install);
    return INSTALL_FINE;
}

bool install_is_known(const struct install *install)
{
    return dir_has(install->state_fd, "recipe.yaml") || dir_has(install->state_fd, "before");
}

/* Where scripts run outside of a root, no other user may write what they are and where they are. */
static enum install_result check_trust(struct install *install, const struct stat *info, const char *path)
{
    if (dir_trusts(info->st_uid) && !(info->st_mode & (S_IWGRP | S_IWOTH)))
        return INSTALL_FINE;
    snprintf(install->hint, sizeof(install->hint), "the owner of the folder can run this");
    return install_fail(install, "%.400s: another user owns it or may write to it, and %s%.50s", path,
                        install->is_live ? "its scripts run as root" : "scripts run outside of ",
                        install->is_live ? "" : install->options.root);
}

/*
 * Checks a file in a folder of the state, and those in it down to `levels` folders: none is a link; `is_before`:
 * scripts are also the deepest files.
 */
static enum install_result check_file(struct install *install, int dir, const char *name, const char *path, int levels,
                                      bool is_before)
{
    enum install_result result = INSTALL_FINE;
    struct dirent *entry;
    struct stat info;
    DIR *list;

    if (fstatat(dir, name, &info, AT_SYMLINK_NOFOLLOW) != 0)
        return errno == ENOENT ? INSTALL_FINE : install_fail_errno(install, errno, path);
    if (S_ISLNK(info.st_mode) && !install->is_live)
        return install_fail(install, "%.450s: %s", path, install_state_error(ELOOP));
    if (S_ISLNK(info.st_mode))
        info.st_mode &= ~(mode_t)(S_IWGRP | S_IWOTH); /* a link has none */
    if (!install->can_chroot && (levels > 0 || is_before))
        result = check_trust(install, &info, path);
    if (result != INSTALL_FINE || levels == 0 || !S_ISDIR(info.st_mode))
        return result;
    list = dir_list(dir, name);
    if (!list)
        result = errno == ENOENT ? INSTALL_FINE : install_fail(install, "%.450s: %s", path, install_state_error(errno));
    while (result == INSTALL_FINE && (entry = dir_next(&list))) {
        char inside[1400];

        snprintf(inside, sizeof(inside), "%.1100s/%s", path, entry->d_name);
        result = check_file(install, dirfd(list), entry->d_name, inside, levels - 1, is_before);
    }
    if (list)
        closedir(list);
    return result;
}

/* The folders above the state, also those of the root: who may write in one can replace the state, also later. */
static enum install_result check_above(struct install *install)
{
    int at = dup(install->state_fd);
    enum install_result result = INSTALL_FINE;
    struct stat info;
    char path[1024];

    install_path(install, NULL, NULL, path);
    while (result == INSTALL_FINE && *path) {
        int above = openat(at, "..", O_PATH | O_DIRECTORY | O_CLOEXEC);

        if (above < 0 || fstat(above, &info) != 0)
            result = install_fail_errno(install, errno, path);
        dir_close(at);
        at = above;
        *strrchr(path, '/') = '\0';
        /* In a sticky folder others cannot rename what is there. */
        if (result == INSTALL_FINE && (info.st_mode & S_ISVTX))
            info.st_mode &= ~(mode_t)(S_IWGRP | S_IWOTH);
        if (result == INSTALL_FINE)
            result = check_trust(install, &info, *path ? path : "/");
    }
    dir_close(at);
    return result;
}

/*
 * The programs would follow links in the state of a root to files of this machine. Copies of files may be links. A user
 * other than root can run scripts from a folder that is shared.
 */
static enum install_result check_state(struct install *install)
{
    char path[1024];

    if (install->is_live && geteuid() != 0)
        return INSTALL_FINE;
    install_path(install, NULL, NULL, path);
    CMD_TRY(check_file(install, install->state_fd, ".", path, 2, false));
    install_path(install, "before", NULL, path);
    CMD_TRY(check_file(install, install->state_fd, "before", path, 2, true));
    return install->can_chroot ? INSTALL_FINE : check_above(install);
}

enum install_result install_begin(struct install *install)
{
    struct journal journal;
    char path[1024];
    int error;

    /* Another run may be changing them. */
    forget_states(install);
    install_path(install, LOCK, NULL, path);
    error = open_state(install, true);
    if (error)
        return install_fail_errno(install, error, path);
    CMD_TRY(check_state(install));
    CMD_TRY(acquire_lock(install));
    install_path(install, NULL, NULL, path);
    if (journal_open(install->state_fd, path, install->boot, true, &journal) != EP_OK)
        return install_fail_status(install);
    journal_close(&install->journal);
    install->journal = journal;
    if (!install->options.keep && save_recipe(install) != EP_OK)
        return install_fail_status(install);
    return install_probe(install);
}

void install_close(struct install *install)
{
    if (install->journal.events)
        journal_close(&install->journal);
    json_decref(install->left);
    dir_close(install->lock_fd);
    dir_close(install->state_fd);
    install->lock_fd = install->state_fd = -1;
}

/* --- checks --- */

/* A step that includes a reboot is done when it was applied in an earlier boot. */
static void check_after(const struct install *install, const struct recipe_step *step, struct step_state *state)
{
    const json_t *end = step->reboot == REBOOT_AFTER && state->now == STEP_DONE
                            ? journal_last(&install->journal, "end", step->id)
                            : NULL;
    const char *boot = json_string_value(json_object_get(end, "boot"));

    if (boot && strcmp(boot, install->boot) == 0 && install->is_live)
        state_set(state, STEP_REBOOT, "applied; it takes effect with a reboot");
}

/*
 * A driver that somebody else has installed, of this version or a later one, is kept if it works: then the library of
 * its version is there. What this recipe has installed has to be of its own version.
 */
static void check_kept(const struct install *install, struct source *source, const struct recipe_step *step,
                       struct step_state *state)
{
    static const char *const folders[] = {"/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64",
                                          "/home/kubernetes/bin/nvidia/lib64"};
    const char *version = *step->keep_driver ? source_line(source, "/sys/module/nvidia/version").text : "";

    if (state->now == STEP_DONE || !*version || strverscmp(version, step->keep_driver) < 0 ||
        journal_last(&install->journal, "start", step->id))
        return;
    for (size_t i = 0; i < COUNT(folders); i++)
        if (source_stat(source, "%s/libnvidia-ml.so.%s", folders[i], version).state == SOURCE_OK)
            state_set(state, STEP_DONE, "driver %.40s is loaded, with its libraries: it is kept", version);
}

/* The files of a step may exist although the step was killed just before its end. */
static void check_complete(const struct install *install, const struct recipe_step *step, struct step_state *state)
{
    char before[64], complete[80];

    snprintf(before, sizeof(before), "before/%.40s", step->id);
    snprintf(complete, sizeof(complete), "%s/complete", before);
    if (state->now == STEP_DONE && dir_has(install->state_fd, before) && !dir_has(install->state_fd, complete))
        state_set(state, STEP_PARTIAL, "in place, but the step that made it did not end");
}

enum install_result install_probe(struct install *install)
{
    struct check_context context = {.state = install->state,
                                    .kernel = install->kernel,
                                    .probe = install->is_live ? probe : NULL,
                                    .probe_context = install};
    struct source *source;

    if (source_open(install->is_live ? NULL : install->root, &source) != EP_OK)
        return install_fail_status(install);
    context.source = source;
    for (size_t i = 0; i < install->recipe->n_steps; i++) {
        const struct recipe_step *step = &install->recipe->steps[i];
        struct step_state *state = &install->states[i];

        if (observe_is_interrupted()) {
            source_free(source);
            return INSTALL_INTERRUPTED;
        }
        if (step->skipped) {
            state_set(state, STEP_SKIPPED, "%s%s", *step->when == '!' ? step->when + 1 : step->when,
                      *step->when == '!' ? " is 1" : " is 0");
            continue;
        }
        step->type->check(&context, step, state);
        check_kept(install, source, step, state);
        check_complete(install, step, state);
        check_after(install, step, state);
    }
    source_free(source);
    return INSTALL_FINE;
}

size_t install_changes(const struct install *install)
{
    return COUNT_OF(i, install->recipe->n_steps,
                    install->states[i].now != STEP_DONE && install->states[i].now != STEP_SKIPPED);
}
