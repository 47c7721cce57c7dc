/*
 * The part of the FUSE kernel protocol that the front speaks, versions 7.36 to 7.45.
 *
 * Own definitions: distributions ship <linux/fuse.h> of the kernel that they were released with, which is
 * older than passthrough and FUSE over io_uring. The facts (layouts, numbers, bit positions) are those of
 * include/uapi/linux/fuse.h of Linux 6.18; the protocol only ever grows, and every size is asserted below.
 * All integers are in the byte order of the host. Not to be included together with <linux/fuse.h>.
 */
#ifndef TIERFS_ABI_H
#define TIERFS_ABI_H

#ifdef _LINUX_FUSE_H
#error "abi.h and <linux/fuse.h> define the same names"
#endif

#include <stddef.h>
#include <stdint.h>
#include <sys/ioctl.h>

#define FUSE_KERNEL_VERSION 7
#define FUSE_KERNEL_MINOR_VERSION 45
#define FUSE_ROOT_ID 1
/* The kernel refuses to read a request into less than this. */
#define FUSE_MIN_READ_BUFFER 8192

/* In fuse_in_header.unique: the request was sent before, to a server that went away. */
#define FUSE_UNIQUE_RESEND (UINT64_C(1) << 63)

enum fuse_opcode {
    FUSE_LOOKUP = 1,
    FUSE_FORGET = 2, /* no reply */
    FUSE_GETATTR = 3,
    FUSE_SETATTR = 4,
    FUSE_READLINK = 5,
    FUSE_SYMLINK = 6,
    FUSE_MKNOD = 8,
    FUSE_MKDIR = 9,
    FUSE_UNLINK = 10,
    FUSE_RMDIR = 11,
    FUSE_RENAME = 12,
    FUSE_LINK = 13,
    FUSE_OPEN = 14,
    FUSE_READ = 15,
    FUSE_WRITE = 16,
    FUSE_STATFS = 17,
    FUSE_RELEASE = 18,
    FUSE_FSYNC = 20,
    FUSE_SETXATTR = 21,
    FUSE_GETXATTR = 22,
    FUSE_LISTXATTR = 23,
    FUSE_REMOVEXATTR = 24,
    FUSE_FLUSH = 25,
    FUSE_INIT = 26,
    FUSE_OPENDIR = 27,
    FUSE_READDIR = 28,
    FUSE_RELEASEDIR = 29,
    FUSE_FSYNCDIR = 30,
    FUSE_GETLK = 31,
    FUSE_SETLK = 32,
    FUSE_SETLKW = 33,
    FUSE_ACCESS = 34,
    FUSE_CREATE = 35,
    FUSE_INTERRUPT = 36, /* no reply needed */
    FUSE_BMAP = 37,
    FUSE_DESTROY = 38,
    FUSE_IOCTL = 39,
    FUSE_POLL = 40,
    FUSE_NOTIFY_REPLY = 41,
    FUSE_BATCH_FORGET = 42, /* no reply */
    FUSE_FALLOCATE = 43,
    FUSE_READDIRPLUS = 44,
    FUSE_RENAME2 = 45,
    FUSE_LSEEK = 46,
    FUSE_COPY_FILE_RANGE = 47,
    FUSE_SETUPMAPPING = 48,
    FUSE_REMOVEMAPPING = 49,
    FUSE_SYNCFS = 50,
    FUSE_TMPFILE = 51,
    FUSE_STATX = 52,
    FUSE_COPY_FILE_RANGE_64 = 53,
};

/* In fuse_out_header.error of a message with unique 0. */
enum fuse_notify_code {
    FUSE_NOTIFY_POLL = 1,
    FUSE_NOTIFY_INVAL_INODE = 2,
    FUSE_NOTIFY_INVAL_ENTRY = 3,
    FUSE_NOTIFY_STORE = 4,
    FUSE_NOTIFY_RETRIEVE = 5,
    FUSE_NOTIFY_DELETE = 6,
    FUSE_NOTIFY_RESEND = 7,
    FUSE_NOTIFY_INC_EPOCH = 8,
    FUSE_NOTIFY_PRUNE = 9,
};

