/* SPDX-License-Identifier: Apache-2.0 */
/* agent_files.c - the folder of a launch on a node. */
#include "agent_internal.h"

#include "common/temporary.h"

#include "base/error.h"
#include "common/write.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FOLDER "epkit-launch"
#define PROBE_BYTES 65536 /* if the folder cannot take this much, the disk counts as full */

static ep_status write_file(const char *dir, const char *name, const char *data, size_t bytes)
{
    char path[512];
    int fd, number;

    if (strchr(name, '/') || snprintf(path, sizeof(path), "%s/%s", dir, name) >= (int)sizeof(path))
        return ep_fail(EP_E_ARG, "'%.100s' is not a valid file name", name);
    fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0700);
    number = fd < 0 ? errno : write_all(fd, data, bytes);
    if (fd >= 0 && close(fd) != 0 && number == 0)
        number = errno;
    return number ? ep_fail_errno(EP_E_SYSTEM, number, "writing %zu bytes to %s", bytes, path) : EP_OK;
}

/* Finds a full disk now, not in the middle of the job: writes to an unnamed file. */
static int probe_disk(const char *base)
{
    static const char data[PROBE_BYTES];
    int fd = open(base, O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600), number;

    number = fd < 0 ? errno : write_all(fd, data, sizeof(data));
    if (fd >= 0 && close(fd) != 0 && number == 0)
        number = errno;
    return number;
}

/* Is there a folder of an agent, which may be dead? Making a new folder removes those of dead agents. */
static bool has_folders(const char *base)
{
    DIR *stream = opendir(base);
    struct dirent *item;
    bool is_found = false;

    while (stream && !is_found && (item = readdir(stream)))
        is_found = strstr(item->d_name, FOLDER) != NULL;
    if (stream)
        closedir(stream);
    return is_found;
}

/* The same as probe_disk() for file systems without unnamed files. */
static ep_status probe_folder(const char *dir)
{
    static const char data[PROBE_BYTES];
    char path[512];
    ep_status status = write_file(dir, "probe", data, sizeof(data));

    snprintf(path, sizeof(path), "%s/probe", dir);
    unlink(path);
    return status;
}

ep_status agent_write_files(struct agent *agent, const json_t *files)
{
    const char *base = getenv("TMPDIR"), *name;
    int number;
    ep_status status;
    json_t *text;

    if (!base || !*base)
        base = "/tmp";
    number = probe_disk(base);
    /* A container may have no /tmp, or a read-only one: a job without files does not need it. */
    if (json_object_size(files) == 0 && (number == ENOENT || number == EROFS || number == EACCES))
        return EP_OK;
    if (number == 0 && json_object_size(files) == 0 && !has_folders(base))
        return EP_OK;
    if (number && number != EOPNOTSUPP && number != EISDIR && number != EINVAL)
        return ep_fail_errno(EP_E_SYSTEM, number, "writing %d bytes to %s", PROBE_BYTES, base);
    /* This also removes the folder of an agent that was killed, whatever happened to its launcher. */
    number = temporary_folder_in(base, FOLDER, &agent->folder);
    if (number)
        return ep_fail_errno(EP_E_SYSTEM, number, "making the folder %s/" FOLDER "-...", base);
    status = probe_folder(agent->folder.path);
    json_object_foreach((json_t *)files, name, text)
    {
        if (status == EP_OK)
            status = write_file(agent->folder.path, name, json_string_value(text), json_string_length(text));
    }
    if (status != EP_OK || json_object_size(files) == 0)
        agent_remove_files(agent);
    return status;
}

void agent_remove_files(struct agent *agent)
{
    temporary_remove(&agent->folder);
}
