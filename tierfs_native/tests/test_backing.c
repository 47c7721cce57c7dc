/*
 * Who passes through and who does not, against the kernel's rules. ioctl(2) is this file's: it hands out backing
 * ids, and knows which are open. At the end no descriptor is left.
 */
#include "backing.h"

#include "abi.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#define DEVICE 1234
#define IDS 64
#define INO 42u

static ino_t backing_of[IDS]; /* by id: the file; 0: not open */
static int refusal;

int ioctl(int descriptor, unsigned long request, ...)
{
    va_list arguments;
    va_start(arguments, request);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);

    assert(descriptor == DEVICE);
    if (request == FUSE_DEV_IOC_BACKING_CLOSE) {
        uint32_t id = *(uint32_t *)argument;
        assert(id > 0 && id < IDS && backing_of[id] != 0);
        backing_of[id] = 0;
        return 0;
    }
    assert(request == FUSE_DEV_IOC_BACKING_OPEN);
    const struct fuse_backing_map *map = argument;
    struct stat info;
    assert(map->flags == 0 && fstat(map->fd, &info) == 0);
    if (refusal != 0) {
        errno = refusal;
        return -1;
    }
    for (int id = 1; id < IDS; id++)
        if (backing_of[id] == 0) {
            backing_of[id] = info.st_ino;
            return id;
        }
    abort();
}

static int open_ids(void)
{
    int count = 0;

    for (int id = 1; id < IDS; id++)
        count += backing_of[id] != 0;
    return count;
}

static int open_descriptors(void)
{
    DIR *directory = opendir("/proc/self/fd");
    int count = 0;

    assert(directory != NULL);
    while (readdir(directory) != NULL)
        count++;
    closedir(directory);
    return count;
}

/* A file, and its inode number. */
static int a_file(ino_t *inode)
{
    char path[] = "/tmp/tierfs-backing-XXXXXX";
    int descriptor = mkstemp(path);
    struct stat info;

    assert(descriptor >= 0 && fstat(descriptor, &info) == 0 && unlink(path) == 0);
    *inode = info.st_ino;
    return descriptor;
}

static int32_t open_file(struct tierfs_backing *backing, bool writes, bool lends, ino_t *inode)
{
    bool passed = tierfs_backing_open_begins(backing, INO, writes);

    if (lends)
        tierfs_backing_lend(backing, INO, a_file(inode));
    return tierfs_backing_open_ends(backing, INO, writes, lends || passed);
}

static void test_the_first_decides(struct tierfs_backing *backing)
{
    ino_t inode = 0;
    ino_t other = 0;
    int32_t id = open_file(backing, false, true, &inode);

    assert(id > 0 && backing_of[id] == inode);
    assert(open_file(backing, true, false, NULL) == id);  /* a writer follows */
    assert(open_file(backing, false, true, &other) == id); /* one id, whatever is lent now */
    for (int i = 0; i < 3; i++) {
        assert(open_ids() == 1);
        tierfs_backing_released(backing, INO);
    }
    assert(open_ids() == 0);
    assert(open_file(backing, true, false, NULL) == 0);
    assert(open_file(backing, false, true, &inode) == 0); /* cached, since the writer is */
    tierfs_backing_released(backing, INO);
    assert(open_file(backing, false, true, &inode) == 0);
    tierfs_backing_released(backing, INO);
    tierfs_backing_released(backing, INO);
    id = open_file(backing, false, true, &inode);
    assert(id > 0 && backing_of[id] == inode);
    tierfs_backing_released(backing, INO);
}

