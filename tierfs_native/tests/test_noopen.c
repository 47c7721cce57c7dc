/* No-open mode, request by request: when it begins, and what becomes of requests about files without a handle. */
#include "noopen.h"

#include "answer.h"
#include "namespace.h"
#include "reading.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

#define SMALL 2u
#define LARGE 3u
#define UNKNOWN 99u

static struct tierfs_reader *reader;
static unsigned begun;

static void on_begin(void *context)
{
    assert(context == &begun);
    begun++;
}

static void make_namespace(const char *directory)
{
    struct writer writer;

    writer_open(&writer, directory);
    put_format(&writer, TIERFS_FORMAT_VERSION);
    put_inode(&writer,
              &(struct tierfs_inode){.ino = SMALL, .mode = S_IFREG | 0644, .nlink = 1, .size_bytes = 10});
    put_inode(&writer,
              &(struct tierfs_inode){
                  .ino = LARGE, .mode = S_IFREG | 0644, .nlink = 1, .size_bytes = TIERFS_READING_MAX_BYTES});
    writer_close(&writer);
}

static long ask(struct tierfs_noopen *noopen, uint32_t opcode, uint64_t ino, void *body, size_t bytes)
{
    const struct fuse_in_header header = {.opcode = opcode, .nodeid = ino, .unique = 2};

    return tierfs_noopen_answer(noopen, reader, &header, body, bytes);
}

static long open_one(struct tierfs_noopen *noopen, uint64_t ino)
{
    struct fuse_open_in body = {.flags = O_RDONLY};

    return ask(noopen, FUSE_OPEN, ino, &body, sizeof body);
}

static void test_modes(void)
{
    struct tierfs_backing *backing;
    struct tierfs_noopen *noopen;

    assert(tierfs_backing_create(&backing) == 0);
    assert(tierfs_noopen_create((enum tierfs_open_mode)3, backing, &noopen) == -EINVAL);
    assert(tierfs_noopen_create(TIERFS_OPEN_ASK, backing, &noopen) == 0);
    for (unsigned i = 0; i < 3 * TIERFS_NOOPEN_AFTER; i++)
        assert(open_one(noopen, SMALL) == TIERFS_NOT_NOOPEN);
    assert(!tierfs_noopen_has_begun(noopen));
    tierfs_noopen_destroy(noopen);
    assert(tierfs_noopen_create(TIERFS_OPEN_NONE, backing, &noopen) == 0);
    tierfs_noopen_on_begin(noopen, on_begin, &begun);
    assert(begun == 0 && !tierfs_noopen_has_begun(noopen));
    assert(open_one(noopen, UNKNOWN) == -ENOSYS && open_one(noopen, LARGE) == -ENOSYS);
    assert(begun == 1 && tierfs_noopen_has_begun(noopen));
    tierfs_noopen_destroy(noopen);
    tierfs_backing_destroy(backing);
}

static void test_auto(void)
{
    struct tierfs_backing *backing;
    struct tierfs_noopen *noopen;

    begun = 0;
    assert(tierfs_backing_create(&backing) == 0);
    assert(tierfs_noopen_create(TIERFS_OPEN_AUTO, backing, &noopen) == 0);
    tierfs_noopen_on_begin(noopen, on_begin, &begun);
    for (uint64_t other = LARGE; other <= UNKNOWN; other += UNKNOWN - LARGE) {
        for (unsigned i = 0; i < TIERFS_NOOPEN_AFTER; i++)
            assert(open_one(noopen, SMALL) == TIERFS_NOT_NOOPEN);
        assert(open_one(noopen, other) == TIERFS_NOT_NOOPEN);
    }
    assert(tierfs_backing_open_begins(backing, LARGE, false) == 0);
    for (unsigned i = 0; i < TIERFS_NOOPEN_AFTER + 1; i++)
        assert(open_one(noopen, SMALL) == TIERFS_NOT_NOOPEN); /* at the last one another is on its way */
    tierfs_backing_open_failed(backing, LARGE, false);
    for (unsigned i = 0; i < TIERFS_NOOPEN_AFTER; i++)
        assert(open_one(noopen, SMALL) == TIERFS_NOT_NOOPEN);
    assert(open_one(noopen, SMALL) == -ENOSYS && begun == 1);
    assert(open_one(noopen, LARGE) == -ENOSYS && begun == 1);
    tierfs_noopen_destroy(noopen);
    tierfs_backing_destroy(backing);
}

