/* Answers to requests: what is answered, what is relayed, and that nothing in a request is trusted. */
#include "answer.h"
#include "namespace.h"

#include <dirent.h>

#define NOW INT64_C(1700000000000000000)
#define SECOND INT64_C(1000000000)
#define TTL (60 * SECOND)

enum {
    FILE_INO = 20,   /* /file: valid, listed only, of 1,000 bytes */
    LOCAL_INO = 21,  /* /local: being written */
    OLD_INO = 22,    /* /dir/old: expired */
    DIR_INO = 23,    /* /dir: listed long ago, expired */
    LINK_INO = 24,   /* /link */
    XATTR_INO = 25,  /* /xattr: has an attribute */
    ORPHAN_INO = 26, /* no name */
    STALE_INO = 27,  /* /stale: expired, in a directory of which the listing is valid */
    EMPTY_INO = 28,  /* /empty: a directory listed so long ago that names may have come, not yet expired */
    LOST_INO = 29,   /* /lost: no inode record */
    BROKEN_INO = 30, /* /broken: a damaged one */
    DEVICE_INO = 31, /* /device */
    REMOVED_INO = 32, /* a directory without a name, still open */
};

static struct tierfs_view *view;
static struct tierfs_reader *reader;
static struct tierfs_answers *answers;
static union {
    uint8_t bytes[65536];
    struct fuse_entry_out entry;
    struct fuse_attr_out attr;
    struct fuse_open_out open;
    struct fuse_getxattr_out xattr;
} out;

static void put(struct writer *writer, uint64_t parent, const char *name, struct tierfs_inode inode)
{
    inode.generation = 5;
    put_inode(writer, &inode);
    if (name != NULL)
        put_name_of(writer, parent, name, inode.ino, inode.mode & S_IFMT, inode.ino);
}

static void make_namespace(const char *directory)
{
    const uint64_t known = TIERFS_META_KNOWN;
    struct writer writer;
    uint8_t key[16];

    writer_open(&writer, directory);
    put_format(&writer, TIERFS_FORMAT_VERSION);
    put(&writer, 0, NULL,
        (struct tierfs_inode){.ino = 1,
                              .mode = S_IFDIR | 0700,
                              .uid = 1,
                              .gid = 2,
                              .nlink = 4,
                              .flags = known,
                              .valid_until_ns = INT64_MAX,
                              .listed_until_ns = NOW + 59 * SECOND});
    put(&writer, 1, "file",
        (struct tierfs_inode){.ino = FILE_INO,
                              .mode = S_IFREG | 0600,
                              .uid = 9,
                              .gid = 9,
                              .nlink = 1,
                              .size_bytes = 1000,
                              .mtime_ns = -1,
                              .atime_ns = 1500000000,
                              .ctime_ns = INT64_MIN,
                              .valid_until_ns = NOW + 10 * SECOND + 5});
    put(&writer, 1, "local",
        (struct tierfs_inode){.ino = LOCAL_INO,
                              .mode = S_IFREG | 0600,
                              .nlink = 1,
                              .flags = TIERFS_DATA_LOCAL,
                              .valid_until_ns = INT64_MAX});
    put(&writer, DIR_INO, "old",
        (struct tierfs_inode){.ino = OLD_INO, .mode = S_IFREG, .valid_until_ns = NOW});
    put(&writer, 1, "dir",
        (struct tierfs_inode){.ino = DIR_INO,
                              .mode = S_IFDIR | 0711,
                              .nlink = 2,
                              .flags = known,
                              .valid_until_ns = INT64_MAX,
                              .listed_until_ns = NOW});
    put(&writer, 1, "link",
        (struct tierfs_inode){.ino = LINK_INO,
                              .mode = S_IFLNK | 0777,
                              .nlink = 1,
                              .size_bytes = 6,
                              .flags = known,
                              .valid_until_ns = INT64_MAX});
    put_symlink(&writer, LINK_INO, "target");
    put(&writer, 1, "xattr",
        (struct tierfs_inode){.ino = XATTR_INO,
                              .mode = S_IFREG,
                              .nlink = 1,
                              .flags = known | TIERFS_HAS_XATTR,
                              .valid_until_ns = INT64_MAX});
    put(&writer, 0, NULL,
        (struct tierfs_inode){
            .ino = ORPHAN_INO, .mode = S_IFREG | 0644, .nlink = 0, .valid_until_ns = INT64_MAX});
    put(&writer, 1, "stale",
        (struct tierfs_inode){.ino = STALE_INO, .mode = S_IFREG, .nlink = 1, .valid_until_ns = NOW - 1});
    put(&writer, 1, "empty",
        (struct tierfs_inode){.ino = EMPTY_INO,
                              .mode = S_IFDIR,
                              .nlink = 2,
                              .valid_until_ns = INT64_MAX,
                              .listed_until_ns = NOW + 55 * SECOND});
    put_name_of(&writer, 1, "lost", LOST_INO, S_IFREG, LOST_INO);
    put_name_of(&writer, 1, "broken", BROKEN_INO, S_IFREG, BROKEN_INO);
    put_raw(&writer, INODE, key, inode_key(key, BROKEN_INO), "short", 5);
    put(&writer, 1, "device",
        (struct tierfs_inode){.ino = DEVICE_INO,
                              .mode = S_IFCHR | 0600,
                              .nlink = 1,
                              .flags = known,
                              .rdev = 0x103,
                              .valid_until_ns = INT64_MAX});
    put(&writer, 0, NULL,
        (struct tierfs_inode){.ino = REMOVED_INO,
                              .mode = S_IFDIR,
                              .valid_until_ns = INT64_MAX,
                              .listed_until_ns = NOW + 59 * SECOND});
    writer_close(&writer);
}

