#include "batch_queues.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

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

static int map_queues(struct tierfs_queues *queues, const struct io_uring_params *params)
{
    const size_t submit_bytes = params->sq_off.array + params->sq_entries * sizeof(unsigned);
    const size_t done_bytes = params->cq_off.cqes + params->cq_entries * sizeof(struct io_uring_cqe);
    char *base;

    queues->shared_bytes = submit_bytes > done_bytes ? submit_bytes : done_bytes;
    queues->shared = map(queues->descriptor, queues->shared_bytes, IORING_OFF_SQ_RING);
    queues->entry_bytes = (params->flags & TIERFS_SETUP_SQE128) != 0 ? 128 : 64;
    queues->entries_bytes = (size_t)params->sq_entries * queues->entry_bytes;
    queues->entries = map(queues->descriptor, queues->entries_bytes, IORING_OFF_SQES);
    if (queues->shared == NULL || queues->entries == NULL)
        return -ENOMEM;
    base = queues->shared;
    queues->depth = params->sq_entries;
    queues->done_depth = params->cq_entries;
    queues->submit_tail = (_Atomic unsigned *)(void *)(base + params->sq_off.tail);
    memcpy(&queues->submit_mask, base + params->sq_off.ring_mask, sizeof(unsigned));
    queues->submit_array = (unsigned *)(void *)(base + params->sq_off.array);
    queues->done_head = (_Atomic unsigned *)(void *)(base + params->cq_off.head);
    queues->done_tail = (_Atomic unsigned *)(void *)(base + params->cq_off.tail);
    memcpy(&queues->done_mask, base + params->cq_off.ring_mask, sizeof(unsigned));
    queues->done = (struct io_uring_cqe *)(void *)(base + params->cq_off.cqes);
    return 0;
}

int tierfs_queues_open(struct tierfs_queues *queues, unsigned depth, unsigned flags)
{
    /* NODROP: completions wait rather than get lost. 5.5; OPENAT and READ came with 5.6, as did RW_CUR_POS. */
    const unsigned needed = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_RW_CUR_POS;
    struct io_uring_params params = {.flags = flags};
    long descriptor = syscall(SYS_io_uring_setup, depth, &params);
    int result;

    memset(queues, 0, sizeof(*queues));
    queues->descriptor = (int)descriptor;
    if (descriptor < 0)
        return -errno;
    result = (params.features & needed) == needed ? map_queues(queues, &params) : -ENOSYS;
    if (result < 0)
        tierfs_queues_close(queues);
    return result;
}

void tierfs_queues_close(struct tierfs_queues *queues)
{
    if (queues->entries != NULL)
        munmap(queues->entries, queues->entries_bytes);
    if (queues->shared != NULL)
        munmap(queues->shared, queues->shared_bytes);
    if (queues->descriptor >= 0)
        close(queues->descriptor);
    memset(queues, 0, sizeof(*queues));
    queues->descriptor = -1;
}

int tierfs_queues_enter(const struct tierfs_queues *queues, unsigned submit, unsigned wait)
{
    const long result = syscall(SYS_io_uring_enter, queues->descriptor, submit, wait,
                                wait ? IORING_ENTER_GETEVENTS : 0, NULL, 0);

    return result < 0 ? -errno : (int)result;
}

struct io_uring_sqe *tierfs_queues_next(struct tierfs_queues *queues)
{
    const unsigned tail = atomic_load_explicit(queues->submit_tail, memory_order_relaxed);
    const unsigned slot = tail & queues->submit_mask;
    struct io_uring_sqe *entry = (void *)(queues->entries + (size_t)slot * queues->entry_bytes);

    memset(entry, 0, queues->entry_bytes);
    queues->submit_array[slot] = slot;
    atomic_store_explicit(queues->submit_tail, tail + 1, memory_order_release);
    return entry;
}
