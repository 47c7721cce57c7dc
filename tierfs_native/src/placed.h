/*
 * Answers of the engine to READ that say where the bytes lie, not what they are: it has seen to it that they are in
 * a file of a tier, and the front copies them from there, instead of both copying them through a socket.
 *
 * The engine may answer so if the handle in the request has TIERFS_FH_PLACES. Such an answer begins with a mark that
 * nobody else knows, which is how it differs from bytes. What the file holds is believed if it matches the
 * checksums: should the blocks be evicted before they are read, the engine is asked again, without that bit.
 */
#pragma once

#include "reading.h"

#include <stddef.h>
#include <stdint.h>

#define TIERFS_FH_PLACES (UINT64_C(1) << 62)
#define TIERFS_PLACE_MARK_BYTES 16
#define TIERFS_PLACE_BLOCKS 8 /* the largest request, in blocks */
/* Smaller ones are not worth it. */
#define TIERFS_PLACE_LEAST_BYTES (UINT64_C(128) << 10)

/* Little endian; tierfs/fs/placed.py has the same. */
struct tierfs_place {
    uint8_t mark[TIERFS_PLACE_MARK_BYTES];
    uint8_t content_id[16];
    uint64_t offset; /* in the content and in its file; of a block */
    uint32_t length;
    uint32_t tier; /* as they were named to the front */
    uint64_t sums[TIERFS_PLACE_BLOCKS];
};

_Static_assert(sizeof(struct tierfs_place) == 112, "place");

/* Not an answer of that kind. */
#define TIERFS_NOT_PLACED (-100004L)

/*
 * body: of an answer to a READ of at most out_capacity bytes; it may overlap out. Returns how many bytes were put
 * there, or TIERFS_NOT_PLACED, or -EAGAIN: they cannot be had (any more). Any thread.
 */
long tierfs_placed_read(const struct tierfs_reading *reading, const uint8_t mark[TIERFS_PLACE_MARK_BYTES],
                        const void *body, size_t body_bytes, char *out, size_t out_capacity);
