/* SPDX-License-Identifier: Apache-2.0 */
/* kubectl.c - reads a cluster with kubectl, thus with the user's configuration, proxies and credentials. */
#include "cmd_deploy.h"

#include "common/capture.h"
#include "common/dir.h"
#include "common/memory.h"
#include "common/output.h"
#include "common/temporary.h"
#include "common/text.h"
#include "get.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>

#define CALLS_MAX 64
#define WORDS_MAX 32
#define WIDTH 6
#define ANSWER_BYTES_MAX ((size_t)256 << 20)

/* The calls of a round, which run concurrently. */
struct calls {
    const struct kubectl *kubectl;
    char *program; /* split into words */
    char *words[WORDS_MAX];
    int n_words;
    struct capture captures[CALLS_MAX];
    char *argv[CALLS_MAX][WORDS_MAX];
    char paths[CALLS_MAX][512];
    int n, n_done;
};

static struct calls *calls_new(const struct kubectl *kubectl)
{
    struct calls *calls = memory_new(1, sizeof(*calls));
    char *state = NULL;

    calls->kubectl = kubectl;
    calls->program = memory_printf("%s", kubectl->program);
    for (char *word = strtok_r(calls->program, " ", &state); word && calls->n_words < 8;
         word = strtok_r(NULL, " ", &state))
        calls->words[calls->n_words++] = word;
    if (kubectl->context) {
        calls->words[calls->n_words++] = (char *)"--context";
        calls->words[calls->n_words++] = (char *)kubectl->context;
    }
    return calls;
}

static void calls_clear(struct calls *calls)
{
    for (int i = 0; i < calls->n; i++)
        capture_done(&calls->captures[i]);
    calls->n = calls->n_done = 0;
}

static void calls_free(struct calls *calls)
{
    calls_clear(calls);
    free(calls->program);
    free(calls);
}

/* Adds a call, if there is room; the words after NULL are left out. */
static void add_call(struct calls *calls, const char *const *words)
{
    char **argv;
    int n = calls->n_words;

    if (calls->n == CALLS_MAX)
        return;
    argv = calls->argv[calls->n];
    memcpy(argv, calls->words, sizeof(calls->words[0]) * (size_t)n);
    for (; *words; words++)
        argv[n++] = (char *)*words;
    argv[n] = NULL;
    calls->captures[calls->n++] = (struct capture){.argv = argv, .bytes_max = ANSWER_BYTES_MAX};
}

static void on_end(const struct capture *capture, void *context)
{
    struct calls *calls = context;

    calls->n_done++;
    progress_update(calls->n_done, calls->n, "%s %s", calls->words[0], capture->argv[calls->n_words]);
}

static void run_calls(struct calls *calls)
{
    capture_run(calls->captures, calls->n, WIDTH, calls->kubectl->timeout_ms, on_end, calls);
}

static bool succeeded(const struct capture *capture)
{
    return capture->start_error == 0 && !capture->late && WIFEXITED(capture->status) &&
           WEXITSTATUS(capture->status) == 0 && !capture->output.cut;
}

static const char *output_of(const struct capture *capture)
{
    return capture->output.text ? capture->output.text : "";
}

/* Why a call failed, in one line. */
static json_t *failure(const struct capture *capture)
{
    const char *text = capture->error.text ? capture->error.text : "";

    if (capture->start_error)
        return json_string(strerror(capture->start_error));
    if (capture->late)
        return json_string("no answer in time");
    if (capture->output.cut)
        return json_sprintf("the answer is larger than %zu MiB", ANSWER_BYTES_MAX >> 20);
    if (!*text || *text == '\n')
        return json_string(succeeded(capture) ? "the answer is not valid" : "it failed without a message");
    return json_sprintf("%.*s", (int)strcspn(text, "\n"), text) ?: json_string("kubectl's message is not UTF-8");
}

static void put(json_t *snapshot, const char *section, const char *key, json_t *value)
{
    json_object_set_new(json_object_get(snapshot, section), key, value);
}

/* --- first round: version and API groups of the cluster --- */

