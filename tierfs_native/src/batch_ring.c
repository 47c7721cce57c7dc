#include "batch_ring.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define DEPTH 64u
#define OPEN_FLAGS (O_RDONLY | O_CLOEXEC | O_NOFOLLOW)
#ifndef IORING_SETUP_COOP_TASKRUN
#define IORING_SETUP_COOP_TASKRUN (1U << 8)
#endif

struct tierfs_ring {
    int descriptor; /* -1: there is no io_uring */
    void *queue; /* both rings: IORING_FEAT_SINGLE_MMAP */
    size_t queue_bytes;
    struct io_uring_sqe *entries;
    size_t entries_bytes;
    unsigned depth;
    unsigned completion_depth;
    _Atomic unsigned *submit_tail;
    unsigned submit_mask;
    unsigned *submit_array;
    _Atomic unsigned *done_head;
    _Atomic unsigned *done_tail;
    unsigned done_mask;
    struct io_uring_cqe *done;
};

static int enter(const struct tierfs_ring *ring, unsigned submit, unsigned wait)
{
    const long result = syscall(SYS_io_uring_enter, ring->descriptor, submit, wait,
                                wait ? IORING_ENTER_GETEVENTS : 0, NULL, 0);

    return result < 0 ? -errno : (int)result;
}

static void unmap(struct tierfs_ring *ring)
{
    if (ring->entries != NULL)
        munmap(ring->entries, ring->entries_bytes);
    if (ring->queue != NULL)
        munmap(ring->queue, ring->queue_bytes);
    ring->entries = NULL;
    ring->queue = NULL;
}

static void *map(int descriptor, size_t length, off_t what)
{
    void *place = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor, what);

    if (place == MAP_FAILED)
        return NULL;
    /* A child that wrote into its parent's queues would have the parent's kernel side act on it. */
    if (madvise(place, length, MADV_DONTFORK) < 0) {
        munmap(place, length);
        return NULL;
    }
    return place;
}

static int map_queues(struct tierfs_ring *ring, const struct io_uring_params *params)
{
    const size_t submit_bytes = params->sq_off.array + params->sq_entries * sizeof(unsigned);
    const size_t done_bytes = params->cq_off.cqes + params->cq_entries * sizeof(struct io_uring_cqe);
    char *base;

    ring->queue_bytes = submit_bytes > done_bytes ? submit_bytes : done_bytes;
    ring->queue = map(ring->descriptor, ring->queue_bytes, IORING_OFF_SQ_RING);
    ring->entries_bytes = params->sq_entries * sizeof(struct io_uring_sqe);
    ring->entries = map(ring->descriptor, ring->entries_bytes, IORING_OFF_SQES);
    if (ring->queue == NULL || ring->entries == NULL)
        return -ENOMEM;
    base = ring->queue;
    ring->depth = params->sq_entries;
    ring->completion_depth = params->cq_entries;
    ring->submit_tail = (_Atomic unsigned *)(void *)(base + params->sq_off.tail);
    memcpy(&ring->submit_mask, base + params->sq_off.ring_mask, sizeof(unsigned));
    ring->submit_array = (unsigned *)(void *)(base + params->sq_off.array);
    ring->done_head = (_Atomic unsigned *)(void *)(base + params->cq_off.head);
    ring->done_tail = (_Atomic unsigned *)(void *)(base + params->cq_off.tail);
    memcpy(&ring->done_mask, base + params->cq_off.ring_mask, sizeof(unsigned));
    ring->done = (struct io_uring_cqe *)(void *)(base + params->cq_off.cqes);
    return 0;
}

static void set_up(struct tierfs_ring *ring)
{
    struct io_uring_params params = {.flags = IORING_SETUP_CLAMP | IORING_SETUP_COOP_TASKRUN};
    long descriptor = syscall(SYS_io_uring_setup, DEPTH, &params);

    if (descriptor < 0 && errno == EINVAL) {
        params = (struct io_uring_params){.flags = IORING_SETUP_CLAMP};
        descriptor = syscall(SYS_io_uring_setup, DEPTH, &params);
    }
    if (descriptor < 0)
        return;
    ring->descriptor = (int)descriptor;
    /* NODROP: completions wait rather than get lost. 5.5; OPENAT and READ came with 5.6, as did RW_CUR_POS. */
    if ((params.features & (IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_RW_CUR_POS)) !=
            (IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_RW_CUR_POS) ||
        map_queues(ring, &params) < 0) {
        unmap(ring);
        close(ring->descriptor);
        ring->descriptor = -1;
    }
}

int tierfs_ring_open(bool in_turn, struct tierfs_ring **ring)
{
    struct tierfs_ring *made = calloc(1, sizeof(*made));

    if (made == NULL)
        return -ENOMEM;
    made->descriptor = -1;
    if (!in_turn)
        set_up(made);
    *ring = made;
    return 0;
}

void tierfs_ring_close(struct tierfs_ring *ring)
{
    if (ring == NULL)
        return;
    unmap(ring);
    if (ring->descriptor >= 0)
        close(ring->descriptor);
    free(ring);
}

bool tierfs_ring_is_real(const struct tierfs_ring *ring)
{
    return ring->descriptor >= 0;
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

static void prepare(struct tierfs_ring *ring, unsigned slot, const struct tierfs_call *call, size_t number)
{
    struct io_uring_sqe *entry = &ring->entries[slot];

    memset(entry, 0, sizeof(*entry));
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
    unsigned head = atomic_load_explicit(ring->done_head, memory_order_relaxed);
    const unsigned tail = atomic_load_explicit(ring->done_tail, memory_order_acquire);
    size_t reaped = 0;

    for (; head != tail; head++, reaped++) {
        const struct io_uring_cqe *entry = &ring->done[head & ring->done_mask];

        if (entry->user_data < count)
            calls[entry->user_data].result = entry->res;
    }
    atomic_store_explicit(ring->done_head, head, memory_order_release);
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

    if (ring->descriptor < 0) {
        run_in_turn(calls, count);
        return;
    }
    while (next < count || in_flight > 0) {
        unsigned tail = atomic_load_explicit(ring->submit_tail, memory_order_relaxed);
        unsigned wanted;
        int result;

        while (next < count && in_flight < ring->completion_depth && unsubmitted < ring->depth) {
            const unsigned slot = tail & ring->submit_mask;

            prepare(ring, slot, &calls[next], next);
            ring->submit_array[slot] = slot;
            tail++, next++, in_flight++, unsubmitted++;
        }
        atomic_store_explicit(ring->submit_tail, tail, memory_order_release);
        /* Few wake-ups, and never an idle device. */
        wanted = (unsigned)(next < count ? in_flight / 2 : in_flight);
        result = enter(ring, unsubmitted, wanted > 0 ? wanted : 1);
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
