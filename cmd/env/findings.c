/* SPDX-License-Identifier: Apache-2.0 */
/* findings.c - what checks of epkit doctor find about variables of the environment, as rows of epkit env --check. */
#include "common/output.h"
#include "env.h"
#include "machine/doctor/doctor.h"
#include "machine/doctor/nccl_variables.h"

#include <stdio.h>
#include <string.h>

/* Checks that compare variables with the machine; the audit has no rows for what they find. */
static const char *const checks[] = {"gid",           "shared-nic", "nccl-hca",      "socket-interface",
                                     "nccl-disabled", "nccl-gdr",   "traffic-class", "visible-devices",
                                     "net-plugin",    "rendezvous", "hca-lists",     "topology-file",
                                     "dmabuf-off",    "host-name",  "rdmav-drivers"};

static bool is_set(const struct doctor_machine *machine, const char *name)
{
    return source_env(machine->source, name) || *machine_nccl_value(machine, name, NULL);
}

/* The variable that a finding is about, if it is set: the one to unset, one that the text names, or the first. */
static const char *variable_of(const struct doctor_machine *machine, const struct doctor_result *result)
{
    const char *name = NULL;

    if (strncmp(result->fix, "unset ", 6) == 0)
        name = source_printf(machine->source, "%.*s", (int)strcspn(result->fix + 6, " \n"), result->fix + 6);
    for (int named = 1; named >= 0; named--)
        for (int i = 0; i < result->n_evidence && !(name && is_set(machine, name)); i++)
            if (!named || strstr(result->text, result->evidence[i].where))
                name = result->evidence[i].where;
    return name && is_set(machine, name) ? name : NULL;
}

/* What the finding says of this variable: its evidence is "VALUE: WHY" where it has a reason of its own. */
static const char *text_of(const struct doctor_machine *machine, const struct doctor_result *result, const char *name)
{
    const char *value = machine_nccl_value(machine, name, NULL);
    size_t n = strlen(value);

    for (int i = 0; i < result->n_evidence && !strstr(result->text, name); i++)
        if (strcmp(result->evidence[i].where, name) == 0 && strncmp(result->evidence[i].what, value, n) == 0 &&
            strncmp(result->evidence[i].what + n, ": it ", 5) == 0)
            return source_printf(machine->source, "%s %s", name, result->evidence[i].what + n + 5);
    return result->text;
}

static json_t *row_of(const struct doctor_machine *machine, const struct doctor_result *result, const char *name)
{
    const struct advice_row *advice = advice_find(machine->advice, name);
    bool is_serious = result->severity == DOCTOR_ERROR;
    const char *advised = advice && !advice->unset && advice->scope == ADVICE_NODE ? advice->value : NULL;
    char text[4096];
    size_t n = (size_t)snprintf(text, sizeof(text), "%s.%s%s", text_of(machine, result, name),
                                *result->advice ? " " : "", result->advice);

    if (n < sizeof(text) && advised)
        snprintf(text + n, sizeof(text) - n, " Set it to %s.", advised);
    else if (n < sizeof(text) && strncmp(result->fix, "unset ", 6) == 0 && !strstr(result->advice, "unset"))
        snprintf(text + n, sizeof(text) - n, " Unset it.");
    return json_pack("{s:s, s:o, s:s, s:s, s:o, s:o}", "name", name, "value",
                     out_text(machine_nccl_value(machine, name, NULL)), "kind", is_serious ? "harmful" : "differs",
                     "verdict", is_serious ? "harmful" : "not as advised", "advised",
                     advised ? out_text(advised) : json_null(), "text", out_text(text));
}

/* Does a command of the finding set or unset the variable? */
static bool is_mended(const struct doctor_result *result, const char *name)
{
    size_t n = strlen(name);

    for (const char *at = result->fix; (at = strstr(at, name)); at += n)
        if (at > result->fix && at[-1] == ' ' && strchr(" \n=", at[n]))
            return true;
    return false;
}

json_t *env_findings(const struct doctor_machine *machine)
{
    json_t *rows = json_array();

    for (size_t i = 0; i < sizeof(checks) / sizeof(checks[0]); i++) {
        struct doctor_result result;
        const char *name;

        doctor_run(machine, doctor_find(checks[i]), &result);
        name = result.outcome == DOCTOR_FOUND ? variable_of(machine, &result) : NULL;
        if (name)
            json_array_append_new(rows, row_of(machine, &result, name));
        /* One fault in several variables. */
        for (int k = 0; name && k < result.n_evidence; k++) {
            const char *other = result.evidence[k].where;

            if (strcmp(other, name) != 0 && is_set(machine, other) && is_mended(&result, other))
                json_array_append_new(rows, row_of(machine, &result, other));
        }
    }
    return rows;
}
