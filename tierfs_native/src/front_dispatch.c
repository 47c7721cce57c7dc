#define _GNU_SOURCE
#include "front_dispatch.h"

#include "front.h"
#include "log.h"

#include <errno.h>
#include <string.h>

static void answer(const struct tierfs_origin *origin, void *buffer, uint64_t unique, long result)
{
    struct fuse_out_header *header = buffer;

    *header = (struct fuse_out_header){
        .len = (uint32_t)(sizeof *header + (result > 0 ? (size_t)result : 0)),
        .error = result < 0 ? (int32_t)result : 0,
        .unique = unique,
    };
    /* ENOENT: the request was interrupted and nobody waits. */
    int taken = tierfs_origin_answer(origin, header, header->len);
    if (taken < 0 && taken != -ENOENT && taken != -ENODEV)
        tierfs_warning("an answer was not taken  reason=\"%s\"", strerror(-taken));
}

static long answer_from_view(struct tierfs_front *front, struct tierfs_answers *answers, unsigned worker,
                             const struct fuse_in_header *header, size_t body_bytes,
                             const struct tierfs_origin *origin, void *out, size_t capacity)
{
    long result = TIERFS_NOT_SMALL;

    if (front->small != NULL)
        result = tierfs_small_answer(front->small, worker, front->readers[worker], header, header + 1,
                                     body_bytes, origin, out, capacity);

    if (result == TIERFS_NOT_SMALL)
        result =
            tierfs_answer(answers, front->readers[worker], header, header + 1, body_bytes, out, capacity);
    return result;
}

/*
 * Before it writes to a file that is passed through, the kernel asks for security.capability, unless it knows that
 * there is none (which it forgets with every answer about attributes). The engine lets the answer wait while its
 * disk is too full: the only sign of such a write there is.
 */
static bool is_for_engine(struct tierfs_front *front, const struct fuse_in_header *header)
{
    if (header->opcode == FUSE_FLUSH)
        return tierfs_backing_tells_close(front->backing, header->nodeid);
    return header->opcode == FUSE_GETXATTR &&
           atomic_load_explicit(&front->holds_writers, memory_order_relaxed) &&
           tierfs_backing_is_passed(front->backing, header->nodeid);
}

/*
 * out: where the body of an answer goes. Returns its bytes (>= 0), -errno, or TIERFS_NO_REPLY: there is no answer, or
 * origin gets it later.
 */
static long answer_request(struct tierfs_front *front, unsigned worker, void *message, size_t bytes,
                           const struct tierfs_origin *origin, void *out, size_t capacity)
{
    const struct fuse_in_header *header = message;
    struct tierfs_answers *answers = atomic_load_explicit(&front->answers, memory_order_acquire);
    long result = TIERFS_RELAY;

    if (answers != NULL && !is_for_engine(front, header)) {
        if (front->readers[worker] == NULL && tierfs_reader_open(front->view, &front->readers[worker]) < 0)
            front->readers[worker] = NULL;
        if (front->noopen != NULL)
            result = tierfs_noopen_answer(front->noopen, front->readers[worker], header,
                                          (struct fuse_in_header *)message + 1, bytes - sizeof *header);
        if (result == TIERFS_NOT_NOOPEN)
            result = TIERFS_RELAY;
        if (result == TIERFS_RELAY && front->readers[worker] != NULL)
            result = answer_from_view(front, answers, worker, header, bytes - sizeof *header, origin, out,
                                      capacity);
    }
    if (result == TIERFS_RELAY) {
        tierfs_relay_request(front->relay, message, bytes, origin);
        return TIERFS_NO_REPLY;
    }
    atomic_fetch_add_explicit(&front->answered, 1, memory_order_relaxed);
    return result;
}

void tierfs_front_handle_request(void *context, unsigned worker, void *message, size_t bytes,
                                 const struct tierfs_origin *origin, void *buffer)
{
    const struct fuse_in_header *header = message;

    if (bytes < sizeof *header || header->len != bytes)
        return; /* never sent by a kernel; there is no number to answer to */
    long result =
        answer_request(context, worker, message, bytes, origin, (struct fuse_out_header *)buffer + 1,
                       TIERFS_REQUEST_MAX_BYTES - sizeof(struct fuse_out_header));
    if (result != TIERFS_NO_REPLY)
        answer(origin, buffer, header->unique, result);
}

long tierfs_front_answer_from_ring(void *context, unsigned thread, void *message, size_t bytes,
                                   const struct tierfs_origin *origin, void *out, size_t capacity)
{
    struct tierfs_front *front = context;

    return answer_request(front, front->workers + thread, message, bytes, origin, out, capacity);
}
