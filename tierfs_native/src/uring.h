/*
 * FUSE over io_uring: requests and answers in memory that the kernel shares, beside /dev/fuse, which stays in use for
 * INIT, FORGET, INTERRUPT and notifications.
 *
 * The kernel wants a queue for each CPU that the machine may have, and puts a request into that of the CPU on which
 * its caller runs. A request takes an entry of the queue, with a payload of the largest size, until it is answered;
 * when none is left, what comes next on this CPU waits, whatever it asks for. So what waits for the engine, or for the
 * store behind it, may hold up what is local, which it never does on /dev/fuse. Depth and memory are bounded here.
 *
 * Once the kernel has been told in INIT that there will be queues, it holds back every request until they are
 * registered. So all that can fail is done before; if registering fails nonetheless, the kernel goes on with /dev/fuse.
 */
#pragma once

#include "abi.h"
#include "origin.h"

#include <stddef.h>
#include <stdint.h>

#define TIERFS_URING_MAX_THREADS 16u
#define TIERFS_URING_MAX_DEPTH 32u
#define TIERFS_URING_MEMORY_BYTES \
    (UINT64_C(256) << 20) /* of all payloads; only what has been used is there */

struct tierfs_uring;

struct tierfs_uring_links {
    /*
     * A request, in a buffer that may be changed; thread: from 0, below TIERFS_URING_MAX_THREADS. out: where the body
     * of an answer goes, capacity bytes. Returns its bytes (>= 0), -errno, or TIERFS_NO_REPLY: origin gets it later.
     */
    long (*answer)(void *context, unsigned thread, void *message, size_t bytes,
                   const struct tierfs_origin *origin, void *out, size_t capacity);
    void *context;
};

/* How many entries each of so many queues has, with payloads of that size; 0: not even one fits into the bound. */
unsigned tierfs_uring_depth(unsigned queues, size_t payload_bytes);

/* How many CPUs the machine may have, as in /sys/devices/system/cpu/possible ("0-3", "0,2-5"). 0: not readable so. */
unsigned tierfs_uring_count_cpus(const char *possible);

/* That number for this machine. */
unsigned tierfs_uring_possible_cpus(void);

/*
 * Threads, rings and memory for all queues. device: the descriptor of /dev/fuse. payload_bytes: the largest that a
 * request or an answer may have, but for its headers, as INIT grants it. 0, or -errno and nothing is left behind.
 */
int tierfs_uring_create(const struct tierfs_uring_links *links, int device, size_t payload_bytes,
                        struct tierfs_uring **uring);

/* Registers the queues: after the kernel has taken the answer to INIT, in which they were announced. */
void tierfs_uring_begin(struct tierfs_uring *uring);

/* 1: requests come here; 0: not yet; -errno: the kernel did not take the queues, and goes on with /dev/fuse. */
int tierfs_uring_state(const struct tierfs_uring *uring);

/* Requests that came here so far. */
uint64_t tierfs_uring_requests(const struct tierfs_uring *uring);

unsigned tierfs_uring_depth_of(const struct tierfs_uring *uring);
