/* SPDX-License-Identifier: Apache-2.0 */
/* doctor_hosts.c - --hosts: runs epkit doctor on other nodes over ssh, all at once, and says how they differ. */
#include "diagnosis.h"

#include "capture.h"
#include "output.h"
#include "progress.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define HOSTS_MAX 4096
#define LINE_BYTES 1024
#define FILE_BYTES_MAX (8 << 20)
#define WIDTH 32           /* connections at once */
#define CONNECT_SECONDS 10 /* for TCP and the banner; the deadline of a node bounds the rest */
#define SSH_WORDS 32
#define SHOWN_NODES 4  /* names in a cell of a table */
#define SHOWN_BYTES 60 /* of a value in a cell, from near the place on where it differs */

struct host {
    char target[256]; /* [user@]host */
    char port[8];     /* "" the default */
};

struct hosts {
    int n;
    struct host *hosts;
    int *lines; /* where they stand in the file */
    struct node *nodes;
    struct capture *captures;
    char ***argvs;
};

/* --- the file --- */

/* What ssh may be given as a target. A word that begins with '-' would be an option. */
static bool is_target(const char *text)
{
    const char *host = strrchr(text, '@');

    host = host ? host + 1 : text;
    return *text != '-' && *text != '@' && *host && *host != '-' &&
           strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-@:%") == strlen(text);
}

static bool is_port(const char *text)
{
    return *text && strlen(text) < 6 && strspn(text, "0123456789") == strlen(text) && atoi(text) > 0 &&
           atoi(text) < 65536;
}

/* Splits "user@host:222", "[2001:db8::1]:222", "2001:db8::1". */
static bool parse_host(const char *word, struct host *ret_host)
{
    struct host host = {.port = ""};
    char text[256], *open, *close, *colon;

    if (snprintf(text, sizeof(text), "%s", word) >= (int)sizeof(text))
        return false;
    open = strchr(text, '[');
    close = strchr(text, ']');
    if (open && close && close > open) {
        if (close[1] == ':') {
            if (!is_port(close + 2))
                return false;
            snprintf(host.port, sizeof(host.port), "%.5s", close + 2);
        } else if (close[1]) {
            return false;
        }
        *close = '\0';
        memmove(open, open + 1, strlen(open + 1) + 1);
    } else {
        colon = strchr(text, ':');
        if (colon && !strchr(colon + 1, ':')) {
            if (!is_port(colon + 1))
                return false;
            snprintf(host.port, sizeof(host.port), "%.5s", colon + 1);
            *colon = '\0';
        }
    }
    snprintf(host.target, sizeof(host.target), "%s", text);
    *ret_host = host;
    return is_target(host.target);
}

static int add_host(const struct cmd *cmd, const char *file, int number, const char *word, struct hosts *hosts)
{
    struct host host;
    char clean[256];

    root_clean(word, clean, sizeof(clean));
    if (!parse_host(word, &host))
        return cmd_usage(cmd, "%s, line %d: '%s' is no host: [USER@]HOST[:PORT]", file, number, clean);
    for (int i = 0; i < hosts->n; i++)
        if (strcmp(hosts->hosts[i].target, host.target) == 0 && strcmp(hosts->hosts[i].port, host.port) == 0)
            return cmd_usage(cmd, "%s, line %d: '%s' stands in line %d already", file, number, clean, hosts->lines[i]);
    if (hosts->n == HOSTS_MAX)
        return cmd_usage(cmd, "%s, line %d: more than %d hosts", file, number, HOSTS_MAX);
    hosts->nodes[hosts->n].name = strdup(clean);
    if (!hosts->nodes[hosts->n].name)
        return CMD_FAILED;
    hosts->hosts[hosts->n] = host;
    hosts->lines[hosts->n++] = number;
    return CMD_FINE;
}

/* "host slots=8 # text": what stands behind the host must be a setting of Open MPI. */
static int parse_line(const struct cmd *cmd, const char *file, int number, char *line, struct hosts *hosts)
{
    char *rest = line, *word, *host = NULL;

    line[strcspn(line, "#\r\n")] = '\0';
    while ((word = strsep(&rest, " \t"))) {
        if (!*word)
            continue;
        if (!host) {
            host = word;
        } else if (!strchr(word, '=')) {
            char clean[128];

            root_clean(word, clean, sizeof(clean));
            return cmd_usage(cmd, "%s, line %d: '%s' behind the host is no setting like slots=8", file, number, clean);
        }
    }
    return host ? add_host(cmd, file, number, host, hosts) : CMD_FINE;
}

