#define _GNU_SOURCE
#include "reading.h"

#include "batch_sum.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define SEGMENT_FILES 64
#define SCRATCH_BYTES (TIERFS_READING_MAX_BYTES + 2 * TIERFS_BLOCK_BYTES)

struct tier {
    int directory;
    bool is_memory;
    struct tierfs_index *index;
};

struct tierfs_reading {
    size_t tier_count;
    struct tier tiers[TIERFS_READING_TIERS];
};

struct segment_file {
    uint64_t segment; /* 0: none */
    size_t tier;
    int descriptor;
};

struct tierfs_reading_lane {
    const struct tierfs_reading *reading;
    struct tierfs_index_reader *readers[TIERFS_READING_TIERS];
    struct segment_file segments[SEGMENT_FILES];
    char *scratch;
};

/* One range of one file in one tier. */
struct piece {
    size_t tier;
    uint32_t extent_no;
    uint32_t first_block, block_count;
    uint64_t offset; /* in the content */
    size_t length;
    uint64_t snapshot;
    struct tierfs_extent extent;
};

int tierfs_reading_create(struct tierfs_reading **reading)
{
    *reading = calloc(1, sizeof **reading);
    return *reading != NULL ? 0 : -ENOMEM;
}

static int boot_id(char id[37])
{
    int descriptor = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t bytes = descriptor >= 0 ? read(descriptor, id, 36) : -1;

    if (descriptor >= 0)
        close(descriptor);
    id[36] = '\0';
    return bytes == 36 ? 0 : -EIO;
}

