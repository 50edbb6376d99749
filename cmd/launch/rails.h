/* SPDX-License-Identifier: Apache-2.0 */
/* rails.h - the ports that the job ib-write-bw measures. */
#ifndef EP_LAUNCH_RAILS_H
#define EP_LAUNCH_RAILS_H

#define RAILS_COMMAND "__rails"      /* epkit __rails LIST COMMAND...: executes COMMAND on a node */
#define RAILS_VARIABLE "EPKIT_RAILS" /* of COMMAND: "mlx5_0:1 mlx5_1:1" */

/*
 * LIST, or where it is empty the ports that the best assignment gives to GPUs; without GPUs the active ports of all
 * NICs that carry data. `argv` begins with RAILS_COMMAND. Returns an exit code unless COMMAND is executed.
 */
int rails_main(int argc, char **argv);

#endif