/* Sends a request whose body lies in a block of exactly its size, so that a sanitizer sees what is read beyond. */
static long ask_with(uint32_t opcode, uint64_t nodeid, const void *body, size_t body_bytes, uint16_t extlen,
                     size_t capacity)
{
    const struct fuse_in_header header = {
        .opcode = opcode, .nodeid = nodeid, .total_extlen = extlen, .unique = 2};
    void *copy = malloc(body_bytes + !body_bytes);
    long result;

    assert(copy != NULL);
    if (body_bytes != 0)
        memcpy(copy, body, body_bytes);
    memset(&out, 0xa5, sizeof(out));
    result = tierfs_answer_at(answers, reader, NOW, &header, copy, body_bytes, &out, capacity);
    free(copy);
    return result;
}

static long ask(uint32_t opcode, uint64_t nodeid, const void *body, size_t body_bytes)
{
    return ask_with(opcode, nodeid, body, body_bytes, 0, sizeof(out));
}

static long look_up(uint64_t parent, const char *name)
{
    return ask(FUSE_LOOKUP, parent, name, strlen(name) + 1);
}

static long get_attributes(uint64_t ino)
{
    const struct fuse_getattr_in body = {0};

    return ask(FUSE_GETATTR, ino, &body, sizeof(body));
}

static void test_lookup(void)
{
    assert(look_up(1, "file") == sizeof(out.entry));
    assert(out.entry.nodeid == FILE_INO && out.entry.generation == 5);
    assert(out.entry.entry_valid == 10 && out.entry.entry_valid_nsec == 5);
    assert(out.entry.attr_valid == 10 && out.entry.attr_valid_nsec == 5);
    assert(out.entry.attr.ino == FILE_INO && out.entry.attr.size == 1000 && out.entry.attr.blocks == 2);
    assert(out.entry.attr.mode == (S_IFREG | 0640) && out.entry.attr.uid == 1000 &&
           out.entry.attr.gid == 1001);
    assert(out.entry.attr.nlink == 1 && out.entry.attr.blksize == 131072 && out.entry.attr.flags == 0);
    assert((int64_t)out.entry.attr.mtime == -1 && out.entry.attr.mtimensec == 999999999);
    assert(out.entry.attr.atime == 1 && out.entry.attr.atimensec == 500000000);
    assert((int64_t)out.entry.attr.ctime == -9223372037 && out.entry.attr.ctimensec == 145224192);

    assert(look_up(1, "dir") == sizeof(out.entry));
    assert(out.entry.entry_valid == 60 && out.entry.entry_valid_nsec == 0);
    assert(out.entry.attr.mode == (S_IFDIR | 0711) && out.entry.attr.uid == 0 && out.entry.attr.blocks == 8);
    assert(look_up(1, "empty") == sizeof(out.entry) && out.entry.attr.mode == (S_IFDIR | 0750));
    assert(look_up(1, "device") == sizeof(out.entry));
    assert(out.entry.attr.rdev == 0x103 && out.entry.attr.blocks == 0);

    /* Expired, and the directory vouches for it; then not. */
    assert(look_up(1, "stale") == sizeof(out.entry));
    assert(out.entry.entry_valid == 0 && out.entry.entry_valid_nsec == 0);
    assert(look_up(DIR_INO, "old") == TIERFS_RELAY);

    assert(look_up(1, "local") == TIERFS_RELAY);
    assert(look_up(1, "lost") == TIERFS_RELAY);
    assert(look_up(1, "broken") == TIERFS_RELAY);
    assert(look_up(1, ".") == TIERFS_RELAY);
    assert(look_up(1, "..") == TIERFS_RELAY);
}

