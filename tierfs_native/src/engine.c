#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define ENGINE_FDS 4

/*
 * Between fork and exec: only what signal-safety(7) allows.
 * wanted: what becomes TIERFS_ENGINE_REQUESTS_FD and those that follow; -1: not there.
 */
static void become_engine(char *const *command, const int wanted[ENGINE_FDS], pid_t front)
{
    int moved[ENGINE_FDS];
    sigset_t none;

    /* Nobody can hear its answers without the front, and the next mount waits for the state directory. */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || getppid() != front)
        _exit(127);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    /* Out of the way first, so that no dup2 overwrites what the next one needs. */
    for (int i = 0; i < ENGINE_FDS; i++)
        moved[i] = wanted[i] >= 0 ? fcntl(wanted[i], F_DUPFD, 16) : -1;
    for (int i = 0; i < ENGINE_FDS; i++) {
        if (wanted[i] < 0)
            close(TIERFS_ENGINE_REQUESTS_FD + i);
        else if (moved[i] < 0 || dup2(moved[i], TIERFS_ENGINE_REQUESTS_FD + i) < 0)
            _exit(127);
    }
    close_range(TIERFS_ENGINE_REQUESTS_FD + ENGINE_FDS, ~0u, 0);
    execv(command[0], command);
    _exit(127);
}

static int make_pair(int pair[2])
{
    return socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0 ? -errno : 0;
}

static void close_pairs(int pairs[][2], int count)
{
    for (int i = 0; i < count; i++) {
        close(pairs[i][0]);
        close(pairs[i][1]);
    }
}

int tierfs_engine_start(char *const *command, int report, struct tierfs_engine *engine)
{
    enum {
        REQUESTS,
        CHANNEL,
        NAMES,
        PAIRS
    };
    int pairs[PAIRS][2];
    int size = 4 * 1024 * 1024;

    for (int i = 0; i < PAIRS; i++) {
        int result = make_pair(pairs[i]);
        if (result < 0) {
            close_pairs(pairs, i);
            return result;
        }
    }
    /* The engine's end may lack the privilege to do this by itself; without it large answers are split or refused. */
    if (setsockopt(pairs[REQUESTS][1], SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof size) < 0)
        (void)setsockopt(pairs[REQUESTS][1], SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    const int wanted[ENGINE_FDS] = {pairs[REQUESTS][1], pairs[CHANNEL][1], report, pairs[NAMES][1]};
    pid_t front = getpid();
    pid_t pid = fork();
    if (pid == 0)
        become_engine(command, wanted, front);
    if (pid < 0) {
        int result = -errno;
        close_pairs(pairs, PAIRS);
        return result;
    }
    for (int i = 0; i < PAIRS; i++)
        close(pairs[i][1]);
    *engine = (struct tierfs_engine){
        .pid = pid, .requests = pairs[REQUESTS][0], .channel = pairs[CHANNEL][0], .names = pairs[NAMES][0]};
    return 0;
}
