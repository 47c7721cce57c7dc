#define _GNU_SOURCE
#include "noopen.h"

#include "answer.h"
#include "reading.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

struct tierfs_noopen {
    enum tierfs_open_mode mode;
    struct tierfs_backing *backing;
    void (*on_begin)(void *context);
    void *context;
    atomic_uint small_in_a_row;
    atomic_bool begun;
};

int tierfs_noopen_create(enum tierfs_open_mode mode, struct tierfs_backing *backing,
                         struct tierfs_noopen **noopen)
{
    struct tierfs_noopen *made;

    if (mode != TIERFS_OPEN_ASK && mode != TIERFS_OPEN_AUTO && mode != TIERFS_OPEN_NONE)
        return -EINVAL;
    made = calloc(1, sizeof *made);
    if (made == NULL)
        return -ENOMEM;
    made->mode = mode;
    made->backing = backing;
    *noopen = made;
    return 0;
}

void tierfs_noopen_destroy(struct tierfs_noopen *noopen)
{
    free(noopen);
}

void tierfs_noopen_on_begin(struct tierfs_noopen *noopen, void (*on_begin)(void *context), void *context)
{
    noopen->on_begin = on_begin;
    noopen->context = context;
}

bool tierfs_noopen_has_begun(const struct tierfs_noopen *noopen)
{
    return atomic_load_explicit(&noopen->begun, memory_order_acquire);
}

/* Whether that open is of a file which would not be passed through anyway. */
static bool is_small(struct tierfs_reader *reader, uint64_t ino)
{
    struct tierfs_inode inode;

    if (reader == NULL || tierfs_reader_begin(reader) < 0)
        return false;
    int result = tierfs_find_inode(reader, ino, &inode);
    tierfs_reader_end(reader);
    return result == 0 && S_ISREG(inode.mode) && inode.size_bytes < TIERFS_READING_MAX_BYTES;
}

/* Whether from this open on none is answered. */
static bool begins_with(struct tierfs_noopen *noopen, struct tierfs_reader *reader, uint64_t ino)
{
    if (noopen->mode == TIERFS_OPEN_ASK)
        return false;
    if (noopen->mode == TIERFS_OPEN_AUTO) {
        if (!is_small(reader, ino)) {
            atomic_store_explicit(&noopen->small_in_a_row, 0, memory_order_relaxed);
            return false;
        }
        if (atomic_fetch_add_explicit(&noopen->small_in_a_row, 1, memory_order_relaxed) < TIERFS_NOOPEN_AFTER)
            return false;
    }
    /*
     * An inode that is passed through can only be opened in that way, which would be an error for such opens; and of
     * what the engine has opened it would not hear the end.
     */
    if (!tierfs_backing_stop_opens(noopen->backing)) {
        atomic_store_explicit(&noopen->small_in_a_row, 0, memory_order_relaxed);
        return false;
    }
    if (!atomic_exchange(&noopen->begun, true) && noopen->on_begin != NULL)
        noopen->on_begin(noopen->context);
    return true;
}

/* What the front can only refuse: the handle could not be written through, had it been asked for. */
static long refuse_change(const void *body, size_t body_bytes, size_t handle_at)
{
    uint64_t fh;

    if (body_bytes < handle_at + sizeof fh)
        return TIERFS_NOT_NOOPEN;
    memcpy(&fh, (const char *)body + handle_at, sizeof fh);
    return fh == 0 ? -EROFS : TIERFS_NOT_NOOPEN;
}

long tierfs_noopen_answer(struct tierfs_noopen *noopen, struct tierfs_reader *reader,
                          const struct fuse_in_header *header, void *body, size_t body_bytes)
{
    uint64_t fh;

    switch (header->opcode) {
    case FUSE_OPEN:
        if (tierfs_noopen_has_begun(noopen) || begins_with(noopen, reader, header->nodeid))
            return -ENOSYS;
        return TIERFS_NOT_NOOPEN;
    case FUSE_WRITE:
    case FUSE_FALLOCATE:
        return refuse_change(body, body_bytes, 0);
    case FUSE_COPY_FILE_RANGE:
    case FUSE_COPY_FILE_RANGE_64:
        return refuse_change(body, body_bytes, offsetof(struct fuse_copy_file_range_in, fh_out));
    case FUSE_READ: /* the handle comes first in all of these */
    case FUSE_FLUSH:
    case FUSE_FSYNC:
    case FUSE_LSEEK:
        break;
    default:
        return TIERFS_NOT_NOOPEN;
    }
    if (body_bytes < sizeof fh || (header->nodeid & TIERFS_FH_FRONT) != 0)
        return TIERFS_NOT_NOOPEN;
    memcpy(&fh, body, sizeof fh);
    if (fh != 0)
        return TIERFS_NOT_NOOPEN;
    /* There is nothing to write back at a close; this too is remembered, and each close costs nothing then. */
    if (header->opcode == FUSE_FLUSH)
        return -ENOSYS;
    fh = TIERFS_FH_FRONT | header->nodeid;
    memcpy(body, &fh, sizeof fh);
    return TIERFS_NOT_NOOPEN;
}
