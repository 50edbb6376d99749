/* SPDX-License-Identifier: Apache-2.0 */
#include "location.h"

#include "base/clock.h"
#include "base/error.h"
#include "common/capture.h"
#include "common/clean.h"
#include "common/write.h"
#include "hosts.h"
#include "launch_job.h"

#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#define METADATA_SERVER "169.254.169.254"
#define METADATA_PATH "/computeMetadata/v1/instance/attributes/physical_host"
#define LABELS_FILE "/etc/podinfo/labels"
#define LINE_BYTES 4096
#define SWITCH_DEPTH 16

bool location_is_valid(const char *text)
{
    size_t length = strlen(text);

    if (length == 0 || length >= LOCATION_BYTES)
        return false;
    for (const char *at = text; *at; at++)
        if (*at <= ' ' || *at > '~' || strchr("<>{}\"'`\\", *at))
            return false;
    return true;
}

/* --- a command --- */

static bool from_command(const char *command, char *ret_location, char *ret_why, size_t bytes)
{
    const char *argv[] = {"sh", "-c", command, NULL};
    struct capture capture = {.argv = (char *const *)argv};
    bool is_found = false;
    char clean[160];

    if (capture_run(&capture, 1, 1, LOCATION_SECONDS * 1000, NULL, NULL) != 0 || capture.start_error) {
        snprintf(ret_why, bytes, "the command for the location could not be run");
    } else if (capture.late) {
        snprintf(ret_why, bytes, "the command for the location did not end within %d s", LOCATION_SECONDS);
    } else if (!WIFEXITED(capture.status) || WEXITSTATUS(capture.status) != 0) {
        const char *said = capture.error.text ? capture.error.text : "";

        snprintf(clean, sizeof(clean), "%.*s", (int)strcspn(said, "\r\n"), said);
        text_clean(clean, clean, sizeof(clean));
        snprintf(ret_why, bytes, "the command for the location ended with status %d%s%s",
                 WIFEXITED(capture.status) ? WEXITSTATUS(capture.status) : 128 + WTERMSIG(capture.status),
                 *clean ? ": " : "", clean);
    } else {
        const char *text = capture.output.text ? capture.output.text : "";
        char first[LOCATION_BYTES];

        snprintf(first, sizeof(first), "%.*s", (int)strcspn(text, "\r\n"), text);
        is_found = location_is_valid(first);
        if (is_found)
            memcpy(ret_location, first, sizeof(first));
        else
            snprintf(ret_why, bytes, "the command for the location printed %s",
                     *first ? "more than one word" : "nothing");
    }
    capture_done(&capture);
    return is_found;
}

/* --- Slurm, Kubernetes --- */

static bool from_slurm(char *ret_location, char *ret_why, size_t bytes)
{
    const char *address = getenv("SLURM_TOPOLOGY_ADDR");

    /* Without a topology plugin the address is the name of the node. */
    if (!address || !strchr(address, '.')) {
        snprintf(ret_why, bytes, "Slurm reports no switches here (SLURM_TOPOLOGY_ADDR is not set)");
        return false;
    }
    if (!location_is_valid(address)) {
        snprintf(ret_why, bytes, "SLURM_TOPOLOGY_ADDR is not a valid location");
        return false;
    }
    snprintf(ret_location, LOCATION_BYTES, "%s", address);
    return true;
}

/* The value of a label in the format of the downward API: key="value" on a line. */
static bool find_label(FILE *stream, const char *key, char *ret_value, size_t bytes)
{
    char line[LINE_BYTES];

    rewind(stream);
    while (fgets(line, sizeof(line), stream)) {
        char *value = line + strlen(key);

        if (strncmp(line, key, strlen(key)) != 0 || *value != '=')
            continue;
        value += 1 + (value[1] == '"');
        value[strcspn(value, "\"\r\n")] = '\0';
        snprintf(ret_value, bytes, "%s", value);
        return *ret_value;
    }
    return false;
}

/* From the widest to the narrowest: nearby nodes share a prefix. */
static bool from_kubernetes(char *ret_location, char *ret_why, size_t bytes)
{
    static const char *const keys[] = {"topology.kubernetes.io/zone", "cloud.google.com/gce-topology-block",
                                       "cloud.google.com/gce-topology-subblock", "cloud.google.com/gce-topology-host",
                                       "kubernetes.io/hostname"};
    FILE *stream = hosts_open(LABELS_FILE);
    char text[LOCATION_BYTES] = "", value[128];

    if (!stream) {
        snprintf(ret_why, bytes, "%.180s", ep_last_error());
        return false;
    }
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        size_t used = strlen(text);

        if (find_label(stream, keys[i], value, sizeof(value)))
            snprintf(text + used, sizeof(text) - used, "/%s", value);
    }
    fclose(stream);
    if (!location_is_valid(text)) {
        snprintf(ret_why, bytes, LABELS_FILE " contains no topology label");
        return false;
    }
    memcpy(ret_location, text, sizeof(text));
    return true;
}

