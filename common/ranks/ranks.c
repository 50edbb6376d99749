/* SPDX-License-Identifier: Apache-2.0 */
/* ranks.c - a rank: its communicator, its job, its events. */
#include "ranks_internal.h"

#include "common/cmd.h"
#include "gpu.h"

#include "common/dir.h"
#include "common/text.h"
#include "machine/hardware/map.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define ENV_DEVICE "EPKIT_VERBS_DEVICE"

int ranks_worse(int a, int b)
{
    static const int order[] = {CMD_FINE, CMD_FINDINGS, CMD_UNSUPPORTED, CMD_USAGE, CMD_FAILED};
    int index_a = -1, index_b = -1;

    for (int i = 0; i < (int)(COUNT(order)); i++) {
        index_a = a == order[i] ? i : index_a;
        index_b = b == order[i] ? i : index_b;
    }
    /* An unknown code is a failure. */
    if (index_a < 0 || index_b < 0)
        return CMD_FAILED;
    return index_a > index_b ? a : b;
}

void ranks_emit(struct ranks_ctx *ctx, json_t *event)
{
    const struct ranks_rank_context *self = (const struct ranks_rank_context *)ctx;
    size_t length;
    char *line;

    if (ctx->emit_fd < 0) {
        self->on_event(self->context, event);
        json_decref(event);
        return;
    }
    line = json_dumps(event, JSON_COMPACT);
    json_decref(event);
    if (!line)
        return;
    length = strlen(line);
    line[length++] = '\n';
    /* When this fails, the launcher has exited: this rank is about to be killed. */
    (void)write_all(ctx->emit_fd, line, length);
    free(line);
}

/* Without libepkit-cuda, the hint of the status would be about libraries that cannot be loaded. */
static const char *find_hint(const struct ranks_ctx *ctx, ep_status status, const char *text)
{
    if (status == EP_E_UNSUPPORTED && gpu_is_backend(ctx->spec->backend) && gpu_is_missing(text))
        return "this epkit was built without the CUDA backend: select the host backend by EPKIT_BACKEND=host";
    return ep_status_hint(status);
}

int ranks_emit_error(struct ranks_ctx *ctx, ep_status status, const char *what)
{
    const char *raw = ep_last_error();
    char text[1024];

    if (!*raw && ctx->comm)
        raw = ep_comm_last_error(ctx->comm);
    if (!*raw)
        raw = ep_status_text(status);
    /* Invalid UTF-8, for example a truncated name, cannot be put into JSON. */
    text_clean(raw, text, sizeof(text));
    ranks_emit(ctx,
               json_pack("{s:s, s:i, s:s, s:s, s:s, s:s}", "event", "error", "rank", ctx->rank, "status",
                         ep_status_name(status), "what", what, "text", text, "hint", find_hint(ctx, status, text)));
    return CMD_FAILED;
}

static ranks_job_fn find_job(const char *name)
{
    for (const struct ranks_job *job = ranks_jobs; job->name; job++)
        if (strcmp(job->name, name) == 0)
            return job->run;
    return NULL;
}

static bool injects_faults(const ep_net_emulation *emulation)
{
    return emulation->delay_us || emulation->ring_bytes || emulation->split_bytes || emulation->reorder;
}

static void choose_nics(void)
{
    struct source *source;
    const struct topo *topo;
    struct map *map;
    const char *ports;

    if (source_open(NULL, &source) != EP_OK)
        return;
    topo = topo_read(source);
    map = map_best(topo);
    ports = map_verbs(topo, map);
    if (*ports)
        setenv(ENV_DEVICE, ports, 1);
    map_free(map);
    source_free(source);
}

/*
 * With the network "verbs", sets EPKIT_VERBS_DEVICE, unless it is set, so that each rank uses the NIC that `epkit topo`
 * assigns to the GPU with its local rank. Does nothing if a GPU has no NIC.
 */
static void init_nics(const struct ranks_spec *spec)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    const char *set = getenv(ENV_DEVICE);

    if (spec->network && strcmp(spec->network, "verbs") == 0 && (!set || !*set))
        pthread_once(&once, choose_nics);
}

static ep_status open_comm(struct ranks_ctx *ctx, const ep_boot *boot)
{
    const struct ranks_spec *spec = ctx->spec;
    ep_comm_config config = EP_COMM_CONFIG_INIT;

    config.backend = spec->backend ? spec->backend : "host";
    config.ranks_per_node = spec->nranks / (spec->nnodes > 1 ? spec->nnodes : 1);
    config.timeout_ms = spec->timeout_ms;
    config.channels = spec->channels;
    config.partial_type = spec->partial_type;
    ep_net_emulate(&spec->emulation);
    /* Only the emulated network can inject faults; by default, ranks of a launcher use sockets. */
    if (spec->nnodes > 1 && injects_faults(&spec->emulation))
        config.network = "emulated";
    else if (spec->nnodes > 1)
        config.network = spec->network;
    return ep_comm_new(boot, &config, &ctx->comm);
}

