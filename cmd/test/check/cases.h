/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cases.h - the job of `epkit test`: one matrix of cases on every rank of a group.
 *
 * Matrices:
 *   intranode   24 = previous event {no, yes} x async {no, yes} x {bf16 random, bf16 constant, fp8} x top-k {no, yes}
 *   internode   32 = previous event x async x {bf16, fp8} {random, constant} x top-k, combines with two biases
 *   lowlatency  32 = {bf16, fp8 with f32, rounded f32 and ue8m0 scales, nvfp4, mxfp8; constant: bf16, fp8 with ue8m0} x
 *               hook {no, yes} x combine {copy, zero copy}; scales of nvfp4 and mxfp8 alternate between rows and tiles
 * The network between the ranks is that of the communicator: each throughput matrix runs on any group.
 *
 * Other properties alternate with the number of the case: type of the indices, type and strides of the scales,
 * alignment of the counts, number of biases of the second combine, and the memory of outputs. So number and seed
 * reproduce a case.
 *
 * Parameters, a JSON object:
 *   matrix     "intranode", "internode" or "lowlatency"
 *   tokens     N, default 128; with a file 0 or absent: the number in the file
 *   hidden     H, default 2048
 *   topk       K, default 8; with a file 0 or absent: that of the file
 *   experts    E, default 8 times the ranks
 *   dtype      "all" (default), "bf16" or "fp8": runs these cases only
 *   seed       default 1
 *   routing    a name of routing_names[] (default "uniform") or the path of a file (routings.h)
 *   only       number of the one case to run, from 1
 *   symmetric  true: outputs of dispatch and inputs of combine in memory of ep_alloc; false: in ordinary memory;
 *              absent: alternating
 *
 * Emits, from rank 0, per case
 *   {"event":"case", "index", "name", "passed", "detail", "ms"}
 * index counts from 1 within the whole matrix, even if only some of its cases run; "detail", the first mismatch, is
 * present only if passed is false.
 */
#ifndef EP_TEST_CHECK_CASES_H
#define EP_TEST_CHECK_CASES_H

#include "common/ranks/ranks.h"

/* The names of the matrices; ends with NULL. */
extern const char *const check_matrices[];

/*
 * 0: all cases passed; 1: some failed, or a call of the library did (emitted as an error event; ends the job and aborts
 * the group, so that no peer waits); 2: invalid parameters; 4: EP_E_UNSUPPORTED of the library.
 */
int check_job(struct ranks_ctx *ctx, const json_t *parameters);

#endif
