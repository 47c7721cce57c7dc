/* From paths to places in tier files. */
#include "batch_lane.h"

#include <errno.h>
#include <limits.h>
#include <linux/capability.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAY_SEARCH 1u
#define MAY_READ 4u

struct resolving {
    struct tierfs_lane *lane;
    const struct tierfs_caller *caller;
    int64_t now_ns;
    struct tierfs_inode root; /* its mode tells the defaults of this mount, unless META_KNOWN */
};

static bool has_capability(unsigned which)
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct sets[_LINUX_CAPABILITY_U32S_3] = {0};

    if (syscall(SYS_capget, &header, sets) < 0)
        return false;
    return (sets[CAP_TO_INDEX(which)].effective & CAP_TO_MASK(which)) != 0;
}

void tierfs_caller_now(struct tierfs_caller *caller, bool believe_capabilities)
{
    int groups = getgroups(TIERFS_BATCH_GROUPS, caller->groups);

    /* An id that cannot be set returns the one that is. */
    caller->uid = (uint32_t)setfsuid((uid_t)-1);
    caller->gid = (uint32_t)setfsgid((gid_t)-1);
    caller->too_many_groups = groups < 0;
    caller->group_count = groups < 0 ? 0 : (size_t)groups;
    caller->overrides =
        believe_capabilities && (has_capability(CAP_DAC_OVERRIDE) || has_capability(CAP_DAC_READ_SEARCH));
}

static bool is_member(const struct tierfs_caller *caller, uint32_t gid)
{
    if (caller->gid == gid)
        return true;
    for (size_t i = 0; i < caller->group_count; i++)
        if (caller->groups[i] == gid)
            return true;
    return false;
}

/* The kernel's generic_permission(), without access control lists: the mount has none. */
static bool may(const struct resolving *with, const struct tierfs_inode *inode, uint32_t wanted)
{
    uint32_t mode = inode->mode, uid = inode->uid, gid = inode->gid;

    if (with->caller->overrides)
        return true;
    if ((inode->flags & TIERFS_META_KNOWN) == 0 && inode->ino != TIERFS_ROOT_INO) {
        /* Mode and owner are what the options of the mount say, which only the root's own record tells. */
        if (with->root.flags & TIERFS_META_KNOWN)
            return false;
        uid = with->root.uid;
        gid = with->root.gid;
        mode = S_ISDIR(inode->mode) ? with->root.mode : with->root.mode & ~0111u;
    }
    if (with->caller->uid == uid)
        return (mode >> 6 & wanted) == wanted;
    if (with->caller->too_many_groups)
        return (mode >> 3 & mode & wanted) == wanted;
    if (is_member(with->caller, gid))
        mode >>= 3;
    return (mode & wanted) == wanted;
}

/* One step down. The record is good if the inode's own is, or its directory's listing. */
static enum tierfs_outcome step(const struct resolving *with, uint64_t parent, int64_t listed_until_ns,
                                const char *name, size_t length, struct tierfs_inode *inode)
{
    struct tierfs_dirent entry;

    if (tierfs_find_entry(with->lane->names, parent, name, length, &entry) < 0 ||
        tierfs_find_inode(with->lane->names, entry.ino, inode) < 0)
        return TIERFS_UNKNOWN_NAME;
    if (inode->valid_until_ns <= with->now_ns && listed_until_ns <= with->now_ns)
        return TIERFS_UNKNOWN_NAME;
    return TIERFS_LOCAL;
}

static size_t slot_of(const char *path, size_t length)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);

    for (size_t i = 0; i < length; i++)
        hash = (hash ^ (uint8_t)path[i]) * UINT64_C(0x100000001b3);
    return (size_t)(hash ^ hash >> 32) & (TIERFS_KNOWN_DIRECTORIES - 1);
}

static size_t length_of_parent(const char *path, size_t length)
{
    while (length > 0 && path[length - 1] != '/')
        length--;
    return length > 0 ? length - 1 : 0;
}

static const char *name_in(const char *path, size_t parent_length)
{
    return parent_length > 0 ? path + parent_length + 1 : path;
}

/* Fills in *found, which may be overwritten by the next call. */
static void resolve_directory(const struct resolving *with, const char *path, size_t length,
                              struct tierfs_known_directory *found)
{
    struct tierfs_known_directory *slot = &with->lane->directories[slot_of(path, length)];
    const size_t parent_length = length_of_parent(path, length);
    const char *name = name_in(path, parent_length);
    struct tierfs_inode inode;