static void test_absent_names(void)
{
    char name[300];

    /* Listed a second ago, negative answers hold for five. */
    assert(look_up(1, "none") == -ENOENT);
    assert(look_up(1, ".tierfs") == TIERFS_RELAY); /* whether there are snapshots only the engine knows */
    assert(look_up(EMPTY_INO, "none") == TIERFS_RELAY); /* listed five seconds ago */
    assert(look_up(DIR_INO, "none") == TIERFS_RELAY);
    assert(look_up(FILE_INO, "none") == -ENOTDIR);
    assert(look_up(ORPHAN_INO, "none") == -ENOTDIR);
    assert(look_up(12345, "none") == -ENOENT); /* no such directory, as the engine says */
    assert(look_up(REMOVED_INO, "none") == -ENOENT);

    memset(name, 'n', sizeof(name));
    name[255] = 0;
    assert(look_up(1, name) == -ENOENT);
    name[255] = 'n';
    name[256] = 0;
    assert(look_up(1, name) == -ENAMETOOLONG);
    name[256] = 'n';
    name[299] = 0;
    assert(look_up(1, name) == -ENAMETOOLONG);

    assert(look_up(1, "") == -EINVAL);
    assert(ask(FUSE_LOOKUP, 1, "file", 4) == -EINVAL); /* no NUL */
    assert(ask(FUSE_LOOKUP, 1, "", 0) == -EINVAL);
    assert(ask_with(FUSE_LOOKUP, 1, "file\0\0\0\0\0\0\0\0", 13, 1, sizeof(out)) == sizeof(out.entry));
    assert(ask_with(FUSE_LOOKUP, 1, "file\0\0\0", 8, 1, sizeof(out)) == -EINVAL); /* all of it is extension */
    assert(ask_with(FUSE_LOOKUP, 1, "file", 5, 1, sizeof(out)) == -EINVAL);
    assert(ask_with(FUSE_LOOKUP, 1, "file", 5, UINT16_MAX, sizeof(out)) == -EINVAL);
    assert(ask_with(FUSE_LOOKUP, 1, "file", 5, 0, 100) == -EINVAL); /* no room for a reply */
}

static void test_getattr(void)
{
    assert(get_attributes(FILE_INO) == sizeof(out.attr));
    assert(out.attr.attr_valid == 10 && out.attr.attr_valid_nsec == 5 && out.attr.attr.size == 1000);
    assert(get_attributes(OLD_INO) == sizeof(out.attr));
    assert(out.attr.attr_valid == 0 && out.attr.attr_valid_nsec == 0 && out.attr.dummy == 0);
    assert(get_attributes(ORPHAN_INO) == sizeof(out.attr) && out.attr.attr.nlink == 0);
    assert(get_attributes(LOCAL_INO) == TIERFS_RELAY);
    assert(get_attributes(BROKEN_INO) == TIERFS_RELAY);
    assert(get_attributes(LOST_INO) == -ENOENT);
}

static void test_readlink(void)
{
    assert(ask(FUSE_READLINK, LINK_INO, "", 0) == 6 && memcmp(out.bytes, "target", 6) == 0);
    assert(ask(FUSE_READLINK, FILE_INO, "", 0) == -EINVAL);
    assert(ask(FUSE_READLINK, LOST_INO, "", 0) == -ENOENT);
    assert(ask(FUSE_READLINK, BROKEN_INO, "", 0) == TIERFS_RELAY);
}

static long get_xattr(uint64_t ino, const char *name)
{
    char body[64] = {0};

    strcpy(body + sizeof(struct fuse_getxattr_in), name);
    return ask(FUSE_GETXATTR, ino, body, sizeof(struct fuse_getxattr_in) + strlen(name) + 1);
}