/* --- the metadata server of Google Compute Engine, by HTTP 1.0 --- */

/* A blocking socket with a deadline for each call. -1 with the reason. */
static int connect_server(const char *server, const char **ret_why)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *info = NULL;
    struct timeval deadline = {.tv_sec = LOCATION_SECONDS};
    const char *colon = strrchr(server, ':');
    char name[256];
    int fd, number;

    snprintf(name, sizeof(name), "%.*s", (int)(colon ? colon - server : (ptrdiff_t)strlen(server)), server);
    number = getaddrinfo(name, colon ? colon + 1 : "80", &hints, &info);
    *ret_why = number ? gai_strerror(number) : NULL;
    if (number)
        return -1;
    fd = socket(info->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &deadline, sizeof(deadline)) != 0 ||
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &deadline, sizeof(deadline)) != 0 ||
        connect(fd, info->ai_addr, info->ai_addrlen) != 0) {
        *ret_why = errno == EINPROGRESS ? "timeout" : strerror(errno);
        if (fd >= 0)
            close(fd);
        fd = -1;
    }
    freeaddrinfo(info);
    return fd;
}

/* Reads the answer up to its end. NULL, or why it is incomplete. */
static const char *read_answer(int fd, char *ret_text, size_t bytes)
{
    uint64_t until_ns = ep_deadline_ns(LOCATION_SECONDS * 1000);
    size_t used = 0;
    ssize_t n;

    while ((n = read(fd, ret_text + used, bytes - 1 - used)) > 0) {
        used += (size_t)n;
        if (used == bytes - 1 || ep_now_ns() > until_ns)
            return used == bytes - 1 ? "the answer is not a location" : "timeout";
    }
    ret_text[used] = '\0';
    return n == 0 ? NULL : errno == EAGAIN ? "timeout" : strerror(errno);
}

/* Every answer that is not 200, and a body that is no location, is an error. */
static bool from_metadata_server(const char *server, char *ret_location, char *ret_why, size_t bytes)
{
    char request[512], answer[4096], status[40] = "";
    const char *why = NULL, *body;
    int fd = connect_server(server, &why), http = 0, number;

    snprintf(request, sizeof(request),
             "GET " METADATA_PATH " HTTP/1.0\r\nHost: %.250s\r\nMetadata-Flavor: Google\r\nConnection: close\r\n\r\n",
             server);
    if (fd >= 0) {
        number = write_all(fd, request, strlen(request));
        why = number ? strerror(number) : read_answer(fd, answer, sizeof(answer));
        close(fd);
    }
    body = why ? NULL : strstr(answer, "\r\n\r\n");
    if (!why && (!body || sscanf(answer, "HTTP/1.%*d %d", &http) != 1)) {
        why = "the answer is not HTTP";
    } else if (!why && http != 200) {
        snprintf(status, sizeof(status), "HTTP status %d", http);
        why = status;
    } else if (!why) {
        size_t n = strcspn(body + 4, "\r\n");

        snprintf(ret_location, LOCATION_BYTES, "%.*s", (int)n, body + 4);
        why = n == 0                                                    ? "the answer is empty"
              : n >= LOCATION_BYTES || !location_is_valid(ret_location) ? "the answer is not a location"
                                                                        : NULL;
    }
    if (why) {
        ret_location[0] = '\0';
        snprintf(ret_why, bytes, "http://%.250s" METADATA_PATH ": %s", server, why);
    }
    return !why;
}

static bool is_google(void)
{
    char text[64] = "";
    FILE *stream = fopen("/sys/class/dmi/id/product_name", "re");

    if (!stream)
        return false;
    if (!fgets(text, sizeof(text), stream))
        text[0] = '\0';
    fclose(stream);
    return strncmp(text, "Google", 6) == 0;
}