/* INIT flags. Bits 32 and up travel in flags2, shifted down, and only if FUSE_INIT_EXT is set in flags. */
#define FUSE_ASYNC_READ (UINT64_C(1) << 0)
#define FUSE_POSIX_LOCKS (UINT64_C(1) << 1)
#define FUSE_FILE_OPS (UINT64_C(1) << 2)
#define FUSE_ATOMIC_O_TRUNC (UINT64_C(1) << 3)
#define FUSE_EXPORT_SUPPORT (UINT64_C(1) << 4)
#define FUSE_BIG_WRITES (UINT64_C(1) << 5)
#define FUSE_DONT_MASK (UINT64_C(1) << 6)
#define FUSE_SPLICE_WRITE (UINT64_C(1) << 7)
#define FUSE_SPLICE_MOVE (UINT64_C(1) << 8)
#define FUSE_SPLICE_READ (UINT64_C(1) << 9)
#define FUSE_FLOCK_LOCKS (UINT64_C(1) << 10)
#define FUSE_HAS_IOCTL_DIR (UINT64_C(1) << 11)
#define FUSE_AUTO_INVAL_DATA (UINT64_C(1) << 12)
#define FUSE_DO_READDIRPLUS (UINT64_C(1) << 13)
#define FUSE_READDIRPLUS_AUTO (UINT64_C(1) << 14)
#define FUSE_ASYNC_DIO (UINT64_C(1) << 15)
#define FUSE_WRITEBACK_CACHE (UINT64_C(1) << 16)
#define FUSE_NO_OPEN_SUPPORT (UINT64_C(1) << 17)
#define FUSE_PARALLEL_DIROPS (UINT64_C(1) << 18)
#define FUSE_HANDLE_KILLPRIV (UINT64_C(1) << 19)
#define FUSE_POSIX_ACL (UINT64_C(1) << 20)
#define FUSE_ABORT_ERROR (UINT64_C(1) << 21)
#define FUSE_MAX_PAGES (UINT64_C(1) << 22)
#define FUSE_CACHE_SYMLINKS (UINT64_C(1) << 23)
#define FUSE_NO_OPENDIR_SUPPORT (UINT64_C(1) << 24)
#define FUSE_EXPLICIT_INVAL_DATA (UINT64_C(1) << 25)
#define FUSE_MAP_ALIGNMENT (UINT64_C(1) << 26)
#define FUSE_SUBMOUNTS (UINT64_C(1) << 27)
#define FUSE_HANDLE_KILLPRIV_V2 (UINT64_C(1) << 28)
#define FUSE_SETXATTR_EXT (UINT64_C(1) << 29)
#define FUSE_INIT_EXT (UINT64_C(1) << 30)
#define FUSE_INIT_RESERVED (UINT64_C(1) << 31)
#define FUSE_SECURITY_CTX (UINT64_C(1) << 32)
#define FUSE_HAS_INODE_DAX (UINT64_C(1) << 33)
#define FUSE_CREATE_SUPP_GROUP (UINT64_C(1) << 34)
#define FUSE_HAS_EXPIRE_ONLY (UINT64_C(1) << 35)
#define FUSE_DIRECT_IO_ALLOW_MMAP (UINT64_C(1) << 36)
#define FUSE_PASSTHROUGH (UINT64_C(1) << 37)
#define FUSE_NO_EXPORT_SUPPORT (UINT64_C(1) << 38)
#define FUSE_HAS_RESEND (UINT64_C(1) << 39)
#define FUSE_ALLOW_IDMAP (UINT64_C(1) << 40)
#define FUSE_OVER_IO_URING (UINT64_C(1) << 41)
#define FUSE_REQUEST_TIMEOUT (UINT64_C(1) << 42)

/* fuse_open_out.open_flags */
#define FOPEN_DIRECT_IO (UINT32_C(1) << 0)
#define FOPEN_KEEP_CACHE (UINT32_C(1) << 1)
#define FOPEN_NONSEEKABLE (UINT32_C(1) << 2)
#define FOPEN_CACHE_DIR (UINT32_C(1) << 3)
#define FOPEN_STREAM (UINT32_C(1) << 4)
#define FOPEN_NOFLUSH (UINT32_C(1) << 5)
#define FOPEN_PARALLEL_DIRECT_WRITES (UINT32_C(1) << 6)
#define FOPEN_PASSTHROUGH (UINT32_C(1) << 7)

