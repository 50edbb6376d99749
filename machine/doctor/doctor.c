/* SPDX-License-Identifier: Apache-2.0 */
/* doctor.c - reads the machine that is checked, and runs checks. */
#include "doctor.h"
#include "base/error.h"
#include "common/memory.h"
#include "common/text.h"
#include "queries.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct doctor_machine *doctor_machine_read(struct source *source)
{
    struct doctor_machine *machine = memory_new(1, sizeof(*machine));

    machine->source = source;
    machine->stacks = memory_new(STACKS_MAX, sizeof(*machine->stacks));
    machine->topo = topo_read(machine->source);
    machine->map = map_best(machine->topo);
    machine->ibgda = map_ibgda(machine->topo);
    machine->software = software_read(machine->source, machine->topo);
    machine->advice = advice_make(machine->topo, machine->software, machine->map, machine->ibgda);
    machine->audit = audit_make(machine->topo, machine->software, machine->advice);
    return machine;
}

void doctor_machine_free(struct doctor_machine *machine)
{
    if (!machine)
        return;
    free(machine->stacks);
    map_free(machine->ibgda);
    map_free(machine->map);
    source_free(machine->source);
    free(machine);
}

const struct doctor_check *doctor_find(const char *id)
{
    const struct doctor_check *const *check = doctor_checks;

    while (*check && strcmp((*check)->id, id) != 0)
        check++;
    return *check;
}

static bool has_needs(const struct doctor_machine *machine, unsigned needs, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;

    if ((needs & NEEDS_GPUS && !machine_has_gpus(machine, result)) ||
        (needs & (NEEDS_DRIVER | NEEDS_NVML) && !machine_has_driver(machine, result)))
        return false;
    if (doctor_unknown_if(result, needs & NEEDS_NVML && !topo->nvml, "NVML does not answer: %s", topo->nvml_why)) {
        result->missing = machine_missing_nvml(machine);
        return false;
    }
    return (!(needs & NEEDS_DATA_NICS) || machine_has_data_nics(machine, result)) &&
           (!(needs & NEEDS_ENVIRONMENT) || machine_has_environment(machine, result));
}

void doctor_result_init(const struct doctor_machine *machine, const struct doctor_check *check,
                        struct doctor_result *ret_result)
{
    *ret_result =
        (struct doctor_result){.machine = machine, .check = check, .text = "", .fix = "", .advice = "", .fix_cost = ""};
}

void doctor_run(const struct doctor_machine *machine, const struct doctor_check *check,
                struct doctor_result *ret_result)
{
    doctor_result_init(machine, check, ret_result);
    if (has_needs(machine, check->needs, ret_result))
        check->run(machine, ret_result);
    if (ret_result->outcome == DOCTOR_FOUND && !*ret_result->fix && !*ret_result->advice)
        doctor_advise_remedy(ret_result);
}

/* --- what checks report --- */

#define TEXT_BYTES 2048

/* Formats a text and makes it safe to print, by lines if `ends` is "\n", not "": evidence comes from the machine. */
static const char *__attribute__((format(printf, 3, 0)))
format_text(const struct doctor_result *result, const char *ends, const char *format, va_list args)
{
    char raw[TEXT_BYTES], clean[TEXT_BYTES];
    size_t used = 0;
    char *rest = raw, *line;

    vsnprintf(raw, sizeof(raw), format, args);
    while ((line = strsep(&rest, ends))) {
        text_clean(line, clean + used, sizeof(clean) - used);
        used += strlen(clean + used);
        if (rest && used + 1 < sizeof(clean))
            clean[used++] = '\n';
    }
    clean[used] = '\0';
    return source_printf(result->machine->source, "%s", clean);
}

/* The text that the last arguments of a function make. */
#define FORMATTED(result, ends, format) WITH_ARGS(args, format, format_text(result, ends, format, args))

void doctor_found(struct doctor_result *result, enum doctor_severity severity, const char *format, ...)
{
    result->text = FORMATTED(result, "", format);
    result->outcome = DOCTOR_FOUND;
    result->severity = severity;
}

bool doctor_conclude(struct doctor_result *result, enum doctor_outcome outcome, bool condition, const char *format, ...)
{
    if (!condition)
        return false;
    result->text = FORMATTED(result, "", format);
    result->outcome = outcome;
    return true;
}

void doctor_evidence(struct doctor_result *result, const char *where, const char *format, ...)
{
    struct doctor_evidence *evidence;
    char place[TEXT_BYTES];

    if (result->n_evidence == (int)COUNT(result->evidence)) {
        result->n_evidence_left_out++;
        return;
    }
    evidence = &result->evidence[result->n_evidence++];
    evidence->what = FORMATTED(result, "", format);
    text_clean(where, place, sizeof(place));
    evidence->where = source_printf(result->machine->source, "%s", place);
}

void doctor_evidence_env(struct doctor_result *result, const char *name)
{
    const char *value = source_env(result->machine->source, name);

    doctor_evidence(result, name, "%s", value ? value : "not set");
}

void doctor_fix(struct doctor_result *result, bool is_safe, const char *format, ...)
{
    char unused[1];
    int n = WITH_ARGS(args, format, vsnprintf(unused, sizeof(unused), format, args));

    /* A truncated command is another command, or leaves a quote open. */
    if (n < 0 || n >= TEXT_BYTES) {
        result->advice = "The command is too long to be shown.";
        return;
    }
    result->fix = FORMATTED(result, "\n", format);
    result->fix_is_safe = is_safe;
    result->fix_class = *result->fix ? DOCTOR_FIX_SAFE : DOCTOR_FIX_NONE;
    if (strstr(result->fix, "sudo reboot"))
        doctor_cost(result, DOCTOR_FIX_RESTART, "The machine restarts, and every job on it ends.");
}

void doctor_cost(struct doctor_result *result, enum doctor_fix_class class, const char *format, ...)
{
    if (!*result->fix)
        return;
    result->fix_cost = FORMATTED(result, "", format);
    result->fix_class = class;
    result->fix_is_safe = false;
}

void doctor_advise_remedy(struct doctor_result *result)
{
    result->advice = result->check->remedy;
}

bool doctor_unreadable_if(struct doctor_result *result, bool condition, const char *what, enum source_state state,
                          const char *why)
{
    return doctor_unknown_if(result, condition, "%s: %s", what, machine_reason(state, why));
}

const char *doctor_missing_text(enum doctor_missing missing)
{
    static const char *const texts[] = {
        [DOCTOR_MISSING_FILE] =
            "Make the named file or device readable, or save the snapshot again, and repeat the check.",
        [DOCTOR_MISSING_DRIVER] = "Run nvidia-smi: it and the kernel log say why the driver does not answer.",
        [DOCTOR_MISSING_LIBRARY] =
            "Have libnvidia-ml.so.1 mounted into the container (utility in NVIDIA_DRIVER_CAPABILITIES).",
        [DOCTOR_MISSING_GPUS] = "Run epkit doctor in a job or a container that has GPUs.",
        [DOCTOR_MISSING_ROOT] = "Run epkit doctor as root.",
        [DOCTOR_MISSING_NODE] = "Run epkit doctor on the node, outside of this container.",
        [DOCTOR_MISSING_RUN] = "Run the program's own test between two nodes: its files do not say it.",
    };

    return texts[missing];
}

bool doctor_is_inconclusive(const struct doctor_result *result)
{
    return result->outcome == DOCTOR_UNKNOWN && result->missing < DOCTOR_MISSING_ROOT;
}

void doctor_advise(struct doctor_result *result, const char *format, ...)
{
    result->advice = FORMATTED(result, "", format);
}
