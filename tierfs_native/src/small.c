#define _GNU_SOURCE
#include "small.h"

#include "answer.h"
#include "log.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

struct tierfs_small {
    struct tierfs_backing *backing;
    const struct tierfs_reading *reading;
    atomic_uint_fast64_t opens, reads, missed;
    atomic_uint_fast64_t touched_count; /* ever; each is at its number modulo the size */
    atomic_uint_fast64_t touched[TIERFS_SMALL_TOUCHED];
    uint64_t told_count;
    void (*on_miss)(void *context);
    void *context;
    struct tierfs_disk *disk;  /* NULL: workers wait for the device */
    atomic_uint waiting;       /* workers that do */
    unsigned waiting_limit;
    unsigned workers;
    struct tierfs_reading_lane *lanes[];
};

int tierfs_small_create(struct tierfs_backing *backing, const struct tierfs_reading *reading,
                        unsigned workers, unsigned may_wait, struct tierfs_small **small)
{
    struct tierfs_small *made = calloc(1, sizeof *made + workers * sizeof made->lanes[0]);

    if (made == NULL)
        return -ENOMEM;
    made->backing = backing;
    made->reading = reading;
    made->workers = workers;
    made->waiting_limit = may_wait;
    *small = made;
    return 0;
}

/* A regular file whose bytes are those of its content, and no newer ones in the engine's hands. 0 or -errno. */
static int find_clean(struct tierfs_reader *reader, uint64_t ino, struct tierfs_inode *inode)
{
    int result = tierfs_reader_begin(reader);

    if (result < 0)
        return result;
    result = tierfs_find_inode(reader, ino, inode);
    tierfs_reader_end(reader);
    if (result == 0 && (!S_ISREG(inode->mode) || (inode->flags & TIERFS_DATA_LOCAL) != 0))
        result = -EAGAIN;
    return result;
}

static bool passthrough_is_refused(struct tierfs_small *small)
{
    int refusal = 0;

    (void)tierfs_backing_opens(small->backing, &refusal);
    return refusal != 0;
}

static long answer_open(struct tierfs_small *small, struct tierfs_reader *reader, uint64_t ino,
                        const void *body, size_t body_bytes, void *out)
{
    struct fuse_open_out reply = {.fh = TIERFS_FH_FRONT | ino,
                                  .open_flags = FOPEN_KEEP_CACHE | FOPEN_NOFLUSH};
    struct fuse_open_in asked;
    struct tierfs_inode inode;

    if (body_bytes < sizeof asked || (ino & TIERFS_FH_FRONT) != 0)
        return TIERFS_RELAY;
    memcpy(&asked, body, sizeof asked);
    if ((asked.flags & O_ACCMODE) != O_RDONLY || (asked.flags & O_TRUNC) != 0 ||
        find_clean(reader, ino, &inode) < 0)
        return TIERFS_RELAY;
    if (inode.size_bytes >= TIERFS_READING_MAX_BYTES && !passthrough_is_refused(small))
        return TIERFS_RELAY;
    if (!tierfs_backing_open_here(small->backing, ino))
        return TIERFS_RELAY;
    atomic_fetch_add_explicit(&small->opens, 1, memory_order_relaxed);
    memcpy(out, &reply, sizeof reply);
    return sizeof reply;
}

/* Whether a worker may wait for the device: there has to be another one for all that does not. */
static bool begin_wait(struct tierfs_small *small)
{
    if (atomic_fetch_add_explicit(&small->waiting, 1, memory_order_relaxed) < small->waiting_limit)
        return true;
    atomic_fetch_sub_explicit(&small->waiting, 1, memory_order_relaxed);
    return false;
}

/* A read for which the device is needed: by another thread, if this one must not wait for it. */
static long read_device(struct tierfs_small *small, struct tierfs_reading_lane *lane,
                        const struct tierfs_device_read *read, const struct fuse_in_header *header,
                        size_t body_bytes, const struct tierfs_origin *origin, char *out)
{
    bool may_wait = begin_wait(small);

    if (!may_wait && small->disk != NULL &&
        tierfs_disk_read(small->disk, read, header, sizeof *header + body_bytes, origin))
        return TIERFS_NO_REPLY;
    bool done = tierfs_reading_wait(lane, read, out);
    if (may_wait)
        atomic_fetch_sub_explicit(&small->waiting, 1, memory_order_relaxed);
    return done ? (long)read->piece.length : -EAGAIN;
}

