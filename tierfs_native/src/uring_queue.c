#define _GNU_SOURCE
#include "uring_queue.h"

#include "answer.h"
#include "log.h"
#include "uring_message.h"

#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#define URING_CMD 46u     /* IORING_OP_URING_CMD */
#define POLL_MULTISHOT (UINT32_C(1) << 0)
#define MORE_TO_COME (UINT32_C(1) << 1) /* IORING_CQE_F_MORE */

/* -- what is submitted --------------------------------------------------------------------------------------------- */

/* The layout of an entry of 128 bytes; older headers do not name the end of it. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "cmd_op is the lower half of off");
static void command(struct tierfs_uring_entry *entry, uint32_t operation)
{
    struct tierfs_uring_thread *thread = entry->thread;
    struct io_uring_sqe *submission = tierfs_queues_next(&thread->queues);
    const struct fuse_uring_cmd_req request = {.commit_id = entry->commit_id, .qid = entry->queue};

    thread->unsubmitted++;
    submission->opcode = URING_CMD;
    submission->fd = thread->uring->device;
    submission->off = operation; /* cmd_op: the lower half, on little-endian machines */
    submission->user_data = (uint64_t)(uintptr_t)entry;
    if (operation == FUSE_IO_URING_CMD_REGISTER) {
        submission->addr = (uint64_t)(uintptr_t)entry->parts;
        submission->len = 2;
    }
    memcpy((char *)submission + 48, &request, sizeof request);
}

/* Completes whenever woken can be read. */
static void poll_woken(struct tierfs_uring_thread *thread)
{
    struct io_uring_sqe *submission = tierfs_queues_next(&thread->queues);

    thread->unsubmitted++;
    submission->opcode = IORING_OP_POLL_ADD;
    submission->fd = thread->woken;
    submission->poll32_events = POLLIN;
    submission->len = POLL_MULTISHOT;
}

static void commit(struct tierfs_uring_entry *entry, long result)
{
    tierfs_uring_answer_header(entry->header, entry->unique, result);
    command(entry, FUSE_IO_URING_CMD_COMMIT_AND_FETCH);
}

/* -- answers of other threads -------------------------------------------------------------------------------------- */

int tierfs_uring_answer_entry(const struct tierfs_origin *origin, const void *message, size_t bytes)
{
    struct tierfs_uring_entry *entry = (void *)(uintptr_t)origin;
    struct tierfs_uring_thread *thread = entry->thread;
    struct fuse_out_header head;
    const uint64_t one = 1;

    if (bytes < sizeof head || bytes - sizeof head > thread->uring->payload_bytes)
        return -EINVAL;
    memcpy(&head, message, sizeof head);
    if (head.unique != entry->unique || head.error > 0)
        return -EINVAL;
    if (head.error == 0)
        memcpy(entry->payload, (const char *)message + sizeof head, bytes - sizeof head);
    tierfs_uring_answer_header(entry->header, entry->unique,
                               head.error < 0 ? head.error : (long)(bytes - sizeof head));
    pthread_mutex_lock(&thread->lock);
    bool first = thread->done == NULL;
    entry->next_done = thread->done;
    thread->done = entry;
    pthread_mutex_unlock(&thread->lock);
    if (first && write(thread->woken, &one, sizeof one) < 0)
        return -errno;
    return 0;
}

static void commit_done(struct tierfs_uring_thread *thread)
{
    pthread_mutex_lock(&thread->lock);
    struct tierfs_uring_entry *entry = thread->done;
    thread->done = NULL;
    pthread_mutex_unlock(&thread->lock);
    for (struct tierfs_uring_entry *next; entry != NULL; entry = next) {
        next = entry->next_done;
        command(entry, FUSE_IO_URING_CMD_COMMIT_AND_FETCH);
    }
}

/* -- a thread ------------------------------------------------------------------------------------------------------ */

static void serve(struct tierfs_uring_thread *thread, struct tierfs_uring_entry *entry)
{
    struct tierfs_uring *uring = thread->uring;
    struct fuse_in_header head;
    char *message;
    long result = -EIO;

    memcpy(&head, entry->header->in_out, sizeof head);
    entry->unique = head.unique;
    entry->commit_id = entry->header->ring_ent_in_out.commit_id;
    atomic_fetch_add_explicit(&uring->requests, 1, memory_order_relaxed);
    size_t bytes = tierfs_uring_message(entry->header, entry->payload, uring->payload_bytes, thread->message,
                                        TIERFS_URING_SMALL_BYTES, &message);
    if (bytes == 0 || head.opcode == FUSE_FORGET || head.opcode == FUSE_BATCH_FORGET ||
        head.opcode == FUSE_INTERRUPT) {
        tierfs_error("a request from a ring is not understood  opcode=%u len=%u payload=%u", head.opcode,
                     head.len, entry->header->ring_ent_in_out.payload_sz);
    } else {
        bool is_copy = message == thread->message;
        result = uring->links.answer(uring->links.context, thread->number, message, bytes, &entry->origin,
                                     is_copy ? entry->payload : thread->scratch,
                                     is_copy ? uring->payload_bytes : TIERFS_URING_SMALL_BYTES);
        if (result == TIERFS_NO_REPLY)
            return; /* tierfs_uring_answer_entry has been called, or will be */
        if (!is_copy && result > 0)
            memcpy(entry->payload, thread->scratch, (size_t)result);
    }
    commit(entry, result);
}

/* The entry is out of use. */
static void note_failure(struct tierfs_uring *uring, int result)
{
    int known = 0;

    if (result == -ENOTCONN || result == -ECONNABORTED)
        return; /* the mount is gone */
    if (atomic_compare_exchange_strong(&uring->state, &known, result) || known == 1) {
        atomic_store(&uring->state, result);
        tierfs_error("the kernel does not take a queue of requests  reason=\"%s\"", strerror(-result));
    }
}

static void take_completions(struct tierfs_uring_thread *thread)
{
    struct tierfs_queues *queues = &thread->queues;
    unsigned head = atomic_load_explicit(queues->done_head, memory_order_relaxed);
    const unsigned tail = atomic_load_explicit(queues->done_tail, memory_order_acquire);

    for (; head != tail; head++) {
        const struct io_uring_cqe completion = queues->done[head & queues->done_mask];
        struct tierfs_uring_entry *entry = (void *)(uintptr_t)completion.user_data;
        uint64_t count;
        if (entry == NULL) {
            if (read(thread->woken, &count, sizeof count) < 0 && errno != EAGAIN)
                tierfs_warning("an event cannot be read  reason=\"%s\"", strerror(errno));
            if ((completion.flags & MORE_TO_COME) == 0)
                poll_woken(thread);
        } else if (completion.res < 0) {
            note_failure(thread->uring, completion.res);
        } else {
            serve(thread, entry);
        }
    }
    atomic_store_explicit(queues->done_head, head, memory_order_release);
}

void tierfs_uring_run(struct tierfs_uring_thread *thread)
{
    for (size_t i = 0; i < thread->entry_count; i++)
        command(&thread->entries[i], FUSE_IO_URING_CMD_REGISTER);
    poll_woken(thread);
    for (;;) {
        int result = tierfs_queues_enter(&thread->queues, thread->unsubmitted, 1);
        if (result > 0)
            thread->unsubmitted -= (unsigned)result;
        if (result < 0 && result != -EINTR && result != -EAGAIN && result != -EBUSY) {
            note_failure(thread->uring, result);
            return;
        }
        take_completions(thread);
        commit_done(thread);
    }
}
