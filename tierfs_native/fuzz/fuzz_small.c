/*
 * Opens and reads that the front answers from a tier, with an index whose records are arbitrary: what is read is what
 * lies at the place that a sound record names, or the engine is asked.
 *
 * An input: one byte for how many records there are (up to 7); each of them one byte for the content, one for the
 * number of the extent and whether its checksums are made right, two for its size, then the record. Then requests: one
 * byte for what is asked, one for the inode, two for the size of the body, then the body. Another process writes the
 * index: LMDB must not be open twice in one.
 */
#include "../tests/namespace.h"
#include "../tests/tier.h"

#include "answer.h"
#include "batch_sum.h"
#include "small.h"

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/prctl.h>
#include <sys/socket.h>

#define SEGMENT UINT64_C(5)
#define SEGMENT_BYTES (UINT64_C(3) << 20)
#define FIRST 2u
#define FILES 6u
#define BEING_WRITTEN 8u
#define DIRECTORY 9u
#define INODES 10u
#define ROWS_MAX 8u
#define ROW_HEAD 4u
#define OUT_BYTES (TIERFS_READING_MAX_BYTES + 4096)
#define INPUT_MAX 65536u
#define DROPS_CACHE 240u /* first byte: from there on nothing is in the page cache */

static const uint64_t sizes[FILES] = {0, 5000, TIERFS_BLOCK_BYTES, 300001, (1 << 20) - 1, UINT64_C(9) << 20};

/* The record of an extent, as it was written last. */
struct row {
    const uint8_t *value;
    size_t bytes;
};

static struct tier_place place;
static struct tierfs_view *view;
static struct tierfs_reader *reader;
static struct tierfs_backing *backing;
static struct tierfs_small *small;
static uint64_t opened[INODES];
static char *out;
static int writing; /* to the process that writes the index */

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed);
/* Of libFuzzer, which otherwise would change nothing by itself; without it, replay_main.c does half of them. */
__attribute__((weak)) size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);

static size_t key_of(uint8_t key[20], uint64_t file, uint32_t extent_no)
{
    const uint32_t number = __builtin_bswap32(extent_no);

    memset(key, 0, 20);
    memcpy(key, &file, sizeof(file));
    memcpy(key + 16, &number, sizeof(number));
    return 20;
}

static void run_writer(int asked)
{
    static uint8_t data[INPUT_MAX];
    struct tier_writer writer;
    uint8_t key[20];
    ssize_t got;

    tier_writer_open(&writer, &place);
    while (packet_send(asked, "", 1) == 1 && (got = packet_receive(asked, data, sizeof(data))) > 0) {
        assert(mdb_drop(writer.txn, writer.extents, 0) == 0);
        for (size_t at = 0; at + ROW_HEAD <= (size_t)got;) {
            uint16_t bytes;

            memcpy(&bytes, data + at + 2, sizeof(bytes));
            (void)key_of(key, data[at], data[at + 1]);
            tier_put(writer.txn, writer.extents, key, sizeof(key), data + at + ROW_HEAD, bytes);
            at += ROW_HEAD + bytes;
        }
        tier_writer_commit(&writer);
    }
    _exit(0);
}