static long answer_read(struct tierfs_small *small, unsigned worker, struct tierfs_reader *reader,
                        const struct fuse_in_header *header, size_t body_bytes,
                        const struct tierfs_origin *origin, const struct fuse_read_in *asked, void *out,
                        size_t out_capacity)
{
    const uint64_t ino = header->nodeid;
    struct tierfs_device_read later;
    struct tierfs_inode inode;
    long result = -EAGAIN;

    if (small->lanes[worker] == NULL && tierfs_reading_lane_open(small->reading, &small->lanes[worker]) < 0)
        small->lanes[worker] = NULL;
    if (small->lanes[worker] != NULL && asked->size <= out_capacity && find_clean(reader, ino, &inode) == 0)
        result = tierfs_reading_read(small->lanes[worker], &inode, asked->offset, asked->size, out, &later);
    if (result == TIERFS_READING_WAITS)
        result = read_device(small, small->lanes[worker], &later, header, body_bytes, origin, out);
    if (result < 0 && result != TIERFS_NO_REPLY) {
        tierfs_small_missed(small);
        return TIERFS_RELAY;
    }
    atomic_fetch_add_explicit(&small->reads, 1, memory_order_relaxed);
    uint64_t number = atomic_fetch_add_explicit(&small->touched_count, 1, memory_order_relaxed);
    atomic_store_explicit(&small->touched[number % TIERFS_SMALL_TOUCHED], ino, memory_order_relaxed);
    return result;
}

void tierfs_small_missed(struct tierfs_small *small)
{
    atomic_fetch_add_explicit(&small->missed, 1, memory_order_relaxed);
    if (small->on_miss != NULL)
        small->on_miss(small->context);
}

long tierfs_small_answer(struct tierfs_small *small, unsigned worker, struct tierfs_reader *reader,
                         const struct fuse_in_header *header, const void *body, size_t body_bytes,
                         const struct tierfs_origin *origin, void *out, size_t out_capacity)
{
    union {
        uint64_t fh; /* the first field of each */
        struct fuse_read_in read;
        struct fuse_release_in release;
        struct fuse_flush_in flush;
    } asked;
    size_t wanted;

    switch (header->opcode) {
    case FUSE_OPEN:
        return answer_open(small, reader, header->nodeid, body, body_bytes, out);
    case FUSE_READ:
        wanted = sizeof asked.read;
        break;
    case FUSE_RELEASE:
        wanted = sizeof asked.release;
        break;
    case FUSE_FLUSH:
        wanted = sizeof asked.flush;
        break;
    default:
        return TIERFS_NOT_SMALL;
    }
    if (body_bytes < wanted)
        return TIERFS_NOT_SMALL;
    memcpy(&asked, body, wanted);
    if ((asked.fh & TIERFS_FH_FRONT) == 0 || (asked.fh & ~TIERFS_FH_FRONT) != header->nodeid)
        return TIERFS_NOT_SMALL;
    if (header->opcode == FUSE_READ)
        return answer_read(small, worker, reader, header, body_bytes, origin, &asked.read, out, out_capacity);
    if (header->opcode == FUSE_RELEASE)
        tierfs_backing_released_here(small->backing, header->nodeid);
    return 0;
}

size_t tierfs_small_touched(struct tierfs_small *small, uint64_t *inos)
{
    uint64_t end = atomic_load_explicit(&small->touched_count, memory_order_relaxed);
    size_t count = 0;

    if (end - small->told_count > TIERFS_SMALL_TOUCHED)
        small->told_count = end - TIERFS_SMALL_TOUCHED;
    for (; small->told_count < end; small->told_count++) {
        size_t slot = small->told_count % TIERFS_SMALL_TOUCHED;
        uint64_t ino = atomic_exchange_explicit(&small->touched[slot], 0, memory_order_relaxed);
        if (ino != 0) /* else its reader has the number, and has not written yet */
            inos[count++] = ino;
    }
    return count;
}

void tierfs_small_set_disk(struct tierfs_small *small, struct tierfs_disk *disk)
{
    small->disk = disk;
}

void tierfs_small_on_miss(struct tierfs_small *small, void (*on_miss)(void *context), void *context)
{
    small->on_miss = on_miss;
    small->context = context;
}

void tierfs_small_counts(struct tierfs_small *small, uint64_t *opens, uint64_t *reads, uint64_t *missed)
{
    *opens = atomic_load(&small->opens);
    *reads = atomic_load(&small->reads);
    *missed = atomic_load(&small->missed);
}
