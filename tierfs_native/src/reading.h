/*
 * Reads of small clean files, answered from the files of a tier without the engine.
 *
 * What may be believed, and why, stands in batch.h and batch_index.h; here it is one range of one file:
 *
 *   names    The request's snapshot of the namespace says which content the inode has, and that it is not being
 *            written. A write that has been acknowledged before this read began is visible there.
 *   bytes    The committed index of a tier says where the blocks are. Bytes from the page cache are believed; what
 *            has to be read from the device is read in whole blocks, which must match their checksums.
 *   after    The index, looked at again, says the same, and not so much has been committed meanwhile that the place
 *            could have been punched and filled anew.
 *
 * What cannot be had like this is the engine's. One value serves all workers; a lane belongs to one of them.
 */
#pragma once

#include "batch_index.h"
#include "records.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define TIERFS_READING_TIERS 8
#define TIERFS_READING_MAX_BYTES (UINT64_C(1) << 20) /* larger files are passed through */

struct tierfs_reading;
struct tierfs_reading_lane;

int tierfs_reading_create(struct tierfs_reading **reading); /* 0 or -errno */

/* Before the first lane is opened: the root of a tier, fast to slow. is_memory: a tmpfs. 0 or -errno. */
int tierfs_reading_add_tier(struct tierfs_reading *reading, const char *root, bool is_memory);

/* A file of a large content in a tier of that number, for reading. A descriptor or -errno. */
int tierfs_reading_open_file(const struct tierfs_reading *reading, uint32_t tier,
                             const uint8_t content_id[16], bool *is_memory);

/* preadv2; only what is in the page cache with TIERFS_READ_NOWAIT. */
#define TIERFS_READ_NOWAIT 8 /* RWF_NOWAIT */
ssize_t tierfs_read_at(int descriptor, char *out, size_t length, uint64_t offset, int flags);

int tierfs_reading_lane_open(const struct tierfs_reading *reading, struct tierfs_reading_lane **lane);

/* One range of one file in one tier. */
struct tierfs_reading_piece {
    size_t tier;
    uint32_t extent_no;
    uint32_t first_block, block_count;
    uint64_t offset; /* in the content */
    size_t length;
    uint64_t snapshot;
    struct tierfs_extent extent;
};

/* A read of which something has to come from the device: whole blocks, which contain what was asked for. */
struct tierfs_device_read {
    struct tierfs_inode inode;
    struct tierfs_reading_piece piece;
    int descriptor;
    bool
        is_own; /* the descriptor is to be closed by who got this; else it is the lane's, until its next read */
    uint64_t place; /* in the file */
    size_t bytes; /* at most TIERFS_READING_BLOCKS_BYTES */
    size_t skip; /* from there on it is what was asked for: piece.length bytes */
};

#define TIERFS_READING_BLOCKS_BYTES (TIERFS_READING_MAX_BYTES + 2 * TIERFS_BLOCK_BYTES)
#define TIERFS_READING_WAITS (-100004L)

/*
 * Up to length bytes of inode from offset. Returns how many (fewer only at the end of the file), or -EAGAIN: the
 * engine has to answer; or TIERFS_READING_WAITS: the page cache has not all of it, and *later says what is to be read.
 */
long tierfs_reading_read(struct tierfs_reading_lane *lane, const struct tierfs_inode *inode, uint64_t offset,
                         size_t length, char *out, struct tierfs_device_read *later);

/* Reads it, and waits. False: the engine has to answer. */
bool tierfs_reading_wait(struct tierfs_reading_lane *lane, const struct tierfs_device_read *read, char *out);

/* Somebody else reads it: called once the descriptor is not needed any more. */
void tierfs_reading_let_go(const struct tierfs_device_read *read);

/*
 * Whether all these blocks, which have come from there (got bytes), are right and still what they were said to be.
 * The lane may be another one than that which said so.
 */
bool tierfs_reading_check(struct tierfs_reading_lane *lane, const struct tierfs_device_read *read,
                          const char *blocks, ssize_t got);
