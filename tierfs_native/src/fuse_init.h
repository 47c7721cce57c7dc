/*
 * The answer to FUSE_INIT: what pyfuse3 grants the kernel, and what the front adds to it and takes away (passthrough,
 * FUSE over io_uring, how many requests at a time and of which size).
 *
 * No state and no lock. Called for the first engine of a mount, before the kernel gets its answer.
 */
#pragma once

#include "abi.h"

#include <stdbool.h>
#include <stddef.h>

struct tierfs_init_terms {
    int socket;           /* to the engine: a request is one packet, and has to fit into its buffer */
    bool lists_plainly;   /* READDIR without attributes is answered */
    bool truncates_apart; /* an open that truncates comes in two parts */
    /* As in struct tierfs_relay_links; called once at most. */
    bool (*prepare_ring)(void *context, bool is_offered, size_t payload_bytes);
    void *context;
};

/*
 * asked: what the kernel has sent; header: the engine's answer, bytes in all, which is changed. An error, and what is
 * too short to be an answer, stays as it is.
 */
void tierfs_init_amend(const struct tierfs_init_terms *terms, const struct fuse_init_in *asked,
                       struct fuse_out_header *header, size_t bytes);
