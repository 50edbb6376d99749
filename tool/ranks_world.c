/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ranks_world.c - epkit started by mpirun: "mpirun -n 8 epkit test intranode".
 *
 * Rank 0 runs the verb and renders; the others follow it: they wait for a job, run it, and wait for the next, until
 * rank 0 is done. So a verb may run several jobs, and what it draws (a seed) is drawn once.
 */
#include "cmd.h"
#include "output.h"
#include "progress.h"
#include "ranks_internal.h"

#include <stdlib.h>
#include <string.h>

#define CHUNK_BYTES 4096
#define IDLE_MS (24 * 3600 * 1000) /* a follower's patience between two jobs */

static struct {
    const struct ep_mpi_module *module;
    struct ep_boot_mpi *boot;
    bool tried;
} world;

/* Environment variables in which the launchers of the common MPIs tell a process its place. */
static const char *const place_names[][2] = {
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
    {"PMI_RANK", "PMI_SIZE"},
};

/* A world of one is none: interactive shells of batch systems look like it. */
static bool find_place(int *ret_rank, int *ret_size)
{
    for (size_t i = 0; i < sizeof(place_names) / sizeof(place_names[0]); i++) {
        const char *rank = getenv(place_names[i][0]), *size = getenv(place_names[i][1]);

        if (rank && size && atoi(size) > 1) {
            *ret_rank = atoi(rank);
            *ret_size = atoi(size);
            return true;
        }
    }
    return false;
}

int ranks_world_rank(void)
{
    int rank, size;

    return find_place(&rank, &size) ? rank : -1;
}

int ranks_world_size(void)
{
    int rank, size;

    return find_place(&rank, &size) ? size : 0;
}

static int join(void)
{
    if (world.tried)
        return world.boot ? CMD_FINE : CMD_UNSUPPORTED;
    world.tried = true;
    if (ranks_mpi_load(&world.module) == EP_OK && world.module->start(&world.boot) == EP_OK)
        return CMD_FINE;
    world.boot = NULL;
    if (ranks_world_rank() == 0)
        out_problem("joining the ranks of mpirun", NULL, ep_last_error(),
                    "build epkit with MPI, or start it without mpirun");
    return CMD_UNSUPPORTED;
}

static ep_status gather(const void *mine, size_t bytes, void *ret_all)
{
    const ep_boot *boot = world.module->get(world.boot);

    return boot->allgather(boot->context, mine, bytes, IDLE_MS, ret_all);
}

/* Rank 0's text on all ranks: its length, then its pieces. ret_text is the caller's to free. */
static ep_status broadcast(const char *text, char **ret_text)
{
    int nranks = ranks_world_size();
    unsigned char *all = calloc((size_t)nranks, CHUNK_BYTES);
    uint64_t length = text ? strlen(text) : 0, *lengths = calloc((size_t)nranks, sizeof(*lengths));
    char chunk[CHUNK_BYTES] = "", *result = NULL;
    ep_status status = all && lengths ? gather(&length, sizeof(length), lengths) : EP_E_MEMORY;

    if (status == EP_OK) {
        result = calloc(1, lengths[0] + 1);
        status = result ? EP_OK : EP_E_MEMORY;
    }
    for (uint64_t at = 0; status == EP_OK && at < lengths[0]; at += CHUNK_BYTES) {
        size_t n = lengths[0] - at < CHUNK_BYTES ? (size_t)(lengths[0] - at) : CHUNK_BYTES;

        if (text)
            memcpy(chunk, text + at, n);
        status = gather(chunk, CHUNK_BYTES, all);
        memcpy(result + at, all, n);
    }
    if (status == EP_OK) {
        *ret_text = result;
        result = NULL;
    }
    free(result);
    free(lengths);
    free(all);
    return status;
}

/* The worst of all ranks' codes, on all ranks. */
static int agree(int code)
{
    int nranks = ranks_world_size(), worst = code;
    int *codes = calloc((size_t)nranks, sizeof(*codes));

    if (!codes || gather(&code, sizeof(code), codes) != EP_OK)
        worst = CMD_FAILED;
    for (int rank = 0; codes && rank < nranks; rank++)
        worst = ranks_worse(worst, codes[rank]);
    free(codes);
    return worst;
}

struct hearing {
    ranks_event_fn on_event; /* NULL on followers: their errors are printed, other events have nowhere to go */
    void *context;
    json_t *problems;
};

static void take_event(void *context, const json_t *event)
{
    struct hearing *hearing = context;
    const char *kind = json_string_value(json_object_get(event, "event"));

    if (kind && strcmp(kind, "exit") == 0)
        return;
    if (kind && strcmp(kind, "error") == 0)
        ranks_problem_add(hearing->problems, event);
    if (hearing->on_event)
        hearing->on_event(hearing->context, event);
}

static int serve(const struct ranks_spec *spec, const char *job, const json_t *parameters, struct hearing *hearing)
{
    struct ranks_seat seat = {.ctx.spec = spec,
                              .ctx.mpi = world.module,
                              .ctx.mpi_boot = world.boot,
                              .ctx.emit_fd = -1,
                              .on_event = take_event,
                              .context = hearing};
    int code;

    hearing->problems = json_array();
    code = ranks_serve(&seat, world.module->get(world.boot), job, parameters);
    /* Before the ranks agree: if one of them is dead, mpirun ends the others there. */
    ranks_problem_print(hearing->problems);
    json_decref(hearing->problems);
    return agree(code);
}

int ranks_world_run(const struct ranks_spec *spec, const char *job, const json_t *parameters, ranks_event_fn on_event,
                    void *context)
{
    struct hearing hearing = {on_event, context, NULL};
    char *text, *copy = NULL;
    json_t *message;
    ep_status status;
    int result = join();

    if (result != CMD_FINE)
        return result;
    message = json_pack("{s:o, s:s, s:O}", "spec", ranks_spec_to_json(spec), "job", job, "parameters", parameters);
    text = json_dumps(message, JSON_COMPACT);
    json_decref(message);
    status = text ? broadcast(text, &copy) : EP_E_MEMORY;
    if (status == EP_OK) {
        result = serve(spec, job, parameters, &hearing);
    } else {
        out_problem("announcing the job to the ranks", NULL, ep_last_error(), ep_status_hint(status));
        result = CMD_FAILED;
    }
    free(copy);
    free(text);
    return result;
}

int ranks_follow(void)
{
    int result = join();

    while (result == CMD_FINE) {
        struct hearing hearing = {0};
        struct ranks_spec spec;
        char *text = NULL;
        json_t *message;

        if (broadcast(NULL, &text) != EP_OK)
            return CMD_FAILED;
        message = json_loads(text, 0, NULL);
        free(text);
        if (ranks_spec_from_json(json_object_get(message, "spec"), &spec) != 0) {
            /* An empty message: rank 0 is done. The exit code that counts is its own. */
            json_decref(message);
            break;
        }
        serve(&spec, json_string_value(json_object_get(message, "job")), json_object_get(message, "parameters"),
              &hearing);
        json_decref(message);
    }
    return result;
}

void ranks_world_done(void)
{
    char *text = NULL;

    if (!world.boot)
        return;
    if (ranks_world_rank() == 0)
        broadcast("{}", &text);
    free(text);
    world.module->stop(world.boot);
    world.boot = NULL;
}
