/*
 * Directories. The handle of one that is opened here is its inode number: the cookie in each request says where to
 * go on, so nothing is kept in between, and nothing is lost when the engine dies.
 */
#include "answer_parts.h"

/* Cookies 1 and 2 stand for . and ..; those of the namespace are shifted by that. */
#define DOT_COOKIE 1
#define DOT_DOT_COOKIE 2
/*
 * The kernel asks for attributes at the beginning of a directory, and later on if somebody has wanted those that it
 * got. For each entry it makes a dentry and an inode then, which costs it several times what the name alone does; and
 * find(1), for one, wants none of them. So the first answer is short.
 */
#define FIRST_PLUS_BYTES 4096

long tierfs_answer_opendir(const struct tierfs_request *request)
{
    struct fuse_open_out reply = {0};
    struct tierfs_inode directory;
    int status = tierfs_find_directory(request, &directory);

    if (status != 0)
        return tierfs_reply_of(status);
    if (tierfs_time_left_ns(request, directory.listed_until_ns) == 0 || directory.ino & TIERFS_FH_FRONT)
        return TIERFS_RELAY;
    reply.fh = TIERFS_FH_FRONT | directory.ino;
    memcpy(request->out, &reply, sizeof(reply));
    return sizeof(reply);
}

/* A directory being written to the reply. */
struct listing {
    const struct tierfs_request *request;
    bool plus;
    size_t capacity, used;
};

/* The scan stops here; no errno. */
#define FULL 1

/* inode: for its attributes; NULL: none are told, and the kernel looks the name up when it needs them. */
static int put_name(struct listing *listing, const char *name, size_t length, uint64_t cookie, uint64_t ino,
                    uint32_t type, const struct tierfs_inode *inode)
{
    const struct fuse_dirent entry = {
        .ino = ino, .off = cookie, .namelen = (uint32_t)length, .type = type >> 12};
    const size_t prefix = listing->plus ? sizeof(struct fuse_entry_out) : 0;
    const size_t bytes = fuse_align(prefix + sizeof(entry) + length);
    uint8_t *out = listing->request->out + listing->used;

    if (bytes > listing->capacity - listing->used)
        return FULL;
    if (listing->plus) {
        struct fuse_entry_out attributes = {0};

        if (inode != NULL)
            tierfs_put_entry(listing->request, inode, &attributes);
        memcpy(out, &attributes, sizeof(attributes));
    }
    memcpy(out + prefix, &entry, sizeof(entry));
    memcpy(out + prefix + sizeof(entry), name, length);
    memset(out + prefix + sizeof(entry) + length, 0, bytes - prefix - sizeof(entry) - length);
    listing->used += bytes;
    return 0;
}

static int put_scanned(void *context, uint64_t seq, const char *name, size_t length, uint64_t ino,
                       uint32_t type)
{
    struct listing *listing = context;
    struct tierfs_inode inode;
    int status;

    if (seq > INT64_MAX - DOT_DOT_COOKIE)
        return -EUCLEAN;
    seq += DOT_DOT_COOKIE;
    if (!listing->plus)
        return put_name(listing, name, length, seq, ino, type, NULL);
    status = tierfs_find_inode(listing->request->reader, ino, &inode);
    if (status == -ENOENT)
        return 0;
    if (status == -EUCLEAN)
        return put_name(listing, name, length, seq, ino, type, NULL); /* the others can still be read */
    if (status != 0)
        return status;
    return put_name(listing, name, length, seq, ino, inode.mode & S_IFMT,
                    tierfs_is_in_flux(&inode) ? NULL : &inode);
}

static int put_dots(struct listing *listing, const struct tierfs_inode *here, uint64_t offset)
{
    struct tierfs_reader *reader = listing->request->reader;
    struct tierfs_inode parent = *here;
    uint64_t parent_ino;
    int status = 0;

    if (offset < DOT_COOKIE)
        status = put_name(listing, ".", 1, DOT_COOKIE, here->ino, S_IFDIR, here);
    if (status != 0 || offset >= DOT_DOT_COOKIE)
        return status;
    if (here->ino != TIERFS_ROOT_INO) {
        status = tierfs_find_parent(reader, here->ino, &parent_ino);
        if (status == 0)
            status = tierfs_find_inode(reader, parent_ino, &parent);
        else if (status == -ENOENT)
            status = 0; /* removed while it is open */
        if (status != 0)
            return status;
    }
    return put_name(listing, "..", 2, DOT_DOT_COOKIE, parent.ino, parent.mode & S_IFMT, &parent);
}

long tierfs_answer_readdir(const struct tierfs_request *request)
{
    struct listing listing = {.request = request, .plus = request->header->opcode == FUSE_READDIRPLUS};
    struct tierfs_inode directory;
    struct fuse_read_in asked;
    int status;

    if (request->body_bytes < sizeof(asked))
        return -EINVAL;
    memcpy(&asked, request->body, sizeof(asked));
    /* Whoever opened it: the engine keeps no position either, and has listed it all before it answered. */
    if ((asked.fh & TIERFS_FH_FRONT) != 0 && (asked.fh & ~TIERFS_FH_FRONT) != request->header->nodeid)
        return -EBADF;
    listing.capacity = asked.size < request->out_capacity ? asked.size : request->out_capacity;
    if (listing.plus && asked.offset == 0 && listing.capacity > FIRST_PLUS_BYTES)
        listing.capacity = FIRST_PLUS_BYTES;
    status = tierfs_find_inode(request->reader, request->header->nodeid, &directory);
    if (status == 0 && !S_ISDIR(directory.mode))
        status = -ENOTDIR;
    if (status == 0)
        status = put_dots(&listing, &directory, asked.offset);
    if (status == 0)
        status = tierfs_scan(request->reader, directory.ino,
                             asked.offset > DOT_DOT_COOKIE ? asked.offset - DOT_DOT_COOKIE : 0, put_scanned,
                             &listing);
    /* What came before a damaged entry is told; the next call, which begins there, fails. */
    if (status < 0 && listing.used == 0)
        return status == -EUCLEAN ? -EIO : status;
    return (long)listing.used;
}
