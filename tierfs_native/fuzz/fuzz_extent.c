/*
 * Arbitrary records of a tier's index.
 *
 * An input: four bytes of extent number, four of epoch, the record.
 */
#include "batch_index.h"

#include <assert.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define HEAD_BYTES 8

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct tierfs_extent extent;
    uint32_t numbers[2];
    uint8_t *record;

    if (size < HEAD_BYTES)
        return 0;
    memcpy(numbers, data, sizeof(numbers));
    /* A copy that ends where the record ends: whatever is read behind it shows. */
    record = malloc(size - HEAD_BYTES + 1);
    assert(record != NULL);
    memcpy(record + 1, data + HEAD_BYTES, size - HEAD_BYTES);
    if (tierfs_extent_decode(record + 1, size - HEAD_BYTES, numbers[0], numbers[1], &extent) == 0) {
        assert(extent.sum_count == tierfs_blocks_in_extent(extent.size_bytes, numbers[0]));
        assert(extent.sum_count <= TIERFS_EXTENT_BLOCKS);
        assert((extent.present & ~tierfs_block_mask(extent.sum_count)) == 0);
        assert((extent.unverified & ~extent.present) == 0);
        assert(extent.segment == 0 || extent.place_bytes + extent.size_bytes <= INT64_MAX);
    }
    free(record);
    return 0;
}
