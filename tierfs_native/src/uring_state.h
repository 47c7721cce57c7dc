/*
 * The queues of io_uring and their threads, for the parts of uring.h alone: uring.c (beginning and end), uring_queue.c
 * (what a thread does with its queues), uring_depth.c (how many there are).
 *
 * A thread owns its queues and entries. Another thread writes into an entry only while its request is that thread's to
 * answer, and then hands it back through `done`, under the lock of the entry's thread. prepared, failure and phase are
 * under the lock of all of them. Nobody holds both locks.
 */
#pragma once

#include "batch_queues.h"
#include "origin.h"
#include "uring.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#define TIERFS_URING_PAGE_BYTES 4096u
/* Messages up to here are copied, so that the answer can be written over them. */
#define TIERFS_URING_SMALL_BYTES 8192u

/* One request at a time: the kernel's, ours while it is being answered, the kernel's again. */
struct tierfs_uring_entry {
    struct tierfs_origin origin; /* first: tierfs_origin.answer gets it */
    struct tierfs_uring_thread *thread;
    struct fuse_uring_req_header
        *header; /* at the start of a page; the end of that page is room for a message's head */
    char *payload;                        /* the pages behind it */
    struct iovec parts[2];
    uint16_t queue;
    uint64_t commit_id;
    uint64_t unique;
    struct tierfs_uring_entry *next_done;
};

struct tierfs_uring_thread {
    struct tierfs_uring *uring;
    unsigned number;
    pthread_t handle;
    struct tierfs_queues queues;
    unsigned unsubmitted;
    struct tierfs_uring_entry *entries;
    size_t entry_count;
    char *memory;
    size_t memory_bytes;
    int woken; /* eventfd: something is in done */
    pthread_mutex_t lock;
    struct tierfs_uring_entry *done; /* answered by other threads */
    char *message;      /* TIERFS_URING_SMALL_BYTES */
    char *scratch;      /* TIERFS_URING_SMALL_BYTES: for the answer to a message that lies in the payload */
};

struct tierfs_uring {
    struct tierfs_uring_links links;
    int device;
    size_t payload_bytes;
    unsigned queue_count, thread_count, depth;
    pthread_mutex_t lock; /* guards what follows up to the threads */
    pthread_cond_t changed;
    unsigned prepared; /* threads that are ready, or have failed */
    int failure;
    enum {
        TIERFS_URING_WAITING,
        TIERFS_URING_BEGUN,
        TIERFS_URING_GIVEN_UP
    } phase;
    atomic_int state; /* see tierfs_uring_state */
    atomic_uint_fast64_t requests;
    struct tierfs_uring_thread threads[TIERFS_URING_MAX_THREADS];
};
