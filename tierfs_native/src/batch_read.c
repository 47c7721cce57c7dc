/* From places in tier files to bytes in memory. What may be believed, and why, stands in batch.h. */
#include "batch_lane.h"
#include "batch_sum.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

struct window {
    struct tierfs_lane *lane;
    struct tierfs_wanted *files;
    struct tierfs_piece *pieces;
    size_t count;
    uint64_t snapshots[TIERFS_BATCH_TIERS]; /* of the indexes, before the files were opened */
};

static bool is_wanted(const struct window *window, size_t i)
{
    return window->files[window->pieces[i].file].outcome == TIERFS_LOCAL;
}

static void give_up(const struct window *window, size_t i, enum tierfs_outcome outcome)
{
    window->files[window->pieces[i].file].outcome = outcome;
}

static int directory_of(const struct window *window, const struct tierfs_piece *piece)
{
    return window->lane->batch->tiers[piece->tier].directory;
}

/* -- opening --------------------------------------------------------------------------------------------------- */

/* Without waiting for the device. Negative: it has to be done in the slow way. */
static int open_cached(int directory, const char *path)
{
    const struct open_how how = {.flags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW, .resolve = RESOLVE_CACHED};

    return (int)syscall(SYS_openat2, directory, path, &how, sizeof(how));
}

static struct tierfs_segment_file *slot_of(struct tierfs_lane *lane, const struct tierfs_piece *piece)
{
    return &lane->segment_files[(piece->segment >> 1) & (TIERFS_SEGMENT_FILES - 1)];
}

static bool is_open(const struct tierfs_segment_file *slot, const struct tierfs_piece *piece)
{
    return slot->segment == piece->segment && slot->tier == piece->tier;
}

/* In this window, for an earlier piece. */
static bool is_being_opened(const struct tierfs_segment_file *slot, const struct tierfs_piece *piece)
{
    return is_open(slot, piece) && slot->descriptor < 0;
}

/* One descriptor for the extents of one content that follow each other. */
static bool shares_file(const struct tierfs_piece *piece, const struct tierfs_piece *before)
{
    return piece->segment == 0 && before->segment == 0 && piece->file == before->file &&
           piece->tier == before->tier;
}

static void note_opened(const struct window *window, size_t i, int descriptor)
{
    struct tierfs_piece *piece = &window->pieces[i];
    struct tierfs_segment_file *slot = slot_of(window->lane, piece);

    /* Exactly these bytes: what else the kernel would read ahead nobody has asked for. */
    (void)posix_fadvise(descriptor, 0, 0, POSIX_FADV_RANDOM);
    piece->descriptor = descriptor;
    piece->owns_descriptor = true;
    if (piece->segment != 0 && (slot->segment == 0 || is_being_opened(slot, piece))) {
        *slot = (struct tierfs_segment_file){piece->segment, piece->tier, descriptor};
        piece->owns_descriptor = false;
    }
}

/* With the piece that opened the file for them. */
static void share_descriptors(const struct window *window)
{
    for (size_t i = 0; i < window->count; i++) {
        struct tierfs_piece *piece = &window->pieces[i];
        const struct tierfs_segment_file *slot = slot_of(window->lane, piece);

        if (!is_wanted(window, i) || piece->descriptor >= 0)
            continue;
        if (piece->segment == 0)
            piece->descriptor = window->pieces[i - 1].descriptor; /* shares_file: it is not the first */
        else if (is_open(slot, piece))
            piece->descriptor = slot->descriptor;
        else
            give_up(window, i, TIERFS_CHANGED);
    }
}

static void open_files(const struct window *window)
{
    struct tierfs_lane *lane = window->lane;
    size_t waiting = 0;

    for (size_t i = 0; i < window->count; i++) {
        struct tierfs_piece *piece = &window->pieces[i];
        struct tierfs_segment_file *slot = slot_of(lane, piece);
        int descriptor;

        piece->descriptor = -1;
        piece->owns_descriptor = piece->from_device = false;
        piece->done = 0;
        if (!is_wanted(window, i) || (i > 0 && shares_file(piece, piece - 1)))
            continue;
        if (piece->segment != 0 && is_open(slot, piece)) {
            piece->descriptor = slot->descriptor;
            continue;
        }
        tierfs_tier_path(lane->paths[waiting], piece->segment, window->files[piece->file].content_id);
        descriptor = open_cached(directory_of(window, piece), lane->paths[waiting]);
        if (descriptor >= 0) {
            note_opened(window, i, descriptor);
            continue;
        }
        if (piece->segment != 0 && slot->segment == 0)
            *slot = (struct tierfs_segment_file){piece->segment, piece->tier, -1};
        lane->call_pieces[waiting] = i;
        lane->calls[waiting] = (struct tierfs_call){
            .kind = TIERFS_CALL_OPEN,
            .descriptor = directory_of(window, piece),
            .path = lane->paths[waiting],
        };
        waiting++;
    }
    if (waiting > 0)
        tierfs_ring_run(lane->ring, lane->calls, waiting);
    for (size_t call = 0; call < waiting; call++) {
        const size_t i = lane->call_pieces[call];

        if (lane->calls[call].result >= 0) {
            note_opened(window, i, lane->calls[call].result);
            continue;
        }
        if (window->pieces[i].segment != 0 &&
            is_being_opened(slot_of(lane, &window->pieces[i]), &window->pieces[i]))
            slot_of(lane, &window->pieces[i])->segment = 0;
        give_up(window, i, lane->calls[call].result == -ENOENT ? TIERFS_CHANGED : TIERFS_UNREADABLE);
    }
    share_descriptors(window);
}

