/* SPDX-License-Identifier: Apache-2.0 */
#include "bench.h"

#include <time.h>

#if defined(__clang__)
#define COMPILER "clang " __clang_version__
#else
#define COMPILER "gcc " __VERSION__
#endif

json_t *bench_provenance(void)
{
    time_t now = time(NULL);
    char date[32] = "";
    struct tm utc;

    if (gmtime_r(&now, &utc))
        strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%SZ", &utc);
    return json_pack("{s:s, s:s, s:s, s:s}", "commit", EPKIT_COMMIT, "compiler", COMPILER, "build_type",
                     EPKIT_BUILD_TYPE, "date", date);
}
