/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stacks.h - what a library for expert parallelism needs, compared with what this machine has, in the order in which
 * the library itself would fail. Each need belongs to one check, which reports it if it is the first that is not met.
 */
#ifndef EP_MACHINE_DOCTOR_STACKS_H
#define EP_MACHINE_DOCTOR_STACKS_H

#include "doctor.h"

/* Compares a need of `installed` with the machine. The result is DOCTOR_FINE before. */
typedef void stack_need(const struct doctor_machine *machine, const struct stack_installed *installed,
                        struct doctor_result *result);

/* The needs of the extension, from its ELF headers (checks_import.c). */
stack_need stack_needs_python, stack_needs_cuda, stack_needs_libraries, stack_needs_symbols;

/* The command that installs it, for the CUDA of PyTorch. */
const char *stack_install(const struct doctor_machine *machine, const struct stack *stack);

/* Of a stack: found, with the first need that is not met; not known; fine. */
struct stack_result {
    bool is_known;
    int need;                                /* index in the list of needs; -1 if all are met */
    const struct stack_installed *installed; /* NULL: what it would lack here, apart from its package */
    struct doctor_result result;
    int own_need; /* the same of those needs that checks report, whatever other checks find */
    struct doctor_result own;
};

const struct stack_result *stack_evaluate(const struct doctor_machine *machine, const struct stack *stack);

/* The run() of a check that owns needs: reports the first stack of which one of these is the first that is not met. */
void stacks_run(const struct doctor_machine *machine, struct doctor_result *result);

#endif