/* fuse_setattr_in.valid */
#define FATTR_MODE (UINT32_C(1) << 0)
#define FATTR_UID (UINT32_C(1) << 1)
#define FATTR_GID (UINT32_C(1) << 2)
#define FATTR_SIZE (UINT32_C(1) << 3)
#define FATTR_ATIME (UINT32_C(1) << 4)
#define FATTR_MTIME (UINT32_C(1) << 5)
#define FATTR_FH (UINT32_C(1) << 6)
#define FATTR_ATIME_NOW (UINT32_C(1) << 7)
#define FATTR_MTIME_NOW (UINT32_C(1) << 8)
#define FATTR_LOCKOWNER (UINT32_C(1) << 9)
#define FATTR_CTIME (UINT32_C(1) << 10)
#define FATTR_KILL_SUIDGID (UINT32_C(1) << 11)

#define FUSE_GETATTR_FH (UINT32_C(1) << 0)            /* getattr_flags */
#define FUSE_RELEASE_FLUSH (UINT32_C(1) << 0)         /* release_flags */
#define FUSE_RELEASE_FLOCK_UNLOCK (UINT32_C(1) << 1)  /* release_flags */
#define FUSE_LK_FLOCK (UINT32_C(1) << 0)              /* lk_flags */
#define FUSE_WRITE_CACHE (UINT32_C(1) << 0)           /* write_flags: from the page cache, fh is a guess */
#define FUSE_WRITE_LOCKOWNER (UINT32_C(1) << 1)       /* write_flags */
#define FUSE_WRITE_KILL_SUIDGID (UINT32_C(1) << 2)    /* write_flags */
#define FUSE_READ_LOCKOWNER (UINT32_C(1) << 1)        /* read_flags */
#define FUSE_FSYNC_FDATASYNC (UINT32_C(1) << 0)       /* fsync_flags */
#define FUSE_OPEN_KILL_SUIDGID (UINT32_C(1) << 0)     /* fuse_open_in.open_flags */
#define FUSE_EXPIRE_ONLY (UINT32_C(1) << 0)           /* fuse_notify_inval_entry_out.flags */
#define FUSE_POLL_SCHEDULE_NOTIFY (UINT32_C(1) << 0)  /* fuse_poll_in.flags */
#define FUSE_IOCTL_COMPAT (UINT32_C(1) << 0)          /* fuse_ioctl_in.flags */
#define FUSE_IOCTL_UNRESTRICTED (UINT32_C(1) << 1)
#define FUSE_IOCTL_RETRY (UINT32_C(1) << 2)
#define FUSE_IOCTL_32BIT (UINT32_C(1) << 3)
#define FUSE_IOCTL_DIR (UINT32_C(1) << 4)

/* -- every message ------------------------------------------------------------------------------------ */

struct fuse_in_header {
    uint32_t len; /* of the whole message */
    uint32_t opcode;
    uint64_t unique;
    uint64_t nodeid;
    uint32_t uid, gid, pid;
    uint16_t total_extlen; /* extensions at the end of the message, in units of 8 bytes */
    uint16_t padding;
};

struct fuse_out_header {
    uint32_t len;
    int32_t error; /* 0 or -errno; of a notification its code */
    uint64_t unique;
};

/* Precedes each extension; types 0 to 31 belong to security contexts, 32 to supplementary groups. */
struct fuse_ext_header {
    uint32_t size; /* this header included */
    uint32_t type;
};

struct fuse_init_in {
    uint32_t major, minor;
    uint32_t max_readahead;
    uint32_t flags, flags2; /* flags2 only with FUSE_INIT_EXT */
    uint32_t unused[11];
};

