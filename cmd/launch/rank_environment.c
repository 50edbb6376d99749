/* SPDX-License-Identifier: Apache-2.0 */
#include "cmd_launch.h"

#include "common/output.h"
#include "common/text.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

/* The ranks find each other by these variables: one value for all ranks would prevent that. */
static const struct {
    const char *name, *option;
} own_names[] = {
    {"RANK", ""},
    {"LOCAL_RANK", ""},
    {"NODE_RANK", ""},
    {"NNODES", ""},
    {"WORLD_SIZE", "--world"},
    {"LOCAL_WORLD_SIZE", "--per-node"},
    {"GPUS_PER_NODE", "--gpus-per-node"},
    {"MASTER_ADDR", "--hosts and --location"},
    {"MASTER_PORT", "--master-port"},
};

static int add_variable(const struct cmd *cmd, const char *word, json_t *env)
{
    size_t length = strcspn(word, "=");
    char name[256];
    const char *value;

    if (length == 0 || length >= sizeof(name) || (word[0] >= '0' && word[0] <= '9') ||
        strspn(word, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_") < length)
        /* The value is not printed: it may be a secret. */
        return cmd_usage(cmd, "--env: '%.*s' is not a variable name: NAME or NAME=VALUE",
                         (int)(length < 60 ? length : 60), word);
    snprintf(name, sizeof(name), "%.*s", (int)length, word);
    for (size_t i = 0; i < sizeof(own_names) / sizeof(own_names[0]); i++)
        if (strcmp(name, own_names[i].name) == 0)
            return cmd_usage(cmd, "--env %s: epkit sets it for each rank%s%s", name,
                             *own_names[i].option ? "; see " : "", own_names[i].option);
    value = word[length] ? word + length + 1 : getenv(name);
    if (!value)
        return cmd_refuse(cmd, NULL, "--env %s: the variable is not set here; give NAME=VALUE", name);
    if (json_object_set_new(env, name, json_string(value)) != 0)
        return cmd_usage(cmd, "--env %s: its value is not UTF-8", name);
    return CMD_FINE;
}

/*
 * The debugging variables from NVSHMEM's and NCCL's manuals. No file is named: the output of ranks is kept, and a name
 * in /tmp that others can guess may be their link.
 */
static void add_debugging(json_t *env)
{
    static const char *const rows[][2] = {
        {"NVSHMEM_DEBUG", "WARN,INFO"},
        {"NVSHMEM_DEBUG_SUBSYS", "INIT,TRANSPORT,P2P"},
        {"NVSHMEM_ENABLE_ERROR_CHECKS", "true"},
        {"NVSHMEM_NVTX", "common"},
        {"NCCL_DEBUG", "INFO"},
        {"NCCL_DEBUG_SUBSYS", "INIT,NET,GRAPH"},
        {"TORCH_DISTRIBUTED_DEBUG", "DETAIL"},
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        json_object_set_new(env, rows[i][0], json_string(rows[i][1]));
}

/*
 * A library that is preloaded into epkit is meant for the program: it is passed there, and not into ssh and mpirun on
 * the way.
 */
static const char *choose_preload(const struct launch_environment *args)
{
    const char *own = getenv("EPKIT_PRELOAD");

    if (args->preload)
        return args->preload;
    if (own && *own)
        return own;
    own = getenv("LD_PRELOAD");
    return own && *own ? own : NULL;
}

/* Adds this process's variables whose names begin so; a name that ends in '=' is a whole one. */
static void add_own(const char *const *names, json_t *env)
{
    for (char **entry = environ; *entry; entry++) {
        char name[256];

        if (!text_begins_any(*entry, names) || strcspn(*entry, "=") >= sizeof(name))
            continue;
        snprintf(name, sizeof(name), "%.*s", (int)strcspn(*entry, "="), *entry);
        json_object_set_new(env, name, json_string(*entry + strlen(name) + 1));
    }
}

/*
 * In a pod the container's environment is that of the job, but a login by ssh does not get it; all pods have the same
 * image. Scripts begin with its variables, and may add to search paths; settings of communication stay as they are.
 */
static void add_pod_variables(json_t *spec, json_t *env)
{
    json_t *inherited = json_object();

    add_own(TEXTS("NCCL_", "NVSHMEM_", "DEEP_EP_", "UCX_", "HF_TOKEN="), env);
    json_object_update(inherited, env);
    add_own(TEXTS("LD_LIBRARY_PATH=", "PYTHONPATH=", "PATH=", "VIRTUAL_ENV=", "CUDA_HOME="), inherited);
    json_object_set_new(spec, "inherited", inherited);
}

int launch_add_secret(const struct cmd *cmd, json_t *env)
{
    unsigned char bytes[16];
    char text[2 * sizeof(bytes) + 1];

    if (json_object_get(env, "EPKIT_SECRET"))
        return CMD_FINE;
    if (getrandom(bytes, sizeof(bytes), 0) != (ssize_t)sizeof(bytes)) {
        out_error("%s: random bytes from the kernel: %s", cmd->name, strerror(errno));
        return CMD_FAILED;
    }
    for (size_t i = 0; i < sizeof(bytes); i++)
        snprintf(text + 2 * i, 3, "%02x", bytes[i]);
    json_object_set_new(env, "EPKIT_SECRET", json_string(text));
    return CMD_FINE;
}

int launch_environment(const struct cmd *cmd, const struct launch_environment *args, bool is_pods, json_t *spec)
{
    json_t *env = json_object(), *source;
    const char *preload = choose_preload(args);

    json_object_set_new(spec, "env", env);
    if (is_pods)
        add_pod_variables(spec, env);
    if (args->debug)
        add_debugging(env);
    for (size_t i = 0; i < args->env->n; i++)
        if (add_variable(cmd, args->env->values[i], env) != CMD_FINE)
            return CMD_USAGE;
    if (args->source->n) {
        /* Replaces the scripts of the job. */
        source = json_array();
        json_object_set_new(spec, "source", source);
        for (size_t i = 0; i < args->source->n; i++)
            json_array_append_new(source, json_string(args->source->values[i]));
    }
    if (preload && !json_object_get(env, "LD_PRELOAD"))
        json_object_set_new(spec, "preload", json_string(preload));
    return CMD_FINE;
}
