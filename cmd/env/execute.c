/* SPDX-License-Identifier: Apache-2.0 */
/* execute.c - executes a command with the advised environment. */
#include "common/cmd.h"
#include "common/inherited.h"
#include "common/output.h"
#include "env.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXIT_CANNOT_EXECUTE 126
#define EXIT_NO_COMMAND 127

static const char *own_env(void *unused, const char *name)
{
    (void)unused;
    return getenv(name);
}

/* Launchers: a library preloaded into one is loaded by everything that it starts. */
static bool is_launcher(char **command)
{
    if (text_is_any(text_base(command[0]),
                    TEXTS("mpirun", "mpiexec", "orterun", "prterun", "srun", "sbatch", "salloc", "ssh", "pdsh", "flux",
                          "jsrun", "torchrun", "deepspeed", "docker", "podman", "kubectl")))
        return true;
    /* python3 -m torch.distributed.run is torchrun */
    for (; command[0] && command[1]; command++)
        if (strcmp(command[0], "-m") == 0 &&
            text_is_any(command[1], TEXTS("torch.distributed.run", "torch.distributed.launch")))
            return true;
    return false;
}

static bool prepend(struct source *source, const char *name, const char *value)
{
    const char *current = getenv(name);
    const char *path = advice_prepend(source, value, current ? current : "");

    if (!*path)
        errno = ENOMEM;
    return *path && setenv(name, path, 1) == 0;
}

/* The library has to exist on the machine that runs the command, or ld.so complains in each process. */
static bool preload_is_wanted(const struct advice_row *row, char **command)
{
    if (is_launcher(command)) {
        out_warning("%s is left out: %s would load the library too, and whatever it starts", row->name,
                    text_base(command[0]));
        out_hint("put 'epkit env --' in front of the program: %s ... epkit env -- PROGRAM", text_base(command[0]));
        return false;
    }
    if (access(row->value, R_OK) != 0) {
        out_warning("%s is left out: %s is not on this machine", row->name, row->value);
        return false;
    }
    return true;
}

static bool apply(struct source *source, const struct advice_row *row, int gpu, char **command)
{
    if (row->unset)
        return unsetenv(row->name) == 0;
    if (row->scope == ADVICE_RANK)
        return gpu < 0 || gpu >= row->n_values || setenv(row->name, row->values[gpu], 1) == 0;
    if (row->scope == ADVICE_PROGRAM && !preload_is_wanted(row, command))
        return true;
    return row->prepend ? prepend(source, row->name, row->value) : setenv(row->name, row->value, 1) == 0;
}

int env_execute(const struct env_script *script, char **command)
{
    int gpu = advice_gpu_of(script->topo, own_env, NULL);
    int error;

    for (int i = 0; i < script->advice->n; i++) {
        const struct advice_row *row = &script->advice->rows[i];

        if (!apply(script->topo->source, row, gpu, command)) {
            out_error("%s could not be set: %s", row->name, strerror(errno));
            return CMD_FAILED;
        }
    }
    fflush(stdout);
    inherited_restore();
    execvp(command[0], command);
    error = errno;
    out_error("%s cannot be executed: %s", command[0], strerror(error));
    return error == ENOENT ? EXIT_NO_COMMAND : EXIT_CANNOT_EXECUTE;
}
