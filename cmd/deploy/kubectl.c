/* SPDX-License-Identifier: Apache-2.0 */
/* kubectl.c - reads a cluster with kubectl, thus with the user's configuration, proxies and credentials. */
#include "kubectl.h"

#include "common/cmd.h"
#include "common/output.h"
#include "common/progress.h"

#include "common/capture.h"
#include "common/temporary.h"
#include "deploy.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

#define CALLS_MAX 64
#define WORDS_MAX 32
#define WIDTH 6
#define ANSWER_BYTES_MAX ((size_t)256 << 20)

struct calls {
    const struct kubectl *kubectl;
    char *program; /* split into words */
    char *words[WORDS_MAX];
    int n_words;
    struct capture captures[CALLS_MAX];
    char *argv[CALLS_MAX][WORDS_MAX];
    char arguments[CALLS_MAX][128]; /* generated arguments */
    int n, n_done;
};

/* Adds a call; the words after NULL are left out. Returns its index. */
static int add_call(struct calls *calls, const char *const *words)
{
    char **argv = calls->argv[calls->n];
    int n = calls->n_words;

    memcpy(argv, calls->words, sizeof(calls->words[0]) * (size_t)n);
    if (calls->kubectl->context) {
        argv[n++] = (char *)"--context";
        argv[n++] = (char *)calls->kubectl->context;
    }
    for (; *words && n < WORDS_MAX - 1; words++)
        argv[n++] = (char *)*words;
    argv[n] = NULL;
    calls->captures[calls->n] = (struct capture){.argv = argv, .bytes_max = ANSWER_BYTES_MAX};
    return calls->n++;
}

static void on_end(const struct capture *capture, void *context)
{
    struct calls *calls = context;

    calls->n_done++;
    progress_update(calls->n_done, calls->n, "kubectl %s", capture->argv[calls->n_words]);
}

static bool succeeded(const struct capture *capture)
{
    return capture->start_error == 0 && !capture->late && WIFEXITED(capture->status) &&
           WEXITSTATUS(capture->status) == 0 && !capture->output.cut;
}

/* Why a call failed, in one line. */
static const char *failure(const struct capture *capture, char *ret_text, size_t bytes)
{
    const char *text = capture->error.text ? capture->error.text : "";

    if (capture->start_error)
        snprintf(ret_text, bytes, "%s", strerror(capture->start_error));
    else if (capture->late)
        snprintf(ret_text, bytes, "no answer in time");
    else if (capture->output.cut)
        snprintf(ret_text, bytes, "the answer is larger than %zu MiB", ANSWER_BYTES_MAX >> 20);
    else
        snprintf(ret_text, bytes, "%.*s", (int)strcspn(text, "\n"), text);
    return ret_text;
}

static int split_program(struct calls *calls)
{
    char *state = NULL;

    calls->program = strdup(calls->kubectl->program);
    if (!calls->program)
        return -1;
    for (char *word = strtok_r(calls->program, " ", &state); word && calls->n_words < 8;
         word = strtok_r(NULL, " ", &state))
        calls->words[calls->n_words++] = word;
    return calls->n_words > 0 ? 0 : -1;
}

/* The calls of one round; NULL: out of memory, or --kubectl names no program. */
static struct calls *calls_new(const struct kubectl *kubectl)
{
    struct calls *calls = calloc(1, sizeof(*calls));

    if (!calls)
        return NULL;
    calls->kubectl = kubectl;
    if (split_program(calls) == 0)
        return calls;
    free(calls->program);
    free(calls);
    return NULL;
}

/* Runs all calls concurrently; false: out of memory. */
static bool calls_run(struct calls *calls)
{
    return capture_run(calls->captures, calls->n, WIDTH, calls->kubectl->timeout_ms, on_end, calls) == 0;
}

static void calls_free(struct calls *calls)
{
    if (!calls)
        return;
    for (int i = 0; i < calls->n; i++)
        capture_done(&calls->captures[i]);
    free(calls->program);
    free(calls);
}

/* --- first round: version and API groups of the cluster --- */

enum { ROUND_VERSION, ROUND_GROUPS, ROUND_USER };

