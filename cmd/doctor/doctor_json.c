/* SPDX-License-Identifier: Apache-2.0 */
/* doctor_json.c - a diagnosis as JSON, with the facts that are compared between nodes. */
#include "diagnosis.h"

#include "cmd/topo/topo_view.h"
#include "common/env_variables.h"
#include "common/output.h"
#include "machine/doctor/queries.h"

#include "common/text.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

static const char *const fix_classes[] = {[DOCTOR_FIX_NONE] = NULL,
                                          [DOCTOR_FIX_SAFE] = "safe",
                                          [DOCTOR_FIX_RESTART] = "restart",
                                          [DOCTOR_FIX_CUTS_OFF] = "cuts-off"};

static json_t *or_null(const char *text)
{
    char clean[2048];

    text_clean(text, clean, sizeof(clean));
    return out_text_or_null(clean);
}

json_t *diagnosis_row(const struct doctor_result *result)
{
    static const char *const outcomes[] = {"fine", "found", "not_here", "unknown"};
    json_t *row = json_pack("{s:s, s:s, s:i, s:s, s:s, s:s}", "id", result->check->id, "group", result->check->group,
                            "mode", result->check->mode, "title", result->check->title, "outcome",
                            outcomes[result->outcome], "text", result->text),
           *evidence;

    if (result->outcome == DOCTOR_UNKNOWN)
        json_object_update_new(row, json_pack("{s:b, s:s}", "open", doctor_is_inconclusive(result), "would_tell",
                                              doctor_missing_text(result->missing)));
    if (result->outcome != DOCTOR_FOUND)
        return row;
    evidence = json_array();
    FOR_EACH (one, result->evidence, result->n_evidence)
        json_array_append_new(evidence, json_pack("{s:s, s:s}", "where", one->where, "what", one->what));
    /* doctor.c has made the commands safe to print; they are on separate lines. */
    json_object_update_new(row, json_pack("{s:s, s:o, s:i, s:s, s:s?, s:b, s:s?, s:o, s:o}", "severity",
                                          result->severity == DOCTOR_ERROR ? "serious" : "warning", "evidence",
                                          evidence, "evidence_left_out", result->n_evidence_left_out, "cause",
                                          result->check->cause, "fix", *result->fix ? result->fix : NULL, "fix_is_safe",
                                          result->fix_is_safe, "fix_class", fix_classes[result->fix_class], "fix_cost",
                                          or_null(result->fix_cost), "advice", or_null(result->advice)));
    return row;
}

/* --- facts --- */

/* The first port has the name of the NIC; others have their number appended. */
static json_t *nic_facts(const struct topo *topo)
{
    static const char *const layers[] = {"unknown", "InfiniBand", "Ethernet"};
    json_t *nics = json_array();

    FOR_EACH (nic, topo->nics, topo->n_nics) {
        FOR_EACH (port, nic->ports, nic->n_ports) {
            char name[128];

            snprintf(name, sizeof(name), "%.100s:%d", nic->name, port->number);
            json_array_append_new(nics,
                                  json_pack("{s:s, s:s, s:f, s:s, s:s, s:o}", "name", name, "state", port->state,
                                            "rate_gbps", port->rate_gbps, "link_layer", layers[port->link_layer],
                                            "role", topo_role_name(nic->role), "firmware", or_null(nic->firmware)));
        }
    }
    return nics;
}

/* Variables of NVSHMEM, NCCL, DeepEP or the linker; those that a launcher sets per rank are no facts of a node. */
static json_t *environment_facts(struct source *source)
{
    const char *const *others = TEXTS("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "CUDA_VISIBLE_DEVICES");
    struct source_environment environment = source_environment(source);
    json_t *facts = json_object();

    FOR_EACH (variable, environment.variables, environment.n) {
        char name[256], value[2048];

        /* Those of epkit apply to a single run, and one is a secret. */
        if (!text_is_any(variable->name, others) && !variable_has_known_prefix(variable->name) &&
            (!variable_find(variable->name) || variable_is_epkit(variable->name)))
            continue;
        text_clean(variable->name, name, sizeof(name));
        text_clean(variable->value, value, sizeof(value));
        json_object_set_new(facts, name, out_text(value));
    }
    return facts;
}

json_t *diagnosis_facts(const struct doctor_machine *machine)
{
    const struct topo *topo = machine->topo;
    const struct software *software = machine->software;
    const struct software_deepep *deepep = &software->deepep;
    const struct topo_gpu *first = topo->n_gpus && machine_has_multinode_nvlink(topo) ? &topo->gpus[0] : NULL;
    json_t *gpus = json_array();

    for (int i = 0; i < topo->n_gpus; i++)
        json_array_append_new(gpus, out_text(*topo->gpus[i].name ? topo->gpus[i].name : "NVIDIA GPU"));
    /* The domain is "CLUSTER.CLIQUE": nodes with the same one reach each other by NVLink. */
    return json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "nvlink_domain",
                     first && first->cluster && *first->cluster
                         ? json_sprintf("%s.%lld", first->cluster, (long long)first->clique)
                         : json_null(),
                     "kernel", or_null(software->driver.kernel), "driver", or_null(software->driver.version), "doca",
                     or_null(software->driver.doca), "nvshmem", or_null(software->nvshmem.version), "nccl",
                     or_null(software->nccl.version), "deepep",
                     or_null(deepep->imported >= 0 ? deepep->copies[deepep->imported].version : ""), "gpus", gpus,
                     "nics", nic_facts(topo), "environment", environment_facts(machine->source));
}

