/* SPDX-License-Identifier: Apache-2.0 */
#include "location.h"

#include "common/capture.h"
#include "common/clean.h"
#include "common/embedded.h"
#include "launch_job.h"

#include <stdio.h>
#include <string.h>
#include <sys/wait.h>

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
    if (capture_run(&capture, 1, 1, LOCATION_SECONDS * 1000, NULL, NULL) != 0 || capture.start_error) {
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