static int report_failure(const struct calls *calls, const struct capture *capture)
{
    char why[512];

    failure(capture, why, sizeof(why));
    if (capture->start_error == ENOENT) {
        out_error("there is no '%s'", calls->words[0]);
        out_hint("install kubectl, or read a file that --save wrote elsewhere: --from FILE");
        return CMD_UNSUPPORTED;
    }
    out_error("the cluster does not answer: %s", *why ? why : "kubectl failed without a message");
    out_hint("'kubectl version' must work; --context names another cluster");
    return CMD_FAILED;
}

static json_t *groups_of(const char *text)
{
    json_t *answer = json_loads(text ? text : "", 0, NULL), *groups = json_pack("[s]", "v1");
    const json_t *group, *version;
    size_t i, v;

    json_array_foreach (json_object_get(answer, "groups"), i, group) {
        json_array_foreach (json_object_get(group, "versions"), v, version) {
            json_array_append(groups, json_object_get(version, "groupVersion"));
        }
    }
    json_decref(answer);
    return groups;
}

static json_t *text_at(const char *text, const char *first, const char *second, const char *third)
{
    json_t *answer = json_loads(text ? text : "", 0, NULL);
    const json_t *value = json_object_get(json_object_get(answer, first), second);
    json_t *result;

    if (third)
        value = json_object_get(value, third);
    result = json_string(json_is_string(value) ? json_string_value(value) : "");
    json_decref(answer);
    return result;
}

static int read_version(const struct kubectl *kubectl, json_t *snapshot)
{
    bool is_named = kubectl->program[strspn(kubectl->program, " ")] != '\0';
    struct calls *calls = calls_new(kubectl);
    int code = CMD_FINE;

    if (!calls) {
        out_error("%s", is_named ? "no memory to read the cluster" : "--kubectl is empty");
        return is_named ? CMD_FAILED : CMD_USAGE;
    }
    add_call(calls, TEXTS("version", "-o", "json"));
    add_call(calls, TEXTS("get", "--raw", "/apis"));
    add_call(calls, TEXTS("auth", "whoami", "-o", "json"));
    if (!calls_run(calls))
        code = CMD_FAILED;
    for (int round = ROUND_VERSION; round <= ROUND_GROUPS && code == CMD_FINE; round++)
        if (!succeeded(&calls->captures[round]))
            code = report_failure(calls, &calls->captures[round]);
    if (code == CMD_FINE) {
        json_object_set_new(snapshot, "version",
                            text_at(calls->captures[ROUND_VERSION].output.text, "serverVersion", "gitVersion", NULL));
        json_object_set_new(snapshot, "groups", groups_of(calls->captures[ROUND_GROUPS].output.text));
        json_object_set_new(snapshot, "user",
                            text_at(calls->captures[ROUND_USER].output.text, "status", "userInfo", "username"));
    }
    calls_free(calls);
    return code;
}

/* --- second round: objects and rights --- */

static bool is_served(const json_t *snapshot, const char *group)
{
    const json_t *served;
    size_t i, n = strlen(group);

    if (n == 0)
        return true;
    json_array_foreach (json_object_get(snapshot, "groups"), i, served) {
        const char *text = json_string_value(served);

        if (text && strncmp(text, group, n) == 0 && text[n] == '/')
            return true;
    }
    return false;
}

/* "NAMESPACE/NAME" per line, for objects whose contents must not be read. */
static json_t *names_of(char *text)
{
    json_t *items = json_array();
    char *state = NULL;

    for (char *line = text ? strtok_r(text, "\n", &state) : NULL; line; line = strtok_r(NULL, "\n", &state)) {
        char *slash = strchr(line, '/');

        if (!slash)
            continue;
        *slash = '\0';
        json_array_append_new(items, json_pack("{s:{s:s, s:s}}", "metadata", "namespace", line, "name", slash + 1));
    }
    return items;
}

static void add_resource(struct calls *calls, const struct deploy_resource *resource)
{
    static const char template[] =
        "go-template={{range .items}}{{with .metadata}}{{or .namespace \"\"}}/{{.name}}{{\"\\n\"}}{{end}}{{end}}";
    const char *words[8] = {"get", resource->kubectl, "-o", resource->names_only ? template : "json"};
    int n = 4;

    if (resource->scope == DEPLOY_NAMESPACE) {
        words[n++] = "-n";
        words[n++] = calls->kubectl->space;
    } else if (resource->scope == DEPLOY_EVERYWHERE) {
        words[n++] = "-A";
    }
    words[n] = NULL;
    add_call(calls, words);
}

