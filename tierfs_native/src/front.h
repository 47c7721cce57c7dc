/*
 * The state of the front process, for its parts alone: main.c (beginning, and the loop of the main thread),
 * front_dispatch.c (who answers a request), front_transport.c (the mount, and the ways in), front_channel.c (messages of
 * the engine and to it), front_commands.c (what it asks for), front_serving.c (what is answered without it),
 * front_handover.c (what a new one is told), front_supervisor.c (its life).
 *
 * It belongs to the main thread, which alone writes it, but for
 *   readers     each of one worker, in front_dispatch.c
 *   atomics     any thread
 *   packets     any thread, under channel_lock
 *   engine      written by the main thread under channel_lock; read by others under it
 * Other threads read without a lock what does not change any more: workers, backing, handles, relay and place_mark once
 * there is a mount, device from INIT on, and view, reading, small and noopen once `answers` is set.
 */
#pragma once

#include "answer.h"
#include "backing.h"
#include "channel.h"
#include "device.h"
#include "engine.h"
#include "handles.h"
#include "noopen.h"
#include "placed.h"
#include "reading.h"
#include "relay.h"
#include "small.h"
#include "uring.h"
#include "view.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#define TIERFS_FRONT_MAX_WORKERS 16u

struct tierfs_queued_packet {
    struct tierfs_queued_packet *next;
    struct tierfs_packet packet;
};

struct tierfs_front {
    const char *state_dir;
    char *const *command;
    int report;
    unsigned workers;
    int signals, gone, woken; /* signalfd and two eventfds */
    struct tierfs_engine engine;
    int64_t
        ready_at_ms; /* when the engine of now said that it serves; 0: not yet. Monotonic, as start_at_ms */
    int64_t start_at_ms; /* 0: an engine is running */
    unsigned useless;    /* engines that died without an answer since one has served for USEFUL_MS */
    uint32_t engine_starts;
    bool ready;          /* an engine has served: from then on a dead one is replaced */
    bool stopping;       /* an engine ends on purpose, or the kernel has let go of the mount */
    unsigned stop_asked; /* signals that asked for it */
    bool mounted;
    struct tierfs_device *device;
    struct tierfs_backing *backing;
    struct tierfs_handles *handles;
    struct tierfs_relay *relay;
    _Atomic(struct tierfs_answers *) answers; /* NULL until the engine has told with which settings */
    struct tierfs_view *view;
    struct tierfs_reader
        *readers[TIERFS_FRONT_MAX_WORKERS + TIERFS_URING_MAX_THREADS]; /* each of one worker */
    bool wants_ring;
    _Atomic(struct tierfs_uring *) uring; /* NULL: all requests come through /dev/fuse */
    atomic_int ring_errno; /* why there is none */
    struct tierfs_reading *reading;
    uint8_t place_mark[TIERFS_PLACE_MARK_BYTES];
    struct tierfs_small *small; /* NULL: the engine opens and reads all files */
    struct tierfs_noopen *noopen; /* NULL: things are written through this mount, or the engine answers all */
    atomic_uint_fast64_t answered;
    atomic_bool holds_writers; /* TIERFS_HOLD */
    /* The channel is read by this thread, and by the one that gets the engine's answers. */
    pthread_mutex_t channel_lock;
    struct tierfs_queued_packet *packets, **packets_end;
};

/* Of the monotonic clock. */
static inline int64_t tierfs_now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}
