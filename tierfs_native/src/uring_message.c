#include "uring_message.h"

#include <string.h>

size_t tierfs_uring_message(const struct fuse_uring_req_header *header, char *payload,
                            size_t payload_capacity, char *copy, size_t capacity, char **message)
{
    struct fuse_in_header head;
    const size_t payload_bytes = header->ring_ent_in_out.payload_sz;

    memcpy(&head, header->in_out, sizeof head);
    if (payload_bytes > payload_capacity || head.len < sizeof head + payload_bytes)
        return 0;
    const size_t operation_bytes = head.len - sizeof head - payload_bytes;
    if (operation_bytes > sizeof header->op_in)
        return 0;
    char *start = copy;
    if (head.len > capacity) {
        if (operation_bytes % 8 != 0)
            return 0; /* the header would not be where a processor can read it */
        start = payload - operation_bytes - sizeof head;
    }
    memcpy(start, &head, sizeof head);
    memcpy(start + sizeof head, header->op_in, operation_bytes);
    if (start == copy)
        memcpy(start + sizeof head + operation_bytes, payload, payload_bytes);
    *message = start;
    return head.len;
}

void tierfs_uring_answer_header(struct fuse_uring_req_header *header, uint64_t unique, long result)
{
    const struct fuse_out_header head = {
        .len = (uint32_t)(sizeof head + (result > 0 ? (size_t)result : 0)),
        .error = result < 0 ? (int32_t)result : 0,
        .unique = unique,
    };

    memset(header->in_out, 0, sizeof header->in_out);
    memcpy(header->in_out, &head, sizeof head);
    header->ring_ent_in_out.payload_sz = result > 0 ? (uint32_t)result : 0;
}