struct fuse_init_out {
    uint32_t major, minor;
    uint32_t max_readahead;
    uint32_t flags;
    uint16_t max_background, congestion_threshold;
    uint32_t max_write;
    uint32_t time_gran;
    uint16_t max_pages, map_alignment;
    uint32_t flags2;
    uint32_t max_stack_depth; /* for FUSE_PASSTHROUGH */
    uint16_t request_timeout; /* seconds, for FUSE_REQUEST_TIMEOUT */
    uint16_t unused[11];
};

struct fuse_interrupt_in {
    uint64_t unique; /* of the request that nobody waits for any more */
};

/* -- attributes --------------------------------------------------------------------------------------- */

struct fuse_attr {
    uint64_t ino, size, blocks;
    uint64_t atime, mtime, ctime; /* seconds, as int64_t */
    uint32_t atimensec, mtimensec, ctimensec;
    uint32_t mode, nlink, uid, gid, rdev, blksize;
    uint32_t flags;
};

struct fuse_entry_out {
    uint64_t nodeid; /* 0: the name does not exist, for entry_valid */
    uint64_t generation;
    uint64_t entry_valid, attr_valid; /* seconds */
    uint32_t entry_valid_nsec, attr_valid_nsec;
    struct fuse_attr attr;
};

struct fuse_attr_out {
    uint64_t attr_valid;
    uint32_t attr_valid_nsec;
    uint32_t dummy;
    struct fuse_attr attr;
};

struct fuse_getattr_in {
    uint32_t getattr_flags;
    uint32_t dummy;
    uint64_t fh; /* with FUSE_GETATTR_FH */
};

struct fuse_setattr_in {
    uint32_t valid;
    uint32_t padding;
    uint64_t fh, size, lock_owner;
    uint64_t atime, mtime, ctime;
    uint32_t atimensec, mtimensec, ctimensec;
    uint32_t mode;
    uint32_t unused4;
    uint32_t uid, gid;
    uint32_t unused5;
};

struct fuse_sx_time {
    int64_t tv_sec;
    uint32_t tv_nsec;
    int32_t reserved;
};

/* The same bytes as struct statx. */
struct fuse_statx {
    uint32_t mask, blksize;
    uint64_t attributes;
    uint32_t nlink, uid, gid;
    uint16_t mode, spare0;
    uint64_t ino, size, blocks, attributes_mask;
    struct fuse_sx_time atime, btime, ctime, mtime;
    uint32_t rdev_major, rdev_minor, dev_major, dev_minor;
    uint64_t spare2[14];
};

struct fuse_statx_in {
    uint32_t getattr_flags;
    uint32_t reserved;
    uint64_t fh;
    uint32_t sx_flags, sx_mask;
};

struct fuse_statx_out {
    uint64_t attr_valid;
    uint32_t attr_valid_nsec;
    uint32_t flags;
    uint64_t spare[2];
    struct fuse_statx stat;
};

struct fuse_access_in {
    uint32_t mask;
    uint32_t padding;
};

/* Followed by the name and, for setxattr, the value. Without FUSE_SETXATTR_EXT only the first 8 bytes. */
struct fuse_setxattr_in {
    uint32_t size, flags;
    uint32_t setxattr_flags;
    uint32_t padding;
};

/* Followed by the name; for listxattr by nothing. */
struct fuse_getxattr_in {
    uint32_t size; /* 0: how long is it? */
    uint32_t padding;
};

struct fuse_getxattr_out {
    uint32_t size;
    uint32_t padding;
};

struct fuse_kstatfs {
    uint64_t blocks, bfree, bavail, files, ffree;
    uint32_t bsize, namelen, frsize;
    uint32_t padding;
    uint32_t spare[6];
};

struct fuse_statfs_out {
    struct fuse_kstatfs st;
};

/* -- names -------------------------------------------------------------------------------------------- */

struct fuse_forget_in {
    uint64_t nlookup;
};

struct fuse_forget_one {
    uint64_t nodeid, nlookup;
};

/* Followed by count times struct fuse_forget_one. */
struct fuse_batch_forget_in {
    uint32_t count;
    uint32_t dummy;
};

/* These are followed by a name; rename by the old and the new one. */
struct fuse_mknod_in {
    uint32_t mode, rdev, umask;
    uint32_t padding;
};