static int report_failure(const struct calls *calls, const struct capture *capture)
{
    json_t *why = failure(capture);

    if (capture->start_error == ENOENT) {
        out_error("there is no '%s'", calls->words[0]);
        out_hint("install kubectl, or read a file that --save wrote elsewhere: --from FILE");
    } else {
        out_error("the cluster does not answer: %s", get_string(why));
        out_hint("'kubectl version' must work; --context names another cluster");
    }
    json_decref(why);
    return capture->start_error == ENOENT ? CMD_UNSUPPORTED : CMD_FAILED;
}

static int read_version(struct calls *calls, json_t *snapshot)
{
    json_t *answers[2], *groups = json_pack("[s]", "v1");
    int code = CMD_FINE;

    add_call(calls, TEXTS("version", "-o", "json"));
    add_call(calls, TEXTS("get", "--raw", "/apis"));
    run_calls(calls);
    for (size_t i = 0; i < COUNT(answers) && code == CMD_FINE; i++)
        if (!succeeded(&calls->captures[i]))
            code = report_failure(calls, &calls->captures[i]);
    for (size_t i = 0; i < COUNT(answers); i++)
        answers[i] = json_loads(output_of(&calls->captures[i]), 0, NULL);
    FOR_JSON (group, get(answers[1], "groups"))
        FOR_JSON (version, get(group, "versions"))
            json_array_append(groups, json_object_get(version, "groupVersion"));
    json_object_set_new(snapshot, "version", json_string(get_text(answers[0], "serverVersion/gitVersion")));
    json_object_set_new(snapshot, "groups", groups);
    for (size_t i = 0; i < COUNT(answers); i++)
        json_decref(answers[i]);
    calls_clear(calls);
    return code;
}

/* --- second round: objects --- */

/* Lines KIND/NAME: objects of which nothing else may be kept. */
static json_t *names_of(const char *text, const char *space)
{
    json_t *items = json_array();

    FOR_PIECES (line, text, "\n") {
        const char *slash = memchr(line.text, '/', line.n);
        int n = slash ? (int)(line.text + line.n - slash) - 1 : 0;

        if (slash)
            json_array_append_new(items,
                                  json_pack("{s:{s:s*, s:s#}}", "metadata", "namespace", space, "name", slash + 1, n));
    }
    return items;
}

/* Removes what nothing here reads: variables of containers may have keys as values, and the rest is large. */
static void strip(json_t *value)
{
    json_object_del(value, "env");
    json_object_del(value, "annotations");
    json_object_del(value, "managedFields");
    FOR_MEMBERS (key, item, value)
        strip(item);
    FOR_JSON (item, value)
        strip(item);
}

static void add_resource(struct calls *calls, const struct deploy_resource *resource, bool is_check)
{
    const char *where = resource->flags & DEPLOY_GLOBAL                    ? NULL
                        : is_check && (resource->flags & DEPLOY_CHECK_ALL) ? "-A"
                                                                           : "-n";

    add_call(calls, TEXTS("get", resource->plural, "-o", resource->flags & DEPLOY_NAMES ? "name" : "json", where,
                          where && strcmp(where, "-n") == 0 ? calls->kubectl->space : NULL));
}

static void store_resource(const struct calls *calls, json_t *snapshot, const struct deploy_resource *resource,
                           const struct capture *capture)
{
    const char *space = resource->flags & (DEPLOY_GLOBAL | DEPLOY_CHECK_ALL) ? NULL : calls->kubectl->space;
    json_t *answer = NULL, *items = NULL;
    char key[64];

    snprintf(key, sizeof(key), "%.*s", (int)strcspn(resource->plural, "."), resource->plural);
    if (succeeded(capture) && resource->flags & DEPLOY_NAMES) {
        items = names_of(output_of(capture), space);
    } else if (succeeded(capture)) {
        answer = json_loadb(output_of(capture), capture->output.bytes, 0, NULL);
        items = json_incref(json_object_get(answer, "items"));
        strip(items);
    } else if (capture->error.text && strstr(capture->error.text, "doesn't have a resource type")) {
        /* The API server serves the group, but not this kind: there are no objects. */
        items = json_array();
    }
    put(snapshot, json_is_array(items) ? "items" : "unread", key,
        json_is_array(items) ? json_incref(items) : failure(capture));
    json_decref(items);
    json_decref(answer);
}

