/*
 * The two queues that io_uring shares with the kernel: mapped, and what has to be known to use them. Raw system
 * calls; what is submitted, and in which order, is the owner's.
 *
 * They belong to one process (a child must not touch its parent's) and to one thread at a time.
 */
#pragma once

#include <linux/io_uring.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* Newer than the headers of some distributions. */
#define TIERFS_SETUP_COOP_TASKRUN (UINT32_C(1) << 8)
#define TIERFS_SETUP_SQE128 (UINT32_C(1) << 10)
#define TIERFS_SETUP_SINGLE_ISSUER (UINT32_C(1) << 12)
#define TIERFS_SETUP_DEFER_TASKRUN (UINT32_C(1) << 13)

struct tierfs_queues {
    int descriptor; /* -1: there are none */
    unsigned depth, done_depth;
    void *shared; /* both rings: IORING_FEAT_SINGLE_MMAP */
    size_t shared_bytes;
    char *entries;
    size_t entries_bytes;
    unsigned entry_bytes; /* of a submission entry: 64, or 128 */
    _Atomic unsigned *submit_tail;
    unsigned submit_mask;
    unsigned *submit_array;
    _Atomic unsigned *done_head;
    _Atomic unsigned *done_tail;
    unsigned done_mask;
    struct io_uring_cqe *done;
};

/* flags: of io_uring_setup(2). 0 or -errno; -ENOSYS: this kernel's is too old. */
int tierfs_queues_open(struct tierfs_queues *queues, unsigned depth, unsigned flags);
void tierfs_queues_close(struct tierfs_queues *queues);

/* Submits so many entries, waits until so many completions are there. How many were taken, or -errno. */
int tierfs_queues_enter(const struct tierfs_queues *queues, unsigned submit, unsigned wait);

/*
 * A zeroed submission entry behind the last one, to be filled before the next enter(), which is when the kernel looks
 * (it must not be polling by itself: IORING_SETUP_SQPOLL). At most depth of them until enter() has taken them.
 */
struct io_uring_sqe *tierfs_queues_next(struct tierfs_queues *queues);