static void make_namespace(const char *directory)
{
    struct writer writer;

    writer_open(&writer, directory);
    put_format(&writer, TIERFS_FORMAT_VERSION);
    for (uint64_t ino = FIRST; ino < INODES; ino++) {
        struct tierfs_inode inode = {.ino = ino,
                                     .mode = (ino == DIRECTORY ? S_IFDIR : S_IFREG) | 0644,
                                     .nlink = 1,
                                     .flags = ino == BEING_WRITTEN ? TIERFS_DATA_LOCAL : 0,
                                     .size_bytes = ino < FIRST + FILES ? sizes[ino - FIRST] : 100000,
                                     .content_id = {(uint8_t)ino},
                                     .valid_until_ns = INT64_MAX};
        put_inode(&writer, &inode);
    }
    writer_close(&writer);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    struct tierfs_reading *reading;
    char directory[PATH_BYTES];
    int ends[2];
    pid_t child;

    (void)argc, (void)argv;
    make_directory(directory);
    make_namespace(directory);
    tier_make(&place);
    tier_remove_at_exit(&place);
    tier_write_file(&place, SEGMENT, 0, SEGMENT_BYTES);
    for (uint64_t ino = FIRST; ino < FIRST + FILES; ino++)
        tier_write_file(&place, 0, ino, sizes[ino - FIRST]);
    sync();
    assert(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    child = fork();
    assert(child >= 0);
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(ends[0]);
        run_writer(ends[1]);
    }
    close(ends[1]);
    writing = ends[0];
    char ready;
    assert(packet_receive(writing, &ready, 1) == 1);
    assert(tierfs_view_open(directory, &view) == 0 && tierfs_reader_open(view, &reader) == 0);
    remove_directory(directory); /* what is open stays, and nothing is left behind */
    assert(tierfs_backing_create(&backing) == 0 && tierfs_reading_create(&reading) == 0);
    assert(tierfs_reading_add_tier(reading, place.root, false) == 0);
    assert(tierfs_small_create(backing, reading, 1, 1, &small) == 0);
    out = malloc(OUT_BYTES);
    assert(out != NULL);
    return 0;
}

/* Whether the front may take the block at offset of that inode from where this record says. */
static bool may_take(const struct row *row, uint64_t ino, uint64_t offset, struct tierfs_extent *extent)
{
    const uint64_t bit = offset % TIERFS_EXTENT_BYTES / TIERFS_BLOCK_BYTES;
    const uint32_t extent_no = (uint32_t)(offset / TIERFS_EXTENT_BYTES);

    if (row->value == NULL || tierfs_extent_decode(row->value, row->bytes, extent_no, 0, extent) < 0)
        return false;
    return extent->size_bytes == sizes[ino - FIRST] && (extent->segment == 0 || extent->segment == SEGMENT) &&
           (extent->present & ~extent->unverified & UINT64_C(1) << bit) != 0;
}

static void check_read(struct row rows[INODES][2], uint64_t ino, const struct fuse_read_in *asked, long got)
{
    assert(ino >= FIRST && ino < FIRST + FILES);
    const uint64_t size = sizes[ino - FIRST];
    const uint64_t left = asked->offset < size ? size - asked->offset : 0;

    assert((uint64_t)got == (left < asked->size ? left : asked->size));
    for (uint64_t at = 0; at < (uint64_t)got;) {
        struct tierfs_extent extent;
        uint64_t offset = asked->offset + at;
        const uint64_t end = offset - offset % TIERFS_BLOCK_BYTES + TIERFS_BLOCK_BYTES;

        assert(may_take(&rows[ino][offset / TIERFS_EXTENT_BYTES], ino, offset, &extent));
        const uint64_t file = extent.segment != 0 ? SEGMENT : ino;
        for (; offset < end && at < (uint64_t)got; offset++, at++) {
            assert(extent.segment == 0 || extent.place_bytes + offset < SEGMENT_BYTES);
            assert(out[at] == tier_byte_at(file, extent.place_bytes + offset));
        }
    }
}