int tierfs_reading_add_tier(struct tierfs_reading *reading, const char *root, bool is_memory)
{
    struct tier *tier = &reading->tiers[reading->tier_count];
    char path[4096];
    char id[37];
    int used = snprintf(path, sizeof path, "%s/index.lmdb", root);
    int result = boot_id(id);

    if (result < 0)
        return result;
    if (reading->tier_count == TIERFS_READING_TIERS || used < 0 || (size_t)used >= sizeof path)
        return -E2BIG;
    result = tierfs_index_open(path, id, &tier->index);
    if (result < 0)
        return result;
    tier->directory = open(root, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (tier->directory < 0) {
        result = -errno;
        tierfs_index_close(tier->index);
        return result;
    }
    tier->is_memory = is_memory;
    reading->tier_count++;
    return 0;
}

int tierfs_reading_lane_open(const struct tierfs_reading *reading, struct tierfs_reading_lane **lane)
{
    struct tierfs_reading_lane *made = calloc(1, sizeof *made);
    int result = made != NULL ? 0 : -ENOMEM;

    if (result < 0)
        return result;
    made->reading = reading;
    made->scratch = aligned_alloc(4096, SCRATCH_BYTES);
    if (made->scratch == NULL)
        result = -ENOMEM;
    for (size_t i = 0; i < reading->tier_count && result == 0; i++)
        result = tierfs_index_reader_open(reading->tiers[i].index, &made->readers[i]);
    if (result == 0) {
        *lane = made;
        return 0;
    }
    for (size_t i = 0; i < reading->tier_count; i++)
        if (made->readers[i] != NULL)
            tierfs_index_reader_close(made->readers[i]);
    free(made->scratch);
    free(made);
    return result;
}

static bool has_blocks(const struct tierfs_extent *extent, const struct piece *piece, uint64_t size_bytes)
{
    uint64_t word = tierfs_block_mask(piece->block_count) << piece->first_block;

    return extent->size_bytes == size_bytes && (extent->present & ~extent->unverified & word) == word;
}

/* The first tier that has all blocks of the piece. */
static int locate(struct tierfs_reading_lane *lane, const struct tierfs_inode *inode, struct piece *piece)
{
    for (size_t i = 0; i < lane->reading->tier_count; i++) {
        if (tierfs_index_begin(lane->readers[i], &piece->snapshot) < 0)
            continue;
        int result = tierfs_index_find(lane->readers[i], inode->content_id, piece->extent_no, &piece->extent);
        tierfs_index_end(lane->readers[i]);
        if (result == 0 && has_blocks(&piece->extent, piece, inode->size_bytes)) {
            piece->tier = i;
            return 0;
        }
    }
    return -EAGAIN;
}

/* It still says so, and the bytes cannot have gone and others come in between (see batch_index.h). */
static bool is_still_so(struct tierfs_reading_lane *lane, const struct tierfs_inode *inode,
                        const struct piece *piece)
{
    struct tierfs_extent now;
    uint64_t snapshot;
    int result = tierfs_index_begin(lane->readers[piece->tier], &snapshot);

    if (result < 0)
        return false;
    if (snapshot == piece->snapshot) {
        tierfs_index_end(lane->readers[piece->tier]);
        return true;
    }
    result = tierfs_index_find(lane->readers[piece->tier], inode->content_id, piece->extent_no, &now);
    tierfs_index_end(lane->readers[piece->tier]);
    return result == 0 && snapshot - piece->snapshot < 2 && has_blocks(&now, piece, inode->size_bytes) &&
           now.segment == piece->extent.segment && now.place_bytes == piece->extent.place_bytes;
}

static int open_segment(struct tierfs_reading_lane *lane, const struct piece *piece)
{
    uint64_t segment = piece->extent.segment;
    struct segment_file *slot = &lane->segments[(segment >> 1) % SEGMENT_FILES];
    struct stat info;
    char path[TIERFS_TIER_PATH];

    if (slot->segment != 0) {
        /* What has been unlinked would keep its blocks for as long as it is open here. */
        if (slot->segment == segment && slot->tier == piece->tier && fstat(slot->descriptor, &info) == 0 &&
            info.st_nlink > 0)
            return slot->descriptor;
        close(slot->descriptor);
        slot->segment = 0;
    }
    tierfs_tier_path(path, segment, NULL);
    slot->descriptor =
        openat(lane->reading->tiers[piece->tier].directory, path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (slot->descriptor < 0)
        return -errno;
    slot->segment = segment;
    slot->tier = piece->tier;
    return slot->descriptor;
}

int tierfs_reading_open_file(const struct tierfs_reading *reading, uint32_t tier,
                             const uint8_t content_id[16], bool *is_memory)
{
    char path[TIERFS_TIER_PATH];
    int descriptor;

    if (tier >= reading->tier_count)
        return -EINVAL;
    tierfs_tier_path(path, 0, content_id);
    *is_memory = reading->tiers[tier].is_memory;
    descriptor = openat(reading->tiers[tier].directory, path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    return descriptor >= 0 ? descriptor : -errno;
}

_Static_assert(TIERFS_READ_NOWAIT == RWF_NOWAIT, "RWF_NOWAIT");

ssize_t tierfs_read_at(int descriptor, char *out, size_t length, uint64_t offset, int flags)
{
    struct iovec vector = {.iov_base = out, .iov_len = length};
    ssize_t count;

    do
        count = preadv2(descriptor, &vector, 1, (off_t)offset, flags);
    while (count < 0 && errno == EINTR);
    return count;
}

/* Whole blocks from the device, checked. */
static bool read_checked(const struct tierfs_reading_lane *lane, const struct tierfs_inode *inode,
                         const struct piece *piece, int descriptor, char *out)
{
    uint64_t start = piece->extent_no * TIERFS_EXTENT_BYTES + piece->first_block * TIERFS_BLOCK_BYTES;
    uint64_t stop = start + piece->block_count * TIERFS_BLOCK_BYTES;
    size_t bytes;
    size_t done = 0;

    if (stop > inode->size_bytes)
        stop = inode->size_bytes;
    bytes = (size_t)(stop - start);
    while (done < bytes) {
        ssize_t count = tierfs_read_at(descriptor, lane->scratch + done, bytes - done,
                                       piece->extent.place_bytes + start + done, 0);
        if (count <= 0)
            return false;
        done += (size_t)count;
    }
    for (uint32_t i = 0; i < piece->block_count; i++) {
        size_t at = i * TIERFS_BLOCK_BYTES;
        size_t length = bytes - at < TIERFS_BLOCK_BYTES ? bytes - at : TIERFS_BLOCK_BYTES;
        if (piece->first_block + i >= piece->extent.sum_count ||
            tierfs_block_sum(lane->scratch + at, length) != piece->extent.sums[piece->first_block + i]) {
            /* The engine must not find them in the page cache, where it would believe them. */
            (void)posix_fadvise(descriptor, (off_t)(piece->extent.place_bytes + start), (off_t)bytes,
                                POSIX_FADV_DONTNEED);
            return false;
        }
    }
    memcpy(out, lane->scratch + (piece->offset - start), piece->length);
    return true;
}

static bool read_piece(struct tierfs_reading_lane *lane, const struct tierfs_inode *inode,
                       const struct piece *piece, char *out)
{
    bool is_packed = piece->extent.segment != 0;
    bool is_memory = lane->reading->tiers[piece->tier].is_memory;
    int descriptor = is_packed ? open_segment(lane, piece)
                               : tierfs_reading_open_file(lane->reading, (uint32_t)piece->tier,
                                                          inode->content_id, &is_memory);
    int flags = is_memory ? 0 : RWF_NOWAIT;
    bool done;

    if (descriptor < 0)
        return false;
    done = tierfs_read_at(descriptor, out, piece->length, piece->extent.place_bytes + piece->offset, flags) ==
           (ssize_t)piece->length;
    if (!done)
        done = read_checked(lane, inode, piece, descriptor, out);
    if (!is_packed)
        close(descriptor);
    return done;
}

long tierfs_reading_read(struct tierfs_reading_lane *lane, const struct tierfs_inode *inode, uint64_t offset,
                         size_t length, char *out)
{
    size_t done = 0;

    if (offset >= inode->size_bytes)
        return 0;
    if (length > inode->size_bytes - offset)
        length = (size_t)(inode->size_bytes - offset);
    /* Records have 32 bits for the number of an extent: behind that it would be another one's. */
    if (length > TIERFS_READING_MAX_BYTES || (offset + length) / TIERFS_EXTENT_BYTES > UINT32_MAX)
        return -EAGAIN;
    while (done < length) {
        uint64_t at = offset + done;
        uint64_t in_extent = at % TIERFS_EXTENT_BYTES;
        size_t left = length - done;
        struct piece piece = {
            .extent_no = (uint32_t)(at / TIERFS_EXTENT_BYTES),
            .offset = at,
            .length =
                left < TIERFS_EXTENT_BYTES - in_extent ? left : (size_t)(TIERFS_EXTENT_BYTES - in_extent),
            .first_block = (uint32_t)(in_extent / TIERFS_BLOCK_BYTES),
        };

        piece.block_count =
            (uint32_t)((in_extent + piece.length + TIERFS_BLOCK_BYTES - 1) / TIERFS_BLOCK_BYTES) -
            piece.first_block;
        if (locate(lane, inode, &piece) < 0 || !read_piece(lane, inode, &piece, out + done) ||
            !is_still_so(lane, inode, &piece))
            return -EAGAIN;
        done += piece.length;
    }
    return (long)length;
}
