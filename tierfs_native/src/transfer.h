/*
 * The body of an answer of the store, from its socket into a file of a tier, with the checksums of its blocks: each
 * block is received, summed and written while it is in the processor's cache.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tierfs_transfer {
    int source; /* a socket or a file; may be non-blocking */
    int target;
    uint64_t target_offset;
    uint64_t length;
    const char *head; /* the first bytes of the body, which have been read already */
    size_t head_bytes;
    int timeout_ms; /* how long nothing may come */
    bool waits;     /* the source is a blocking socket with that limit of its own: SO_RCVTIMEO */
    char *body;     /* where the whole body goes besides, or NULL */
};

/* What went wrong, if anything did: at most one of them is not 0. */
struct tierfs_transfer_result {
    uint64_t received; /* bytes of the body, the head included */
    int source_errno; /* ETIMEDOUT: nothing came for timeout_ms. The body ended early: 0, and received < length */
    int target_errno;
};

/* sums: one for each block of TIERFS_BLOCK_BYTES that length has begun. */
void tierfs_transfer(const struct tierfs_transfer *transfer, uint64_t *sums,
                     struct tierfs_transfer_result *result);
