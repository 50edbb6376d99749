/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any bytes as a run folder: run.json and worker-a.log, with a NUL between them. The document can be made,
 * compared with itself and put into a history; the page has no character that is hidden, and no tag of the folder.
 */
#include "cmd/report/report.h"
#include "common/redact.h"
#include "common/text.h"

#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TAG "<planted"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static char path[] = "/dev/shm/epkit-fuzz-XXXXXX"; /* a disk is a hundred times as slow */
static const char *const names[] = {"run.json", "worker-a.log"};

static void check(bool holds)
{
    if (!holds)
        abort();
}

static void remove_folder(void)
{
    int dir = open(path, O_PATH | O_DIRECTORY);

    for (size_t i = 0; i < COUNT(names); i++)
        unlinkat(dir, names[i], 0);
    close(dir);
    rmdir(path);
}

static void write_files(const uint8_t *data, size_t size)
{
    int dir = open(path, O_PATH | O_DIRECTORY);

    for (size_t i = 0; i < COUNT(names); i++) {
        const uint8_t *end = i + 1 < COUNT(names) ? memchr(data, 0, size) : NULL;
        size_t n = end ? (size_t)(end - data) : size;
        int fd = openat(dir, names[i], O_WRONLY | O_CREAT | O_TRUNC, 0600);

        check(fd >= 0 && write(fd, data, n) == (ssize_t)n);
        close(fd);
        data += end ? n + 1 : n;
        size -= end ? n + 1 : n;
    }
    close(dir);
}

static void check_page(const json_t *document, void (*print)(FILE *stream, const json_t *document))
{
    char *page = NULL;
    const char *shown;
    size_t bytes, n, shown_bytes;
    FILE *stream = open_memstream(&page, &bytes);

    check(stream);
    print(stream, document);
    check(fclose(stream) == 0 && !strcasestr(page, TAG) && strlen(page) == bytes);
    for (size_t at = 0; at < bytes; at += n) {
        n = 1;
        if (page[at] >= ' ' && page[at] <= '~')
            continue;
        n = text_printable(page + at, bytes - at, &shown, &shown_bytes);
        check(n > 0 && shown == page + at);
    }
    free(page);
}

static json_t *judge(const struct folder *folder)
{
    static const struct cmd cmd = {.name = "report"};
    static const struct verdict_options wanted = {.tolerance = 0.15};
    static struct reference *reference;
    json_t *parsed = NULL;

    if (!reference)
        reference = reference_new();
    check(reference && input_judge_folder(&cmd, folder, reference, &wanted, &parsed) == CMD_FINE && parsed);
    return parsed;
}

static void check_folder(const struct folder *folder)
{
    json_t *parsed = NULL, *document, *shown, *entry, *comparison;

    if (!json_is_object(json_object_get(folder->run, "results")))
        parsed = judge(folder);
    document = report_gather(folder, parsed);
    entry = report_history_entry(document);
    comparison = report_compare(document, document, 0.05, NULL);
    check(document && entry && comparison && json_number(comparison, "regressions") == 0);
    check(*json_text(document, "verdict") && json_is_string(json_object_get(document, "result")));
    shown = redact_document(document);
    check(shown);
    check_page(shown, report_page);
    check_page(comparison, report_compare_page);
    json_decref(shown);
    json_decref(comparison);
    json_decref(entry);
    json_decref(document);
    json_decref(parsed);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static bool is_made;
    struct folder *folder;
    char why[200];

    if (!is_made)
        is_made = mkdtemp(path) && atexit(remove_folder) == 0;
    check(is_made);
    write_files(data, size);
    check(runfolder_open(path, &folder, why, sizeof(why)));
    check_folder(folder);
    runfolder_free(folder);
    return 0;
}
