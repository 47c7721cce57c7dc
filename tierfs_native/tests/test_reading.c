/* Reads from a tier: the bytes that a record names, and offsets for which there can be no record. */
#include "tier.h"

#include "batch_sum.h"
#include "reading.h"

#include <errno.h>

#define FILE_NUMBER 2u
#define BLOCK TIERFS_BLOCK_BYTES

static void put_record(struct tier_writer *writer, uint64_t size_bytes)
{
    uint8_t record[TIER_RECORD_MAX] = {0}, key[20] = {FILE_NUMBER};
    const uint16_t sums = (uint16_t)tierfs_blocks_in_extent(size_bytes, 0);
    const uint64_t present = 1;
    static char block[BLOCK];

    for (uint64_t at = 0; at < sizeof block; at++)
        block[at] = tier_byte_at(FILE_NUMBER, at);
    const uint64_t sum = tierfs_block_sum(block, sizeof block);
    memcpy(record, &size_bytes, 8);
    memcpy(record + 8, &present, 8);
    memcpy(record + 56, &sums, 2);
    memcpy(record + TIER_HEAD_BYTES, &sum, 8);
    tier_put(writer->txn, writer->extents, key, sizeof key, record, TIER_HEAD_BYTES + 8u * sums);
}

/* The number of an extent has 32 bits: an offset behind the last one must not be looked for in the first. */
int main(void)
{
    const uint64_t first_behind = (UINT64_C(1) << 32) * TIERFS_EXTENT_BYTES;
    const struct tierfs_inode inode = {.content_id = {FILE_NUMBER}, .size_bytes = first_behind + BLOCK};
    struct tier_place place;
    struct tier_writer writer;
    static struct tierfs_reading
        *reading; /* these live as long as a front: there is nothing that ends them */
    static struct tierfs_reading_lane *lane;
    struct tierfs_device_read later;
    char out[100];

    tier_make(&place);
    tier_remove_at_exit(&place);
    tier_write_file(&place, 0, FILE_NUMBER, BLOCK);
    tier_writer_open(&writer, &place);
    put_record(&writer, inode.size_bytes);
    tier_writer_close(&writer);
    assert(tierfs_reading_create(&reading) == 0 && tierfs_reading_add_tier(reading, place.root, false) == 0);
    assert(tierfs_reading_lane_open(reading, &lane) == 0);
    assert(tierfs_reading_read(lane, &inode, 10, sizeof out, out, &later) == sizeof out);
    for (size_t at = 0; at < sizeof out; at++)
        assert(out[at] == tier_byte_at(FILE_NUMBER, 10 + at));
    assert(tierfs_reading_read(lane, &inode, BLOCK, sizeof out, out, &later) == -EAGAIN);
    assert(tierfs_reading_read(lane, &inode, first_behind, sizeof out, out, &later) == -EAGAIN);
    assert(tierfs_reading_read(lane, &inode, inode.size_bytes, sizeof out, out, &later) == 0);
    return 0;
}
