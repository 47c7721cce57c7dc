/*
 * tierfs-front: the process that holds the mount. It answers what the local state can answer, hands the rest to the
 * engine, and starts another engine when one dies. It never waits for the network, and nothing here is Python.
 *
 *   tierfs-front --state-dir DIR [--workers N] [--report FD] -- ENGINE [ARGUMENT...]
 *
 * Threads: this one (signals, the channel, the engine's life), the workers of device.c, the one of disk.c, the three of
 * relay.h, the one of notifications.c, and those of uring.c, if any. What they share is in front.h.
 */
#define _GNU_SOURCE
#include "front.h"
#include "front_channel.h"
#include "front_commands.h"
#include "front_serving.h"
#include "front_supervisor.h"
#include "front_transport.h"
#include "log.h"

#include <errno.h>
#include <getopt.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <unistd.h>

#define TOUCHED_MS 500

static void drain_event(int eventfd)
{
    uint64_t count;

    if (read(eventfd, &count, sizeof count) < 0 && errno != EAGAIN)
        tierfs_warning("an event cannot be read  reason=\"%s\"", strerror(errno));
}

static int run(struct tierfs_front *front)
{
    int64_t told_ms = 0;

    for (;;) {
        struct pollfd polled[] = {{front->signals, POLLIN, 0},
                                  {front->gone, POLLIN, 0},
                                  {front->woken, POLLIN, 0},
                                  {front->engine.channel, POLLIN, 0}};
        int timeout_ms = front->small != NULL ? TOUCHED_MS : -1;

        if (front->small != NULL && tierfs_now_ms() - told_ms >= TOUCHED_MS) {
            told_ms = tierfs_now_ms();
            tierfs_front_tell_touched(front);
        }
        if (front->start_at_ms != 0) {
            int64_t pause_ms = front->start_at_ms - tierfs_now_ms();
            if (pause_ms <= 0) {
                tierfs_front_start_engine_again(front);
                continue;
            }
            timeout_ms = (int)pause_ms;
        }
        if (poll(polled, 4, timeout_ms) < 0 && errno != EINTR)
            return TIERFS_EXIT_FAILED;
        if (polled[2].revents != 0)
            drain_event(front->woken);
        if (polled[3].revents != 0 && !tierfs_front_take_packets(front) && front->engine.pid <= 0)
            continue;
        tierfs_front_handle_packets(front);
        if (polled[1].revents != 0) {
            drain_event(front->gone);
            front->mounted = false;
            front->stopping = true;
            if (front->engine.pid <= 0)
                return tierfs_front_give_up(front);
            tierfs_front_tell(front, TIERFS_GONE, 0, NULL, 0);
        }
        if (polled[0].revents != 0) {
            int code = tierfs_front_handle_signal(front);
            if (code >= 0)
                return code;
        }
    }
}

static void take_packets_for_relay(void *context)
{
    (void)tierfs_front_take_packets(context);
}

static int prepare(struct tierfs_front *front)
{
    struct tierfs_relay_links links = {.read_channel = take_packets_for_relay,
                                       .prepare_ring = tierfs_front_prepare_ring,
                                       .read_placed = tierfs_front_read_placed,
                                       .begin_ring = tierfs_front_begin_ring,
                                       .context = front};
    sigset_t wanted;
    int result;

    sigemptyset(&wanted);
    sigaddset(&wanted, SIGTERM);
    sigaddset(&wanted, SIGINT);
    sigaddset(&wanted, SIGCHLD);
    if (sigprocmask(SIG_BLOCK, &wanted, NULL) < 0)
        return -errno;
    signal(SIGPIPE, SIG_IGN);
    front->signals = signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK);
    front->gone = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    front->woken = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (front->signals < 0 || front->gone < 0 || front->woken < 0)
        return -errno;
    if (getrandom(front->place_mark, sizeof front->place_mark, 0) != sizeof front->place_mark)
        return -EIO;
    pthread_mutex_init(&front->channel_lock, NULL);
    front->packets_end = &front->packets;
    front->engine = (struct tierfs_engine){.pid = -1, .requests = -1, .channel = -1};
    result = tierfs_backing_create(&front->backing);
    if (result == 0)
        result = tierfs_handles_create(&front->handles);
    links.backing = front->backing;
    links.handles = front->handles;
    return result == 0 ? tierfs_relay_create(&links, &front->relay) : result;
}

static int usage(void)
{
    fprintf(stderr,
            "usage: tierfs-front --state-dir DIR [--workers N] [--report FD] -- ENGINE [ARGUMENT...]\n");
    return 2;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"state-dir", required_argument, NULL, 's'},
                                            {"workers", required_argument, NULL, 'w'},
                                            {"report", required_argument, NULL, 'r'},
                                            {NULL, 0, NULL, 0}};
    /* Not on the stack of main alone: threads use it until the process ends. */
    static struct tierfs_front front = {.report = -1, .workers = 2};
    int option;

    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (option == 's')
            front.state_dir = optarg;
        else if (option == 'w')
            front.workers = (unsigned)strtoul(optarg, NULL, 10);
        else if (option == 'r')
            front.report = (int)strtol(optarg, NULL, 10);
        else
            return usage();
    }
    if (front.state_dir == NULL || optind >= argc || front.workers < 1 ||
        front.workers > TIERFS_FRONT_MAX_WORKERS)
        return usage();
    front.command = argv + optind;
    int result = prepare(&front);
    if (result == 0)
        result = tierfs_front_start_engine(&front);
    if (result < 0) {
        tierfs_error("the front cannot start  reason=\"%s\"", strerror(-result));
        return TIERFS_EXIT_FAILED;
    }
    return run(&front);
}