    if (slot->call == with->lane->call && slot->path_bytes == length &&
        memcmp(slot->path, path, length) == 0) {
        *found = *slot;
        return;
    }
    *found = (struct tierfs_known_directory){.outcome = TIERFS_LOCAL};
    if (length == 0) {
        inode = with->root;
    } else {
        /* Not deeper than a path has parts: PATH_MAX bounds it. */
        resolve_directory(with, path, parent_length, found);
        if (found->outcome == TIERFS_LOCAL)
            found->outcome =
                step(with, found->ino, found->listed_until_ns, name, length - (size_t)(name - path), &inode);
    }
    if (found->outcome == TIERFS_LOCAL && !S_ISDIR(inode.mode))
        found->outcome = TIERFS_NOT_A_FILE;
    else if (found->outcome == TIERFS_LOCAL && !may(with, &inode, MAY_SEARCH))
        found->outcome = TIERFS_NO_ACCESS;
    if (found->outcome == TIERFS_LOCAL) {
        found->ino = inode.ino;
        found->listed_until_ns = inode.listed_until_ns;
    }
    found->path = path;
    found->path_bytes = length;
    found->call = with->lane->call;
    *slot = *found;
}

/* Relative, and every part a plain name: what `..` means depends on links, and that is the mount's business. */
static bool is_plain(const char *path, size_t length)
{
    size_t start = 0;

    if (length == 0 || length >= PATH_MAX || memchr(path, '\0', length) != NULL)
        return false;
    for (size_t i = 0; i <= length; i++) {
        if (i < length && path[i] != '/')
            continue;
        if (i == start || i - start > TIERFS_NAME_MAX || (i - start == 1 && path[start] == '.') ||
            (i - start == 2 && path[start] == '.' && path[start + 1] == '.'))
            return false;
        start = i + 1;
    }
    return true;
}

static enum tierfs_outcome resolve(const struct resolving *with, struct tierfs_wanted *file)
{
    struct tierfs_known_directory parent;
    struct tierfs_inode inode;
    enum tierfs_outcome outcome;
    size_t parent_length;
    const char *name;

    if (!is_plain(file->path, file->path_bytes))
        return TIERFS_ELSEWHERE;
    parent_length = length_of_parent(file->path, file->path_bytes);
    name = name_in(file->path, parent_length);
    resolve_directory(with, file->path, parent_length, &parent);
    if (parent.outcome != TIERFS_LOCAL)
        return parent.outcome;
    outcome = step(with, parent.ino, parent.listed_until_ns, name,
                   file->path_bytes - (size_t)(name - file->path), &inode);
    if (outcome != TIERFS_LOCAL)
        return outcome;
    if (!S_ISREG(inode.mode))
        return TIERFS_NOT_A_FILE;
    if (!may(with, &inode, MAY_READ))
        return TIERFS_NO_ACCESS;
    if (file->expected_ino != 0 && file->expected_ino != inode.ino)
        return TIERFS_REPLACED;
    if (inode.flags & TIERFS_DATA_LOCAL)
        return TIERFS_BEING_WRITTEN;
    file->ino = inode.ino;
    file->size_bytes = inode.size_bytes;
    memcpy(file->content_id, inode.content_id, sizeof(file->content_id));
    return TIERFS_LOCAL;
}

static int resolve_all(struct tierfs_lane *lane, const struct tierfs_caller *caller,
                       struct tierfs_wanted *files, size_t count)
{
    struct resolving with = {.lane = lane, .caller = caller};
    struct timespec now;
    int result;

    clock_gettime(CLOCK_REALTIME, &now);
    with.now_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    result = tierfs_reader_begin(lane->names);
    if (result < 0)
        return result;
    lane->names_snapshot = tierfs_reader_snapshot(lane->names);
    result = tierfs_find_inode(lane->names, TIERFS_ROOT_INO, &with.root);
    for (size_t i = 0; i < count && result == 0; i++)
        if (files[i].outcome == TIERFS_LOCAL)
            files[i].outcome = resolve(&with, &files[i]);
    tierfs_reader_end(lane->names);
    return result;
}

/* Room for one more piece and its sums. */
static int reserve(struct tierfs_lane *lane)
{
    if (lane->piece_count == lane->piece_capacity) {
        const size_t capacity = lane->piece_capacity > 0 ? lane->piece_capacity * 2 : 256;
        void *grown = reallocarray(lane->pieces, capacity, sizeof(*lane->pieces));

        if (grown == NULL)
            return -ENOMEM;
        lane->pieces = grown;
        lane->piece_capacity = capacity;
    }
    if (lane->sum_capacity - lane->sum_count < TIERFS_EXTENT_BLOCKS) {
        const size_t capacity = lane->sum_capacity > 0 ? lane->sum_capacity * 2 : 1024;
        void *grown = reallocarray(lane->sums, capacity, sizeof(*lane->sums));

        if (grown == NULL)
            return -ENOMEM;
        lane->sums = grown;
        lane->sum_capacity = capacity;
    }
    return 0;
}

int tierfs_lane_find_extent(struct tierfs_lane *lane, unsigned tier, const struct tierfs_wanted *file,
                            uint32_t extent_no)
{
    const int result = tierfs_index_find(lane->indexes[tier], file->content_id, extent_no, &lane->extent);

    if (result < 0)
        return result;
    return lane->extent.size_bytes == file->size_bytes ? 0 : -ENOENT;
}

