/* Prints what the C structures of records look like: struct, field, offset, size. Compared with schema.py. */
#include "records.h"

#include <stdio.h>

#define FIELD(type, field) \
    printf(#type " " #field " %zu %zu\n", offsetof(struct type, field), sizeof(((struct type *)0)->field))

int main(void)
{
    FIELD(tierfs_dirent, ino);
    FIELD(tierfs_dirent, seq);
    FIELD(tierfs_dirent, type);
    FIELD(tierfs_dirent, reserved);
    FIELD(tierfs_dirseq, ino);
    FIELD(tierfs_dirseq, type);
    FIELD(tierfs_dirseq, reserved);
    FIELD(tierfs_inode, ino);
    FIELD(tierfs_inode, mode);
    FIELD(tierfs_inode, uid);
    FIELD(tierfs_inode, gid);
    FIELD(tierfs_inode, nlink);
    FIELD(tierfs_inode, rdev);
    FIELD(tierfs_inode, size_bytes);
    FIELD(tierfs_inode, atime_ns);
    FIELD(tierfs_inode, mtime_ns);
    FIELD(tierfs_inode, ctime_ns);
    FIELD(tierfs_inode, generation);
    FIELD(tierfs_inode, flags);
    FIELD(tierfs_inode, content_id);
    FIELD(tierfs_inode, valid_until_ns);
    FIELD(tierfs_inode, listed_until_ns);
    FIELD(tierfs_inode, reserved);
    printf("tierfs_dirent = %zu\n", sizeof(struct tierfs_dirent));
    printf("tierfs_dirseq = %zu\n", sizeof(struct tierfs_dirseq));
    printf("tierfs_inode = %zu\n", sizeof(struct tierfs_inode));
    printf("FORMAT_VERSION = %d\n", TIERFS_FORMAT_VERSION);
    printf("NAME_MAX_BYTES = %d\n", TIERFS_NAME_MAX);
    printf("SYMLINK_MAX_BYTES = %d\n", TIERFS_SYMLINK_MAX);
    printf("HAS_XATTR = %d\n", (int)TIERFS_HAS_XATTR);
    printf("DATA_LOCAL = %d\n", (int)TIERFS_DATA_LOCAL);
    printf("META_KNOWN = %d\n", (int)TIERFS_META_KNOWN);
    return 0;
}
