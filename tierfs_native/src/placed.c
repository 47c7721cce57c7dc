#define _GNU_SOURCE
#include "placed.h"

#include "batch_sum.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

/* All of it from the page cache, or nothing: who calls has other things to do than to wait for a device. */
static bool read_whole(int descriptor, char *out, size_t bytes, uint64_t offset, bool is_memory)
{
    size_t done = 0;

    while (done < bytes) {
        ssize_t count = tierfs_read_at(descriptor, out + done, bytes - done, offset + done,
                                       is_memory ? 0 : TIERFS_READ_NOWAIT);
        if (count <= 0)
            return false;
        done += (size_t)count;
    }
    return true;
}

static bool matches(const struct tierfs_place *place, const char *data)
{
    for (size_t at = 0; at < place->length; at += TIERFS_BLOCK_BYTES) {
        size_t left = place->length - at;
        size_t bytes = left < TIERFS_BLOCK_BYTES ? left : (size_t)TIERFS_BLOCK_BYTES;

        if (tierfs_block_sum(data + at, bytes) != place->sums[at / TIERFS_BLOCK_BYTES])
            return false;
    }
    return true;
}

long tierfs_placed_read(const struct tierfs_reading *reading, const uint8_t mark[TIERFS_PLACE_MARK_BYTES],
                        const void *body, size_t body_bytes, char *out, size_t out_capacity)
{
    struct tierfs_place place;
    bool is_memory;
    bool done;
    int descriptor;

    if (body_bytes != sizeof place || memcmp(body, mark, TIERFS_PLACE_MARK_BYTES) != 0)
        return TIERFS_NOT_PLACED;
    memcpy(&place, body, sizeof place);
    if (place.length == 0 || place.length > out_capacity ||
        place.length > TIERFS_PLACE_BLOCKS * TIERFS_BLOCK_BYTES || place.offset % TIERFS_BLOCK_BYTES != 0)
        return -EAGAIN;
    descriptor = tierfs_reading_open_file(reading, place.tier, place.content_id, &is_memory);
    if (descriptor < 0)
        return -EAGAIN;
    done = read_whole(descriptor, out, place.length, place.offset, is_memory) && matches(&place, out);
    close(descriptor);
    return done ? (long)place.length : -EAGAIN;
}