struct fuse_mkdir_in {
    uint32_t mode, umask;
};

struct fuse_create_in {
    uint32_t flags, mode, umask;
    uint32_t open_flags;
};

struct fuse_link_in {
    uint64_t oldnodeid;
};

struct fuse_rename_in {
    uint64_t newdir;
};

struct fuse_rename2_in {
    uint64_t newdir;
    uint32_t flags;
    uint32_t padding;
};

/* -- open files and directories ------------------------------------------------------------------------- */

struct fuse_open_in {
    uint32_t flags;
    uint32_t open_flags;
};

struct fuse_open_out {
    uint64_t fh;
    uint32_t open_flags;
    int32_t backing_id; /* with FOPEN_PASSTHROUGH */
};

struct fuse_release_in {
    uint64_t fh;
    uint32_t flags, release_flags;
    uint64_t lock_owner;
};

struct fuse_flush_in {
    uint64_t fh;
    uint32_t unused;
    uint32_t padding;
    uint64_t lock_owner;
};

struct fuse_fsync_in {
    uint64_t fh;
    uint32_t fsync_flags;
    uint32_t padding;
};

/* READ, READDIR, READDIRPLUS */
struct fuse_read_in {
    uint64_t fh, offset;
    uint32_t size, read_flags;
    uint64_t lock_owner;
    uint32_t flags;
    uint32_t padding;
};

/* Followed by the bytes. */
struct fuse_write_in {
    uint64_t fh, offset;
    uint32_t size, write_flags;
    uint64_t lock_owner;
    uint32_t flags;
    uint32_t padding;
};

struct fuse_write_out {
    uint32_t size;
    uint32_t padding;
};

struct fuse_file_lock {
    uint64_t start, end;
    uint32_t type;
    uint32_t pid;
};

struct fuse_lk_in {
    uint64_t fh, owner;
    struct fuse_file_lock lk;
    uint32_t lk_flags;
    uint32_t padding;
};

struct fuse_lk_out {
    struct fuse_file_lock lk;
};

struct fuse_lseek_in {
    uint64_t fh, offset;
    uint32_t whence;
    uint32_t padding;
};

struct fuse_lseek_out {
    uint64_t offset;
};

struct fuse_fallocate_in {
    uint64_t fh, offset, length;
    uint32_t mode;
    uint32_t padding;
};

struct fuse_copy_file_range_in {
    uint64_t fh_in, off_in;
    uint64_t nodeid_out, fh_out, off_out;
    uint64_t len, flags;
};

/* Of FUSE_COPY_FILE_RANGE_64; the older request is answered with fuse_write_out. */
struct fuse_copy_file_range_out {
    uint64_t bytes_copied;
};

struct fuse_ioctl_in {
    uint64_t fh;
    uint32_t flags, cmd;
    uint64_t arg;
    uint32_t in_size, out_size;
};

struct fuse_ioctl_out {
    int32_t result;
    uint32_t flags, in_iovs, out_iovs;
};

struct fuse_poll_in {
    uint64_t fh, kh;
    uint32_t flags, events;
};

struct fuse_poll_out {
    uint32_t revents;
    uint32_t padding;
};

struct fuse_syncfs_in {
    uint64_t padding;
};

/* Followed by the name without a NUL, then zeros up to a multiple of 8 bytes. */
struct fuse_dirent {
    uint64_t ino;
    uint64_t off; /* where the next READDIR begins to continue after this entry */
    uint32_t namelen;
    uint32_t type; /* DT_* */
    char name[];
};

/* Like struct fuse_dirent, with the answer to a LOOKUP of the name before it. */
struct fuse_direntplus {
    struct fuse_entry_out entry_out;
    struct {
        uint64_t ino, off;
        uint32_t namelen, type;
    } dirent;
};

#define FUSE_NAME_OFFSET (sizeof(struct fuse_dirent))
#define FUSE_NAME_OFFSET_DIRENTPLUS (sizeof(struct fuse_direntplus))

/* Sizes of directory records and of extensions are multiples of 8. */
static inline size_t fuse_align(size_t bytes)
{
    return (bytes + 7) & ~(size_t)7;
}