/* --- stacks --- */

static json_t *stack_row(const struct doctor_machine *machine, const struct stack *stack)
{
    const struct stack_result *first = stack_evaluate(machine, stack);
    const struct stack_installed *installed = first->installed;
    const char *state = "runs", *text = "runs here", *fix = first->result.fix;

    if (first->result.outcome != DOCTOR_FINE) {
        state = first->result.outcome == DOCTOR_FOUND ? "missing" : "not-known";
        text = first->result.text;
    } else if (!installed) {
        state = "not-installed";
        text = "not installed; what it needs is here";
        fix = stack_install(machine, stack);
    }
    return json_pack("{s:s, s:s, s:s, s:o, s:o, s:s, s:o, s:s?, s:o}", "name", stack->name, "title", stack->title,
                     "package", stack->package, "version", or_null(installed ? installed->version : ""), "folder",
                     or_null(installed ? installed->folder : ""), "state", state, "text", out_text(text), "fix",
                     *fix ? fix : NULL, "advice", or_null(first->result.advice));
}

json_t *diagnosis_stacks(const struct doctor_machine *machine, char *const *names, int n)
{
    const struct stacks_installed *found = &machine->software->stacks;
    bool all = n == 1 && strcmp(names[0], "all") == 0;
    json_t *rows = json_array();

    for (int i = 0; i < n && !all; i++) {
        const struct stack *stack = stack_find(names[i]);

        /* Of the rows with this package the one that is installed. */
        for (int k = 0; stack && k < found->n; k++)
            if (strcasecmp(stack->name, names[i]) != 0 && strcmp(found->stacks[k].stack->package, stack->package) == 0)
                stack = found->stacks[k].stack;
        if (!stack || !stack->source) {
            char clean[128];

            text_clean(names[i], clean, sizeof(clean));
            out_error("--stacks: not known: %s", clean);
            out_hint("epkit doctor --stacks all lists the libraries whose needs are known.");
            json_decref(rows);
            return NULL;
        }
        json_array_append_new(rows, stack_row(machine, stack));
    }
    for (const struct stack *stack = stacks; stack->name && (all || n == 0); stack++)
        if (stack->source && (all || stack_evaluate(machine, stack)->installed))
            json_array_append_new(rows, stack_row(machine, stack));
    return rows;
}

/* --- documents --- */

json_t *diagnosis_json(const char *command, const struct diagnosis *diagnosis)
{
    json_t *document = out_document(command), *checks = json_array();
    int code = diagnosis_exit(diagnosis);
    const char *state = code == CMD_FINE ? "healthy" : code == CMD_FINDINGS ? "findings" : "not-known";
    char verdict[4096];

    diagnosis_verdict(diagnosis, verdict, sizeof(verdict));
    for (int i = 0; i < diagnosis->n; i++)
        json_array_append_new(checks, diagnosis_row(&diagnosis->results[i]));
    json_object_update_new(document,
                           json_pack("{s:o, s:b, s:s, s:{s:i, s:i, s:i, s:i, s:i}, s:o, s:o, s:o}", "verdict",
                                     out_text(verdict), "healthy", code == CMD_FINE, "state", state, "counts", "fine",
                                     diagnosis->n_fine, "found", diagnosis->n_found, "serious", diagnosis->n_errors,
                                     "not_here", diagnosis->n_not_applicable, "unknown", diagnosis->n_unknown, "checks",
                                     checks, "stacks", diagnosis_stacks(diagnosis->machine, NULL, 0), "facts",
                                     diagnosis_facts(diagnosis->machine)));
    return document;
}

json_t *diagnosis_list(const struct doctor_check *const *checks)
{
    json_t *list = json_array();

    for (int i = 0; checks[i]; i++) {
        json_t *links = json_array();

        for (int k = 0; checks[i]->links[k]; k++)
            json_array_append_new(links, out_text(checks[i]->links[k]));
        json_array_append_new(list, json_pack("{s:s, s:s, s:i, s:s, s:s, s:s, s:s, s:o}", "id", checks[i]->id, "group",
                                              checks[i]->group, "mode", checks[i]->mode, "title", checks[i]->title,
                                              "symptom", checks[i]->symptom, "cause", checks[i]->cause, "remedy",
                                              checks[i]->remedy, "links", links));
    }
    return list;
}