static void read_objects(struct calls *calls, bool is_check, json_t *snapshot)
{
    const struct deploy_resource *asked[CALLS_MAX], *resource;

    for (resource = deploy_resources; resource->kind; resource++) {
        const char *group = strchr(resource->plural, '.');

        if (!(resource->flags & (is_check ? DEPLOY_CHECK : DEPLOY_WHY)) ||
            !get_serves(snapshot, group ? group + 1 : ""))
            continue;
        asked[calls->n] = resource;
        add_resource(calls, resource, is_check);
    }
    run_calls(calls);
    for (int n = 0; n < calls->n; n++)
        store_resource(calls, snapshot, asked[n], &calls->captures[n]);
    calls_clear(calls);
}

/* --- third round: dry runs by the API server --- */

/* The refusal in the error output of `kubectl create`; NULL: the error does not concern the object. */
static json_t *refusal_of(const char *error)
{
    static const char *const others[] = {"does not support dry run", "(Timeout)",         "(ServerTimeout)",
                                         "(ServiceUnavailable)",     "(TooManyRequests)", "(Unauthorized)"};
    const char *text = NULL;
    size_t n;

    while (text_begins(error, "Warning: ") && strchr(error, '\n'))
        error = strchr(error, '\n') + 1;
    for (size_t i = 0; i < COUNT(others); i++)
        if (strstr(error, others[i]))
            return NULL;
    if (text_begins(error, "Error from server") && strstr(error, ": ")) {
        text = strstr(error, ": ") + 2;
        /* kubectl's file is not the object. */
        if (text_begins(text, "error when creating \"") && strstr(text, "\": "))
            text = strstr(text, "\": ") + 3;
    } else if (text_begins(error, "The ") && strstr(error, " is invalid: ")) {
        text = error;
    } else {
        text = strstr(error, "no matches for kind ");
    }
    for (n = text ? strlen(text) : 0; n > 0 && text[n - 1] == '\n'; n--)
        ;
    return n > 0 ? json_stringn(text, n) : NULL;
}

/* The files may contain keys: only their owner may enter the folder. */
static int run_dry_runs(struct calls *calls, json_t *dry_runs, const struct temporary *folder, json_t *snapshot)
{
    json_t *dry_run, *refusal;

    for (size_t i = 0; (dry_run = json_array_get(dry_runs, i)); i++) {
        const json_t *document = get(dry_run, "document");
        char *path = calls->paths[i], *text;
        int number;

        if (i == CALLS_MAX || (json_is_true(get(dry_run, "derived")) && !calls->kubectl->derived))
            break;
        snprintf(path, sizeof(calls->paths[i]), "%s/%zu.json", folder->path, i);
        text = json_dumps(document, JSON_COMPACT);
        number = dir_write(folder->fd, text_base(path), text, strlen(text), 0600);
        free(text);
        if (number)
            return number;
        /* kubectl refuses a namespace other than that of the object. */
        add_call(calls, TEXTS("create", "--dry-run=server", "-o", "name", "-f", path,
                              *get_space(document) ? NULL : "-n", calls->kubectl->space));
    }
    run_calls(calls);
    for (int n = 0; n < calls->n; n++) {
        const struct capture *capture = &calls->captures[n];
        bool has_ended = !capture->start_error && !capture->late && capture->error.text;

        refusal = succeeded(capture) ? json_string("") : has_ended ? refusal_of(capture->error.text) : NULL;
        if (refusal)
            put(snapshot, "answers", get_text(json_array_get(dry_runs, (size_t)n), "digest"), refusal);
        else
            put(snapshot, "unread", "answers to dry runs", failure(capture));
    }
    return 0;
}

