/*
 * The records of the namespace that the front reads, laid out as tierfs/namespace/schema.py writes them.
 *
 * Records lie in the memory map of LMDB without alignment, and what is in a file may be damaged: a record is always
 * copied out before its fields are looked at, and its length is compared first.
 */
#pragma once

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "records are little endian, and are used without conversion"
#endif

#define TIERFS_FORMAT_VERSION 4
/* What snapshots add to it are tables of their own. */
#define TIERFS_OLDEST_FORMAT_VERSION 2
/* In the number of every inode below .tierfs/snapshots/, which only the engine knows. */
#define TIERFS_SNAPSHOT_INO (UINT64_C(1) << 61) /* and no higher bit */
#define TIERFS_RESERVED_NAME ".tierfs"
#define TIERFS_ROOT_INO 1
#define TIERFS_NAME_MAX 255
#define TIERFS_SYMLINK_MAX 4095

/* tierfs_inode.flags, as far as the front looks at them */
#define TIERFS_HAS_XATTR (UINT64_C(1) << 2)
#define TIERFS_DATA_LOCAL (UINT64_C(1) << 4)
#define TIERFS_META_KNOWN (UINT64_C(1) << 6)

struct tierfs_inode {
    uint64_t ino;
    uint32_t mode; /* with the file type */
    uint32_t uid, gid;
    uint32_t nlink;
    uint64_t rdev;
    uint64_t size_bytes;
    int64_t atime_ns, mtime_ns, ctime_ns;
    uint64_t generation;
    uint64_t flags;
    uint8_t content_id[16];
    int64_t valid_until_ns; /* wall clock; INT64_MAX: the local state is the truth */
    int64_t listed_until_ns; /* directories; 0: never listed */
    uint64_t reserved[2];
};

struct tierfs_dirent {
    uint64_t ino;
    uint64_t seq; /* directory cookie */
    uint32_t type; /* S_IFMT bits */
    uint32_t reserved;
};

/* Followed by the name to the end of the record. */
struct tierfs_dirseq {
    uint64_t ino;
    uint32_t type;
    uint32_t reserved;
};

_Static_assert(sizeof(struct tierfs_inode) == 128, "INODE of schema.py");
_Static_assert(offsetof(struct tierfs_inode, rdev) == 24, "INODE of schema.py");
_Static_assert(offsetof(struct tierfs_inode, flags) == 72, "INODE of schema.py");
_Static_assert(offsetof(struct tierfs_inode, content_id) == 80, "INODE of schema.py");
_Static_assert(offsetof(struct tierfs_inode, listed_until_ns) == 104, "INODE of schema.py");
_Static_assert(sizeof(struct tierfs_dirent) == 24, "DIRENT of schema.py");
_Static_assert(sizeof(struct tierfs_dirseq) == 16, "DIRSEQ of schema.py");

static inline bool tierfs_is_of_snapshot(uint64_t ino)
{
    return (ino & ~(TIERFS_SNAPSHOT_INO - 1)) == TIERFS_SNAPSHOT_INO;
}

/* Whether these can be S_IFMT bits of a file: the kernel declares an inode of any other type bad for good. */
static inline bool tierfs_is_file_type(uint32_t type)
{
    return type == S_IFREG || type == S_IFDIR || type == S_IFLNK || type == S_IFIFO || type == S_IFSOCK ||
           type == S_IFCHR || type == S_IFBLK;
}

/* Whether these bytes can be a name: 1 to 255 of them, no NUL, no slash. */
static inline bool tierfs_is_name(const char *name, size_t length)
{
    return length >= 1 && length <= TIERFS_NAME_MAX && memchr(name, '\0', length) == NULL &&
           memchr(name, '/', length) == NULL;
}

/* Each of these returns 0 or -EUCLEAN: the record is not what it must be, and out is not to be used. */

static inline int tierfs_decode_inode(const void *data, size_t length, uint64_t ino, struct tierfs_inode *out)
{
    if (length != sizeof(*out))
        return -EUCLEAN;
    memcpy(out, data, sizeof(*out));
    if (out->ino != ino || !tierfs_is_file_type(out->mode & ~07777u) || out->size_bytes > INT64_MAX)
        return -EUCLEAN;
    return 0;
}

static inline int tierfs_decode_dirent(const void *data, size_t length, struct tierfs_dirent *out)
{
    if (length != sizeof(*out))
        return -EUCLEAN;
    memcpy(out, data, sizeof(*out));
    if (out->ino == 0 || !tierfs_is_file_type(out->type))
        return -EUCLEAN;
    return 0;
}

/* name is left pointing into data. */
static inline int tierfs_decode_dirseq(const void *data, size_t length, struct tierfs_dirseq *out,
                                       const char **name, size_t *name_length)
{
    if (length <= sizeof(*out))
        return -EUCLEAN;
    memcpy(out, data, sizeof(*out));
    *name = (const char *)data + sizeof(*out);
    *name_length = length - sizeof(*out);
    if (out->ino == 0 || !tierfs_is_file_type(out->type) || !tierfs_is_name(*name, *name_length))
        return -EUCLEAN;
    return 0;
}

/* Integers in keys are big endian, so that they sort. */
static inline void tierfs_encode_key(uint8_t key[8], uint64_t number)
{
    const uint64_t swapped = __builtin_bswap64(number);
    memcpy(key, &swapped, sizeof(swapped));
}

static inline uint64_t tierfs_decode_key(const void *key)
{
    uint64_t swapped;
    memcpy(&swapped, key, sizeof(swapped));
    return __builtin_bswap64(swapped);
}
