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

/* Between fork and exec: only what signal-safety(7) allows. */
static void become_engine(char *const *command, int requests, int channel, int report, pid_t front)
{
    int wanted[] = {requests, channel, report};
    int moved[3];
    sigset_t none;

    /* Nobody can hear its answers without the front, and the next mount waits for the state directory. */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || getppid() != front)
        _exit(127);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    /* Out of the way first, so that no dup2 overwrites what the next one needs. */
    for (int i = 0; i < 3; i++)
        moved[i] = wanted[i] >= 0 ? fcntl(wanted[i], F_DUPFD, 16) : -1;
    for (int i = 0; i < 3; i++)
        if (wanted[i] >= 0 && (moved[i] < 0 || dup2(moved[i], TIERFS_ENGINE_REQUESTS_FD + i) < 0))
            _exit(127);
    close_range(report >= 0 ? TIERFS_ENGINE_REPORT_FD + 1 : TIERFS_ENGINE_REPORT_FD, ~0u, 0);
    execv(command[0], command);
    _exit(127);
}

static int make_pair(int pair[2])
{
    return socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0 ? -errno : 0;
}

int tierfs_engine_start(char *const *command, int report, struct tierfs_engine *engine)
{
    int requests[2];
    int channel[2];
    int size = 4 * 1024 * 1024;
    int result = make_pair(requests);

    if (result < 0)
        return result;
    result = make_pair(channel);
    if (result < 0) {
        close(requests[0]);
        close(requests[1]);
        return result;
    }
    /* The engine's end may lack the privilege to do this by itself; without it large answers are split or refused. */
    if (setsockopt(requests[1], SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof size) < 0)
        (void)setsockopt(requests[1], SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    pid_t front = getpid();
    pid_t pid = fork();
    if (pid == 0)
        become_engine(command, requests[1], channel[1], report, front);
    result = pid < 0 ? -errno : 0;
    close(requests[1]);
    close(channel[1]);
    if (result < 0) {
        close(requests[0]);
        close(channel[0]);
        return result;
    }
    *engine = (struct tierfs_engine){.pid = pid, .requests = requests[0], .channel = channel[0]};
    return 0;
}
