#define _GNU_SOURCE
#include "transfer.h"

#include "batch_index.h"
#include "batch_sum.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* Wait until so much is there, or the end: a block is not worth several wake-ups. Only a socket can do that. */
static void want(int source, size_t bytes)
{
    int least = bytes < TIERFS_BLOCK_BYTES ? (int)bytes : (int)TIERFS_BLOCK_BYTES;

    (void)setsockopt(source, SOL_SOCKET, SO_RCVLOWAT, &least, sizeof least);
}

/* Returns 0, or an errno. */
static int wait_for_more(int source, int timeout_ms)
{
    struct pollfd waiting = {.fd = source, .events = POLLIN};
    int ready;

    do
        ready = poll(&waiting, 1, timeout_ms);
    while (ready < 0 && errno == EINTR);
    if (ready < 0)
        return errno;
    return ready == 0 ? ETIMEDOUT : 0;
}

/* Up to `bytes` bytes; fewer at the end of the source, or with an error in the result. */
static size_t receive(const struct tierfs_transfer *transfer, char *out, size_t bytes,
                      struct tierfs_transfer_result *result)
{
    size_t done = 0;

    while (done < bytes) {
        ssize_t count = transfer->waits ? recv(transfer->source, out + done, bytes - done, MSG_WAITALL)
                                        : read(transfer->source, out + done, bytes - done);

        if (count == 0)
            break;
        if (count > 0) {
            done += (size_t)count;
            continue;
        }
        if (errno == EINTR)
            continue;
        if (errno != EAGAIN || transfer->waits) {
            result->source_errno = errno == EAGAIN ? ETIMEDOUT : errno;
            break;
        }
        want(transfer->source, bytes - done);
        result->source_errno = wait_for_more(transfer->source, transfer->timeout_ms);
        if (result->source_errno != 0)
            break;
    }
    return done;
}

/* Returns 0, or an errno. */
static int write_all(int target, const char *data, size_t bytes, uint64_t offset)
{
    while (bytes > 0) {
        ssize_t count = pwrite(target, data, bytes, (off_t)offset);

        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            return count < 0 ? errno : EIO;
        data += count;
        bytes -= (size_t)count;
        offset += (size_t)count;
    }
    return 0;
}

void tierfs_transfer(const struct tierfs_transfer *transfer, uint64_t *sums,
                     struct tierfs_transfer_result *result)
{
    char *own = transfer->body == NULL ? aligned_alloc(4096, TIERFS_BLOCK_BYTES) : NULL;
    size_t from_head = 0;

    *result = (struct tierfs_transfer_result){0};
    if (transfer->body == NULL && own == NULL) {
        result->target_errno = ENOMEM;
        return;
    }
    while (result->received < transfer->length) {
        uint64_t left = transfer->length - result->received;
        size_t wanted = left < TIERFS_BLOCK_BYTES ? (size_t)left : (size_t)TIERFS_BLOCK_BYTES;
        size_t known = transfer->head_bytes - from_head;
        char *block = own != NULL ? own : transfer->body + result->received;
        size_t have;

        if (known > wanted)
            known = wanted;
        if (known > 0)
            memcpy(block, transfer->head + from_head, known);
        from_head += known;
        have = known + receive(transfer, block + known, wanted - known, result);
        if (have < wanted) {
            result->received += have;
            break;
        }
        *sums++ = tierfs_block_sum(block, have);
        result->target_errno =
            write_all(transfer->target, block, have, transfer->target_offset + result->received);
        result->received += have;
        if (result->target_errno != 0)
            break;
    }
    if (!transfer->waits)
        want(transfer->source, 1);
    free(own);
}