/* What carries no handle gets the one of a file that the front has opened; what has one keeps it. */
static void test_requests(void)
{
    static const uint32_t opcodes[] = {FUSE_READ, FUSE_LSEEK, FUSE_FSYNC};
    struct tierfs_backing *backing;
    struct tierfs_noopen *noopen;
    uint64_t body[8];

    assert(tierfs_backing_create(&backing) == 0);
    assert(tierfs_noopen_create(TIERFS_OPEN_NONE, backing, &noopen) == 0);
    for (size_t i = 0; i < sizeof opcodes / sizeof *opcodes; i++) {
        memset(body, 0, sizeof body);
        assert(ask(noopen, opcodes[i], SMALL, body, sizeof body) == TIERFS_NOT_NOOPEN);
        assert(body[0] == (TIERFS_FH_FRONT | SMALL) && body[1] == 0);
        body[0] = 7;
        assert(ask(noopen, opcodes[i], SMALL, body, sizeof body) == TIERFS_NOT_NOOPEN && body[0] == 7);
        body[0] = 0;
        assert(ask(noopen, opcodes[i], SMALL, body, 7) == TIERFS_NOT_NOOPEN && body[0] == 0);
        assert(ask(noopen, opcodes[i], TIERFS_FH_FRONT, body, sizeof body) == TIERFS_NOT_NOOPEN &&
               body[0] == 0);
    }
    memset(body, 0, sizeof body);
    assert(ask(noopen, FUSE_FLUSH, SMALL, body, sizeof(struct fuse_flush_in)) == -ENOSYS);
    assert(ask(noopen, FUSE_WRITE, SMALL, body, sizeof(struct fuse_write_in)) == -EROFS);
    assert(ask(noopen, FUSE_FALLOCATE, SMALL, body, sizeof(struct fuse_fallocate_in)) == -EROFS);
    body[0] = TIERFS_FH_FRONT | SMALL;
    assert(ask(noopen, FUSE_FLUSH, SMALL, body, sizeof(struct fuse_flush_in)) == TIERFS_NOT_NOOPEN);
    assert(ask(noopen, FUSE_COPY_FILE_RANGE, SMALL, body, sizeof(struct fuse_copy_file_range_in)) == -EROFS);
    assert(ask(noopen, FUSE_COPY_FILE_RANGE_64, SMALL, body, 31) == TIERFS_NOT_NOOPEN);
    body[offsetof(struct fuse_copy_file_range_in, fh_out) / 8] = 5;
    assert(ask(noopen, FUSE_COPY_FILE_RANGE_64, SMALL, body, sizeof(struct fuse_copy_file_range_in)) ==
           TIERFS_NOT_NOOPEN);
    assert(ask(noopen, FUSE_LOOKUP, SMALL, body, sizeof body) == TIERFS_NOT_NOOPEN);
    tierfs_noopen_destroy(noopen);
    tierfs_backing_destroy(backing);
}

int main(void)
{
    char directory[PATH_BYTES];
    struct tierfs_view *view;

    make_directory(directory);
    make_namespace(directory);
    assert(tierfs_view_open(directory, &view) == 0 && tierfs_reader_open(view, &reader) == 0);
    remove_directory(directory);
    test_modes();
    test_auto();
    test_requests();
    tierfs_reader_close(reader);
    tierfs_view_close(view);
    return 0;
}