static void dry_run(struct calls *calls, const struct deploy_job *job, json_t *snapshot)
{
    const char *parent = getenv("TMPDIR");
    json_t *dry_runs = deploy_dry_runs(job);
    struct temporary folder = {0};
    int number = temporary_folder_in(parent && *parent ? parent : "/tmp", "epkit-deploy", &folder);

    json_object_set_new(snapshot, "answers", json_object());
    if (!number) {
        number = run_dry_runs(calls, dry_runs, &folder, snapshot);
        temporary_remove(&folder);
    }
    if (number)
        put(snapshot, "unread", "answers to dry runs", json_string(write_reason(number)));
    json_decref(dry_runs);
    calls_clear(calls);
}

/* --- fourth round: what gcloud says of a cluster on GKE --- */

/* Contexts of GKE are called gke_PROJECT_LOCATION_CLUSTER. False after noting that the one that is used is not. */
static bool read_context(struct calls *calls, json_t *snapshot, char project[100], char location[100], char name[100])
{
    const char *context = calls->kubectl->context;
    bool is_gke;

    if (!context) {
        add_call(calls, TEXTS("config", "current-context"));
        run_calls(calls);
        context = succeeded(&calls->captures[0]) ? output_of(&calls->captures[0]) : "";
    }
    is_gke = sscanf(context, "gke_%99[^_\n]_%99[^_\n]_%99[^_\n]", project, location, name) == 3;
    if (!is_gke) {
        char why[300];

        snprintf(why, sizeof(why), "the context of kubectl, '%.*s', is not of the form gke_PROJECT_LOCATION_CLUSTER",
                 (int)strcspn(context, "\n") < 100 ? (int)strcspn(context, "\n") : 100, context);
        put(snapshot, "unread", "answers of gcloud", out_text(why));
    }
    calls_clear(calls);
    return is_gke;
}

static void read_gke(struct calls *calls, json_t *snapshot)
{
    static const char *const keys[] = {"cluster", "networks"};
    const struct kubectl program = {.program = "gcloud", .timeout_ms = calls->kubectl->timeout_ms};
    char project[100], location[100], name[100];
    json_t *answers = json_object();
    struct calls *asked;

    json_object_set_new(snapshot, "gke", answers);
    if (!read_context(calls, snapshot, project, location, name))
        return;
    asked = calls_new(&program);
    add_call(asked, TEXTS("container", "clusters", "describe", name, "--location", location, "--project", project,
                          "--format=json", "--quiet"));
    add_call(asked, TEXTS("compute", "networks", "list", "--project", project, "--format=json", "--quiet"));
    run_calls(asked);
    for (int i = asked->n; i-- > 0;) { /* of two reasons the first is kept */
        const struct capture *capture = &asked->captures[i];
        json_t *answer = succeeded(capture) ? json_loads(output_of(capture), 0, NULL) : NULL;

        strip(answer);
        if (answer)
            json_object_set_new(answers, keys[i], answer);
        else
            put(snapshot, "unread", "answers of gcloud", failure(capture));
    }
    calls_free(asked);
}

int kubectl_snapshot(const struct kubectl *kubectl, const struct deploy_job *job, json_t **ret_snapshot)
{
    struct calls *calls = calls_new(kubectl);
    json_t *snapshot = json_pack("{s:i, s:o, s:{}, s:{}}", "epkit_cluster", DEPLOY_SNAPSHOT_VERSION, "time",
                                 out_time(time(NULL)), "items", "unread");
    int code;

    progress_start("reading the cluster");
    code = read_version(calls, snapshot);
    if (code == CMD_FINE)
        read_objects(calls, job != NULL, snapshot);
    if (code == CMD_FINE && job)
        dry_run(calls, job, snapshot);
    if (code == CMD_FINE && job && job->prerequisites && strstr(get_text(snapshot, "version"), "-gke."))
        read_gke(calls, snapshot);
    progress_stop();
    if (code == CMD_FINE)
        *ret_snapshot = json_incref(snapshot);
    json_decref(snapshot);
    calls_free(calls);
    return code;
}
