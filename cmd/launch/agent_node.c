/* SPDX-License-Identifier: Apache-2.0 */
/* agent_node.c - the node of an agent: facts that the launcher needs, its location, the folder of the launch. */
#include "agent_internal.h"
#include "base/error.h"
#include "common/capture.h"
#include "common/dir.h"
#include "common/embedded.h"
#include "common/text.h"
#include "machine/source/source.h"

#include <epkit/types.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

/* --- the location --- */

extern const struct embedded location_scripts[]; /* location.sh */

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

static void first_line(const struct capture_text *output, char *ret_line, size_t bytes)
{
    const char *text = output->text ? output->text : "";

    snprintf(ret_line, bytes, "%.*s", (int)strcspn(text, "\r\n"), text);
}

bool location_find(const json_t *how, char ret_location[LOCATION_BYTES], char *ret_why, size_t bytes)
{
    const char *method = job_text(how, "method", "auto"), *command = job_text(how, "command", NULL);
    const char *script[] = {
        "bash", "-c", location_scripts[0].text, "location.sh", method, job_text(how, "metadata", ""), NULL};
    const char *given[] = {"sh", "-c", command, NULL};
    struct capture capture = {.argv = (char *const *)(command ? given : script)};
    const char *what = command ? "the command for the location" : method;
    char line[LOCATION_BYTES], said[200];
    bool is_found = false;

    ret_why[0] = ret_location[0] = '\0';
    if (strcmp(method, "none") == 0)
        return false;
    capture_run(&capture, 1, 1, LOCATION_SECONDS * 1000, NULL, NULL);
    if (capture.start_error) {
        snprintf(ret_why, bytes, "%s could not be run", what);
    } else if (capture.late) {
        snprintf(ret_why, bytes, "%s: timeout: no answer within %d s", what, LOCATION_SECONDS);
    } else if (!WIFEXITED(capture.status) || WEXITSTATUS(capture.status) != 0) {
        first_line(&capture.error, said, sizeof(said));
        text_clean(said, said, sizeof(said));
        if (command || !*said)
            snprintf(ret_why, bytes, "%s ended with status %d%s%s", what,
                     WIFEXITED(capture.status) ? WEXITSTATUS(capture.status) : 128 + WTERMSIG(capture.status),
                     *said ? ": " : "", said);
        else
            snprintf(ret_why, bytes, "%s", said);
    } else {
        first_line(&capture.output, line, sizeof(line));
        is_found = location_is_valid(line);
        if (is_found)
            memcpy(ret_location, line, sizeof(line));
        else if (*line || command)
            snprintf(ret_why, bytes, "%s: %s", what, *line ? "the answer is not a location" : "the answer is empty");
    }
    capture_done(&capture);
    return is_found;
}

/* --- facts --- */

#define FOLDER "epkit-launch"
#define PROBE_BYTES 65536 /* if the folder cannot take this much, the disk counts as full */
#define GPUS_DIR "/proc/driver/nvidia/gpus"
#define RDMA_DIR "/sys/class/infiniband"

static int count_gpus(struct source *source, const char **ret_name)
{
    int n = 0;

    FOR_NAMES (gpu, source_list(source, GPUS_DIR)) {
        const char *text = source_read(source, GPUS_DIR "/%s/information", gpu).text;
        const char *name = source_field(source, text, "Model");

        if (*name) {
            *ret_name = name;
            n++;
        }
    }
    return n;
}

/*
 * Identifies the network namespace of a running kernel: equal for two names of one host, different for two containers.
 * "": unknown.
 */
static void read_machine(struct source *source, char *ret_text, size_t bytes)
{
    const char *boot = source_line(source, "/proc/sys/kernel/random/boot_id").text;
    char net[64];
    ssize_t n = readlink("/proc/self/ns/net", net, sizeof(net) - 1);

    *ret_text = '\0';
    if (n > 0 && *boot)
        snprintf(ret_text, bytes, "%s %.*s", boot, (int)n, net);
}