static void close_files(const struct window *window)
{
    for (size_t i = 0; i < window->count; i++)
        if (window->pieces[i].owns_descriptor)
            close(window->pieces[i].descriptor);
}

static void close_segments(struct tierfs_lane *lane)
{
    for (size_t i = 0; i < TIERFS_SEGMENT_FILES; i++)
        if (lane->segment_files[i].segment != 0)
            close(lane->segment_files[i].descriptor);
    memset(lane->segment_files, 0, sizeof(lane->segment_files));
}

/* -- reading --------------------------------------------------------------------------------------------------- */

static char *place_of(const struct window *window, const struct tierfs_piece *piece)
{
    return window->files[piece->file].destination + piece->offset_bytes;
}

static uint64_t file_offset(const struct tierfs_piece *piece)
{
    return piece->place_bytes + piece->offset_bytes;
}

/* What the page cache has, and everything where the tier is memory (tmpfs does not know RWF_NOWAIT). */
static void read_cached(const struct window *window, size_t i)
{
    struct tierfs_piece *piece = &window->pieces[i];
    const struct iovec vector = {.iov_base = place_of(window, piece), .iov_len = piece->length};
    const int flags = window->lane->batch->tiers[piece->tier].is_memory ? 0 : RWF_NOWAIT;
    ssize_t count;

    do
        count = preadv2(piece->descriptor, &vector, 1, (off_t)file_offset(piece), flags);
    while (count < 0 && errno == EINTR);
    if (count > 0)
        piece->done = (uint32_t)count;
    else if (count == 0)
        give_up(window, i, TIERFS_CHANGED);
    else if (errno != EAGAIN && errno != EOPNOTSUPP)
        give_up(window, i, TIERFS_UNREADABLE);
}

static size_t prepare_reads(const struct window *window)
{
    struct tierfs_lane *lane = window->lane;
    size_t count = 0;

    for (size_t i = 0; i < window->count; i++) {
        struct tierfs_piece *piece = &window->pieces[i];

        if (!is_wanted(window, i) || piece->done == piece->length)
            continue;
        piece->from_device = true;
        lane->call_pieces[count] = i;
        lane->calls[count++] = (struct tierfs_call){
            .kind = TIERFS_CALL_READ,
            .descriptor = piece->descriptor,
            .buffer = place_of(window, piece) + piece->done,
            .length = piece->length - piece->done,
            .offset = file_offset(piece) + piece->done,
        };
    }
    return count;
}

static void read_pieces(const struct window *window)
{
    struct tierfs_lane *lane = window->lane;
    size_t count;

    for (size_t i = 0; i < window->count; i++)
        if (is_wanted(window, i))
            read_cached(window, i);
    /* A short read is continued; every round makes progress or gives up. */
    while ((count = prepare_reads(window)) > 0) {
        tierfs_ring_run(lane->ring, lane->calls, count);
        for (size_t call = 0; call < count; call++) {
            const size_t i = lane->call_pieces[call];
            const int result = lane->calls[call].result;

            if (result > 0)
                window->pieces[i].done += (uint32_t)result;
            else
                give_up(window, i, result == 0 ? TIERFS_CHANGED : TIERFS_UNREADABLE);
        }
    }
}

/* -- believing ------------------------------------------------------------------------------------------------- */

/* The bytes that came from the device are those that were once written. */
static void verify_pieces(const struct window *window)
{
    for (size_t i = 0; i < window->count; i++) {
        const struct tierfs_piece *piece = &window->pieces[i];
        const char *data = place_of(window, piece);

        if (!is_wanted(window, i) || !piece->from_device)
            continue;
        for (uint32_t block = 0; block < piece->block_count; block++) {
            const uint64_t start = block * TIERFS_BLOCK_BYTES;
            const uint64_t left = piece->length - start;
            const size_t length = (size_t)(left < TIERFS_BLOCK_BYTES ? left : TIERFS_BLOCK_BYTES);

            if (tierfs_block_sum(data + start, length) == window->lane->sums[piece->first_sum + block])
                continue;
            /* The engine must not find them in the page cache, where it would believe them. */
            (void)posix_fadvise(piece->descriptor, (off_t)file_offset(piece), (off_t)piece->length,
                                POSIX_FADV_DONTNEED);
            give_up(window, i, TIERFS_UNREADABLE);
            break;
        }
    }
}