/* -- notifications: unique 0 ---------------------------------------------------------------------------- */

struct fuse_notify_poll_wakeup_out {
    uint64_t kh;
};

struct fuse_notify_inval_inode_out {
    uint64_t ino;
    int64_t off, len; /* off < 0: attributes only */
};

/* Followed by the name and a NUL that namelen does not count. */
struct fuse_notify_inval_entry_out {
    uint64_t parent;
    uint32_t namelen;
    uint32_t flags;
};

/* Likewise. */
struct fuse_notify_delete_out {
    uint64_t parent, child;
    uint32_t namelen;
    uint32_t padding;
};

/* Followed by the bytes. */
struct fuse_notify_store_out {
    uint64_t nodeid, offset;
    uint32_t size;
    uint32_t padding;
};

struct fuse_notify_retrieve_out {
    uint64_t notify_unique, nodeid, offset;
    uint32_t size;
    uint32_t padding;
};

/* What the kernel sends back as FUSE_NOTIFY_REPLY, followed by the bytes. */
struct fuse_notify_retrieve_in {
    uint64_t dummy1, offset;
    uint32_t size, dummy2;
    uint64_t dummy3, dummy4;
};

/* Followed by count node ids of 8 bytes. */
struct fuse_notify_prune_out {
    uint32_t count;
    uint32_t padding;
    uint64_t spare;
};

/* -- ioctls of /dev/fuse -------------------------------------------------------------------------------- */

struct fuse_backing_map {
    int32_t fd;
    uint32_t flags;
    uint64_t padding;
};

#define FUSE_DEV_IOC_MAGIC 229
#define FUSE_DEV_IOC_CLONE _IOR(FUSE_DEV_IOC_MAGIC, 0, uint32_t)
#define FUSE_DEV_IOC_BACKING_OPEN _IOW(FUSE_DEV_IOC_MAGIC, 1, struct fuse_backing_map)
#define FUSE_DEV_IOC_BACKING_CLOSE _IOW(FUSE_DEV_IOC_MAGIC, 2, uint32_t)

/* -- FUSE over io_uring ---------------------------------------------------------------------------------- */

#define FUSE_URING_IN_OUT_HEADER_SZ 128
#define FUSE_URING_OP_IN_OUT_SZ 128

struct fuse_uring_ent_in_out {
    uint64_t flags;
    uint64_t commit_id; /* names the request when it is answered */
    uint32_t payload_sz;
    uint32_t padding;
    uint64_t reserved;
};

struct fuse_uring_req_header {
    char in_out[FUSE_URING_IN_OUT_HEADER_SZ]; /* fuse_in_header, then fuse_out_header */
    char op_in[FUSE_URING_OP_IN_OUT_SZ]; /* the fixed part of the request */
    struct fuse_uring_ent_in_out ring_ent_in_out;
};

enum fuse_uring_cmd {
    FUSE_IO_URING_CMD_INVALID = 0,
    FUSE_IO_URING_CMD_REGISTER = 1,
    FUSE_IO_URING_CMD_COMMIT_AND_FETCH = 2,
};

/* In the command area of an SQE of 128 bytes. */
struct fuse_uring_cmd_req {
    uint64_t flags;
    uint64_t commit_id;
    uint16_t qid;
    uint8_t padding[6];
};

/* -- the layouts are as the kernel has them ---------------------------------------------------------------- */

