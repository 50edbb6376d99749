/* SPDX-License-Identifier: Apache-2.0 */
/*
 * driver.c - main() for fuzz targets without libFuzzer: runs every file of the folders that are named. For regressions:
 * an input that once crashed goes into the corpus and stays there.
 */
#include <dirent.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int run_file(const char *path, size_t size)
{
    /* Exactly as large as the file, so that a sanitizer sees a read behind it. */
    uint8_t *data = malloc(size ? size : 1);
    FILE *file = fopen(path, "rb");
    int failed = 1;

    if (!data || !file || fread(data, 1, size, file) != size) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
    } else {
        LLVMFuzzerTestOneInput(data, size);
        failed = 0;
    }
    if (file)
        fclose(file);
    free(data);
    return failed;
}

static int run_folder(const char *folder, int *n_files)
{
    DIR *dir = opendir(folder);
    struct dirent *entry;
    int failed = 0;

    if (!dir) {
        fprintf(stderr, "%s: %s\n", folder, strerror(errno));
        return 1;
    }
    while ((entry = readdir(dir))) {
        char path[4096];
        struct stat info;

        snprintf(path, sizeof(path), "%s/%s", folder, entry->d_name);
        if (stat(path, &info) < 0 || !S_ISREG(info.st_mode))
            continue;
        failed |= run_file(path, (size_t)info.st_size);
        ++*n_files;
    }
    closedir(dir);
    return failed;
}

int main(int argc, char **argv)
{
    int failed = 0, n_files = 0;

    for (int i = 1; i < argc; i++)
        failed |= run_folder(argv[i], &n_files);
    printf("%d files\n", n_files);
    /* A corpus that has moved away must not pass for a clean run. */
    return failed || n_files == 0;
}