static void test_a_writer_on_its_way(struct tierfs_backing *backing)
{
    ino_t inode;

    assert(!tierfs_backing_open_begins(backing, INO, true));
    assert(open_file(backing, false, true, &inode) == 0); /* the engine does not expect others to write */
    assert(tierfs_backing_open_ends(backing, INO, true, false) == 0);
    tierfs_backing_released(backing, INO);
    tierfs_backing_released(backing, INO);
    /* If it fails, the next reader may. */
    assert(!tierfs_backing_open_begins(backing, INO, true));
    tierfs_backing_open_failed(backing, INO, true);
    assert(open_file(backing, false, true, &inode) > 0);
    /* Told that it passes through, but the last one that did has gone meanwhile: through the page cache. */
    assert(tierfs_backing_open_begins(backing, INO, true));
    tierfs_backing_released(backing, INO);
    assert(open_ids() == 0);
    assert(tierfs_backing_open_ends(backing, INO, true, true) == 0);
    tierfs_backing_released(backing, INO);
}

static void test_the_newest_file_counts(struct tierfs_backing *backing)
{
    ino_t old;
    ino_t new;

    assert(!tierfs_backing_open_begins(backing, INO, false));
    tierfs_backing_lend(backing, INO, a_file(&old)); /* and then that engine died */
    tierfs_backing_lend(backing, INO, a_file(&new));
    int32_t id = tierfs_backing_open_ends(backing, INO, false, true);
    assert(id > 0 && backing_of[id] == new);
    /* What was lent before the last release is not used after it. */
    assert(tierfs_backing_open_begins(backing, INO, false));
    tierfs_backing_lend(backing, INO, a_file(&old));
    tierfs_backing_released(backing, INO);
    assert(tierfs_backing_open_ends(backing, INO, false, true) == 0);
    tierfs_backing_released(backing, INO);
    /* Nobody opens it: what is lent is closed when that engine is gone. */
    int before = open_descriptors();
    tierfs_backing_lend(backing, INO, a_file(&old));
    assert(open_descriptors() == before + 1);
    tierfs_backing_drop_unasked(backing);
    assert(open_descriptors() == before);
}

static void test_created_and_passed_through(struct tierfs_backing *backing)
{
    ino_t inode;
    ino_t other;

    tierfs_backing_lend(backing, INO, a_file(&inode)); /* before the answer that tells of the inode */
    int before = open_descriptors();
    int32_t id = tierfs_backing_created(backing, INO, true);
    assert(id > 0 && backing_of[id] == inode && open_descriptors() == before - 1);
    assert(tierfs_backing_is_passed(backing, INO) && !tierfs_backing_is_passed(backing, INO + 1));
    struct tierfs_passed_file *files;
    size_t count;
    assert(tierfs_backing_list_passed(backing, &files, &count) == 0 && count == 1);
    assert(files[0].ino == INO && files[0].file_ino == inode && files[0].file_device != 0);
    free(files);
    assert(!tierfs_backing_tells_close(backing, INO));
    tierfs_backing_tell_close(backing, INO);
    tierfs_backing_tell_close(backing, INO + 1);
    assert(tierfs_backing_tells_close(backing, INO) && !tierfs_backing_tells_close(backing, INO + 1));
    tierfs_backing_drop_unasked(backing); /* it is in use */
    assert(open_file(backing, true, false, &other) == id);
    tierfs_backing_released(backing, INO);
    tierfs_backing_released(backing, INO);
    assert(!tierfs_backing_is_passed(backing, INO) && open_ids() == 0);
    assert(!tierfs_backing_tells_close(backing, INO));
    assert(tierfs_backing_list_passed(backing, &files, &count) == 0 && count == 0);
    free(files);
    /* Somebody was faster, through the page cache: so is the one who made it. */
    assert(open_file(backing, false, false, &other) == 0);
    tierfs_backing_lend(backing, INO, a_file(&inode));
    assert(tierfs_backing_created(backing, INO, true) == 0);
    tierfs_backing_released(backing, INO);
    tierfs_backing_released(backing, INO);
    /* A writer is on its way to the engine, which does not know of this one. */
    assert(!tierfs_backing_open_begins(backing, INO, true));
    tierfs_backing_lend(backing, INO, a_file(&inode));
    assert(tierfs_backing_created(backing, INO, true) == 0);
    assert(tierfs_backing_open_ends(backing, INO, true, true) == 0);
    tierfs_backing_released(backing, INO);
    tierfs_backing_released(backing, INO);
}

