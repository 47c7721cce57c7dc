/* Reads from the device by the thread that waits for it: answers, what must not be answered, and that it is bounded. */
#include "tier.h"

#include "abi.h"
#include "batch_sum.h"
#include "disk.h"

#include <errno.h>
#include <pthread.h>
#include <time.h>

#define SEGMENT UINT64_C(0x0123456789abcdef)
#define FILES 40u
#define OWN_FILE (FILES + 1)
#define DAMAGED 7u

/* By inode, from 1: files whose content id is that number. */
static struct {
    uint64_t size_bytes, segment, place_bytes;
} files[FILES + 2];
static uint64_t segment_bytes;

/* What came of a request: the origin is the first part of it. */
struct asked {
    struct tierfs_origin origin;
    uint64_t ino, offset;
    size_t length;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t ended = PTHREAD_COND_INITIALIZER;
static unsigned answered, relayed;

static char byte_at(uint64_t ino, uint64_t offset)
{
    return files[ino].segment != 0 ? tier_byte_at(SEGMENT, files[ino].place_bytes + offset)
                                   : tier_byte_at(ino, offset);
}

static void count(unsigned *counter)
{
    pthread_mutex_lock(&lock);
    ++*counter;
    pthread_cond_broadcast(&ended);
    pthread_mutex_unlock(&lock);
}

static int take_answer(const struct tierfs_origin *origin, const void *message, size_t bytes)
{
    const struct asked *asked = (const void *)origin;
    const char *data = (const char *)message + sizeof(struct fuse_out_header);
    struct fuse_out_header header;

    memcpy(&header, message, sizeof header);
    assert(header.error == 0 && header.unique == asked->ino * 2 && header.len == bytes);
    assert(bytes == sizeof header + asked->length);
    for (size_t at = 0; at < asked->length; at++)
        assert(data[at] == byte_at(asked->ino, asked->offset + at));
    count(&answered);
    return 0;
}

static void take_relayed(void *context, const void *message, size_t bytes, const struct tierfs_origin *origin)
{
    const struct asked *asked = (const void *)origin;
    const struct fuse_in_header *header = message;

    assert(context == &files && header->unique == asked->ino * 2 && header->len == bytes);
    count(&relayed);
}

static void put_record(struct tier_writer *writer, uint64_t ino)
{
    const uint64_t size_bytes = files[ino].size_bytes;
    const uint16_t sums = (uint16_t)tierfs_blocks_in_extent(size_bytes, 0);
    const uint64_t present = tierfs_block_mask(sums);
    uint8_t record[TIER_RECORD_MAX] = {0}, key[20] = {(uint8_t)ino};
    static char block[TIERFS_BLOCK_BYTES];

    memcpy(record, &size_bytes, 8);
    memcpy(record + 8, &present, 8);
    memcpy(record + 32, &files[ino].segment, 8);
    memcpy(record + 40, &files[ino].place_bytes, 8);
    memcpy(record + 56, &sums, 2);
    for (uint64_t start = 0; start < size_bytes; start += sizeof block) {
        const size_t bytes = size_bytes - start < sizeof block ? (size_t)(size_bytes - start) : sizeof block;

        for (size_t at = 0; at < bytes; at++)
            block[at] = byte_at(ino, start + at);
        if (ino == DAMAGED)
            block[100] ^= 1; /* the file has something else */
        const uint64_t sum = tierfs_block_sum(block, bytes);
        memcpy(record + TIER_HEAD_BYTES + start / sizeof block * 8, &sum, 8);
    }
    tier_put(writer->txn, writer->extents, key, sizeof key, record, TIER_HEAD_BYTES + 8u * sums);
}

static void make_tier(struct tier_place *place)
{
    struct tier_writer writer;

    tier_make(place);
    tier_write_file(place, SEGMENT, 0, segment_bytes);
    tier_write_file(place, 0, OWN_FILE, files[OWN_FILE].size_bytes);
    tier_writer_open(&writer, place);
    for (uint64_t ino = 1; ino <= OWN_FILE; ino++)
        put_record(&writer, ino);
    tier_writer_close(&writer);
}

static void make_files(void)
{
    for (uint64_t ino = 1; ino <= FILES; ino++) {
        files[ino].size_bytes = 1000 + ino * 5000;
        files[ino].segment = SEGMENT;
        files[ino].place_bytes = segment_bytes;
        segment_bytes += (files[ino].size_bytes + 4095) / 4096 * 4096;
    }
    files[OWN_FILE].size_bytes = 3 * TIERFS_BLOCK_BYTES + 100;
}

static void forget_pages(const struct tier_place *place)
{
    for (uint64_t ino = FILES; ino <= OWN_FILE; ino++) {
        char inside[TIERFS_TIER_PATH], path[2 * PATH_BYTES];
        const uint8_t content_id[16] = {(uint8_t)ino};

        tierfs_tier_path(inside, files[ino].segment, content_id);
        snprintf(path, sizeof path, "%s/%s", place->root, inside);
        int fd = open(path, O_RDWR | O_CLOEXEC);
        assert(fd >= 0 && fsync(fd) == 0 && posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
        close(fd);
    }
}

/* False: the page cache has it in any case (a tmpfs), so that nothing waits for a device here. */
static bool ask(struct tierfs_disk *disk, struct tierfs_reading_lane *lane, struct asked *asked, char *out)
{
    struct {
        struct fuse_in_header header;
        struct fuse_read_in read;
    } message = {0};
    const struct tierfs_inode inode = {
        .ino = asked->ino, .size_bytes = files[asked->ino].size_bytes, .content_id = {(uint8_t)asked->ino}};
    struct tierfs_device_read read;

    message.header.len = sizeof message;
    message.header.unique = asked->ino * 2;
    message.read.offset = asked->offset;
    message.read.size = (uint32_t)asked->length;
    long result = tierfs_reading_read(lane, &inode, asked->offset, asked->length, out, &read);
    if (result != TIERFS_READING_WAITS) {
        assert(result == (long)asked->length);
        return false;
    }
    while (!tierfs_disk_read(disk, &read, &message, sizeof message, &asked->origin)) {
        /* All are taken: one of them ends. */
        struct timespec pause = {.tv_nsec = 1000000};
        nanosleep(&pause, NULL);
    }
    return true;
}

static void wait_for(unsigned all)
{
    pthread_mutex_lock(&lock);
    while (answered + relayed < all)
        pthread_cond_wait(&ended, &lock);
    pthread_mutex_unlock(&lock);
}

static void test_reads(const struct tier_place *place, struct tierfs_disk *disk,
                       struct tierfs_reading_lane *lane)
{
    static struct asked asked[3 * (OWN_FILE + 1)];
    char *out = malloc(TIERFS_READING_MAX_BYTES);
    unsigned waited = 0;
    bool damaged = false;

    assert(out != NULL);
    answered = relayed = 0;
    for (unsigned way = 0; way < 3; way++) {
        forget_pages(place);
        for (uint64_t ino = 1; ino <= OWN_FILE; ino++) {
            struct asked *one = &asked[way * (OWN_FILE + 1) + ino];
            const uint64_t size = files[ino].size_bytes;
            /* All of it, its end, and something within. */
            *one = (struct asked){.origin.answer = take_answer, .ino = ino};
            one->offset = way == 0 ? 0 : size / 2;
            one->length = (size_t)(way < 2 ? size - one->offset : size / 4);
            if (!ask(disk, lane, one, out))
                continue;
            waited++;
            damaged = damaged || ino == DAMAGED;
        }
        wait_for(waited);
    }
    /* What is damaged is the engine's. Whether it was read from the device depends on what the kernel read ahead. */
    assert(relayed <= 3 && (relayed > 0) == damaged && answered + relayed == waited);
    free(out);
}

/* Disks and lanes live as long as the process, and so do these. */
static struct tierfs_reading_lane *lanes[2];

static void run(const struct tier_place *place, const struct tierfs_reading *reading, bool in_turn)
{
    const struct tierfs_disk_links links = {.relay = take_relayed, .context = &files};
    struct tierfs_disk *disk;

    assert(tierfs_reading_lane_open(reading, &lanes[in_turn]) == 0);
    assert(tierfs_disk_create(&links, reading, in_turn, &disk) == 0);
    assert(!in_turn || !tierfs_disk_has_ring(disk));
    test_reads(place, disk, lanes[in_turn]);
}

int main(void)
{
    static struct tierfs_reading *reading;
    struct tier_place place;

    make_files();
    make_tier(&place);
    tier_remove_at_exit(&place);
    assert(tierfs_reading_create(&reading) == 0 && tierfs_reading_add_tier(reading, place.root, false) == 0);
    run(&place, reading, false);
    run(&place, reading, true);
    return 0;
}