/* A regular file of a size that makes sense, as a stream. NULL: *ret_code, after reporting why. */
static FILE *open_hosts(const struct cmd *cmd, const char *file, int *ret_code)
{
    int fd = open(file, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    struct stat info;
    FILE *stream = NULL;

    /* Without waiting for the writer of a FIFO; and what was opened is what is looked at. */
    if (fd < 0 || fstat(fd, &info) != 0)
        *ret_code = cmd_usage(cmd, "--hosts %s: %s", file, strerror(errno));
    else if (!S_ISREG(info.st_mode))
        *ret_code = cmd_usage(cmd, "--hosts %s: not a regular file", file);
    else if (info.st_size > FILE_BYTES_MAX)
        *ret_code = cmd_usage(cmd, "--hosts %s: larger than %d MiB", file, FILE_BYTES_MAX >> 20);
    else if (!(stream = fdopen(fd, "r")))
        *ret_code = cmd_usage(cmd, "--hosts %s: %s", file, strerror(errno));
    if (!stream && fd >= 0)
        close(fd);
    return stream;
}

/* Files of /proc and of FUSE tell no size, and may go on without end: so what is read is counted. */
static int read_hosts(const struct cmd *cmd, const char *file, struct hosts *hosts)
{
    char line[LINE_BYTES];
    size_t used = 0;
    int code = CMD_FINE;
    FILE *stream = open_hosts(cmd, file, &code);

    for (int number = 1; stream && code == CMD_FINE; number++) {
        int byte;
        size_t n = 0;

        while ((byte = getc(stream)) != EOF && byte != '\n' && byte && n + 1 < sizeof(line))
            line[n++] = (char)byte;
        line[n] = '\0';
        used += n + 1;
        if (byte == EOF && ferror(stream))
            code = cmd_usage(cmd, "--hosts %s: %s", file, strerror(errno));
        else if (byte == 0)
            code = cmd_usage(cmd, "%s, line %d: holds a byte 0, so that it is no text", file, number);
        else if (n + 1 == sizeof(line))
            code = cmd_usage(cmd, "%s, line %d: longer than %d bytes", file, number, LINE_BYTES - 2);
        else if (used > FILE_BYTES_MAX)
            code = cmd_usage(cmd, "--hosts %s: larger than %d MiB", file, FILE_BYTES_MAX >> 20);
        else
            code = parse_line(cmd, file, number, line, hosts);
        if (byte == EOF)
            break;
    }
    if (stream)
        fclose(stream);
    if (code == CMD_FINE && hosts->n == 0)
        code = cmd_usage(cmd, "--hosts %s: there is no host in it", file);
    return code;
}

static bool allocate(struct hosts *hosts)
{
    hosts->hosts = calloc(HOSTS_MAX, sizeof(*hosts->hosts));
    hosts->lines = calloc(HOSTS_MAX, sizeof(*hosts->lines));
    hosts->nodes = calloc(HOSTS_MAX, sizeof(*hosts->nodes));
    hosts->captures = calloc(HOSTS_MAX, sizeof(*hosts->captures));
    hosts->argvs = calloc(HOSTS_MAX, sizeof(*hosts->argvs));
    return hosts->hosts && hosts->lines && hosts->nodes && hosts->captures && hosts->argvs;
}

static void free_hosts(struct hosts *hosts)
{
    for (int i = 0; i < hosts->n; i++) {
        free(hosts->nodes[i].name);
        json_decref(hosts->nodes[i].document);
        capture_done(&hosts->captures[i]);
        free(hosts->argvs[i]);
    }
    free(hosts->hosts);
    free(hosts->lines);
    free(hosts->nodes);
    free(hosts->captures);
    free(hosts->argvs);
}

/* --- running it --- */

/* ssh and its options as words; `words` is cut up for them. */
static int split_ssh(char *words, char **ret_argv)
{
    char *rest = words, *word;
    int n = 0;

    while ((word = strsep(&rest, " \t")))
        if (*word && n < SSH_WORDS)
            ret_argv[n++] = word;
    return n;
}

struct command {
    char words[LINE_BYTES]; /* of --ssh, cut up */
    char *ssh[SSH_WORDS];
    int n_ssh;
    char batch[16], connect[32], option[3], port_option[3];
    char remote[LINE_BYTES * 4];
};

static char **make_argv(struct command *command, struct host *host)
{
    char **argv = calloc((size_t)command->n_ssh + 10, sizeof(*argv));
    int n = 0;

    if (!argv)
        return NULL;
    for (int i = 0; i < command->n_ssh; i++)
        argv[n++] = command->ssh[i];
    argv[n++] = command->option;
    argv[n++] = command->batch;
    argv[n++] = command->option;
    argv[n++] = command->connect;
    if (*host->port) {
        argv[n++] = command->port_option;
        argv[n++] = host->port;
    }
    argv[n++] = host->target;
    argv[n++] = command->remote;
    return argv;
}

struct counting {
    int n_done, n;
};

static void count_one(const struct capture *capture, void *context)
{
    struct counting *counting = context;

    (void)capture;
    progress_update(++counting->n_done, counting->n, "nodes");
}

static int run_all(struct hosts *hosts, const struct hosts_how *how)
{
    struct command command = {.batch = "BatchMode=yes", .option = "-o", .port_option = "-p"};
    struct counting counting = {.n = hosts->n};
    int result;

    snprintf(command.words, sizeof(command.words), "%s", how->ssh);
    command.n_ssh = split_ssh(command.words, command.ssh);
    snprintf(command.connect, sizeof(command.connect), "ConnectTimeout=%d",
             how->timeout_s < CONNECT_SECONDS ? (int)how->timeout_s : CONNECT_SECONDS);
    snprintf(command.remote, sizeof(command.remote), "%s", how->remote_command);
    for (int i = 0; i < hosts->n; i++) {
        hosts->argvs[i] = make_argv(&command, &hosts->hosts[i]);
        if (!hosts->argvs[i])
            return -1;
        hosts->captures[i].argv = hosts->argvs[i];
    }
    progress_start("asking nodes");
    result = capture_run(hosts->captures, hosts->n, WIDTH, how->timeout_s * 1000, count_one, &counting);
    progress_stop();
    return result;
}

/* --- what they said --- */

/* What ssh and the remote shell say, and the layer that it speaks of. OpenSSH's words, and those of getaddrinfo(). */
static const char *layer_of(const char *said, int status)
{
    static const struct {
        const char *text, *layer;
    } words[] = {
        {"Could not resolve hostname", "DNS"},
        {"Name or service not known", "DNS"},
        {"Temporary failure in name resolution", "DNS"},
        {"Connection refused", "TCP"},
        {"No route to host", "TCP"},
        {"Network is unreachable", "TCP"},
        {"Connection reset", "TCP"},
        {"Connection closed by", "TCP"},
        {"kex_exchange_identification", "TCP"},
        {"Connection timed out", "timeout"},
        {"Operation timed out", "timeout"},
        {"Permission denied (", "authentication"},
        {"Permission denied,", "authentication"},
        {"Host key verification failed", "authentication"},
        {"REMOTE HOST IDENTIFICATION HAS CHANGED", "authentication"},
        {"Too many authentication failures", "authentication"},
        {"command not found", "epkit"},
        {"epkit: not found", "epkit"},
        {"unknown verb 'doctor'", "version"},
        {"unknown option", "version"},
    };

    for (size_t i = 0; said && i < sizeof(words) / sizeof(words[0]); i++)
        if (strstr(said, words[i].text))
            return words[i].layer;
    if (WIFEXITED(status) && (WEXITSTATUS(status) == 127 || WEXITSTATUS(status) == 126))
        return "epkit";
    if (WIFEXITED(status) && WEXITSTATUS(status) == 255)
        return "ssh";
    return "answer";
}

/* The last line that says something. */
static void last_line(const char *text, char *ret_line, size_t bytes)
{
    char raw[512] = "";

    for (const char *at = text; at && *at;) {
        size_t n = strcspn(at, "\n");

        if (n > strspn(at, " \t\r"))
            snprintf(raw, sizeof(raw), "%.*s", (int)(n < sizeof(raw) ? n : sizeof(raw) - 1), at);
        at += n;
        at += *at == '\n';
    }
    raw[strcspn(raw, "\r")] = '\0';
    root_clean(raw, ret_line, bytes);
}

/* The document may stand behind the greeting of a login shell. */
static json_t *find_document(const struct capture_text *output, char *ret_why, size_t bytes)
{
    const char *start = output->text ? strchr(output->text, '{') : NULL;
    json_error_t error;
    json_t *document;

    if (output->cut) {
        snprintf(ret_why, bytes, "the answer is larger than %u MiB", CAPTURE_BYTES_MAX >> 20);
        return NULL;
    }
    if (!start) {
        snprintf(ret_why, bytes, "%s", output->bytes ? "the answer is no JSON" : "there was no answer");
        return NULL;
    }
    document = json_loadb(start, output->bytes - (size_t)(start - output->text), JSON_DISABLE_EOF_CHECK, &error);
    if (!document) {
        char text[160];

        root_clean(error.text, text, sizeof(text));
        snprintf(ret_why, bytes, "the answer is no JSON: line %d: %s", error.line, text);
    }
    return document;
}

static bool is_ours(const json_t *document)
{
    const char *verb = json_string_value(json_object_get(document, "verb"));

    return verb && strcmp(verb, "doctor") == 0 && json_is_object(json_object_get(document, "facts"));
}

static void judge_failure(const struct capture *capture, struct node *node)
{
    char said[400];

    last_line(capture->error.text, said, sizeof(said));
    node->layer = layer_of(capture->error.text, capture->status);
    if (*said)
        snprintf(node->why, sizeof(node->why), "%s", said);
    else if (WIFSIGNALED(capture->status))
        snprintf(node->why, sizeof(node->why), "killed by signal %d", WTERMSIG(capture->status));
    else
        snprintf(node->why, sizeof(node->why), "exit status %d", WEXITSTATUS(capture->status));
}

static void judge(const struct capture *capture, const char *ssh, int64_t timeout_s, struct node *node)
{
    json_t *document;

    if (capture->start_error) {
        char program[200];

        root_clean(ssh, program, sizeof(program));
        node->layer = "ssh";
        snprintf(node->why, sizeof(node->why), "%s: %s", program, strerror(capture->start_error));
        return;
    }
    if (capture->late) {
        node->layer = "timeout";
        snprintf(node->why, sizeof(node->why), "no answer within %lld s", (long long)timeout_s);
        return;
    }
    document = find_document(&capture->output, node->why, sizeof(node->why));
    if (document && is_ours(document) &&
        json_integer_value(json_object_get(document, "schema_version")) == OUT_SCHEMA_VERSION) {
        node->document = document;
        node->why[0] = '\0';
        return;
    }
    if (document && is_ours(document)) {
        node->layer = "version";
        snprintf(node->why, sizeof(node->why), "its epkit answers in version %lld of the format, this one reads %d",
                 (long long)json_integer_value(json_object_get(document, "schema_version")), OUT_SCHEMA_VERSION);
    } else if (document) {
        node->layer = "answer";
        snprintf(node->why, sizeof(node->why), "the answer is not that of epkit doctor");
    } else if (!WIFEXITED(capture->status) || WEXITSTATUS(capture->status) != 0) {
        judge_failure(capture, node);
    } else {
        node->layer = "answer";
    }
    json_decref(document);
}

/* --- saying it --- */

/* "node1, node2 and 5 more" */
static void name_nodes(const json_t *names, char *ret_text, size_t bytes)
{
    size_t n = json_array_size(names), used = 0;

    ret_text[0] = '\0';
    for (size_t i = 0; i < n && i < SHOWN_NODES && used < bytes; i++)
        used += (size_t)snprintf(ret_text + used, bytes - used, "%s%s", i ? ", " : "",
                                 json_string_value(json_array_get(names, i)));
    if (n > SHOWN_NODES && used < bytes)
        snprintf(ret_text + used, bytes - used, " and %zu more", n - SHOWN_NODES);
}

/* Two values cut in the same way, so that what differs is seen. --json has them whole. */
static void cut_values(const char *const values[2], char ret_cut[2][SHOWN_BYTES + 8])
{
    size_t same = 0, start;

    while (values[0][same] && values[0][same] == values[1][same])
        same++;
    start = same > SHOWN_BYTES / 2 ? same - SHOWN_BYTES / 4 : 0;
    if (strlen(values[0]) <= SHOWN_BYTES && strlen(values[1]) <= SHOWN_BYTES)
        start = 0;
    /* What is equal before the place is so in both, up to the beginning of a character. */
    while (start > 0 && (values[0][start] & 0xc0) == 0x80)
        start--;
    for (int i = 0; i < 2; i++) {
        char shown[SHOWN_BYTES + 1];

        snprintf(shown, sizeof(shown), "%s", values[i] + start);
        root_cut(shown);
        snprintf(ret_cut[i], SHOWN_BYTES + 8, "%s%s%s", start ? "..." : "", shown,
                 strlen(values[i] + start) > SHOWN_BYTES ? "..." : "");
    }
}

static void print_differences(const json_t *differences)
{
    static const struct out_column columns[] = {{"FACT", "fact", 0, 0},
                                                {"MOST HAVE", "most", 0, OUT_TRUNC},
                                                {"NODES", "nodes", 0, 0},
                                                {"HAVE", "have", 0, OUT_TRUNC}};
    json_t *rows = json_array();

    for (size_t i = 0; i < json_array_size(differences); i++) {
        const json_t *row = json_array_get(differences, i), *others = json_object_get(row, "others");

        for (size_t k = 0; k < json_array_size(others); k++) {
            const json_t *other = json_array_get(others, k);
            const char *const values[2] = {json_string_value(json_object_get(row, "value")),
                                           json_string_value(json_object_get(other, "value"))};
            char names[512], cut[2][SHOWN_BYTES + 8];

            name_nodes(json_object_get(other, "nodes"), names, sizeof(names));
            cut_values(values, cut);
            json_array_append_new(rows, json_pack("{s:O, s:s, s:s, s:s}", "fact", json_object_get(row, "fact"), "most",
                                                  cut[0], "nodes", names, "have", cut[1]));
        }
    }
    out_line("\nDifferences:");
    out_table(stdout, columns, sizeof(columns) / sizeof(columns[0]), rows, OUT_TABLE);
    json_decref(rows);
}

static void print_silent(const struct hosts *hosts)
{
    static const struct out_column columns[] = {
        {"NODE", "node", 0, 0}, {"FAILED AT", "layer", 0, 0}, {"WHY", "why", 0, 0}};
    json_t *rows = json_array();

    for (int i = 0; i < hosts->n; i++)
        if (!hosts->nodes[i].document)
            json_array_append_new(rows, json_pack("{s:s, s:s, s:s}", "node", hosts->nodes[i].name, "layer",
                                                  hosts->nodes[i].layer, "why", hosts->nodes[i].why));
    out_line("\nNo answer from:");
    out_table(stdout, columns, sizeof(columns) / sizeof(columns[0]), rows, OUT_TABLE);
    json_decref(rows);
}

static void print_findings(const json_t *findings)
{
    static const struct out_column columns[] = {
        {"SEVERITY", "severity", 0, 0}, {"ID", "id", 0, 0}, {"NODES", "names", 0, 0}, {"WHAT", "text", 0, OUT_TRUNC}};
    json_t *rows = json_array();

    for (size_t i = 0; i < json_array_size(findings); i++) {
        json_t *row = json_copy(json_array_get(findings, i));
        char names[512];

        name_nodes(json_object_get(row, "nodes"), names, sizeof(names));
        json_object_set_new(row, "names", out_text(names));
        json_array_append_new(rows, row);
    }
    out_line("\nFindings:");
    out_table(stdout, columns, sizeof(columns) / sizeof(columns[0]), rows, OUT_TABLE);
    json_decref(rows);
}

struct outcome {
    int n, n_silent;
    int n_empty; /* of those that answered: with neither GPU nor NIC */
    json_t *differences, *findings;
};

static const char *plural(size_t n)
{
    return n == 1 ? "" : "s";
}

static void make_verdict(const struct outcome *outcome, char *ret_text, size_t bytes)
{
    size_t n_differences = json_array_size(outcome->differences), n_findings = json_array_size(outcome->findings);
    int n_answered = outcome->n - outcome->n_silent;

    if (n_answered == 0)
        snprintf(ret_text, bytes, "None of %d node%s answered.", outcome->n, plural((size_t)outcome->n));
    else if (n_differences == 0 && n_answered == outcome->n_empty && outcome->n_silent == 0)
        snprintf(ret_text, bytes, "Nothing to look at: none of %d node%s has a GPU or an RDMA NIC.", n_answered,
                 plural((size_t)n_answered));
    else if (n_differences == 0 && n_findings == 0 && outcome->n_silent == 0)
        snprintf(ret_text, bytes, "Healthy: %d node%s, nothing found%s.", n_answered, plural((size_t)n_answered),
                 n_answered > 1 ? ", no differences" : "");
    else
        snprintf(ret_text, bytes, "%zu difference%s between %d node%s, %zu finding%s; %d of %d did not answer.",
                 n_differences, plural(n_differences), n_answered, plural((size_t)n_answered), n_findings,
                 plural(n_findings), outcome->n_silent, outcome->n);
}

static json_t *make_document(const char *verb, const struct hosts *hosts, const struct outcome *outcome,
                             const char *verdict)
{
    json_t *document = out_document(verb), *list = json_array();

    for (int i = 0; i < hosts->n; i++) {
        const struct node *node = &hosts->nodes[i];

        json_array_append_new(list, json_pack("{s:s, s:b, s:s?, s:s?, s:O?}", "host", node->name, "answered",
                                              node->document != NULL, "failed_at", node->document ? NULL : node->layer,
                                              "why", node->document ? NULL : node->why, "document", node->document));
    }
    json_object_set_new(document, "verdict", out_text(verdict));
    json_object_set_new(document, "hosts", list);
    json_object_set(document, "differences", outcome->differences);
    json_object_set(document, "findings", outcome->findings);
    return document;
}

static int report(const struct cmd *cmd, const struct hosts *hosts, const struct outcome *outcome, bool json)
{
    bool is_clean = json_array_size(outcome->differences) == 0 && json_array_size(outcome->findings) == 0;
    bool is_empty = outcome->n_empty == outcome->n;
    int code = outcome->n_silent ? CMD_FAILED : !is_clean ? CMD_FINDINGS : is_empty ? CMD_UNSUPPORTED : CMD_FINE;
    char verdict[256];

    make_verdict(outcome, verdict, sizeof(verdict));
    if (json)
        return out_json(make_document(cmd->name, hosts, outcome, verdict)) == 0 ? code : CMD_FAILED;
    out_verdict(code == CMD_FINE ? OUT_GOOD : OUT_BAD, "%s", verdict);
    if (json_array_size(outcome->differences))
        print_differences(outcome->differences);
    if (outcome->n_silent)
        print_silent(hosts);
    if (json_array_size(outcome->findings))
        print_findings(outcome->findings);
    return out_finish() == CMD_FINE ? code : CMD_FAILED;
}

int hosts_run(const struct cmd *cmd, const struct hosts_how *how)
{
    struct hosts hosts = {.n = 0};
    struct outcome outcome = {.n = 0};
    int code = CMD_FAILED;

    if (strlen(how->ssh) >= LINE_BYTES || strspn(how->ssh, " \t") == strlen(how->ssh))
        return cmd_usage(cmd, "--ssh: no program, or longer than %d characters", LINE_BYTES - 1);
    if (strlen(how->remote_command) >= sizeof(((struct command *)NULL)->remote))
        return cmd_usage(cmd, "--remote-command: longer than %d characters", LINE_BYTES * 4 - 1);
    if (allocate(&hosts))
        code = read_hosts(cmd, how->file, &hosts);
    else
        out_error("no memory for the list of nodes");
    if (code == CMD_FINE && run_all(&hosts, how) != 0) {
        out_error("no memory for the answers of the nodes");
        code = CMD_FAILED;
    } else if (code == CMD_FINE) {
        for (int i = 0; i < hosts.n; i++) {
            judge(&hosts.captures[i], how->ssh, how->timeout_s, &hosts.nodes[i]);
            outcome.n_silent += hosts.nodes[i].document == NULL;
            outcome.n_empty +=
                hosts.nodes[i].document && !json_is_array(json_object_get(hosts.nodes[i].document, "checks"));
        }
        outcome.n = hosts.n;
        outcome.differences = compare_nodes(hosts.nodes, hosts.n);
        outcome.findings = compare_findings(hosts.nodes, hosts.n);
        code = report(cmd, &hosts, &outcome, how->json);
        json_decref(outcome.differences);
        json_decref(outcome.findings);
    }
    free_hosts(&hosts);
    return code;
}