json_t *agent_facts(void)
{
    char host[256] = "", machine[160] = "";
    const char *gpu = "", *driver = "";
    struct utsname system = {.release = ""};
    struct source *source = NULL;
    json_t *facts;
    int gpus = 0;

    gethostname(host, sizeof(host) - 1);
    uname(&system);
    if (source_open(NULL, &source) == EP_OK) {
        gpus = count_gpus(source, &gpu);
        driver = source_line(source, "/sys/module/nvidia/version").text;
        read_machine(source, machine, sizeof(machine));
    }
    facts = json_pack("{s:s, s:s, s:s, s:s?, s:s?, s:i, s:s}", "epkit", ep_version(), "host", host, "kernel",
                      system.release, "driver", *driver ? driver : NULL, "gpu", *gpu ? gpu : NULL, "gpus", gpus,
                      "machine", machine);
    source_free(source);
    return facts;
}

/* A data counter, in bytes: the IB specification counts 4-byte words, EFA in its driver bytes. */
static bool read_counter(struct source *source, const char *device, int port, const char *name, const char *of_driver,
                         json_int_t *ret_bytes)
{
    uint64_t value;
    bool is_in_words =
        source_number_uncached(source, &value, RDMA_DIR "/%s/ports/%d/counters/%s", device, port, name) == SOURCE_OK;

    if (!is_in_words && source_number_uncached(source, &value, RDMA_DIR "/%s/ports/%d/hw_counters/%s", device, port,
                                               of_driver) != SOURCE_OK)
        return false;
    value *= is_in_words ? 4 : 1;
    *ret_bytes = (json_int_t)value;
    return true;
}

json_t *agent_nics(json_t *begin)
{
    json_t *list = json_array(), *first;
    struct source_names devices = {0};
    struct source *source = NULL;
    char key[300];

    if (source_open(NULL, &source) == EP_OK)
        devices = source_list(source, RDMA_DIR);
    for (size_t i = 0; i < devices.n; i++) {
        json_int_t sent, received;

        for (int port = 1; read_counter(source, devices.names[i], port, "port_xmit_data", "tx_bytes", &sent) &&
                           read_counter(source, devices.names[i], port, "port_rcv_data", "rx_bytes", &received);
             port++) {
            snprintf(key, sizeof(key), "%s:%d", devices.names[i], port);
            first = json_object_get(begin, key);
            if (!first) {
                json_object_set_new(begin, key, json_pack("[II]", sent, received));
                continue;
            }
            sent -= json_integer_value(json_array_get(first, 0));
            received -= json_integer_value(json_array_get(first, 1));
            /* A counter that decreased was reset: its traffic is unknown. */
            if (sent >= 0 && received >= 0)
                json_array_append_new(list, json_pack("{s:s, s:i, s:I, s:I}", "device", devices.names[i], "port", port,
                                                      "tx_bytes", sent, "rx_bytes", received));
        }
    }
    source_free(source);
    return list;
}

/* --- the folder of a launch --- */

ep_status agent_write_files(struct agent *agent, const json_t *files)
{
    static const char data[PROBE_BYTES];
    const char *base = getenv("TMPDIR");
    int number;

    if (!base || !*base)
        base = "/tmp";
    /* This also removes the folder of an agent that was killed, whatever happened to its launcher. */
    number = temporary_folder_in(base, FOLDER, &agent->folder);
    /* A container may have no /tmp, or a read-only one: a job without files does not need it. */
    if (json_object_size(files) == 0 && (number == ENOENT || number == EROFS || number == EACCES))
        return EP_OK;
    if (number)
        return ep_fail(EP_E_SYSTEM, "making the folder %s/" FOLDER "-...: %s", base,
                       number == EPERM ? "it belongs to another user" : write_reason(number));
    /* Finds a full disk now, not in the middle of the job. */
    number = dir_write(agent->folder.fd, "probe", data, sizeof(data), 0700);
    if (number) {
        agent_remove_files(agent);
        return ep_fail_errno(EP_E_SYSTEM, number, "writing %d bytes to %s", PROBE_BYTES, base);
    }
    FOR_MEMBERS (name, text, files) {
        number = dir_write(agent->folder.fd, name, json_string_value(text), json_string_length(text), 0700);
        if (number)
            return ep_fail_errno(EP_E_SYSTEM, number, "writing %s to %s", name, agent->folder.path);
    }
    if (json_object_size(files) == 0)
        agent_remove_files(agent);
    return EP_OK;
}

void agent_remove_files(struct agent *agent)
{
    temporary_remove(&agent->folder);
}
