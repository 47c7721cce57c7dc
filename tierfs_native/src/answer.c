#include "answer_parts.h"

#include <stdlib.h>
#include <time.h>

int tierfs_answers_open(const struct tierfs_answer_settings *settings, struct tierfs_answers **result)
{
    struct tierfs_answers *answers = calloc(1, sizeof(*answers));

    if (answers == NULL)
        return -ENOMEM;
    answers->settings = *settings;
    if (answers->settings.negative_ttl_ns > settings->ttl_ns)
        answers->settings.negative_ttl_ns = settings->ttl_ns;
    answers->settings.file_mode &= ~(uint32_t)S_IFMT;
    answers->settings.dir_mode &= ~(uint32_t)S_IFMT;
    *result = answers;
    return 0;
}

void tierfs_answers_close(struct tierfs_answers *answers)
{
    free(answers);
}

/* Whether a name that is not recorded in this directory is known not to be in the bucket either. */
static bool is_complete(const struct tierfs_request *request, const struct tierfs_inode *directory)
{
    const struct tierfs_answer_settings *settings = request->settings;

    return tierfs_time_left_ns(request, directory->listed_until_ns) >
           settings->ttl_ns - settings->negative_ttl_ns;
}

int tierfs_find_directory(const struct tierfs_request *request, struct tierfs_inode *directory)
{
    int status = tierfs_find_inode(request->reader, request->header->nodeid, directory);

    if (status != 0)
        return status;
    if (!S_ISDIR(directory->mode))
        return -ENOTDIR;
    return directory->nlink == 0 ? -ENOENT : 0;
}

long tierfs_reply_of(int status)
{
    return status == -ENOENT || status == -ENOTDIR || status == -ENAMETOOLONG ? status : TIERFS_RELAY;
}

/* -- names ------------------------------------------------------------------------------------------------------- */

static long lookup_missing(const struct tierfs_request *request)
{
    struct tierfs_inode directory;
    int status = tierfs_find_directory(request, &directory);

    if (status != 0)
        return tierfs_reply_of(status);
    return is_complete(request, &directory) ? -ENOENT : TIERFS_RELAY;
}

static long answer_lookup(const struct tierfs_request *request)
{
    const char *name = (const char *)request->body;
    const char *end = memchr(name, '\0', request->body_bytes);
    struct fuse_entry_out reply;
    struct tierfs_dirent entry;
    struct tierfs_inode inode;
    int status;

    if (end == NULL || end == name)
        return -EINVAL;
    if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
        return TIERFS_RELAY;
    status = tierfs_find_entry(request->reader, request->header->nodeid, name, (size_t)(end - name), &entry);
    if (status == -ENOENT)
        return lookup_missing(request);
    if (status != 0)
        return tierfs_reply_of(status);
    status = tierfs_find_inode(request->reader, entry.ino, &inode);
    if (status != 0 || tierfs_is_in_flux(&inode))
        return TIERFS_RELAY;
    if (tierfs_time_left_ns(request, inode.valid_until_ns) == 0) {
        struct tierfs_inode directory;

        if (tierfs_find_inode(request->reader, request->header->nodeid, &directory) != 0 ||
            tierfs_time_left_ns(request, directory.listed_until_ns) == 0)
            return TIERFS_RELAY;
    }
    tierfs_put_entry(request, &inode, &reply);
    memcpy(request->out, &reply, sizeof(reply));
    return sizeof(reply);
}

static long answer_readlink(const struct tierfs_request *request)
{
    struct tierfs_inode inode;
    size_t length;
    int status = tierfs_find_symlink(request->reader, request->header->nodeid, (char *)request->out,
                                     request->out_capacity, &length);

    if (status == 0)
        return (long)length;
    if (status != -ENOENT)
        return TIERFS_RELAY;
    status = tierfs_find_inode(request->reader, request->header->nodeid, &inode);
    return status != 0 ? tierfs_reply_of(status) : -EINVAL;
}

/* The engine reaps an inode without a name when the kernel forgets it, and does nothing about any other. */
static bool is_orphan(const struct tierfs_request *request, uint64_t ino)
{
    struct tierfs_inode inode;
    int status = tierfs_find_inode(request->reader, ino, &inode);

    return status != -ENOENT && (status != 0 || inode.nlink == 0);
}

static long answer_forget(const struct tierfs_request *request)
{
    return is_orphan(request, request->header->nodeid) ? TIERFS_RELAY : TIERFS_NO_REPLY;
}

static long answer_batch_forget(const struct tierfs_request *request)
{
    struct fuse_batch_forget_in batch;
    struct fuse_forget_one one;

    if (request->body_bytes < sizeof(batch))
        return TIERFS_NO_REPLY;
    memcpy(&batch, request->body, sizeof(batch));
    if (batch.count > (request->body_bytes - sizeof(batch)) / sizeof(one))
        return TIERFS_NO_REPLY;
    for (size_t i = 0; i < batch.count; i++) {
        memcpy(&one, request->body + sizeof(batch) + i * sizeof(one), sizeof(one));
        if (is_orphan(request, one.nodeid))
            return TIERFS_RELAY;
    }
    return TIERFS_NO_REPLY;
}