static void test_xattrs(void)
{
    struct fuse_getxattr_in all = {.size = 100};

    assert(get_xattr(FILE_INO, "user.x") == -ENODATA);
    assert(get_xattr(FILE_INO, "security.capability") == -ENODATA);
    assert(get_xattr(FILE_INO, "trusted.x") == -ENODATA);
    assert(get_xattr(FILE_INO, "user.tierfs.state") == TIERFS_RELAY);
    assert(get_xattr(FILE_INO, "user.tierfs") == -ENODATA);
    assert(get_xattr(XATTR_INO, "user.x") == TIERFS_RELAY);
    assert(get_xattr(XATTR_INO, "system.posix_acl_access") == -EOPNOTSUPP);
    assert(get_xattr(XATTR_INO, "other.x") == -ENODATA);
    assert(get_xattr(LOST_INO, "user.x") == -ENOENT);
    assert(get_xattr(BROKEN_INO, "user.x") == TIERFS_RELAY);
    assert(ask(FUSE_GETXATTR, FILE_INO, "01234567user.x", 14) == -EINVAL); /* no NUL */
    assert(ask(FUSE_GETXATTR, FILE_INO, "0123456", 8) == -EINVAL);
    assert(ask(FUSE_GETXATTR, FILE_INO, "01", 2) == -EINVAL);

    assert(ask(FUSE_LISTXATTR, FILE_INO, &all, sizeof(all)) == 0);
    assert(ask(FUSE_LISTXATTR, XATTR_INO, &all, sizeof(all)) == TIERFS_RELAY);
    assert(ask(FUSE_LISTXATTR, LOST_INO, &all, sizeof(all)) == -ENOENT);
    all.size = 0;
    assert(ask(FUSE_LISTXATTR, FILE_INO, &all, sizeof(all)) == sizeof(out.xattr) && out.xattr.size == 0);
    assert(ask(FUSE_LISTXATTR, FILE_INO, &all, 7) == -EINVAL);
}

static void test_forget(void)
{
    const struct fuse_forget_in one = {1};
    struct {
        struct fuse_batch_forget_in head;
        struct fuse_forget_one ones[3];
    } batch = {{.count = 3}, {{FILE_INO, 1}, {LOST_INO, 1}, {LINK_INO, 2}}};

    assert(ask(FUSE_FORGET, FILE_INO, &one, sizeof(one)) == TIERFS_NO_REPLY);
    assert(ask(FUSE_FORGET, LOST_INO, &one, sizeof(one)) == TIERFS_NO_REPLY);
    assert(ask(FUSE_FORGET, ORPHAN_INO, &one, sizeof(one)) == TIERFS_RELAY);
    assert(ask(FUSE_FORGET, BROKEN_INO, &one, sizeof(one)) == TIERFS_RELAY);
    assert(ask(FUSE_BATCH_FORGET, 0, &batch, sizeof(batch)) == TIERFS_NO_REPLY);
    batch.ones[2].nodeid = ORPHAN_INO;
    assert(ask(FUSE_BATCH_FORGET, 0, &batch, sizeof(batch)) == TIERFS_RELAY);
    assert(ask(FUSE_BATCH_FORGET, 0, &batch, sizeof(batch) - 1) ==
           TIERFS_NO_REPLY); /* cut short: nothing of it */
    batch.head.count = UINT32_MAX;
    assert(ask(FUSE_BATCH_FORGET, 0, &batch, sizeof(batch)) == TIERFS_NO_REPLY);
    assert(ask(FUSE_BATCH_FORGET, 0, &batch, 3) == TIERFS_NO_REPLY);
    assert(ask_with(FUSE_FORGET, ORPHAN_INO, &one, sizeof(one), 2, sizeof(out)) == TIERFS_NO_REPLY);
}

static long read_directory(uint32_t opcode, uint64_t ino, uint64_t offset, uint32_t size)
{
    const struct fuse_read_in body = {.fh = TIERFS_FH_FRONT | ino, .offset = offset, .size = size};

    return ask(opcode, ino, &body, sizeof(body));
}

/* Goes through a reply. Returns the cookie of the last entry, and appends the names to names. */
static uint64_t parse(long bytes, bool plus, char *names)
{
    uint64_t cookie = 0;

    for (long at = 0; at < bytes;) {
        struct fuse_entry_out entry = {0};
        struct fuse_dirent dirent;

        if (plus) {
            memcpy(&entry, out.bytes + at, sizeof(entry));
            at += (long)sizeof(entry);
        }
        memcpy(&dirent, out.bytes + at, sizeof(dirent));
        at += (long)sizeof(dirent);
        assert(dirent.off > cookie && dirent.namelen >= 1 && at + dirent.namelen <= bytes);
        cookie = dirent.off;
        strncat(names, (const char *)out.bytes + at, dirent.namelen);
        strcat(names, plus && entry.nodeid == 0 ? "? " : " ");
        if (plus && entry.nodeid != 0)
            assert(entry.nodeid == dirent.ino && entry.attr.ino == dirent.ino &&
                   entry.attr.mode >> 12 == dirent.type);
        at += (long)fuse_align(dirent.namelen);
    }
    return cookie;
}

