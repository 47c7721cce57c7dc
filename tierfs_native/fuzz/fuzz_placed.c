/*
 * Answers of the engine that say where bytes are: what is taken is what that file holds, and it matches the checksums.
 *
 * An input: two bytes for the size of the READ in pages, one for how the answer is made sound before it is used (its
 * mark, its content, its checksums), then the answer.
 */
#include "../tests/tier.h"
#include "placed.h"

#include "batch_sum.h"

#include <errno.h>
#include <sys/stat.h>

#define OWN_BYTES (3 * TIERFS_BLOCK_BYTES + 1000)
#define HEAD_BYTES 3

static struct tierfs_reading *reading;
static const uint8_t mark[TIERFS_PLACE_MARK_BYTES] = {7, 6, 5, 4, 3, 2, 1, 0, 7, 6, 5, 4, 3, 2, 1, 9};

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed);
/* Of libFuzzer, which otherwise would change nothing by itself; without it, replay_main.c does half of them. */
__attribute__((weak)) size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    struct tier_place place;

    (void)argc, (void)argv;
    tier_make(&place);
    tier_write_file(&place, 0, 1, OWN_BYTES);
    assert(tierfs_reading_create(&reading) == 0);
    assert(tierfs_reading_add_tier(reading, place.root, false) == 0);
    tier_remove_at_exit(&place);
    return 0;
}

/* The sums that the bytes of this file have, as far as there are any. */
static void make_sums(struct tierfs_place *place)
{
    static char block[TIERFS_BLOCK_BYTES];

    for (size_t i = 0; i < TIERFS_PLACE_BLOCKS && i * TIERFS_BLOCK_BYTES < place->length; i++) {
        uint64_t left = place->length - i * TIERFS_BLOCK_BYTES;
        size_t bytes = left < TIERFS_BLOCK_BYTES ? (size_t)left : (size_t)TIERFS_BLOCK_BYTES;

        for (size_t at = 0; at < bytes; at++)
            block[at] = tier_byte_at(1, place->offset + i * TIERFS_BLOCK_BYTES + at);
        place->sums[i] = tierfs_block_sum(block, bytes);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint8_t content_id[16] = {1};
    struct tierfs_place place;
    uint16_t pages;
    char *body, *out;

    if (size < HEAD_BYTES)
        return 0;
    memcpy(&pages, data, sizeof pages);
    const size_t capacity = (size_t)(pages % 300) * 4096;
    const uint8_t made_sound = data[2];
    data += HEAD_BYTES;
    size -= HEAD_BYTES;
    body = malloc(size + !size); /* an allocation of its own: what is read behind it is found */
    out = malloc(capacity + !capacity);
    assert(body != NULL && out != NULL);
    if (size != 0)
        memcpy(body, data, size);
    if (size == sizeof place) {
        memcpy(&place, body, sizeof place);
        if ((made_sound & 1) != 0)
            memcpy(place.mark, mark, sizeof mark);
        if ((made_sound & 2) != 0) {
            memcpy(place.content_id, content_id, sizeof content_id);
            place.tier = 0;
            place.offset = place.offset % 6 * TIERFS_BLOCK_BYTES;
            place.length %= OWN_BYTES;
        }
        if ((made_sound & 4) != 0)
            make_sums(&place);
        memcpy(body, &place, sizeof place);
    }
    long result = tierfs_placed_read(reading, mark, body, size, out, capacity);
    assert(result > 0 || result == TIERFS_NOT_PLACED || result == -EAGAIN);
    assert((result == TIERFS_NOT_PLACED) ==
           (size != sizeof place || memcmp(place.mark, mark, sizeof mark) != 0));
    if (result > 0) {
        assert((uint32_t)result == place.length && place.length <= capacity);
        assert(place.offset + place.length <= OWN_BYTES && place.offset % TIERFS_BLOCK_BYTES == 0);
        for (uint32_t at = 0; at < place.length; at++)
            assert(out[at] == tier_byte_at(1, place.offset + at));
    }
    free(body);
    free(out);
    return 0;
}

/* An answer of the right size. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed)
{
    struct tier_random random = {seed};

    if (LLVMFuzzerMutate != NULL && tier_random(&random, 4) != 0)
        return LLVMFuzzerMutate(data, size, max_size);
    size = HEAD_BYTES + sizeof(struct tierfs_place);
    size = size < max_size ? size : max_size;
    for (size_t i = 0; i < size; i++)
        data[i] = (uint8_t)tier_random(&random, 256);
    return size;
}