/* True: the request is about a directory that was opened here. */
static bool has_front_handle(const struct tierfs_request *request)
{
    uint64_t fh; /* first in fuse_read_in and fuse_release_in */

    if (request->body_bytes < sizeof(fh))
        return false;
    memcpy(&fh, request->body, sizeof(fh));
    return fh & TIERFS_FH_FRONT;
}

/* Only the engine knows snapshots, and whether there are any. */
static bool is_about_snapshots(const struct tierfs_request *request)
{
    static const char name[] = TIERFS_RESERVED_NAME; /* with its NUL */

    if (tierfs_is_of_snapshot(request->header->nodeid))
        return true;
    return request->header->opcode == FUSE_LOOKUP && request->header->nodeid == TIERFS_ROOT_INO &&
           request->body_bytes >= sizeof(name) && memcmp(request->body, name, sizeof(name)) == 0;
}

/* -- requests ------------------------------------------------------------------------------------------------------ */

typedef long answer_fn(const struct tierfs_request *request);

/* What answers such a request from the records, or NULL. */
static answer_fn *find_answer(uint32_t opcode)
{
    switch (opcode) {
    case FUSE_LOOKUP:
        return answer_lookup;
    case FUSE_GETATTR:
        return tierfs_answer_getattr;
    case FUSE_READLINK:
        return answer_readlink;
    case FUSE_GETXATTR:
        return tierfs_answer_getxattr;
    case FUSE_LISTXATTR:
        return tierfs_answer_listxattr;
    case FUSE_OPENDIR:
        return tierfs_answer_opendir;
    case FUSE_READDIR:
    case FUSE_READDIRPLUS:
        return tierfs_answer_readdir;
    case FUSE_FORGET:
        return answer_forget;
    case FUSE_BATCH_FORGET:
        return answer_batch_forget;
    default: /* FSYNCDIR too, with any handle: the engine syncs the namespace whatever the directory is */
        return NULL;
    }
}

long tierfs_answer_at(const struct tierfs_answers *answers, struct tierfs_reader *reader, int64_t now_ns,
                      const struct fuse_in_header *header, const void *body, size_t body_bytes, void *out,
                      size_t out_capacity)
{
    const size_t extension_bytes = (size_t)header->total_extlen * 8;
    const struct tierfs_request request = {
        .settings = &answers->settings,
        .reader = reader,
        .now_ns = now_ns,
        .header = header,
        .body = body,
        .body_bytes = body_bytes - extension_bytes,
        .out = out,
        .out_capacity = out_capacity,
    };
    answer_fn *answer;
    long result;

    if (extension_bytes > body_bytes || out_capacity < TIERFS_REPLY_BYTES)
        return header->opcode == FUSE_FORGET || header->opcode == FUSE_BATCH_FORGET ? TIERFS_NO_REPLY
                                                                                    : -EINVAL;
    switch (header->opcode) {
    case FUSE_IOCTL:
        return -ENOTTY;
    case FUSE_ACCESS: /* the kernel checks permissions itself, and asks no more once it is told so */
    case FUSE_STATX: /* GETATTR says all there is: nothing has a time of birth */
        return -ENOSYS;
    case FUSE_FLUSH: /* what close(2) has to save is saved at RELEASE, which nobody waits for */
        return answers->settings.close_waits ? TIERFS_RELAY : 0;
    case FUSE_RELEASEDIR:
        return has_front_handle(&request) ? 0 : TIERFS_RELAY;
    default:
        break;
    }
    answer = find_answer(header->opcode);
    if (answer == NULL)
        return TIERFS_RELAY;
    if (is_about_snapshots(&request))
        return header->opcode == FUSE_FORGET ? TIERFS_NO_REPLY : TIERFS_RELAY;
    if (tierfs_reader_begin(reader) != 0) /* the engine does not know the front's handles */
        return answer == tierfs_answer_readdir && has_front_handle(&request) ? -EIO : TIERFS_RELAY;
    result = answer(&request);
    tierfs_reader_end(reader);
    return result;
}

long tierfs_answer(const struct tierfs_answers *answers, struct tierfs_reader *reader,
                   const struct fuse_in_header *header, const void *body, size_t body_bytes, void *out,
                   size_t out_capacity)
{
    struct timespec now;

    if (clock_gettime(CLOCK_REALTIME, &now) != 0)
        return TIERFS_RELAY;
    return tierfs_answer_at(answers, reader, (int64_t)now.tv_sec * TIERFS_SECOND_NS + now.tv_nsec, header,
                            body, body_bytes, out, out_capacity);
}
