/*
 * Arbitrary records of a tier's index.
 *
 * An input: four bytes of extent number, four of epoch, the record.
 */
#include "../tests/tier.h"

#include <assert.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define HEAD_BYTES 8

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed);
/* Of libFuzzer, which otherwise would change nothing by itself; without it, replay_main.c does half of them. */
__attribute__((weak)) size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);

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

/* A record that is sound but for a few bits: noise never has the right size. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed)
{
    struct tier_random random = {seed};
    uint8_t input[HEAD_BYTES + TIER_RECORD_MAX] = {0};
    uint32_t extent_no;

    if (LLVMFuzzerMutate != NULL && tier_random(&random, 4) != 0)
        return LLVMFuzzerMutate(data, size, max_size);
    extent_no = tier_random(&random, 3);
    memcpy(input, &extent_no, sizeof(extent_no));
    size = HEAD_BYTES + tier_random_record(input + HEAD_BYTES, &random, extent_no,
                                           (uint64_t)tier_random(&random, 300) << tier_random(&random, 20));
    for (unsigned i = tier_random(&random, 4); i > 0; i--)
        input[tier_random(&random, (uint32_t)size)] ^= (uint8_t)(1u << tier_random(&random, 8));
    size = size < max_size ? size : max_size;
    memcpy(data, input, size);
    return size;
}