static int add_piece(struct tierfs_lane *lane, unsigned tier, size_t number, const struct tierfs_wanted *file,
                     uint32_t extent_no, uint32_t first_block, uint32_t block_count)
{
    const struct tierfs_extent *extent = &lane->extent;
    const uint64_t offset = extent_no * TIERFS_EXTENT_BYTES + first_block * TIERFS_BLOCK_BYTES;
    const uint64_t left = file->size_bytes - offset;
    const uint64_t blocks_bytes = block_count * TIERFS_BLOCK_BYTES;

    if (reserve(lane) < 0)
        return -ENOMEM;
    lane->pieces[lane->piece_count++] = (struct tierfs_piece){
        .file = number,
        .tier = tier,
        .extent_no = extent_no,
        .first_block = first_block,
        .block_count = block_count,
        .segment = extent->segment,
        .place_bytes = extent->place_bytes,
        .offset_bytes = offset,
        .length = (uint32_t)(left < blocks_bytes ? left : blocks_bytes),
        .first_sum = lane->sum_count,
        .descriptor = -1,
    };
    memcpy(lane->sums + lane->sum_count, extent->sums + first_block, block_count * sizeof(*extent->sums));
    lane->sum_count += block_count;
    return 0;
}

/* A piece for every run of blocks in the word. */
static int add_pieces(struct tierfs_lane *lane, unsigned tier, size_t number,
                      const struct tierfs_wanted *file, uint32_t extent_no, uint64_t word)
{
    while (word != 0) {
        const uint32_t first = (uint32_t)__builtin_ctzll(word);
        const uint64_t rest = ~(word >> first);
        const uint32_t count = rest != 0 ? (uint32_t)__builtin_ctzll(rest) : 64;

        if (add_piece(lane, tier, number, file, extent_no, first, count) < 0)
            return -ENOMEM;
        word &= ~(tierfs_block_mask(count) << first);
    }
    return 0;
}

/* Every block from the fastest tier that has it. */
static enum tierfs_outcome locate_extent(struct tierfs_lane *lane, size_t number,
                                         const struct tierfs_wanted *file, uint32_t extent_no)
{
    uint64_t missing = tierfs_block_mask(tierfs_blocks_in_extent(file->size_bytes, extent_no));
    uint64_t unverified = 0;

    for (unsigned tier = 0; tier < lane->batch->tier_count && missing != 0; tier++) {
        const struct tierfs_extent *extent = &lane->extent;
        uint64_t here;

        if (tierfs_lane_find_extent(lane, tier, file, extent_no) < 0)
            continue;
        here = missing & extent->present & ~extent->unverified;
        unverified |= extent->unverified;
        if (add_pieces(lane, tier, number, file, extent_no, here) < 0)
            return TIERFS_UNREADABLE;
        missing &= ~here;
    }
    if (missing != 0)
        return (missing & ~unverified) == 0 ? TIERFS_UNVERIFIED : TIERFS_ABSENT;
    return TIERFS_LOCAL;
}

static enum tierfs_outcome locate(struct tierfs_lane *lane, size_t number, const struct tierfs_wanted *file)
{
    const uint64_t extents =
        file->size_bytes / TIERFS_EXTENT_BYTES + (file->size_bytes % TIERFS_EXTENT_BYTES != 0);

    if (extents > UINT32_MAX)
        return TIERFS_ABSENT;
    for (uint32_t extent_no = 0; extent_no < extents; extent_no++) {
        const enum tierfs_outcome outcome = locate_extent(lane, number, file, extent_no);

        if (outcome != TIERFS_LOCAL)
            return outcome;
    }
    return TIERFS_LOCAL;
}

static int locate_all(struct tierfs_lane *lane, struct tierfs_wanted *files, size_t count)
{
    unsigned begun = 0;
    int result = 0;

    while (begun < lane->batch->tier_count && result == 0) {
        result = tierfs_index_begin(lane->indexes[begun], &lane->snapshots[begun]);
        if (result == 0)
            begun++;
    }
    for (size_t i = 0; i < count && result == 0; i++) {
        struct tierfs_wanted *file = &files[i];

        if (file->outcome != TIERFS_LOCAL)
            continue;
        file->first_piece = lane->piece_count;
        file->outcome = locate(lane, i, file);
        if (file->outcome != TIERFS_LOCAL)
            lane->piece_count = file->first_piece;
        file->piece_count = lane->piece_count - file->first_piece;
    }
    while (begun-- > 0)
        tierfs_index_end(lane->indexes[begun]);
    return result;
}

int tierfs_batch_plan(struct tierfs_lane *lane, const struct tierfs_caller *caller,
                      struct tierfs_wanted *files, size_t count, bool names_only)
{
    int result;

    lane->call++;
    lane->piece_count = lane->sum_count = 0;
    if (caller->uid != lane->batch->owner) {
        for (size_t i = 0; i < count; i++)
            if (files[i].outcome == TIERFS_LOCAL)
                files[i].outcome = TIERFS_NO_ACCESS;
        return 0;
    }
    result = resolve_all(lane, caller, files, count);
    if (result == 0 && !names_only)
        result = locate_all(lane, files, count);
    return result;
}