/* Removes what nothing here reads: variables of containers may have keys as values, and the rest is large. */
static void strip(json_t *value)
{
    static const char *const keys[] = {"env", "annotations", "managedFields"};
    const char *key;
    json_t *item;
    size_t i;

    for (i = 0; i < COUNT(keys); i++)
        json_object_del(value, keys[i]);
    json_object_foreach (value, key, item) {
        strip(item);
    }
    json_array_foreach (value, i, item) {
        strip(item);
    }
}

static void store_resource(json_t *snapshot, const struct deploy_resource *resource, struct capture *capture)
{
    json_t *answer = NULL, *items = NULL;
    char why[512];

    if (succeeded(capture) && resource->names_only) {
        items = names_of(capture->output.text);
    } else if (succeeded(capture)) {
        answer = json_loadb(capture->output.text ? capture->output.text : "", capture->output.bytes, 0, NULL);
        items = json_incref(json_object_get(answer, "items"));
        strip(items);
    }
    failure(capture, why, sizeof(why));
    /* The API server serves the group, but not this kind: there are no objects. */
    if (!items && !succeeded(capture) && strstr(why, "doesn't have a resource type"))
        items = json_array();
    if (json_is_array(items)) {
        json_object_set(json_object_get(snapshot, "items"), resource->name, items);
    } else {
        json_object_set_new(json_object_get(snapshot, "unread"), resource->name,
                            json_string(*why ? why : "the answer is not valid"));
    }
    json_decref(items);
    json_decref(answer);
}

/* The kinds of the manifest, each once. */
static int add_rights(struct calls *calls, const json_t *documents, const char **ret_plurals)
{
    const json_t *document;
    int n = 0, known;
    size_t i;

    json_array_foreach (documents, i, document) {
        const char *kind = json_string_value(json_object_get(document, "kind"));
        const char *plural = kind ? deploy_plural(kind) : "";

        for (known = 0; known < n && strcmp(ret_plurals[known], plural) != 0; known++)
            ;
        if (!*plural || known < n || calls->n == CALLS_MAX)
            continue;
        ret_plurals[n++] = plural;
        add_call(calls, TEXTS("auth", "can-i", "create", plural, "-n", calls->kubectl->space));
    }
    return n;
}

static void store_right(json_t *snapshot, const char *plural, const struct capture *capture)
{
    const char *text = capture->output.text ? capture->output.text : "";

    /* A denial is "no" with exit code 1; anything else is not an answer. */
    if (strncmp(text, "yes", 3) == 0 || strncmp(text, "no", 2) == 0)
        json_object_set_new(json_object_get(snapshot, "rights"), plural, json_boolean(*text == 'y'));
}

static int read_objects(const struct kubectl *kubectl, const struct deploy_resource *resources, const json_t *documents,
                        json_t *snapshot)
{
    struct calls *calls = calls_new(kubectl);
    const struct deploy_resource *asked[CALLS_MAX];
    const char *plurals[CALLS_MAX];
    int n = 0, n_plurals;
    bool good;

    if (!calls)
        return CMD_FAILED;
    for (const struct deploy_resource *resource = resources; resource->name; resource++)
        if (is_served(snapshot, resource->group)) {
            asked[n++] = resource;
            add_resource(calls, resource);
        }
    n_plurals = add_rights(calls, documents, plurals);
    good = calls_run(calls);
    for (int i = 0; i < n && good; i++)
        store_resource(snapshot, asked[i], &calls->captures[i]);
    for (int i = 0; i < n_plurals && good; i++)
        store_right(snapshot, plurals[i], &calls->captures[n + i]);
    calls_free(calls);
    return good ? CMD_FINE : CMD_FAILED;
}

/* --- third round: dry runs by the API server --- */

