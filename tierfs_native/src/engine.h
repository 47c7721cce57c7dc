/* The engine's process: started with one end of three sockets, and started again when it dies. */
#pragma once

#include <sys/types.h>

#define TIERFS_ENGINE_REQUESTS_FD 3
#define TIERFS_ENGINE_CHANNEL_FD 4
#define TIERFS_ENGINE_REPORT_FD 5
#define TIERFS_ENGINE_NAMES_FD 6

struct tierfs_engine {
    pid_t pid;
    int requests; /* our ends */
    int channel;
    int names;
};

/* Start command (NULL at the end); report: a descriptor to inherit, or -1. 0 or -errno. */
int tierfs_engine_start(char *const *command, int report, struct tierfs_engine *engine);