static void test_created_and_unknown(struct tierfs_backing *backing)
{
    ino_t inode;

    tierfs_backing_created(backing, INO, false);
    assert(open_file(backing, false, true, &inode) == 0);
    tierfs_backing_released(backing, INO);
    tierfs_backing_released(backing, INO);
    tierfs_backing_released(backing, INO); /* once too often */
    tierfs_backing_open_failed(backing, INO, true);
    assert(open_file(backing, false, true, &inode) > 0);
    tierfs_backing_released(backing, INO);
}

static void test_refusal(struct tierfs_backing *backing)
{
    ino_t inode;
    int error;

    refusal = EPERM;
    assert(open_file(backing, false, true, &inode) == 0);
    tierfs_backing_opens(backing, &error);
    assert(error == EPERM);
    refusal = 0;
    assert(open_file(backing, false, true, &inode) == 0); /* the first is cached */
    tierfs_backing_released(backing, INO);
    tierfs_backing_released(backing, INO);
}

/* Opens end only while none is there but the front's own; those are forgotten then. */
static void test_no_more_opens(int before)
{
    struct tierfs_backing *backing;
    ino_t inode;

    assert(tierfs_backing_create(&backing) == 0);
    tierfs_backing_set_device(backing, DEVICE);
    assert(tierfs_backing_open_here(backing, INO) && tierfs_backing_open_here(backing, INO + 1));
    assert(tierfs_backing_open_begins(backing, INO, false) == 0);
    assert(!tierfs_backing_stop_opens(backing)); /* one is on its way */
    assert(tierfs_backing_open_ends(backing, INO, false, false) == 0);
    assert(!tierfs_backing_stop_opens(backing)); /* the engine has opened one */
    tierfs_backing_released(backing, INO);
    tierfs_backing_created(backing, INO + 2, false);
    assert(!tierfs_backing_stop_opens(backing));
    tierfs_backing_released(backing, INO + 2);
    tierfs_backing_released_here(backing, INO);
    assert(open_file(backing, false, true, &inode) != 0);
    assert(!tierfs_backing_stop_opens(backing)); /* one is passed through */
    tierfs_backing_released(backing, INO);
    assert(tierfs_backing_count_here(backing) == 1);
    assert(tierfs_backing_stop_opens(backing) && tierfs_backing_stop_opens(backing));
    assert(tierfs_backing_count_here(backing) == 0);
    assert(!tierfs_backing_open_here(backing, INO));
    assert(tierfs_backing_open_begins(backing, INO, false) == -ENOSYS);
    tierfs_backing_released_here(backing, INO + 1);
    tierfs_backing_released(backing, INO);
    tierfs_backing_open_failed(backing, INO, false);
    tierfs_backing_destroy(backing);
    assert(open_ids() == 0 && open_descriptors() == before);
}

int main(void)
{
    int before = open_descriptors();
    struct tierfs_backing *backing;
    int error;

    assert(tierfs_backing_create(&backing) == 0);
    tierfs_backing_set_device(backing, DEVICE);
    test_the_first_decides(backing);
    test_a_writer_on_its_way(backing);
    test_the_newest_file_counts(backing);
    test_created_and_unknown(backing);
    test_created_and_passed_through(backing);
    test_refusal(backing);
    assert(tierfs_backing_opens(backing, &error) == 9);
    assert(open_ids() == 0);
    assert(open_descriptors() == before);
    assert(!tierfs_backing_open_begins(backing, INO, false));
    tierfs_backing_lend(backing, INO, open("/dev/null", O_RDONLY));
    tierfs_backing_destroy(backing);
    tierfs_backing_destroy(NULL);
    test_no_more_opens(before);
    assert(open_descriptors() == before);
    return 0;
}
