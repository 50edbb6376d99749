/* SPDX-License-Identifier: Apache-2.0 */
#include "report.h"

#include "cmd/bench/bench.h"
#include "common/dir.h"
#include "common/memory.h"
#include "common/redact.h"
#include "common/temporary.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static bool refuse(const char *folder, const char *why)
{
    out_error("the folder of the report, %s: %s", folder, why);
    out_hint("choose another with --output");
    return false;
}

/* One of `epkit run` may be replaced. */
static bool has_another_run(const char *folder)
{
    struct folder *run;
    char why[200];
    bool result;

    if (!runfolder_open(folder, &run, why, sizeof(why)))
        return false;
    result = *run->run_error || (run->run && !json_object_get(run->run, "results"));
    runfolder_free(run);
    return result;
}

/* A process that ends before the report is written leaves nothing behind. */
bool report_check(const char *folder)
{
    sigset_t before;
    struct stat info;
    int number;

    if (!*folder)
        return refuse("''", "the name is empty");
    temporary_hold_signals(&before);
    number = dir_make(folder, 0755);
    if (number == 0 && rmdir(folder) != 0)
        number = errno;
    temporary_release_signals(&before);
    if (number != EEXIST)
        return number == 0 || refuse(folder, write_reason(number));
    if (stat(folder, &info) != 0)
        return refuse(folder, strerror(errno));
    if (!S_ISDIR(info.st_mode))
        return refuse(folder, "it is not a folder");
    if (has_another_run(folder))
        return refuse(folder, "it has the run of another command");
    return access(folder, W_OK | X_OK) == 0 || refuse(folder, strerror(errno));
}

static void write_json(FILE *stream, const json_t *document)
{
    stream_json(stream, document, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
}

/* A file of the report. */
struct file {
    const char *name;
    void (*write)(FILE *stream, const json_t *document);
    const json_t *document;
    char *text;
    size_t bytes;
};

/* Without secrets: foreign folders may have some. */
static void render(struct file *file)
{
    json_t *shown = redact_document(file->document);
    FILE *stream = memory_stream(&file->text, &file->bytes);

    file->write(stream, shown);
    json_decref(shown);
    memory_close(stream);
}

/* All texts are complete first, because plots take time. */
bool report_write(const char *folder, const json_t *run, const json_t *document,
                  void (*page)(FILE *stream, const json_t *document))
{
    struct file files[] = {{.name = "report.json", .write = write_json, .document = document},
                           {.name = "report.html", .write = page, .document = document},
                           {.name = "run.json", .write = write_json, .document = run}};
    const size_t n = run ? 3 : 2;
    sigset_t before;
    bool is_new;
    int number, dir;

    for (size_t i = 0; i < n; i++)
        render(&files[i]);
    temporary_hold_signals(&before);
    number = dir_make(folder, 0755);
    is_new = number == 0;
    dir = is_new || number == EEXIST ? dir_open(folder, false) : -1;
    if (is_new || number == EEXIST)
        number = dir < 0 ? errno : 0;
    if (number)
        out_error("making %s: %s", folder, write_reason(number));
    for (size_t i = 0; number == 0 && i < n; i++) {
        number = temporary_save_in(dir, files[i].name, files[i].text, files[i].bytes, dir_usual_mode());
        if (number)
            out_error("writing %s/%s: %s", folder, files[i].name, write_reason(number));
    }
    dir_close(dir);
    if (number && is_new)
        rmdir(folder);
    temporary_release_signals(&before);
    for (size_t i = 0; i < n; i++)
        free(files[i].text);
    return number == 0;
}

bool report_write_results(const char *folder, json_t *results, int code, double seconds)
{
    time_t now = time(NULL);
    json_t *build = bench_provenance();
    json_t *run =
        json_pack("{s:i, s:O, s:O, s:s, s:O, s:o, s:o, s:i, s:s, s:i, s:O}", "schema_version", 1, "epkit",
                  json_object_get(results, "epkit"), "commit", json_object_get(build, "commit"), "job", "epkit-run",
                  "command", json_object_get(results, "command"), "began", out_time(now - (time_t)seconds), "ended",
                  out_time(now), "nodes", 1, "launcher", "local", "exit_code", code, "results", results);
    json_t *document = out_document("report");
    bool good;

    json_object_update_new(document, report_gather(&(struct folder){.path = (char *)folder, .run = run}, NULL));
    good = report_write(folder, run, document, report_page);
    json_decref(document);
    json_decref(run);
    json_decref(build);
    return good;
}
