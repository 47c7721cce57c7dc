#include "batch_ring.h"

#include "batch_queues.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define DEPTH 64u
#define OPEN_FLAGS (O_RDONLY | O_CLOEXEC | O_NOFOLLOW)

struct tierfs_ring {
    struct tierfs_queues queues; /* descriptor -1: there is no io_uring */
};

static void set_up(struct tierfs_ring *ring)
{
    int result = tierfs_queues_open(&ring->queues, DEPTH, IORING_SETUP_CLAMP | TIERFS_SETUP_COOP_TASKRUN);

    if (result == -EINVAL)
        (void)tierfs_queues_open(&ring->queues, DEPTH, IORING_SETUP_CLAMP);
}

int tierfs_ring_open(bool in_turn, struct tierfs_ring **ring)
{
    struct tierfs_ring *made = calloc(1, sizeof(*made));

    if (made == NULL)
        return -ENOMEM;
    made->queues.descriptor = -1;
    if (!in_turn)
        set_up(made);
    *ring = made;
    return 0;
}

void tierfs_ring_close(struct tierfs_ring *ring)
{
    if (ring == NULL)
        return;
    tierfs_queues_close(&ring->queues);
    free(ring);
}

bool tierfs_ring_is_real(const struct tierfs_ring *ring)
{
    return ring->queues.descriptor >= 0;
}

static void run_one(struct tierfs_call *call)
{
    long result;

    do {
        if (call->kind == TIERFS_CALL_OPEN)
            result = openat(call->descriptor, call->path, OPEN_FLAGS);
        else
            result = pread(call->descriptor, call->buffer, call->length, (off_t)call->offset);
    } while (result < 0 && errno == EINTR);
    call->result = result < 0 ? -errno : (int)result;
}

/* Without io_uring: let the device see all reads before the first is waited for. */
static void run_in_turn(struct tierfs_call *calls, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (calls[i].kind == TIERFS_CALL_READ)
            (void)posix_fadvise(calls[i].descriptor, (off_t)calls[i].offset, (off_t)calls[i].length,
                                POSIX_FADV_WILLNEED);
    for (size_t i = 0; i < count; i++)
        run_one(&calls[i]);
}

static void prepare(struct tierfs_ring *ring, const struct tierfs_call *call, size_t number)
{
    struct io_uring_sqe *entry = tierfs_queues_next(&ring->queues);

    entry->fd = call->descriptor;
    entry->user_data = number;
    if (call->kind == TIERFS_CALL_OPEN) {
        entry->opcode = IORING_OP_OPENAT;
        entry->addr = (uint64_t)(uintptr_t)call->path;
        entry->open_flags = OPEN_FLAGS;
    } else {
        entry->opcode = IORING_OP_READ;
        entry->addr = (uint64_t)(uintptr_t)call->buffer;
        entry->len = call->length;
        entry->off = call->offset;
    }
}

static size_t reap(struct tierfs_ring *ring, struct tierfs_call *calls, size_t count)
{
    const struct tierfs_queues *queues = &ring->queues;
    unsigned head = atomic_load_explicit(queues->done_head, memory_order_relaxed);
    const unsigned tail = atomic_load_explicit(queues->done_tail, memory_order_acquire);
    size_t reaped = 0;

    for (; head != tail; head++, reaped++) {
        const struct io_uring_cqe *entry = &queues->done[head & queues->done_mask];

        if (entry->user_data < count)
            calls[entry->user_data].result = entry->res;
    }
    atomic_store_explicit(queues->done_head, head, memory_order_release);
    return reaped;
}

/*
 * Whatever enter() says, the kernel may be writing into the buffers until the last completion is there, so giving
 * up early is not possible. Errors of enter() concern the process (EINTR, no memory for the moment, a full
 * completion queue): each of them passes when completions are reaped, or with time.
 */
void tierfs_ring_run(struct tierfs_ring *ring, struct tierfs_call *calls, size_t count)
{
    size_t next = 0, in_flight = 0;
    unsigned unsubmitted = 0;

    if (ring->queues.descriptor < 0) {
        run_in_turn(calls, count);
        return;
    }
    while (next < count || in_flight > 0) {
        unsigned wanted;
        int result;

        for (; next < count && in_flight < ring->queues.done_depth && unsubmitted < ring->queues.depth;
             next++, in_flight++, unsubmitted++)
            prepare(ring, &calls[next], next);
        /* Few wake-ups, and never an idle device. */
        wanted = (unsigned)(next < count ? in_flight / 2 : in_flight);
        result = tierfs_queues_enter(&ring->queues, unsubmitted, wanted > 0 ? wanted : 1);
        if (result > 0)
            unsubmitted -= (unsigned)result < unsubmitted ? (unsigned)result : unsubmitted;
        else if (result < 0 && result != -EINTR)
            nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
        in_flight -= reap(ring, calls, count);
    }
    for (size_t i = 0; i < count; i++)
        /* A kernel without that operation, or one that is out of memory for requests. */
        if (calls[i].result == -EINVAL || calls[i].result == -EAGAIN || calls[i].result == -EINTR ||
            calls[i].result == -ECANCELED)
            run_one(&calls[i]);
}