/* Writes a document for kubectl, readable only by its owner because it may contain keys. 0, or the errno. */
static int write_document(const struct temporary *folder, int number, const json_t *dry_run, char *ret_path,
                          size_t bytes)
{
    char *text = json_dumps(json_object_get(dry_run, "document"), JSON_COMPACT);
    int error;

    snprintf(ret_path, bytes, "%s/%d.json", folder->path, number);
    error = text ? temporary_save(ret_path, text, strlen(text), 0600) : ENOMEM;
    free(text);
    return error;
}

static void store_answer(json_t *snapshot, const json_t *dry_run, const struct capture *capture)
{
    const char *error = capture->error.text ? capture->error.text : "";
    char text[2048] = "";

    if (succeeded(capture) || (!capture->start_error && !capture->late && deploy_refusal(error, text, sizeof(text)))) {
        json_object_set_new(json_object_get(snapshot, "answers"), json_string_value(json_object_get(dry_run, "digest")),
                            json_string(text));
        return;
    }
    failure(capture, text, sizeof(text));
    json_object_set_new(json_object_get(snapshot, "unread"), "answers to dry runs",
                        json_string(*text ? text : "kubectl failed without a message"));
}

static const char *namespace_of(const json_t *document)
{
    const char *space = json_string_value(json_object_get(json_object_get(document, "metadata"), "namespace"));

    return space ? space : "";
}

static int run_dry_runs(struct calls *calls, json_t *dry_runs, const struct temporary *folder, json_t *snapshot)
{
    char(*paths)[512] = calloc(CALLS_MAX, sizeof(*paths));
    const json_t *dry_run;
    int code = paths ? 0 : ENOMEM;
    bool is_placed;
    size_t i;

    json_array_foreach (dry_runs, i, dry_run) {
        if (calls->n == CALLS_MAX || code)
            break;
        code = write_document(folder, (int)i, dry_run, paths[i], sizeof(paths[i]));
        /* kubectl refuses a namespace other than that of the object. */
        is_placed = *namespace_of(json_object_get(dry_run, "document")) != '\0';
        add_call(calls, TEXTS("create", "--dry-run=server", "-o", "name", "-f", paths[i], is_placed ? NULL : "-n",
                              calls->kubectl->space));
    }
    if (!code && !calls_run(calls))
        code = ENOMEM;
    for (int n = 0; n < calls->n && !code; n++)
        store_answer(snapshot, json_array_get(dry_runs, (size_t)n), &calls->captures[n]);
    free(paths);
    return code;
}

void kubectl_dry_run(const struct kubectl *kubectl, const struct deploy_job *job, json_t *snapshot)
{
    const char *parent = getenv("TMPDIR");
    struct calls *calls = calls_new(kubectl);
    json_t *dry_runs = deploy_dry_runs(job);
    struct temporary folder = {0};
    int code = calls ? temporary_folder_in(parent && *parent ? parent : "/tmp", "epkit-deploy", &folder) : ENOMEM;

    json_object_set_new(snapshot, "answers", json_object());
    if (!code) {
        progress_start("dry runs by the API server");
        code = run_dry_runs(calls, dry_runs, &folder, snapshot);
        progress_stop();
        temporary_remove(&folder);
    }
    if (code)
        json_object_set_new(json_object_get(snapshot, "unread"), "answers to dry runs", json_string(strerror(code)));
    json_decref(dry_runs);
    calls_free(calls);
}

int kubectl_snapshot(const struct kubectl *kubectl, const struct deploy_resource *resources, const json_t *documents,
                     json_t **ret_snapshot)
{
    json_t *snapshot =
        json_pack("{s:i, s:{}, s:{}, s:{}}", "epkit_cluster", DEPLOY_SNAPSHOT_VERSION, "items", "rights", "unread");
    time_t now = time(NULL);
    char text[32] = "";
    struct tm utc;
    int code;

    if (!snapshot)
        return CMD_FAILED;
    if (gmtime_r(&now, &utc))
        strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &utc);
    json_object_set_new(snapshot, "time", json_string(text));
    progress_start("reading the cluster");
    code = read_version(kubectl, snapshot);
    if (code == CMD_FINE)
        code = read_objects(kubectl, resources, documents, snapshot);
    progress_stop();
    if (code != CMD_FINE) {
        json_decref(snapshot);
        return code;
    }
    *ret_snapshot = snapshot;
    return CMD_FINE;
}
