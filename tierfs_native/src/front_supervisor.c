#define _GNU_SOURCE
#include "front_supervisor.h"

#include "front_channel.h"
#include "front_commands.h"
#include "front_handover.h"
#include "log.h"

#include <signal.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#define USEFUL_MS 1000 /* an engine that has served for so long was worth starting */
#define LONGEST_PAUSE_MS 30000
#define MOST_PAUSE_DOUBLINGS 5

int tierfs_front_start_engine(struct tierfs_front *front)
{
    struct tierfs_engine engine;
    int result = tierfs_engine_start(front->command, front->report, &engine);

    if (front->report >= 0)
        close(front->report);
    front->report = -1;
    if (result < 0)
        return result;
    front->engine_starts++;
    front->ready_at_ms = 0;
    front->start_at_ms = 0;
    tierfs_relay_connect(front->relay, engine.requests, engine.channel, engine.names);
    pthread_mutex_lock(&front->channel_lock);
    front->engine = engine;
    pthread_mutex_unlock(&front->channel_lock);
    result = tierfs_front_hand_over(front);
    if (result < 0)
        kill(engine.pid, SIGKILL); /* it would not know what is open; the next one, perhaps */
    return 0;
}

void tierfs_front_start_engine_again(struct tierfs_front *front)
{
    int result = tierfs_front_start_engine(front);

    if (result < 0) {
        tierfs_error("no engine can be started  reason=\"%s\"", strerror(-result));
        front->start_at_ms = tierfs_now_ms() + LONGEST_PAUSE_MS;
    }
}

int tierfs_front_give_up(struct tierfs_front *front)
{
    if (front->mounted)
        (void)tierfs_device_unmount(front->device, MNT_DETACH);
    tierfs_error("the mount ends without an engine; what is not in the store is kept for the next mount");
    return TIERFS_EXIT_FAILED;
}

static unsigned pause_before_next_ms(unsigned useless)
{
    /* The first two deaths are nobody's habit yet. */
    if (useless <= 2)
        return 0;
    return useless - 3 >= MOST_PAUSE_DOUBLINGS ? LONGEST_PAUSE_MS : 1000u << (useless - 3);
}

/* Returns the exit status if the front has to end with it, else -1. */
static int engine_ended(struct tierfs_front *front, int status)
{
    (void)tierfs_front_take_packets(front);
    tierfs_front_handle_packets(front);
    tierfs_backing_drop_unasked(front->backing);
    atomic_store(&front->holds_writers, false);
    bool served = front->ready_at_ms != 0 && tierfs_now_ms() - front->ready_at_ms >= USEFUL_MS;
    pthread_mutex_lock(&front->channel_lock);
    close(front->engine.channel);
    front->engine = (struct tierfs_engine){.pid = -1, .requests = -1, .channel = -1};
    pthread_mutex_unlock(&front->channel_lock);
    if (front->stopping || front->stop_asked > 0 || !front->ready) {
        if (!WIFEXITED(status))
            return tierfs_front_give_up(front);
        if (front->mounted)
            (void)tierfs_device_unmount(front->device, MNT_DETACH);
        return WEXITSTATUS(status);
    }
    if (served)
        front->useless = 0;
    else if (front->ready_at_ms == 0 || tierfs_relay_answered(front->relay) == 0)
        front->useless++;
    unsigned pause_ms = pause_before_next_ms(front->useless);
    front->start_at_ms = tierfs_now_ms() + pause_ms;
    if (WIFSIGNALED(status))
        tierfs_error("the engine died and is started again  signal=%d pause_ms=%u", WTERMSIG(status),
                     pause_ms);
    else if (WEXITSTATUS(status) == TIERFS_EXIT_UPGRADE)
        tierfs_info("the engine has made room for another");
    else
        tierfs_error("the engine ended and is started again  code=%d pause_ms=%u", WEXITSTATUS(status),
                     pause_ms);
    return -1;
}

static int reap(struct tierfs_front *front)
{
    int status;
    pid_t pid;

    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        if (pid == front->engine.pid) {
            int code = engine_ended(front, status);
            if (code >= 0)
                return code;
        }
    return -1;
}

int tierfs_front_handle_signal(struct tierfs_front *front)
{
    struct signalfd_siginfo info;

    if (read(front->signals, &info, sizeof info) != (ssize_t)sizeof info)
        return -1;
    if (info.ssi_signo == SIGCHLD)
        return reap(front);
    /*
     * A new engine of a mount that is there cannot stop in good order before it serves: it is told then (see
     * TIERFS_READY). Whoever asks twice does not want to wait for that.
     */
    int code = reap(front); /* it may be dead already */
    if (code >= 0)
        return code;
    front->stop_asked++;
    if (front->engine.pid <= 0)
        front->start_at_ms = tierfs_now_ms();
    else if (!front->ready || front->ready_at_ms != 0 || front->stop_asked > 1)
        kill(front->engine.pid, (int)info.ssi_signo);
    return -1;
}