static void ask(struct row rows[INODES][2], uint8_t what, uint64_t ino, const uint8_t *data, size_t bytes)
{
    static const uint32_t opcodes[] = {FUSE_OPEN, FUSE_READ, FUSE_READ, FUSE_READ, FUSE_FLUSH, FUSE_RELEASE};
    const struct fuse_in_header header = {.opcode = opcodes[what % 6], .nodeid = ino};
    struct fuse_read_in read;
    const uint64_t fh = TIERFS_FH_FRONT | ino;
    uint8_t *body = malloc(bytes + !bytes); /* an allocation of its own: what is read behind it is found */
    long result;

    assert(body != NULL);
    if (bytes != 0)
        memcpy(body, data, bytes);
    if (what < 128 && header.opcode != FUSE_OPEN && bytes >= sizeof(fh))
        memcpy(body, &fh, sizeof(fh));
    if (header.opcode == FUSE_READ && bytes >= sizeof(read)) {
        memcpy(&read, body, sizeof(read));
        if (what < 128) { /* noise rarely asks for what is there */
            read.size %= read.size % 8 == 0 ? (uint32_t)OUT_BYTES : 9000u;
            read.offset %= UINT64_C(10) << 20;
        }
        memcpy(body, &read, sizeof(read));
    }
    result = tierfs_small_answer(small, 0, reader, &header, body, bytes, NULL, out, OUT_BYTES);
    switch (header.opcode) {
    case FUSE_OPEN:
        assert(result == sizeof(struct fuse_open_out) || result == TIERFS_RELAY);
        assert(result == TIERFS_RELAY ||
               (ino >= FIRST && ino < FIRST + FILES && bytes >= sizeof(struct fuse_open_in)));
        opened[ino] += result > 0;
        break;
    case FUSE_READ:
        assert(result >= 0 || result == TIERFS_RELAY || result == TIERFS_NOT_SMALL);
        if (result >= 0)
            check_read(rows, ino, &read, result);
        break;
    default:
        assert(result == 0 || result == TIERFS_NOT_SMALL);
        if (header.opcode == FUSE_RELEASE && result == 0 && opened[ino] > 0)
            opened[ino]--;
    }
    free(body);
}

/* Checksums of the bytes that are where this record says. */
static void make_sums(uint8_t *value, size_t bytes, uint64_t file, uint32_t extent_no)
{
    static char block[TIERFS_BLOCK_BYTES];
    struct tierfs_extent extent;

    if (file < FIRST || file >= FIRST + FILES ||
        tierfs_extent_decode(value, bytes, extent_no, 0, &extent) < 0)
        return;
    for (uint32_t i = 0; i < extent.sum_count; i++) {
        const uint64_t start = extent_no * TIERFS_EXTENT_BYTES + i * TIERFS_BLOCK_BYTES;
        const uint64_t left = extent.size_bytes - start;
        const size_t length = left < TIERFS_BLOCK_BYTES ? (size_t)left : (size_t)TIERFS_BLOCK_BYTES;
        uint64_t sum;

        for (size_t at = 0; at < length; at++)
            block[at] = extent.segment != 0 ? tier_byte_at(SEGMENT, extent.place_bytes + start + at)
                                            : tier_byte_at(file, start + at);
        sum = tierfs_block_sum(block, length);
        memcpy(value + 64 + 8 * i, &sum, sizeof(sum));
    }
}

/* Gives the index its records. Returns how much of the input they were. */
static size_t take_rows(struct row rows[INODES][2], const uint8_t *data, size_t size)
{
    static uint8_t index[INPUT_MAX];
    size_t at = 1, used = 0;
    char ready;

    for (unsigned i = data[0] % ROWS_MAX; i > 0 && size - at >= ROW_HEAD; i--) {
        uint16_t bytes;
        const uint8_t file = data[at] % INODES, extent_no = data[at + 1] % 2;
        const bool makes_sums = (data[at + 1] & 128) != 0 && data[0] >= DROPS_CACHE; /* else nobody looks */

        memcpy(&bytes, data + at + 2, sizeof(bytes));
        at += ROW_HEAD;
        if (bytes > size - at)
            bytes = (uint16_t)(size - at);
        uint8_t *row = index + used;
        row[0] = file;
        row[1] = extent_no;
        memcpy(row + 2, &bytes, sizeof(bytes));
        memcpy(row + ROW_HEAD, data + at, bytes);
        if (makes_sums)
            make_sums(row + ROW_HEAD, bytes, file, extent_no);
        rows[file][extent_no] = (struct row){row + ROW_HEAD, bytes};
        used += ROW_HEAD + bytes;
        at += bytes;
    }
    if (used == 0)
        index[used++] = 0; /* an empty packet would be the end */
    assert(packet_send(writing, index, used) == (ssize_t)used);
    assert(packet_receive(writing, &ready, 1) == 1);
    return at;
}

