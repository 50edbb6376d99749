/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any bytes as a manifest and, behind a NUL, as a snapshot of a cluster: what is accepted can be checked, and every
 * finding is complete; what is refused has a reason. Of a snapshot with a job, something is said about it.
 */
#include "cmd/deploy/deploy.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_findings(const json_t *findings)
{
    static const char *const keys[] = {"id", "severity", "by", "says", "why", "fix"};

    if (!json_is_array(findings))
        abort();
    FOR_JSON (finding, findings)
        for (size_t k = 0; k < sizeof(keys) / sizeof(keys[0]); k++)
            if (json_string_length(json_object_get(finding, keys[k])) == 0)
                abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint8_t *end = memchr(data, 0, size);
    size_t n = end ? (size_t)(end - data) : size;
    json_t *documents, *snapshot, *findings;
    struct deploy_job job;

    if (deploy_manifest_parse("m", (const char *)data, n, &documents) != EP_OK) {
        if (!*ep_last_error())
            abort();
        return 0;
    }
    snapshot = end ? json_loadb((const char *)end + 1, size - n - 1, 0, NULL) : NULL;
    if (snapshot && deploy_snapshot_check(snapshot) == EP_OK) {
        json_t *answer = deploy_why(snapshot, "ns", "r");

        if (answer && !json_is_array(json_object_get(answer, "reasons")))
            abort();
        json_decref(answer);
    }
    if (snapshot && deploy_snapshot_check(snapshot) == EP_OK && deploy_job_find(documents, "default", &job) == EP_OK) {
        job.prerequisites = true;
        findings = deploy_check(snapshot, &job);
        check_findings(findings);
        json_decref(findings);
    }
    json_decref(snapshot);
    json_decref(documents);
    return 0;
}
