/* Requests about one inode: attributes, extended attributes. */
#include "answer_parts.h"

#define SECTOR_BYTES 512
#define DIRECTORY_SECTORS 8
#define PREFERRED_IO_BYTES (128 * 1024)

static void split_time(int64_t time_ns, uint64_t *seconds, uint32_t *nanoseconds)
{
    int64_t whole = time_ns / TIERFS_SECOND_NS;
    int64_t rest = time_ns % TIERFS_SECOND_NS;

    if (rest < 0) {
        rest += TIERFS_SECOND_NS;
        whole--;
    }
    *seconds = (uint64_t)whole;
    *nanoseconds = (uint32_t)rest;
}

static void put_timeout(const struct tierfs_request *request, const struct tierfs_inode *inode,
                        uint64_t *seconds, uint32_t *nanoseconds)
{
    uint64_t left_ns = tierfs_time_left_ns(request, inode->valid_until_ns);

    if (left_ns > request->settings->ttl_ns)
        left_ns = request->settings->ttl_ns;
    *seconds = left_ns / TIERFS_SECOND_NS;
    *nanoseconds = (uint32_t)(left_ns % TIERFS_SECOND_NS);
}

static void put_attributes(const struct tierfs_request *request, const struct tierfs_inode *inode,
                           struct fuse_attr *attr)
{
    const struct tierfs_answer_settings *settings = request->settings;

    memset(attr, 0, sizeof(*attr));
    attr->ino = inode->ino;
    attr->size = inode->size_bytes;
    attr->mode = inode->mode;
    attr->uid = inode->uid;
    attr->gid = inode->gid;
    if (!(inode->flags & TIERFS_META_KNOWN)) {
        /* They follow the options of this mount, not of the one that listed the object first. */
        attr->mode =
            (inode->mode & S_IFMT) | (S_ISDIR(inode->mode) ? settings->dir_mode : settings->file_mode);
        attr->uid = settings->uid;
        attr->gid = settings->gid;
    }
    if (S_ISREG(inode->mode))
        attr->blocks = inode->size_bytes / SECTOR_BYTES + (inode->size_bytes % SECTOR_BYTES != 0);
    else if (S_ISDIR(inode->mode))
        attr->blocks = DIRECTORY_SECTORS;
    split_time(inode->atime_ns, &attr->atime, &attr->atimensec);
    split_time(inode->mtime_ns, &attr->mtime, &attr->mtimensec);
    split_time(inode->ctime_ns, &attr->ctime, &attr->ctimensec);
    attr->nlink = inode->nlink;
    attr->rdev = (uint32_t)inode->rdev;
    attr->blksize = PREFERRED_IO_BYTES;
}

void tierfs_put_entry(const struct tierfs_request *request, const struct tierfs_inode *inode,
                      struct fuse_entry_out *entry)
{
    memset(entry, 0, sizeof(*entry));
    entry->nodeid = inode->ino;
    entry->generation = inode->generation;
    put_timeout(request, inode, &entry->entry_valid, &entry->entry_valid_nsec);
    entry->attr_valid = entry->entry_valid;
    entry->attr_valid_nsec = entry->entry_valid_nsec;
    put_attributes(request, inode, &entry->attr);
}

long tierfs_answer_getattr(const struct tierfs_request *request)
{
    struct fuse_attr_out reply = {0};
    struct tierfs_inode inode;
    int status = tierfs_find_inode(request->reader, request->header->nodeid, &inode);

    if (status != 0)
        return tierfs_reply_of(status);
    if (tierfs_is_in_flux(&inode))
        return TIERFS_RELAY;
    put_timeout(request, &inode, &reply.attr_valid, &reply.attr_valid_nsec);
    put_attributes(request, &inode, &reply.attr);
    memcpy(request->out, &reply, sizeof(reply));
    return sizeof(reply);
}

/*
 * No file has a label unless one is set: a file system that does not know labels says so. Who asks for that of every
 * file, ls(1) for example, asks once then.
 */
static long absent_attribute(const char *name)
{
    return strcmp(name, "security.selinux") == 0 ? -EOPNOTSUPP : -ENODATA;
}

long tierfs_answer_getxattr(const struct tierfs_request *request)
{
    static const char *const namespaces[] = {"user.", "trusted.", "security."};
    const char *name = (const char *)request->body + sizeof(struct fuse_getxattr_in);
    struct tierfs_inode inode;
    int status;
    bool may_exist = false;

    if (request->body_bytes <= sizeof(struct fuse_getxattr_in) ||
        memchr(name, '\0', request->body_bytes - sizeof(struct fuse_getxattr_in)) == NULL)
        return -EINVAL;
    if (strncmp(name, "user.tierfs.", 12) == 0)
        return TIERFS_RELAY;
    for (size_t i = 0; i < sizeof(namespaces) / sizeof(namespaces[0]); i++)
        may_exist |= strncmp(name, namespaces[i], strlen(namespaces[i])) == 0;
    if (!may_exist)
        return strncmp(name, "system.", 7) == 0 ? -EOPNOTSUPP : -ENODATA;
    status = tierfs_find_inode(request->reader, request->header->nodeid, &inode);
    if (status != 0)
        return tierfs_reply_of(status);
    return inode.flags & TIERFS_HAS_XATTR ? TIERFS_RELAY : absent_attribute(name);
}

long tierfs_answer_listxattr(const struct tierfs_request *request)
{
    const struct fuse_getxattr_out nothing = {0};
    struct fuse_getxattr_in asked;
    struct tierfs_inode inode;
    int status;

    if (request->body_bytes < sizeof(asked))
        return -EINVAL;
    memcpy(&asked, request->body, sizeof(asked));
    status = tierfs_find_inode(request->reader, request->header->nodeid, &inode);
    if (status != 0)
        return tierfs_reply_of(status);
    if (inode.flags & TIERFS_HAS_XATTR)
        return TIERFS_RELAY;
    if (asked.size != 0)
        return 0;
    memcpy(request->out, &nothing, sizeof(nothing));
    return sizeof(nothing);
}