/* The inode of the second entry, which is .. */
static uint64_t parent_of(const uint8_t *reply, bool plus)
{
    const size_t prefix = plus ? sizeof(struct fuse_entry_out) : 0;
    struct fuse_dirent dirent;

    memcpy(&dirent, reply + 2 * prefix + fuse_align(sizeof(dirent) + 1), sizeof(dirent));
    return dirent.ino;
}

static void test_opendir(void)
{
    const struct fuse_open_in body = {0};
    struct fuse_release_in release = {.fh = TIERFS_FH_FRONT | 1};

    assert(ask(FUSE_OPENDIR, 1, &body, sizeof(body)) == sizeof(out.open));
    assert(out.open.fh == (TIERFS_FH_FRONT | 1) && out.open.open_flags == 0 && out.open.backing_id == 0);
    assert(ask(FUSE_OPENDIR, EMPTY_INO, &body, sizeof(body)) == sizeof(out.open));
    assert(ask(FUSE_OPENDIR, DIR_INO, &body, sizeof(body)) == TIERFS_RELAY);
    assert(ask(FUSE_OPENDIR, FILE_INO, &body, sizeof(body)) == -ENOTDIR);
    assert(ask(FUSE_OPENDIR, LOST_INO, &body, sizeof(body)) == -ENOENT);
    assert(ask(FUSE_OPENDIR, REMOVED_INO, &body, sizeof(body)) == -ENOENT);

    assert(ask(FUSE_RELEASEDIR, 1, &release, sizeof(release)) == 0);
    assert(ask(FUSE_FSYNCDIR, 1, &release, sizeof(struct fuse_fsync_in)) == TIERFS_RELAY);
    release.fh = 1;
    assert(ask(FUSE_RELEASEDIR, 1, &release, sizeof(release)) == TIERFS_RELAY);
    assert(ask(FUSE_RELEASEDIR, 1, &release, 7) == TIERFS_RELAY);
}

static void test_readdir(void)
{
    const char *all = ". .. file local dir link xattr stale empty lost broken device ";
    const char *all_plus = ". .. file local? dir link xattr stale empty broken? device ";
    struct fuse_read_in body = {.fh = 5, .size = 4096};
    char names[1024] = "";
    uint64_t cookie;
    long bytes;

    bytes = read_directory(FUSE_READDIR, 1, 0, sizeof(out));
    cookie = parse(bytes, false, names);
    assert(strcmp(names, all) == 0);
    assert(read_directory(FUSE_READDIR, 1, cookie, sizeof(out)) == 0);

    names[0] = 0;
    bytes = read_directory(FUSE_READDIRPLUS, 1, 0, sizeof(out));
    cookie = parse(bytes, true, names);
    assert(strcmp(names, all_plus) == 0);
    assert(read_directory(FUSE_READDIRPLUS, 1, cookie, sizeof(out)) == 0);
    assert(read_directory(FUSE_READDIRPLUS, 1, UINT64_MAX, sizeof(out)) == 0);

    /* One entry at a time: each begins where the one before ended. */
    names[0] = 0;
    cookie = 0;
    while ((bytes = read_directory(FUSE_READDIRPLUS, 1, cookie, 200)) > 0) {
        const uint64_t before = cookie;

        cookie = parse(bytes, true, names);
        assert(cookie > before);
    }
    assert(bytes == 0 && strcmp(names, all_plus) == 0);
    assert(read_directory(FUSE_READDIRPLUS, 1, 0, 150) == 0);
    assert(read_directory(FUSE_READDIRPLUS, 1, 0, 0) == 0);
    assert(read_directory(FUSE_READDIR, 1, 0, UINT32_MAX) > 0);

    names[0] = 0;
    parse(read_directory(FUSE_READDIRPLUS, DIR_INO, 0, 4096), true, names);
    assert(strcmp(names, ". .. old ") == 0);
    assert(parent_of(out.bytes, true) == 1);
    names[0] = 0;
    parse(read_directory(FUSE_READDIR, REMOVED_INO, 0, 4096), false, names);
    assert(strcmp(names, ". .. ") == 0);
    assert(parent_of(out.bytes, false) == REMOVED_INO);
    assert(read_directory(FUSE_READDIR, 1, 0, 31) == 0); /* no room for the first */
    assert(read_directory(FUSE_READDIR, 1, 0, 32) == 32);

    assert(ask(FUSE_READDIRPLUS, 1, &body, sizeof(body)) > 0); /* the engine's handle */
    body.fh = TIERFS_FH_FRONT | DIR_INO;
    assert(ask(FUSE_READDIRPLUS, 1, &body, sizeof(body)) == -EBADF);
    assert(ask(FUSE_READDIRPLUS, 1, &body, sizeof(body) - 1) == -EINVAL);
    assert(read_directory(FUSE_READDIRPLUS, FILE_INO, 0, 4096) == -ENOTDIR);
    assert(read_directory(FUSE_READDIRPLUS, LOST_INO, 0, 4096) == -ENOENT);
    assert(read_directory(FUSE_READDIRPLUS, BROKEN_INO, 0, 4096) == -EIO);
}