bool location_find(const json_t *how, char ret_location[LOCATION_BYTES], char *ret_why, size_t bytes)
{
    const char *method = job_text(how, "method", "auto"), *server = job_text(how, "metadata", NULL);
    bool is_auto = strcmp(method, "auto") == 0;
    char ignored[256];

    ret_why[0] = ret_location[0] = '\0';
    if (strcmp(method, "command") == 0)
        return from_command(job_text(how, "command", "false"), ret_location, ret_why, bytes);
    if (strcmp(method, "slurm") == 0)
        return from_slurm(ret_location, ret_why, bytes);
    if (strcmp(method, "kubernetes") == 0)
        return from_kubernetes(ret_location, ret_why, bytes);
    if (is_auto &&
        (from_slurm(ret_location, ignored, sizeof(ignored)) || from_kubernetes(ret_location, ignored, sizeof(ignored))))
        return true;
    if (strcmp(method, "metadata") == 0 || (is_auto && (server || is_google())))
        return from_metadata_server(server ? server : METADATA_SERVER, ret_location, ret_why, bytes);
    return false;
}

/* --- files --- */

/* The value of "Key=" in a line of topology.conf, up to a space. */
static bool find_value(const char *line, const char *key, char *ret_value, size_t bytes)
{
    const char *at = strcasestr(line, key);

    if (!at || (at != line && at[-1] != ' ' && at[-1] != '\t'))
        return false;
    at += strlen(key);
    snprintf(ret_value, bytes, "%.*s", (int)strcspn(at, " \t\r\n"), at);
    return *ret_value;
}

/* Adds {"name": value} for each name of a Slurm list. */
static ep_status set_all(const char *what, const char *list, const char *value, json_t *object)
{
    struct hosts hosts = {0};
    ep_status status = hosts_add_list(what, list, &hosts);

    for (int i = 0; status == EP_OK && i < hosts.n; i++)
        json_object_set_new(object, host_name(&hosts.list[i]), json_string(value));
    hosts_done(&hosts);
    return status;
}

static ep_status parse_line(const char *file, int number, char *line, json_t *locations, json_t *parents)
{
    char name[LOCATION_BYTES], list[LINE_BYTES], what[300];
    char *rest, *location;

    line[strcspn(line, "#\r\n")] = '\0';
    snprintf(what, sizeof(what), "%.200s, line %d", file, number);
    line += strspn(line, " \t");
    if (!*line)
        return EP_OK;
    /* A block, of the plugin topology/block, is the nodes of an NVLink domain. */
    if (find_value(line, "SwitchName=", name, sizeof(name)) || find_value(line, "BlockName=", name, sizeof(name))) {
        if (!location_is_valid(name))
            return ep_fail(EP_E_ARG, "%s: not a name of a switch or block", what);
        if (find_value(line, "Nodes=", list, sizeof(list)))
            return set_all(what, list, name, locations);
        return find_value(line, "Switches=", list, sizeof(list)) ? set_all(what, list, name, parents) : EP_OK;
    }
    if (find_value(line, "BlockSizes=", list, sizeof(list)))
        return EP_OK;
    rest = line + strcspn(line, " \t");
    location = rest + strspn(rest, " \t");
    *rest = '\0';
    location[strcspn(location, " \t")] = '\0';
    if (!location_is_valid(location))
        return ep_fail(EP_E_ARG, "%s: neither 'HOST LOCATION' nor 'SwitchName=...' nor 'BlockName=...'", what);
    return set_all(what, line, location, locations);
}

/* Prefixes a leaf with the switches above it, "top/leaf", so that nearby nodes share a prefix. */
static void name_switches(json_t *locations, const json_t *parents)
{
    json_t *value;
    const char *host;
    void *next;

    json_object_foreach_safe (locations, next, host, value) {
        char path[LOCATION_BYTES], longer[LOCATION_BYTES];
        const char *up = json_string_value(value);

        snprintf(path, sizeof(path), "%s", up);
        for (int i = 0; i < SWITCH_DEPTH && (up = job_text(parents, up, NULL)); i++) {
            if (snprintf(longer, sizeof(longer), "%s/%s", up, path) >= (int)sizeof(longer))
                break;
            memcpy(path, longer, sizeof(path));
        }
        json_object_set_new(locations, host, json_string(path));
    }
}

json_t *location_read_file(const char *file)
{
    json_t *locations = json_object(), *parents = json_object();
    FILE *stream = hosts_open(file);
    ep_status status = stream ? EP_OK : EP_E_ARG;
    char line[LINE_BYTES];

    for (int number = 1; status == EP_OK && fgets(line, sizeof(line), stream); number++)
        status = parse_line(file, number, line, locations, parents);
    if (stream)
        fclose(stream);
    if (status == EP_OK)
        name_switches(locations, parents);
    json_decref(parents);
    if (status == EP_OK)
        return locations;
    json_decref(locations);
    return NULL;
}