#define FUSE_ASSERT_SIZE(type, bytes) _Static_assert(sizeof(struct type) == (bytes), #type)
FUSE_ASSERT_SIZE(fuse_in_header, 40);
FUSE_ASSERT_SIZE(fuse_out_header, 16);
FUSE_ASSERT_SIZE(fuse_ext_header, 8);
FUSE_ASSERT_SIZE(fuse_init_in, 64);
FUSE_ASSERT_SIZE(fuse_init_out, 64);
FUSE_ASSERT_SIZE(fuse_interrupt_in, 8);
FUSE_ASSERT_SIZE(fuse_attr, 88);
FUSE_ASSERT_SIZE(fuse_entry_out, 128);
FUSE_ASSERT_SIZE(fuse_attr_out, 104);
FUSE_ASSERT_SIZE(fuse_getattr_in, 16);
FUSE_ASSERT_SIZE(fuse_setattr_in, 88);
FUSE_ASSERT_SIZE(fuse_statx, 256);
FUSE_ASSERT_SIZE(fuse_statx_in, 24);
FUSE_ASSERT_SIZE(fuse_statx_out, 288);
FUSE_ASSERT_SIZE(fuse_access_in, 8);
FUSE_ASSERT_SIZE(fuse_setxattr_in, 16);
FUSE_ASSERT_SIZE(fuse_getxattr_in, 8);
FUSE_ASSERT_SIZE(fuse_getxattr_out, 8);
FUSE_ASSERT_SIZE(fuse_statfs_out, 80);
FUSE_ASSERT_SIZE(fuse_forget_in, 8);
FUSE_ASSERT_SIZE(fuse_forget_one, 16);
FUSE_ASSERT_SIZE(fuse_batch_forget_in, 8);
FUSE_ASSERT_SIZE(fuse_mknod_in, 16);
FUSE_ASSERT_SIZE(fuse_mkdir_in, 8);
FUSE_ASSERT_SIZE(fuse_create_in, 16);
FUSE_ASSERT_SIZE(fuse_link_in, 8);
FUSE_ASSERT_SIZE(fuse_rename_in, 8);
FUSE_ASSERT_SIZE(fuse_rename2_in, 16);
FUSE_ASSERT_SIZE(fuse_open_in, 8);
FUSE_ASSERT_SIZE(fuse_open_out, 16);
FUSE_ASSERT_SIZE(fuse_release_in, 24);
FUSE_ASSERT_SIZE(fuse_flush_in, 24);
FUSE_ASSERT_SIZE(fuse_fsync_in, 16);
FUSE_ASSERT_SIZE(fuse_read_in, 40);
FUSE_ASSERT_SIZE(fuse_write_in, 40);
FUSE_ASSERT_SIZE(fuse_write_out, 8);
FUSE_ASSERT_SIZE(fuse_lk_in, 48);
FUSE_ASSERT_SIZE(fuse_lk_out, 24);
FUSE_ASSERT_SIZE(fuse_lseek_in, 24);
FUSE_ASSERT_SIZE(fuse_lseek_out, 8);
FUSE_ASSERT_SIZE(fuse_fallocate_in, 32);
FUSE_ASSERT_SIZE(fuse_copy_file_range_in, 56);
FUSE_ASSERT_SIZE(fuse_copy_file_range_out, 8);
FUSE_ASSERT_SIZE(fuse_ioctl_in, 32);
FUSE_ASSERT_SIZE(fuse_ioctl_out, 16);
FUSE_ASSERT_SIZE(fuse_poll_in, 24);
FUSE_ASSERT_SIZE(fuse_poll_out, 8);
FUSE_ASSERT_SIZE(fuse_syncfs_in, 8);
FUSE_ASSERT_SIZE(fuse_dirent, 24);
FUSE_ASSERT_SIZE(fuse_direntplus, 152);
FUSE_ASSERT_SIZE(fuse_notify_poll_wakeup_out, 8);
FUSE_ASSERT_SIZE(fuse_notify_inval_inode_out, 24);
FUSE_ASSERT_SIZE(fuse_notify_inval_entry_out, 16);
FUSE_ASSERT_SIZE(fuse_notify_delete_out, 24);
FUSE_ASSERT_SIZE(fuse_notify_store_out, 24);
FUSE_ASSERT_SIZE(fuse_notify_retrieve_out, 32);
FUSE_ASSERT_SIZE(fuse_notify_retrieve_in, 40);
FUSE_ASSERT_SIZE(fuse_notify_prune_out, 16);
FUSE_ASSERT_SIZE(fuse_backing_map, 16);
FUSE_ASSERT_SIZE(fuse_uring_ent_in_out, 32);
FUSE_ASSERT_SIZE(fuse_uring_req_header, 288);
FUSE_ASSERT_SIZE(fuse_uring_cmd_req, 24);
#undef FUSE_ASSERT_SIZE

#endif
