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
    made->scratch = aligned_alloc(4096, TIERFS_READING_BLOCKS_BYTES);
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

static bool has_blocks(const struct tierfs_extent *extent, const struct tierfs_reading_piece *piece,
                       uint64_t size_bytes)
{
    uint64_t word = tierfs_block_mask(piece->block_count) << piece->first_block;

    return extent->size_bytes == size_bytes && (extent->present & ~extent->unverified & word) == word;
}

/* The first tier that has all blocks of the piece. */
static int locate(struct tierfs_reading_lane *lane, const struct tierfs_inode *inode,
                  struct tierfs_reading_piece *piece)
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
                        const struct tierfs_reading_piece *piece)
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

static int open_segment(struct tierfs_reading_lane *lane, const struct tierfs_reading_piece *piece)
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
    /* What lies beside is of other files: the page cache must not have what nobody has checked. */
    (void)posix_fadvise(slot->descriptor, 0, 0, POSIX_FADV_RANDOM);
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

/* The whole blocks that contain a piece. */
static void plan_device_read(const struct tierfs_inode *inode, const struct tierfs_reading_piece *piece,
                             int descriptor, struct tierfs_device_read *read)
{
    uint64_t start = piece->extent_no * TIERFS_EXTENT_BYTES + piece->first_block * TIERFS_BLOCK_BYTES;
    uint64_t stop = start + piece->block_count * TIERFS_BLOCK_BYTES;

    if (stop > inode->size_bytes)
        stop = inode->size_bytes;
    *read = (struct tierfs_device_read){
        .inode = *inode,
        .piece = *piece,
        .descriptor = descriptor,
        .is_own = piece->extent.segment == 0,
        .place = piece->extent.place_bytes + start,
        .bytes = (size_t)(stop - start),
        .skip = (size_t)(piece->offset - start),
    };
}

static bool match_sums(const struct tierfs_device_read *read, const char *blocks)
{
    const struct tierfs_reading_piece *piece = &read->piece;

    for (uint32_t i = 0; i < piece->block_count; i++) {
        size_t at = i * TIERFS_BLOCK_BYTES;
        size_t length = read->bytes - at < TIERFS_BLOCK_BYTES ? read->bytes - at : TIERFS_BLOCK_BYTES;

        if (piece->first_block + i >= piece->extent.sum_count ||
            tierfs_block_sum(blocks + at, length) != piece->extent.sums[piece->first_block + i])
            return false;
    }
    return true;
}

/* The engine must not find damaged blocks in the page cache, where it would believe them. */
static void drop_from_cache(struct tierfs_reading_lane *lane, const struct tierfs_device_read *read)
{
    bool is_packed = read->piece.extent.segment != 0;
    bool is_memory;
    int descriptor = is_packed ? open_segment(lane, &read->piece)
                               : tierfs_reading_open_file(lane->reading, (uint32_t)read->piece.tier,
                                                          read->inode.content_id, &is_memory);

    if (descriptor < 0)
        return;
    (void)posix_fadvise(descriptor, (off_t)read->place, (off_t)read->bytes, POSIX_FADV_DONTNEED);
    if (!is_packed)
        close(descriptor);
}

bool tierfs_reading_check(struct tierfs_reading_lane *lane, const struct tierfs_device_read *read,
                          const char *blocks, ssize_t got)
{
    if (got < 0 || (size_t)got != read->bytes)
        return false;
    if (match_sums(read, blocks))
        return is_still_so(lane, &read->inode, &read->piece);
    drop_from_cache(lane, read);
    return false;
}

bool tierfs_reading_wait(struct tierfs_reading_lane *lane, const struct tierfs_device_read *read, char *out)
{
    size_t done = 0;

    while (done < read->bytes) {
        ssize_t count =
            tierfs_read_at(read->descriptor, lane->scratch + done, read->bytes - done, read->place + done, 0);
        if (count <= 0)
            break;
        done += (size_t)count;
    }
    tierfs_reading_let_go(read);
    if (!tierfs_reading_check(lane, read, lane->scratch, (ssize_t)done))
        return false;
    memcpy(out, lane->scratch + read->skip, read->piece.length);
    return true;
}

void tierfs_reading_let_go(const struct tierfs_device_read *read)
{
    if (read->is_own)
        close(read->descriptor);
}

/* Returns the piece's length, -EAGAIN, or TIERFS_READING_WAITS, with *later filled in. */
static long read_piece(struct tierfs_reading_lane *lane, const struct tierfs_inode *inode,
                       const struct tierfs_reading_piece *piece, char *out, struct tierfs_device_read *later)
{
    bool is_packed = piece->extent.segment != 0;
    bool is_memory = lane->reading->tiers[piece->tier].is_memory;
    int descriptor = is_packed ? open_segment(lane, piece)
                               : tierfs_reading_open_file(lane->reading, (uint32_t)piece->tier,
                                                          inode->content_id, &is_memory);
    int flags = is_memory ? 0 : RWF_NOWAIT;

    if (descriptor < 0)
        return -EAGAIN;
    if (tierfs_read_at(descriptor, out, piece->length, piece->extent.place_bytes + piece->offset, flags) !=
        (ssize_t)piece->length) {
        plan_device_read(inode, piece, descriptor, later);
        return TIERFS_READING_WAITS;
    }
    if (!is_packed)
        close(descriptor);
    return is_still_so(lane, inode, piece) ? (long)piece->length : -EAGAIN;
}

long tierfs_reading_read(struct tierfs_reading_lane *lane, const struct tierfs_inode *inode, uint64_t offset,
                         size_t length, char *out, struct tierfs_device_read *later)
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
        struct tierfs_reading_piece piece = {
            .extent_no = (uint32_t)(at / TIERFS_EXTENT_BYTES),
            .offset = at,
            .length =
                left < TIERFS_EXTENT_BYTES - in_extent ? left : (size_t)(TIERFS_EXTENT_BYTES - in_extent),
            .first_block = (uint32_t)(in_extent / TIERFS_BLOCK_BYTES),
        };

        piece.block_count =
            (uint32_t)((in_extent + piece.length + TIERFS_BLOCK_BYTES - 1) / TIERFS_BLOCK_BYTES) -
            piece.first_block;
        if (locate(lane, inode, &piece) < 0)
            return -EAGAIN;
        long result = read_piece(lane, inode, &piece, out + done, later);
        /* What is spread over several places has to be put together: it is waited for here. */
        if (result == TIERFS_READING_WAITS && piece.length < length)
            result = tierfs_reading_wait(lane, later, out + done) ? 0 : -EAGAIN;
        if (result < 0)
            return result;
        done += piece.length;
    }
    return (long)length;
}