static void test_the_rest(void)
{
    static const uint32_t relayed[] = {
        FUSE_SETATTR, FUSE_OPEN,      FUSE_READ,    FUSE_WRITE, FUSE_STATFS, FUSE_RELEASE, FUSE_INIT,
        FUSE_CREATE,  FUSE_INTERRUPT, FUSE_DESTROY, 0,          54,          UINT32_MAX};
    const uint8_t body[64] = {0};

    for (size_t i = 0; i < sizeof(relayed) / sizeof(relayed[0]); i++)
        assert(ask(relayed[i], FILE_INO, body, sizeof(body)) == TIERFS_RELAY);
    assert(ask(FUSE_IOCTL, FILE_INO, body, sizeof(body)) == -ENOTTY);
    assert(ask(FUSE_ACCESS, FILE_INO, body, 8) == -ENOSYS);
    assert(ask(FUSE_STATX, FILE_INO, body, 24) == -ENOSYS);
}

/* Whatever the records say: only the engine knows what is there. */
static void test_snapshots(void)
{
    const uint64_t ino = TIERFS_SNAPSHOT_INO | UINT64_C(1) << 43 | FILE_INO;
    const struct fuse_forget_in forget = {.nlookup = 1};

    assert(look_up(1, ".tierf") == -ENOENT);
    assert(look_up(1, ".tierfs.") == -ENOENT);
    assert(look_up(ino, "file") == TIERFS_RELAY);
    assert(get_attributes(ino) == TIERFS_RELAY);
    assert(get_xattr(ino, "user.a") == TIERFS_RELAY);
    assert(ask(FUSE_READLINK, ino, NULL, 0) == TIERFS_RELAY);
    assert(read_directory(FUSE_READDIRPLUS, ino, 0, 4096) == TIERFS_RELAY);
    assert(ask(FUSE_FORGET, ino, &forget, sizeof(forget)) == TIERFS_NO_REPLY);
}

/* With the clock on the wall. */
static void test_clock(void)
{
    const struct fuse_in_header header = {.opcode = FUSE_GETATTR, .nodeid = FILE_INO};
    const struct fuse_getattr_in body = {0};

    assert(tierfs_answer(answers, reader, &header, &body, sizeof(body), &out, sizeof(out)) ==
           sizeof(out.attr));
    assert(out.attr.attr_valid == 0); /* expired in 2023 */
}

int main(void)
{
    const struct tierfs_answer_settings settings = {.ttl_ns = TTL,
                                                    .negative_ttl_ns = 5 * SECOND,
                                                    .uid = 1000,
                                                    .gid = 1001,
                                                    .file_mode = 0640,
                                                    .dir_mode = 0750};
    char directory[PATH_BYTES];

    make_directory(directory);
    make_namespace(directory);
    assert(tierfs_view_open(directory, &view) == 0);
    assert(tierfs_reader_open(view, &reader) == 0);
    assert(tierfs_answers_open(&settings, &answers) == 0);
    test_lookup();
    test_absent_names();
    test_getattr();
    test_readlink();
    test_xattrs();
    test_forget();
    test_opendir();
    test_readdir();
    test_the_rest();
    test_snapshots();
    test_clock();
    tierfs_answers_close(answers);
    tierfs_reader_close(reader);
    tierfs_view_close(view);
    remove_directory(directory);
    puts("answers: ok");
    return 0;
}