/* With the cuda backend the data of the jobs is in device memory, accessed through the module of the backend. */
static int find_memory(struct ranks_ctx *ctx)
{
    if (!gpu_is_backend(ctx->spec->backend))
        return CMD_FINE;
    ctx->memory = &gpu_memory;
    if (gpu_load(&ctx->gpu) == EP_OK)
        return CMD_FINE;
    ranks_emit(ctx, ranks_problem_new(ctx->rank, "loading the CUDA backend",
                                      "select the host backend by EPKIT_BACKEND=host", "%s", ep_last_error()));
    return CMD_UNSUPPORTED;
}

int ranks_run_rank(struct ranks_rank_context *self, const ep_boot *boot, const char *job, const json_t *parameters)
{
    struct ranks_ctx *ctx = &self->ctx;
    ranks_job_fn run = find_job(job);
    int code = CMD_FAILED;

    ctx->rank = boot->rank;
    ctx->nranks = boot->nranks;
    ctx->boot = boot;
    ctx->nnodes = ctx->spec->nnodes;
    ctx->comm = NULL;
    ctx->memory = NULL;
    ctx->gpu = NULL;
    if (!run) {
        ranks_emit(ctx, ranks_problem_new(ctx->rank, "starting a job", "", "this epkit has no job '%s'", job));
    } else {
        ep_status status;

        init_nics(ctx->spec);
        /* Before memory is allocated, which the kernel places on the node of the first CPU to touch it. */
        if (gpu_is_backend(ctx->spec->backend))
            gpu_bind(ctx->rank);
        status = open_comm(ctx, boot);
        if (status != EP_OK)
            ranks_emit_error(ctx, status, "creating the communicator");
        else
            code = find_memory(ctx);
        if (status == EP_OK && code == CMD_FINE)
            code = run(ctx, parameters);
        if (status == EP_E_UNSUPPORTED)
            code = CMD_UNSUPPORTED;
    }
    ep_comm_free(ctx->comm);
    ctx->comm = NULL;
    ranks_emit(ctx, json_pack("{s:s, s:i, s:i}", "event", "exit", "rank", ctx->rank, "code", code));
    return code;
}

json_t *ranks_spec_to_json(const struct ranks_spec *spec)
{
    const ep_net_emulation *emulation = &spec->emulation;

    return json_pack("{s:i, s:i, s:i, s:i, s:s*, s:s*, s:i, s:i, s:I, s:i, s:i, s:i, s:i, s:i}", "boot", spec->boot,
                     "nranks", spec->nranks, "nnodes", spec->nnodes, "timeout_ms", spec->timeout_ms, "backend",
                     spec->backend, "network", spec->network, "channels", spec->channels, "partial_type",
                     spec->partial_type, "seed", (json_int_t)emulation->seed, "delay_us", (int)emulation->delay_us,
                     "ring_bytes", (int)emulation->ring_bytes, "split_bytes", (int)emulation->split_bytes, "reorder",
                     (int)emulation->reorder, "flip_put", (int)emulation->flip_put);
}

int ranks_spec_from_json(const json_t *json, struct ranks_spec *ret_spec)
{
    struct ranks_spec spec = {0};
    ep_net_emulation *emulation = &spec.emulation;
    json_int_t seed;
    int boot;

    if (json_unpack((json_t *)json, "{s:i, s:i, s:i, s:i, s?s, s?s, s:i, s:i, s:I, s:i, s:i, s:i, s:i, s:i}", "boot",
                    &boot, "nranks", &spec.nranks, "nnodes", &spec.nnodes, "timeout_ms", &spec.timeout_ms, "backend",
                    &spec.backend, "network", &spec.network, "channels", &spec.channels, "partial_type",
                    &spec.partial_type, "seed", &seed, "delay_us", &emulation->delay_us, "ring_bytes",
                    &emulation->ring_bytes, "split_bytes", &emulation->split_bytes, "reorder", &emulation->reorder,
                    "flip_put", &emulation->flip_put) != 0)
        return -1;
    spec.boot = (enum ranks_boot)boot;
    emulation->seed = (uint64_t)seed;
    *ret_spec = spec;
    return 0;
}

char *ranks_request_print(const struct ranks_spec *spec, const char *job, const json_t *parameters)
{
    json_t *message =
        json_pack("{s:o, s:s, s:O}", "spec", ranks_spec_to_json(spec), "job", job, "parameters", parameters);
    char *text = json_dumps(message, JSON_COMPACT);

    json_decref(message);
    return text;
}

int ranks_request_parse(const json_t *message, struct ranks_request *ret_request)
{
    ret_request->job = json_string_value(json_object_get(message, "job"));
    ret_request->parameters = json_object_get(message, "parameters");
    return ret_request->job && ret_request->parameters
               ? ranks_spec_from_json(json_object_get(message, "spec"), &ret_request->spec)
               : -1;
}
