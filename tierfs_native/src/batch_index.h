/*
 * The index of one tier, read only: which blocks of a content its files hold. tierfs/cache/index.py writes it,
 * tierfs/cache/record.py lays records out, and tierfs/cache/tier.py says what may be concluded from them:
 *
 *   - Blocks are recorded after they were written. What is recorded here has been committed, so it is some tenths of
 *     a second old; what is missing may be there all the same.
 *   - A hole is punched after the record without these blocks was committed. A file of a content's own is made only
 *     when no committed record speaks of that content. So a range has not been punched before the commit that
 *     follows a snapshot in which it is recorded, and what comes to be at its place later takes yet another commit.
 *   - A place in a segment is given out once.
 *   - A record of an older epoch was written before an unclean reboot; its blocks have to be verified first.
 *
 * As with the namespace: one index must not be open twice in one process, a child opens its own, and a snapshot is
 * held for microseconds. Functions return 0 or -errno.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TIERFS_BLOCK_BYTES (UINT64_C(128) << 10)
#define TIERFS_EXTENT_BLOCKS 64
#define TIERFS_EXTENT_BYTES (TIERFS_EXTENT_BLOCKS * TIERFS_BLOCK_BYTES)

#define TIERFS_TIER_PATH 48 /* objects/ab/<32 hex> and a NUL */

struct tierfs_index;
struct tierfs_index_reader;

/* A record without its identity. sums: one for each block of the extent. */
struct tierfs_extent {
    uint64_t size_bytes; /* of the whole content */
    uint64_t present, unverified; /* blocks, bit 0 first */
    uint64_t segment; /* 0: the content has a file of its own */
    uint64_t place_bytes;
    uint32_t sum_count;
    uint64_t sums[TIERFS_EXTENT_BLOCKS];
};

/* path: the directory index.lmdb. -EPROTO: another format, or an index that this boot has not opened yet. */
int tierfs_index_open(const char *path, const char *boot_id, struct tierfs_index **index);
void tierfs_index_close(struct tierfs_index *index);

int tierfs_index_reader_open(struct tierfs_index *index, struct tierfs_index_reader **reader);
void tierfs_index_reader_close(struct tierfs_index_reader *reader);

/* snapshot: a number that is the same for the same snapshot, and grows by one with every commit in between. */
int tierfs_index_begin(struct tierfs_index_reader *reader, uint64_t *snapshot);
void tierfs_index_end(struct tierfs_index_reader *reader);

/* Between begin and end. -ENOENT: nothing of that extent is there. -EUCLEAN: a damaged record. */
int tierfs_index_find(struct tierfs_index_reader *reader, const uint8_t content_id[16], uint32_t extent_no,
                      struct tierfs_extent *extent);

/* The same from the bytes of a record. */
int tierfs_extent_decode(const void *data, size_t length, uint32_t extent_no, uint32_t epoch,
                         struct tierfs_extent *extent);

/* Where in the tier's directory a content's bytes are: in that segment, or (0) in a file of its own. */
void tierfs_tier_path(char path[TIERFS_TIER_PATH], uint64_t segment, const uint8_t content_id[16]);

/* How many blocks that extent of a content of that size has; 0 behind its end. */
uint32_t tierfs_blocks_in_extent(uint64_t size_bytes, uint64_t extent_no);

/* The word for so many blocks from bit 0: up to 64. */
uint64_t tierfs_block_mask(uint32_t blocks);