/* A file of a content's own is still the one at its path. */
static void check_paths(const struct window *window)
{
    for (size_t i = 0; i < window->count; i++) {
        const struct tierfs_piece *piece = &window->pieces[i];
        char path[TIERFS_TIER_PATH];
        struct stat opened, there;

        if (piece->segment != 0 || !piece->owns_descriptor || !is_wanted(window, i))
            continue;
        tierfs_tier_path(path, piece->segment, window->files[piece->file].content_id);
        if (fstat(piece->descriptor, &opened) < 0 ||
            fstatat(directory_of(window, piece), path, &there, AT_SYMLINK_NOFOLLOW) < 0 ||
            opened.st_ino != there.st_ino || opened.st_dev != there.st_dev)
            give_up(window, i, TIERFS_CHANGED);
    }
}

static bool is_same(const struct tierfs_lane *lane, const struct tierfs_piece *piece)
{
    const struct tierfs_extent *extent = &lane->extent;
    const uint64_t word = tierfs_block_mask(piece->block_count) << piece->first_block;

    return extent->segment == piece->segment && extent->place_bytes == piece->place_bytes &&
           (extent->present & ~extent->unverified & word) == word &&
           memcmp(extent->sums + piece->first_block, lane->sums + piece->first_sum,
                  piece->block_count * sizeof(*extent->sums)) == 0;
}

/*
 * The index of that tier says the same as it did in the snapshot `before`. After a read: and it cannot have said
 * anything else in between, which matters where bytes can go and come again at the same place.
 */
static uint64_t check_tier(const struct window *window, unsigned tier, uint64_t before, bool after_read)
{
    struct tierfs_lane *lane = window->lane;
    uint64_t now = 0;
    const bool begun = tierfs_index_begin(lane->indexes[tier], &now) == 0;

    if (begun && now == before) {
        tierfs_index_end(lane->indexes[tier]);
        return now;
    }
    for (size_t i = 0; i < window->count; i++) {
        const struct tierfs_piece *piece = &window->pieces[i];

        if (piece->tier != tier || !is_wanted(window, i))
            continue;
        if (!begun || (after_read && piece->segment == 0 && now - before > 1) ||
            tierfs_lane_find_extent(lane, tier, &window->files[piece->file], piece->extent_no) < 0 ||
            !is_same(lane, piece))
            give_up(window, i, TIERFS_CHANGED);
    }
    if (begun)
        tierfs_index_end(lane->indexes[tier]);
    return now;
}

/* The snapshot comes before the files are opened: see batch_index.h for what that says of them. */
static void check_indexes_before(struct window *window)
{
    for (unsigned tier = 0; tier < window->lane->batch->tier_count; tier++)
        window->snapshots[tier] = check_tier(window, tier, window->lane->snapshots[tier], false);
}

static void check_indexes_after(const struct window *window)
{
    for (unsigned tier = 0; tier < window->lane->batch->tier_count; tier++)
        (void)check_tier(window, tier, window->snapshots[tier], true);
}

/* The inodes still have the contents that were read. */
static void check_names(struct tierfs_lane *lane, struct tierfs_wanted *files, size_t count)
{
    const bool begun = tierfs_reader_begin(lane->names) == 0;

    if (begun && tierfs_reader_snapshot(lane->names) == lane->names_snapshot) {
        /* Nothing at all has been committed since the names were resolved. */
        tierfs_reader_end(lane->names);
        return;
    }
    for (size_t i = 0; i < count; i++) {
        struct tierfs_wanted *file = &files[i];
        struct tierfs_inode inode;

        if (file->outcome != TIERFS_LOCAL || file->piece_count == 0)
            continue;
        if (!begun || tierfs_find_inode(lane->names, file->ino, &inode) < 0 ||
            memcmp(inode.content_id, file->content_id, sizeof(inode.content_id)) != 0 ||
            (inode.flags & TIERFS_DATA_LOCAL) != 0)
            file->outcome = TIERFS_CHANGED;
    }
    if (begun)
        tierfs_reader_end(lane->names);
}

/* -- all of it ------------------------------------------------------------------------------------------------- */

static void read_window(struct window *window)
{
    check_indexes_before(window);
    open_files(window);
    read_pieces(window);
    verify_pieces(window);
    check_paths(window);
    check_indexes_after(window);
    close_files(window);
}

void tierfs_batch_read(struct tierfs_lane *lane, struct tierfs_wanted *files, size_t count)
{
    size_t first = 0;

    while (first < lane->piece_count) {
        struct window window = {.lane = lane, .files = files, .pieces = lane->pieces + first};
        uint64_t bytes = 0;

        while (first + window.count < lane->piece_count && window.count < TIERFS_WINDOW_PIECES &&
               (window.count == 0 || bytes + window.pieces[window.count].length <= TIERFS_WINDOW_BYTES))
            bytes += window.pieces[window.count++].length;
        read_window(&window);
        first += window.count;
    }
    close_segments(lane);
    check_names(lane, files, count);
}
