/* Requests as they come through io_uring: in three parts, which are put together to what /dev/fuse would have given. */
#pragma once

#include "abi.h"

#include <stddef.h>

/* In front of the payload there is room for so much; the payload begins at a multiple of 8. */
#define TIERFS_URING_HEAD_BYTES (sizeof(struct fuse_in_header) + FUSE_URING_OP_IN_OUT_SZ)

/*
 * The message that these parts make. Up to capacity bytes of it are copied to copy, so that the payload may be
 * overwritten by the answer; a larger one is made around the payload, where it is. payload_capacity: the size of
 * payload. Returns the size and sets message; 0: no kernel sends that.
 */
size_t tierfs_uring_message(const struct fuse_uring_req_header *header, char *payload,
                            size_t payload_capacity, char *copy, size_t capacity, char **message);

/* The answer to a request: its header, and how much of the payload is its body (0 for an error). */
void tierfs_uring_answer_header(struct fuse_uring_req_header *header, uint64_t unique, long result);
