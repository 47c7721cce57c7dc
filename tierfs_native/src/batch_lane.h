/*
 * What one thread needs for batch reads (tierfs_lane_open), for its parts alone: batch_plan.c resolves, batch_read.c reads.
 * A lane is used by one thread at a time, and has no lock.
 */
#pragma once

#include "batch.h"

#define TIERFS_SEGMENT_FILES 64u /* a power of two */

/* So much is read between two looks at the index. */
#define TIERFS_WINDOW_PIECES 256
#define TIERFS_WINDOW_BYTES (UINT64_C(64) << 20)

/* Blocks of one extent of a file that lie next to each other, in one tier. */
struct tierfs_piece {
    size_t file;
    unsigned tier;
    uint32_t extent_no;
    uint32_t first_block, block_count; /* in the extent */
    uint64_t segment, place_bytes; /* segment 0: a file of the content's own */
    uint64_t offset_bytes; /* in the content */
    uint32_t length;
    size_t first_sum;
    /* while it is read: */
    int descriptor;
    bool owns_descriptor;
    bool from_device;
    uint32_t done;
};

/*
 * A segment that is open during one call. Not longer: the space of a segment that the engine has removed is free only
 * when the last descriptor is closed.
 */
struct tierfs_segment_file {
    uint64_t segment; /* 0: free */
    unsigned tier;
    int descriptor;
};

/* A directory that this call has resolved already. */
struct tierfs_known_directory {
    const char *path;
    size_t path_bytes;
    uint64_t call; /* in which it was resolved: others do not count */
    enum tierfs_outcome outcome;
    uint64_t ino;
    int64_t listed_until_ns;
};

#define TIERFS_KNOWN_DIRECTORIES 1024u /* a power of two */

struct tierfs_lane {
    const struct tierfs_batch *batch;
    struct tierfs_reader *names;
    struct tierfs_index_reader *indexes[TIERFS_BATCH_TIERS];
    uint64_t names_snapshot, snapshots[TIERFS_BATCH_TIERS]; /* of names and indexes, when the plan was made */
    struct tierfs_ring *ring;
    uint64_t call;
    struct tierfs_known_directory directories[TIERFS_KNOWN_DIRECTORIES];
    struct tierfs_segment_file segment_files[TIERFS_SEGMENT_FILES];
    struct tierfs_piece *pieces;
    size_t piece_count, piece_capacity;
    uint64_t *sums;
    size_t sum_count, sum_capacity;
    struct tierfs_extent extent; /* scratch */
    struct tierfs_call calls[TIERFS_WINDOW_PIECES];
    size_t call_pieces[TIERFS_WINDOW_PIECES]; /* which piece each call is for */
    char paths[TIERFS_WINDOW_PIECES][TIERFS_TIER_PATH];
};

/* The record of that extent in a tier's index, into lane->extent; -ENOENT if there is none of that content and size. */
int tierfs_lane_find_extent(struct tierfs_lane *lane, unsigned tier, const struct tierfs_wanted *file,
                            uint32_t extent_no);
