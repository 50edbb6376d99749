/* SPDX-License-Identifier: Apache-2.0 */
/*
 * unit.c - a systemd unit that resumes the installation after a reboot or a power cut. It exists from the first change
 * until the installation is complete or has failed.
 */
#include "base/error.h"
#include "common/dir.h"
#include "common/temporary.h"
#include "install.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define UNIT_FOLDER "/etc/systemd/system"
#define WANTS_FOLDER UNIT_FOLDER "/multi-user.target.wants"

static void names(const struct install *install, char ret_unit[256], char ret_link[256])
{
    snprintf(ret_unit, 256, UNIT_FOLDER "/epkit-install-%s.service", install->recipe->name);
    snprintf(ret_link, 256, WANTS_FOLDER "/epkit-install-%s.service", install->recipe->name);
}

ep_status unit_install(struct install *install)
{
    char unit[256], link_path[256], self[1024], *text = NULL;
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    /* "never" applies to later reboots as well. */
    static const char *const reboots[] = {
        [INSTALL_REBOOT_NOW] = "now", [INSTALL_REBOOT_SENTINEL] = "sentinel", [INSTALL_REBOOT_NEVER] = "never"};
    size_t bytes;
    FILE *file;
    int error;

    /* The unit of an earlier run would resume it as well. */
    if (install->options.no_unit)
        unit_remove(install);
    if (!install->has_systemd || install->options.no_unit)
        return EP_OK;
    names(install, unit, link_path);
    if (n <= 0)
        return ep_fail_errno(EP_E_SYSTEM, errno, "/proc/self/exe");
    self[n] = '\0';
    if (strpbrk(self, " \t\"'\\%$") || strpbrk(install->options.state, " \t\"'\\%$"))
        return ep_fail(EP_E_ARG, "%s: a systemd unit cannot contain a path with such characters", self);
    file = open_memstream(&text, &bytes);
    if (!file)
        return ep_fail(EP_E_MEMORY, "no memory");
    fprintf(file,
            "# Written by epkit install; removed when recipe %s is complete.\n[Unit]\n"
            "Description=epkit install: resume recipe %s\nWants=network-online.target\nAfter=network-online.target\n"
            "[Service]\nType=oneshot\nTimeoutStartSec=infinity\n"
            "ExecStart=%s install resume %s --state %s --reboot %s\n"
            "[Install]\nWantedBy=multi-user.target\n",
            install->recipe->name, install->recipe->name, self, install->recipe->name, install->options.state,
            reboots[install->options.reboot]);
    error = fclose(file) == 0 ? temporary_save(unit, text, bytes, 0644) : ENOMEM;
    free(text);
    if (error)
        return ep_fail_errno(EP_E_SYSTEM, error, "%s", unit);
    error = dir_link(unit, link_path);
    if (error && error != EEXIST)
        return ep_fail_errno(EP_E_SYSTEM, error, "%s", link_path);
    sync();
    return EP_OK;
}

void unit_remove(struct install *install)
{
    const char *reload[] = {"systemctl", "daemon-reload", NULL};
    char unit[256], link_path[256];

    if (!install->has_systemd)
        return;
    names(install, unit, link_path);
    unlink(link_path);
    if (unlink(unit) == 0)
        run_quietly(reload, 60);
}