/* So that some reads have to go to the device, where checksums count. */
static void drop_page_cache(void)
{
    char path[PATH_BYTES + 64];
    int file;

    snprintf(path, sizeof(path), "%s/segments/%016llx", place.root, (unsigned long long)SEGMENT);
    file = open(path, O_RDONLY | O_CLOEXEC);
    assert(file >= 0);
    (void)posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    close(file);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint8_t release[sizeof(struct fuse_release_in)];
    struct row rows[INODES][2] = {0};

    if (size < 1 || size > INPUT_MAX / 2)
        return 0;
    if (data[0] >= DROPS_CACHE)
        drop_page_cache();
    size_t at = take_rows(rows, data, size);
    while (size - at >= ROW_HEAD) {
        const uint8_t what = data[at], ino = data[at + 1] % INODES;
        uint16_t bytes;

        memcpy(&bytes, data + at + 2, sizeof(bytes));
        at += ROW_HEAD;
        if (bytes > size - at)
            bytes = (uint16_t)(size - at);
        ask(rows, what, ino, data + at, bytes);
        at += bytes;
    }
    for (uint64_t ino = 0; ino < INODES; ino++)
        while (opened[ino] > 0)
            ask(rows, 5, ino, release, sizeof(release));
    assert(tierfs_backing_count_here(backing) == 0);
    return 0;
}

/* -- inputs that come further than noise ------------------------------------------------------------------------- */

static size_t add_head(uint8_t *input, uint8_t first, uint8_t second, size_t bytes)
{
    const uint16_t size = (uint16_t)bytes;

    input[0] = first;
    input[1] = second;
    memcpy(input + 2, &size, sizeof(size));
    return ROW_HEAD + bytes;
}

/* Records of the extents of one file, then an open of it, reads, and a release. */
static size_t make_input(uint8_t *input, struct tier_random *random)
{
    const uint8_t ino = (uint8_t)(FIRST + tier_random(random, FILES));
    const uint64_t file_bytes = sizes[ino - FIRST];
    size_t used = 1;

    input[0] = (uint8_t)(2 + (tier_random(random, 8) == 0 ? 240 : 0));
    for (uint32_t extent_no = 0; extent_no < 2; extent_no++) {
        const size_t bytes = tier_random_record(input + used + ROW_HEAD, random, extent_no, file_bytes);
        used += add_head(input + used, ino, (uint8_t)(extent_no | 128), bytes);
    }
    memset(input + used + ROW_HEAD, 0, sizeof(struct fuse_open_in));
    used += add_head(input + used, 0, ino, sizeof(struct fuse_open_in));
    for (unsigned i = 1 + tier_random(random, 3); i > 0; i--) {
        const struct fuse_read_in read = {.offset = tier_random(random, (uint32_t)file_bytes + 100),
                                          .size = tier_random(random, 1 + (1u << tier_random(random, 19)))};

        memcpy(input + used + ROW_HEAD, &read, sizeof(read));
        used += add_head(input + used, 1, ino, sizeof(read));
    }
    memset(input + used + ROW_HEAD, 0, sizeof(struct fuse_release_in));
    return used + add_head(input + used, 5, ino, sizeof(struct fuse_release_in));
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed)
{
    uint8_t input[2048];
    struct tier_random random = {seed};

    if (LLVMFuzzerMutate != NULL && tier_random(&random, 4) != 0)
        return LLVMFuzzerMutate(data, size, max_size);
    size = make_input(input, &random);
    for (unsigned i = tier_random(&random, 4); i > 0; i--)
        input[tier_random(&random, (uint32_t)size)] ^= (uint8_t)(1u << tier_random(&random, 8));
    size = size < max_size ? size : max_size;
    memcpy(data, input, size);
    return size;
}
